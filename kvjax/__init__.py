"""kvjax: a laboratory for the key-value cache.

>>> import kvjax
>>> kvjax.CacheConfig(layout=kvjax.Paged(page_size=16), codec=kvjax.Int(bits=4)).label
'paged / int(bits=4) / keep_all / rotated_absolute'
"""

from kvjax.cache import (
    KIVI,
    KV,
    ROTATED_ABSOLUTE,
    UNROTATED_ABSOLUTE,
    UNROTATED_SLOT,
    ByteReport,
    Cache,
    CacheConfig,
    Codecs,
    LayerPattern,
    PositionRule,
    codecs,
    layouts,
    policies,
)
from kvjax.cache.codecs import *  # noqa: F403
from kvjax.cache.layouts import *  # noqa: F403
from kvjax.cache.policies import *  # noqa: F403
from kvjax.decode.sampling import Sampling
from kvjax.decode.tracing import assert_max_traces
from kvjax.dims import CacheDims
from kvjax.errors import KvjaxError
from kvjax.language_model import Generation, LanguageModel, load

__version__ = "0.1.0"

__all__ = [
    "KIVI",
    "KV",
    "ROTATED_ABSOLUTE",
    "UNROTATED_ABSOLUTE",
    "UNROTATED_SLOT",
    "ByteReport",
    "Cache",
    "CacheConfig",
    "CacheDims",
    "Codecs",
    "Generation",
    "KvjaxError",
    "LanguageModel",
    "LayerPattern",
    "PositionRule",
    "Sampling",
    "assert_max_traces",
    "load",
]
__all__ += codecs.__all__
__all__ += layouts.__all__
__all__ += policies.__all__
