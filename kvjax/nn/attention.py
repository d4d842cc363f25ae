"""Grouped-query attention over a cache, or over the tokens at hand where there is none."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from kvjax.cache.cache import KV, Cache
from kvjax.nn.config import TransformerConfig
from kvjax.nn.layers import Linear
from kvjax.nn.rotary import Rotary
from pallas_kernels._common.operand import Operand
from pallas_kernels._common.visibility import causal
from pallas_kernels.attention import attention


class Attention(nn.Module):
    """N query heads over K heads of keys and values; q, k and v in one matrix.

    Attributes:
        config: the model's sizes.
    """

    config: TransformerConfig

    @nn.compact
    def __call__(
        self, x: jax.Array, positions: jax.Array, cache: Cache | None, layer: int
    ) -> tuple[jax.Array, Cache | None]:
        """Mix [B, T, D]; returns the mix and the cache that holds the new tokens."""
        config = self.config
        B, T, D = x.shape
        N, K, H = config.num_heads, config.num_kv_heads, config.head_dim
        heads = Linear((N + 2 * K) * H, name="qkv")(x).reshape(B, T, N + 2 * K, H)
        q, k, v = jnp.split(heads, (N, N + K), axis=2)
        rotary = Rotary.default(H, config.rope_theta)
        if cache is None:
            output = attend_uncached(q, k, v, positions, rotary)
        else:
            output, cache = cache.attend(layer, q, KV(k, v), positions, rotary=rotary)
        return Linear(D, name="out")(output.reshape(B, T, N * H)), cache


def attend_uncached(
    q: jax.Array,  # [B, T, N, H]
    k: jax.Array,  # [B, T, K, H]
    v: jax.Array,  # [B, T, K, Hv]
    positions: jax.Array,  # i32[B, T]
    rotary: Rotary,
) -> jax.Array:
    """Causal attention of the tokens at hand among themselves, [B, T, N, Hv] in q's dtype."""

    def operand(x: jax.Array) -> Operand:
        B, T, K, W = x.shape
        return Operand.raw(x.swapaxes(1, 2).reshape(B * K, T, W))

    q, k = rotary.apply(q, positions), rotary.apply(k, positions)
    output, _ = attention(q, operand(k), operand(v), causal(positions), positions)
    return output.astype(q.dtype)
