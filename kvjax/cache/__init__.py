"""The cache algebra: cache = layout x codec x policy x position rule."""

from kvjax.cache.accounting import ByteReport
from kvjax.cache.base import (
    ROTATED_ABSOLUTE,
    UNROTATED_ABSOLUTE,
    UNROTATED_SLOT,
    PositionRule,
)
from kvjax.cache.cache import Cache
from kvjax.cache.codecs import CODECS
from kvjax.cache.config import CacheConfig, Codecs, LayerPattern
from kvjax.cache.entries import KV, Latent, LatentQuery
from kvjax.cache.layouts import LAYOUTS
from kvjax.cache.legality import RULES, illegal_reasons
from kvjax.cache.policies import POLICIES
from kvjax.cache.presets import KIVI
from kvjax.cache.saving import restore_cache, save_cache

__all__ = [
    "CODECS",
    "KIVI",
    "KV",
    "LAYOUTS",
    "POLICIES",
    "ROTATED_ABSOLUTE",
    "RULES",
    "UNROTATED_ABSOLUTE",
    "UNROTATED_SLOT",
    "ByteReport",
    "Cache",
    "CacheConfig",
    "Codecs",
    "Latent",
    "LatentQuery",
    "LayerPattern",
    "PositionRule",
    "illegal_reasons",
    "restore_cache",
    "save_cache",
]
