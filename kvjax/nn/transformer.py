"""The decoder: `logits, cache = model.apply(params, tokens, positions, cache)`."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from kvjax.cache.cache import Cache
from kvjax.nn.attention import Attention
from kvjax.nn.config import LatentAttentionConfig, LayerConfig, MoEConfig, TransformerConfig
from kvjax.nn.latent_attention import LatentAttention
from kvjax.nn.layers import GatedMLP, Linear, RMSNorm, matmul, outputs_first
from kvjax.nn.moe import MixtureOfExperts


class Block(nn.Module):
    """Attention and MLP, each normalised before, after, or both.

    Attributes:
        config: the model.
        index: which of its layers this is.
    """

    config: TransformerConfig
    index: int

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        positions: jax.Array,
        cache: Cache | None,
        entry: Any,
    ) -> tuple[jax.Array, Cache | None, Any]:
        """Map [B, T, D] to [B, T, D]; see `Attention`."""
        config, layer = self.config, self.config.layers[self.index]
        h = self._norm(x, "attention_norm", config.norm.before)
        h, cache, entry = self._attention(layer)(h, positions, cache, self.index, entry)
        x = x + self._norm(h, "attention_post_norm", config.norm.after)
        h = self._norm(x, "mlp_norm", config.norm.before)
        h = self._mlp(layer)(h)
        return x + self._norm(h, "mlp_post_norm", config.norm.after), cache, entry

    def _norm(self, x: jax.Array, name: str, present: bool) -> jax.Array:
        return RMSNorm.of(self.config.norm, name=name)(x) if present else x

    def _attention(self, layer: LayerConfig) -> nn.Module:
        attention = self.config.attention
        if isinstance(attention, LatentAttentionConfig):
            return LatentAttention(attention, layer, name="attention")
        return Attention(attention, layer, self.config.norm, name="attention")

    def _mlp(self, layer: LayerConfig) -> nn.Module:
        if isinstance(layer.mlp, MoEConfig):
            return MixtureOfExperts(layer.mlp, name="mlp")
        return GatedMLP(layer.mlp, name="mlp")


class Embedding(nn.Module):
    """One table that embeds and, if tied, unembeds: stored as a matrix from D to V.

    Attributes:
        vocab_size: V.
        width: D.
        dtype: dtype of the table, and with it of all activations.
    """

    vocab_size: int
    width: int
    dtype: str

    def setup(self) -> None:
        """The matrix, stored as `layers.outputs_first` says."""
        shape = (self.vocab_size, self.width)
        shape = shape if outputs_first(self.dtype) else shape[::-1]
        init = nn.initializers.normal(self.width**-0.5)
        self.embedding = self.param("embedding", init, shape, self.dtype)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Embed i32[B, T] to [B, T, D]."""
        if outputs_first(self.dtype):
            return jnp.take(self.embedding, tokens, axis=0, mode="clip")
        return jnp.moveaxis(jnp.take(self.embedding, tokens, axis=1, mode="clip"), 0, -1)

    def unembed(self, x: jax.Array) -> jax.Array:
        """Logits f32[..., V] of [..., D]."""
        return matmul(x, self.embedding)


class Transformer(nn.Module):
    """A decoder; layers are unrolled, so that each updates its own store in place.

    Attributes:
        config: sizes and constants.
        dtype: dtype of weights and activations; logits are f32.
    """

    config: TransformerConfig
    dtype: str = "float32"

    def setup(self) -> None:
        """Name the parts; layers are `layers_0`, `layers_1`, ... in the parameters."""
        config = self.config
        self.embed = Embedding(config.vocab_size, config.d_model, self.dtype)
        self.layers = [Block(config, i) for i in range(config.num_layers)]
        self.norm = RMSNorm.of(config.norm)
        if not config.tie_embeddings:
            self.head = Linear(config.vocab_size)

    def __call__(
        self, tokens: jax.Array, positions: jax.Array, cache: Cache | None = None
    ) -> tuple[jax.Array, Cache | None]:
        """Compute logits and the cache that holds the new tokens.

        The cache's lengths do not move: call `cache.advance` once afterwards.

        Args:
            tokens: i32[B, T].
            positions: i32[B, T], -1 at padding.
            cache: entries of earlier tokens; None attends among `tokens` alone.

        Returns:
            logits f32[B, T, V] and the cache.
        """
        x, cache = self.hidden(tokens, positions, cache)
        return self.logits(x), cache

    def hidden(
        self, tokens: jax.Array, positions: jax.Array, cache: Cache | None = None
    ) -> tuple[jax.Array, Cache | None]:
        """All but the head: [B, T, D] and the cache; see `__call__`."""
        x = self.embed(tokens)
        if self.config.embedding_scale is not None:
            x = x * jnp.asarray(self.config.embedding_scale, x.dtype)
        # Keys and values of the new tokens, for later layers that read the same store.
        entries: list[Any] = []
        for i, layer in enumerate(self.layers):
            reads = self.config.layers[i].reads
            with jax.named_scope(f"layer_{i}"):
                entry = None if reads is None else entries[reads]
                x, cache, entry = layer(x, positions, cache, entry)
            entries.append(entry)
        return x, cache

    def logits(self, x: jax.Array) -> jax.Array:
        """The head: logits f32[..., V] of hidden states [..., D]."""
        with jax.named_scope("head"):
            x = self.norm(x)
            tied, cap = self.config.tie_embeddings, self.config.logit_softcap
            logits = self.embed.unembed(x) if tied else self.head(x).astype(jnp.float32)
            return logits if cap is None else cap * jnp.tanh(logits / cap)
