"""Codecs: how a token's entry is encoded. One idea a file, one line here.

A codec meets `kvjax.cache.base.Codec`; being listed it appears in `kvjax list`, in configs and in
the conformance suite.
"""

from kvjax.cache.base import Codec
from kvjax.cache.codecs.float8 import Float8
from kvjax.cache.codecs.hadamard import Hadamard
from kvjax.cache.codecs.int import Int
from kvjax.cache.codecs.raw import Raw
from kvjax.registry import Registry

CODECS = Registry(
    "codec",
    Codec,
    {
        "raw": Raw,
        "int": Int,
        "float8": Float8,
        "hadamard": Hadamard,
    },
)

__all__ = CODECS.exports()
