"""What attention caches of a token: keys and values of K heads, or one latent for all heads.

An entry kind is a module with the class of the entry, that of the query, and the functions of
`base.EntryKind`. It knows nothing of layouts, codecs and policies.
"""

from kvjax.cache.entries import kv, latent
from kvjax.cache.entries.base import EntryKind, Sight
from kvjax.cache.entries.kv import KV
from kvjax.cache.entries.latent import Latent, LatentQuery

ENTRIES: dict[str, EntryKind] = {"kv": kv.KIND, "latent": latent.KIND}

__all__ = ["ENTRIES", "KV", "EntryKind", "Latent", "LatentQuery", "Sight"]
