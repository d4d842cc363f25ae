"""Attention of new queries over stored keys and values, contiguous or paged, raw or encoded."""

from pallas_kernels.attention.op import (
    IMPLEMENTATIONS,
    KeyRotation,
    attention,
    resolve_implementation,
)

__all__ = ["IMPLEMENTATIONS", "KeyRotation", "attention", "resolve_implementation"]
