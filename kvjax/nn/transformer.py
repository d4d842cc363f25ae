"""The decoder: `logits, cache = model.apply(params, tokens, positions, cache)`."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from kvjax.cache.cache import Cache
from kvjax.nn.attention import Attention
from kvjax.nn.config import TransformerConfig
from kvjax.nn.layers import GatedMLP, Linear, RMSNorm, matmul, outputs_first


class Block(nn.Module):
    """Pre-norm attention and MLP.

    Attributes:
        config: the model's sizes.
    """

    config: TransformerConfig

    @nn.compact
    def __call__(
        self, x: jax.Array, positions: jax.Array, cache: Cache | None, layer: int
    ) -> tuple[jax.Array, Cache | None]:
        """Map [B, T, D] to [B, T, D]."""
        config = self.config
        h = RMSNorm(config.norm_eps, name="attention_norm")(x)
        h, cache = Attention(config, name="attention")(h, positions, cache, layer)
        x = x + h
        h = RMSNorm(config.norm_eps, name="mlp_norm")(x)
        return x + GatedMLP(config.d_ff, name="mlp")(h), cache


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
    """A Llama-family decoder; layers are unrolled, so that each updates its own store in place.

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
        self.layers = [Block(config) for _ in range(config.num_layers)]
        self.norm = RMSNorm(config.norm_eps)
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
        for i, layer in enumerate(self.layers):
            with jax.named_scope(f"layer_{i}"):
                x, cache = layer(x, positions, cache, i)
        return x, cache

    def logits(self, x: jax.Array) -> jax.Array:
        """The head: logits f32[..., V] of hidden states [..., D]."""
        with jax.named_scope("head"):
            x = self.norm(x)
            if self.config.tie_embeddings:
                return self.embed.unembed(x)
            return self.head(x).astype(jnp.float32)
