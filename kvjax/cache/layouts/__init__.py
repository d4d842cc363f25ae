"""Layouts: where the bytes of a slot live. One idea a file, one line here."""

from kvjax.cache.base import Layout
from kvjax.cache.layouts.contiguous import Contiguous
from kvjax.cache.layouts.paged import Paged
from kvjax.registry import Registry

LAYOUTS = Registry(
    "layout",
    Layout,
    {
        "contiguous": Contiguous,
        "paged": Paged,
    },
)

__all__ = LAYOUTS.exports()
