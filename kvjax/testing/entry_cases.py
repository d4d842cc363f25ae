"""Each kind of entry as the conformance suite drives it, and as its oracle sees it."""

from typing import Any

import numpy as np

from kvjax.cache.entries import KV, Latent, LatentQuery
from kvjax.dims import CacheDims

Text = dict[str, Any]  # [B, S, heads, width] of each field of queries and entries


class KVCase:
    """Keys and values of K heads, and how the oracle attends over them."""

    def __init__(self, num_heads=6, num_kv_heads=2, head_dim=10, value_dim=6):
        self.dims = CacheDims(
            num_layers=1,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            value_dim=value_dim,
        )
        self.rotary_dim = head_dim
        self.query_widths = {"q": head_dim}

    def query(self, text: Text):
        """The query that the cache takes."""
        return text["q"]

    def entry(self, text: Text) -> KV:
        """The entry that the cache takes."""
        return KV(text["k"], text["v"])

    def oracle_query(self, text: Text) -> np.ndarray:
        """Queries [..., N, H], the channels that positions turn first."""
        return text["q"]

    def heads(self, fields: Text) -> tuple[np.ndarray, np.ndarray]:
        """Keys [S, K, H], turned channels first, and values [S, K, Hv] of stored fields."""
        return fields["k"], fields["v"]


class LatentCase:
    """Latents; the oracle attends in expanded form, in float64."""

    def __init__(self, num_heads=5, latent_dim=12, rope_dim=6, nope_dim=7, value_dim=9):
        N, C = num_heads, latent_dim
        self.dims = CacheDims(num_layers=1, num_heads=N, latent_dim=C, rope_dim=rope_dim)
        self.rotary_dim = rope_dim
        self.query_widths = {"nope": nope_dim, "rope": rope_dim}
        rng = np.random.default_rng(1)
        self.key_up, self.value_up = (
            (rng.standard_normal((N, width, C)) / np.sqrt(C)).astype(np.float32)
            for width in (nope_dim, value_dim)
        )

    def query(self, text: Text) -> LatentQuery:
        """The query that the cache takes."""
        return LatentQuery(text["nope"], text["rope"], self.key_up, self.value_up)

    def entry(self, text: Text) -> Latent:
        """The entry that the cache takes."""
        return Latent(text["c"], text["k_rope"])

    def oracle_query(self, text: Text) -> np.ndarray:
        """Queries [..., N, R + Hn], the channels that positions turn first."""
        return np.concatenate([text["rope"], text["nope"]], axis=-1)

    def heads(self, fields: Text) -> tuple[np.ndarray, np.ndarray]:
        """Keys [S, N, R + Hn], turned channels first, and values [S, N, Hv] of stored fields."""
        c, k_rope = fields["c"][:, 0].astype(np.float64), fields["k_rope"]
        N, _, _ = self.key_up.shape
        key, value = (np.einsum("sc,nhc->snh", c, up) for up in (self.key_up, self.value_up))
        return np.concatenate([np.repeat(k_rope, N, axis=1), key], axis=-1), value


CASES = {"kv": KVCase, "latent": LatentCase}
