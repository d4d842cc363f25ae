"""Conversions of a model as part of an ablation, and of `kvjax convert`."""

import dataclasses

import numpy as np

from kvjax.conversion import ConversionReport, to_grouped, to_latent
from kvjax.data import load_text
from kvjax.errors import ConfigError
from kvjax.language_model import LanguageModel


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToLatent:
    """Grouped attention to latent attention; see `kvjax.conversion.to_latent`.

    Attributes:
        latent_dim: C, width of the latent.
        rope_dim: rotary channels of each KV head that keep their positions; None keeps all.
        calibration: text that the factors are best for; None looks at the weights alone.
        calibration_tokens: tokens of it.
    """

    latent_dim: int
    rope_dim: int | None = None
    calibration: str | None = None
    calibration_tokens: int = 4096

    def apply(self, lm: LanguageModel) -> tuple[LanguageModel, ConversionReport]:
        """Convert a model."""
        return to_latent(lm, self.latent_dim, self.rope_dim, self._tokens(lm))

    def _tokens(self, lm: LanguageModel) -> np.ndarray | None:
        """Pieces of the text as long as the model's context or 512 tokens, [pieces, length]."""
        if self.calibration is None:
            return None
        if lm.tokenizer is None:
            raise ConfigError(f"{lm.name} has no tokenizer: calibration needs one for its text")
        if self.calibration_tokens < 1:
            raise ConfigError(f"calibration_tokens={self.calibration_tokens} must be at least 1")
        # A character is never more than a few tokens, nor a token more than a few characters.
        text = load_text(self.calibration)[: 16 * self.calibration_tokens]
        ids = lm.tokenizer.encode(text)[: self.calibration_tokens]
        length = min(512, lm.config.max_len, len(ids))
        return np.asarray(ids[: len(ids) // length * length], np.int32).reshape(-1, length)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToGrouped:
    """Another number of KV heads; see `kvjax.conversion.to_grouped`.

    Attributes:
        num_kv_heads: K; fewer are averages, more are copies.
    """

    num_kv_heads: int

    def apply(self, lm: LanguageModel) -> tuple[LanguageModel, ConversionReport]:
        """Convert a model."""
        return to_grouped(lm, self.num_kv_heads)


Conversion = ToLatent | ToGrouped


def describe(conversion: Conversion) -> str:
    """Say what a conversion does, in a few words.

    >>> describe(ToLatent(latent_dim=96, rope_dim=16))
    'latent 96, rope 16 a head'
    >>> describe(ToGrouped(num_kv_heads=1))
    '1 KV heads'
    """
    if isinstance(conversion, ToGrouped):
        return f"{conversion.num_kv_heads} KV heads"
    kept = "all" if conversion.rope_dim is None else str(conversion.rope_dim)
    calibrated = "" if conversion.calibration is None else ", calibrated"
    return f"latent {conversion.latent_dim}, rope {kept} a head{calibrated}"
