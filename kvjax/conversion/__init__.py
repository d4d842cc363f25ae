"""Turn a model into one that caches less: fewer KV heads, or latents."""

from kvjax.conversion.grouped import to_grouped
from kvjax.conversion.latent import to_latent
from kvjax.conversion.report import ConversionReport, LayerError

__all__ = ["ConversionReport", "LayerError", "to_grouped", "to_latent"]
