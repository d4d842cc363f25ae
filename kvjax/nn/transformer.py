"""The decoder: `logits, cache = model.apply(params, tokens, positions, cache)`."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from kvjax.cache.cache import Cache
from kvjax.nn.attention import Attention
from kvjax.nn.config import TransformerConfig
from kvjax.nn.layers import GatedMLP, Linear, RMSNorm, matmul


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
    """One table that embeds and, if tied, unembeds.

    Attributes:
        vocab_size: V.
        width: D.
        dtype: dtype of the table, and with it of all activations.
    """

    vocab_size: int
    width: int
    dtype: str

    @nn.compact
    def __call__(self) -> jax.Array:
        """Return the table [V, D]."""
        init = nn.initializers.normal(self.width**-0.5)
        return self.param("embedding", init, (self.vocab_size, self.width), self.dtype)


class Transformer(nn.Module):
    """A Llama-family decoder; layers are unrolled, so that each updates its own store in place.

    Attributes:
        config: sizes and constants.
        dtype: dtype of weights and activations; logits are f32.
    """

    config: TransformerConfig
    dtype: str = "float32"

    @nn.compact
    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        cache: Cache | None = None,
        select: jax.Array | None = None,
    ) -> tuple[jax.Array, Cache | None]:
        """Compute logits and the cache that holds the new tokens.

        The cache's lengths do not move: call `cache.advance` once afterwards.

        Args:
            tokens: i32[B, T].
            positions: i32[B, T], -1 at padding.
            cache: entries of earlier tokens; None attends among `tokens` alone.
            select: i32[B, Q], the tokens whose logits are wanted; None is all of them.

        Returns:
            logits f32[B, T or Q, V] and the cache.
        """
        config = self.config
        embedding = Embedding(config.vocab_size, config.d_model, self.dtype, name="embed")()
        x = jnp.take(embedding, tokens, axis=0, mode="clip")
        for layer in range(config.num_layers):
            with jax.named_scope(f"layer_{layer}"):
                block = Block(config, name=f"layers_{layer}")
                x, cache = block(x, positions, cache, layer)
        if select is not None:
            x = jnp.take_along_axis(x, select[..., None], axis=1, mode="clip")
        x = RMSNorm(config.norm_eps, name="norm")(x)
        with jax.named_scope("head"):
            if config.tie_embeddings:
                logits = matmul(x, embedding, 1)
            else:
                logits = Linear(config.vocab_size, name="head")(x)
        return logits.astype(jnp.float32), cache
