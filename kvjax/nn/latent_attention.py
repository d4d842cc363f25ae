"""Multi-head latent attention (MLA, arXiv 2405.04434): one latent and one rotary key a token."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from kvjax.cache.cache import Cache
from kvjax.cache.entries import Latent, LatentQuery
from kvjax.cache.entries.latent import expand
from kvjax.nn.attention import attend_uncached
from kvjax.nn.config import LatentAttentionConfig, LayerConfig
from kvjax.nn.layers import Linear, RMSNorm
from kvjax.nn.rotary import Rotary


class LatentAttention(nn.Module):
    """Queries of N heads over latents c [C] and rotary keys [R], which are all that is cached.

    Without a cache it runs in expanded form: keys and values of every head are formed. A cache
    runs it absorbed: the up-projections move to the queries and to the output, and the latents
    themselves are keys and values. Both are the same function.

    Attributes:
        config: widths.
        layer: window and rotary positions.
    """

    config: LatentAttentionConfig
    layer: LayerConfig

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        positions: jax.Array,
        cache: Cache | None,
        index: int,
        entry: Latent | None = None,
    ) -> tuple[jax.Array, Cache | None, Latent]:
        """Mix [B, T, D]; see `Attention`."""
        del entry  # no latent layer reads another's store
        config, D = self.config, x.shape[-1]
        query, entry = self._query(x), self._entry(x)
        scale = config.scale or (config.nope_dim + config.rope_dim) ** -0.5
        options: dict[str, Any] = dict(
            rotary=None if self.layer.rotary is None else Rotary.of(self.layer.rotary),
            scale=scale,
            window=self.layer.window,
        )
        if cache is None:
            key, value = expand(query, entry.c, entry.k_rope)
            # The turned channels come first, where the rotation looks for them.
            q = jnp.concatenate([query.rope, query.nope], axis=-1)
            output = attend_uncached(q, key, value, positions, **options)
        else:
            output, cache = cache.attend(index, query, entry, positions, **options)
        rows = output.reshape(*output.shape[:2], -1)
        return Linear(D, name="out")(rows), cache, entry

    def _query(self, x: jax.Array) -> LatentQuery:
        """Queries of all heads, with the matrices that they are absorbed with."""
        config = self.config
        B, T, _ = x.shape
        N, C, R = config.num_heads, config.latent_dim, config.rope_dim
        if config.query_dim is None:
            q = Linear(N * (config.nope_dim + R), name="query")(x)
        else:
            low = Linear(config.query_dim, name="query_down")(x)
            q = Linear(N * (config.nope_dim + R), name="query_up")(self._norm(low, "query_norm"))
        q = q.reshape(B, T, N, config.nope_dim + R)
        init = nn.initializers.normal(C**-0.5)
        return LatentQuery(
            nope=q[..., : config.nope_dim],
            rope=q[..., config.nope_dim :],
            key_up=self._key_up(init, (N, config.nope_dim, C), x.dtype),
            value_up=self.param("value_up", init, (N, config.value_dim, C), x.dtype),
        )

    def _key_up(self, init, shape: tuple[int, ...], dtype) -> jax.Array:
        # Not a parameter if it is empty: checkpoints do not hold arrays of no size.
        return self.param("key_up", init, shape, dtype) if shape[1] else jnp.zeros(shape, dtype)

    def _entry(self, x: jax.Array) -> Latent:
        C, R = self.config.latent_dim, self.config.rope_dim
        both = Linear(C + R, name="latent")(x)
        c = self._norm(both[..., :C], "latent_norm")
        return Latent(c=c[:, :, None], k_rope=both[:, :, None, C:])

    def _norm(self, x: jax.Array, name: str) -> jax.Array:
        epsilon = self.config.norm_epsilon
        return x if epsilon is None else RMSNorm(epsilon, name=name)(x)
