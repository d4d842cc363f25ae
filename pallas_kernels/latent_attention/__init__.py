"""Attention over one stored latent per token, shared by all heads, and its rotary key (MLA)."""

from pallas_kernels.latent_attention.op import (
    IMPLEMENTATIONS,
    latent_attention,
    resolve_implementation,
)

__all__ = ["IMPLEMENTATIONS", "latent_attention", "resolve_implementation"]
