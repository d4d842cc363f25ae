"""Grouped-query attention over a cache, or over the tokens at hand where there is none."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from kvjax.cache.cache import Cache
from kvjax.cache.entries import KV
from kvjax.nn.config import AttentionConfig, LayerConfig, NormConfig
from kvjax.nn.layers import Linear, RMSNorm
from kvjax.nn.rotary import Rotary
from pallas_kernels._common.operand import Operand
from pallas_kernels._common.visibility import causal
from pallas_kernels.attention import attention


class Attention(nn.Module):
    """N query heads over K heads of keys and values; q, k and v in one matrix.

    Attributes:
        config: heads and what is done to them.
        layer: window, rotary positions, whose keys and values are read.
        norm: epsilon and form of QK-norms.
    """

    config: AttentionConfig
    layer: LayerConfig
    norm: NormConfig

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        positions: jax.Array,
        cache: Cache | None,
        index: int,
        entry: KV | None = None,
    ) -> tuple[jax.Array, Cache | None, KV]:
        """Mix [B, T, D].

        Args:
            x: [B, T, D].
            positions: i32[B, T].
            cache: earlier tokens; None attends among `x` alone.
            index: of the layer.
            entry: keys and values of the layer whose store is read, if it is not this one's own.

        Returns:
            the mix, the cache that holds the new tokens, and their keys and values.
        """
        config, D = self.config, x.shape[-1]
        q, entry = self._project(x, entry)
        self.sow("intermediates", "attended", (q, *entry))  # for whoever asks (attribution)
        rotary = None if self.layer.rotary is None else Rotary.of(self.layer.rotary)
        sinks = None
        if config.sink_logits:
            stored = self.param("sink_logits", nn.initializers.zeros, (config.num_heads,), x.dtype)
            sinks = stored.astype(jnp.float32)
        options: dict[str, Any] = dict(
            rotary=rotary,
            scale=config.scale,
            softcap=config.softcap,
            window=self.layer.window,
            sink_logits=sinks,
        )
        if cache is None:
            output = attend_uncached(q, *entry, positions, **options)
        else:
            output, cache = cache.attend(index, q, entry, positions, **options)
        rows = output.reshape(*output.shape[:2], -1)
        return Linear(D, config.out_bias, name="out")(rows), cache, entry

    def _project(self, x: jax.Array, entry: KV | None) -> tuple[jax.Array, KV]:
        """Queries, and keys and values unless they are given; [B, T, heads, H] each."""
        config = self.config
        B, T, _ = x.shape
        N, K, H = config.num_heads, config.num_kv_heads, config.head_dim
        if entry is not None:
            q = Linear(N * H, config.bias, name="q")(x)
            return self._normalised(q.reshape(B, T, N, H), "q_norm"), entry
        heads = Linear((N + 2 * K) * H, config.bias, name="qkv")(x).reshape(B, T, N + 2 * K, H)
        q, k, v = jnp.split(heads, (N, N + K), axis=2)
        return self._normalised(q, "q_norm"), KV(self._normalised(k, "k_norm"), v)

    def _normalised(self, x: jax.Array, name: str) -> jax.Array:
        """QK-norm of [B, T, heads, H]."""
        match self.config.qk_norm:
            case "none":
                return x
            case "head":
                return RMSNorm.of(self.norm, name=name)(x)
        B, T, heads, H = x.shape
        return RMSNorm.of(self.norm, name=name)(x.reshape(B, T, heads * H)).reshape(x.shape)


def attend_uncached(
    q: jax.Array,  # [B, T, N, H]
    k: jax.Array,  # [B, T, K, H]
    v: jax.Array,  # [B, T, K, Hv]
    positions: jax.Array,  # i32[B, T]
    *,
    rotary: Rotary | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    window: int | None = None,
    sink_logits: jax.Array | None = None,  # f32[N]
) -> jax.Array:
    """Causal attention of the tokens at hand among themselves, [B, T, N, Hv] in q's dtype."""

    def operand(x: jax.Array) -> Operand:
        B, T, K, W = x.shape
        return Operand.raw(x.swapaxes(1, 2).reshape(B * K, T, W))

    if rotary is not None:
        q, k = rotary.apply_to_query(q, positions), rotary.apply(k, positions)
    output, _ = attention(
        q,
        operand(k),
        operand(v),
        causal(positions, window),
        positions,
        scale=scale,
        softcap=softcap,
        sink_logits=sink_logits,
    )
    return output.astype(q.dtype)
