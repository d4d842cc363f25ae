"""The jitted steps: the cache is donated, so its buffers are updated in place."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.cache.cache import Cache
from kvjax.decode.tracing import count_trace


@functools.partial(jax.jit, static_argnames=("model",), donate_argnames=("cache",))
def extend_step(
    model: Any, params: Any, tokens: jax.Array, counts: jax.Array, cache: Cache
) -> tuple[jax.Array, Cache]:
    """Append a chunk of a ragged batch; all but the head, so that it compiles once for both users.

    Args:
        model: a `Transformer`; static.
        params: its parameters.
        tokens: i32[B, T], each sequence's next tokens first, then padding.
        counts: i32[B], how many of them are real; 0 leaves a sequence as it is.
        cache: donated.

    Returns:
        hidden states [B, T, D] and the cache.
    """
    count_trace("extend_step")
    positions = chunk_positions(cache.lengths, counts, tokens.shape[1])
    hidden, cache = model.apply(params, tokens, positions, cache, method="hidden")
    return hidden, cache.advance(counts)


@functools.partial(jax.jit, static_argnames=("model",))
def head_step(model: Any, params: Any, hidden: jax.Array) -> jax.Array:
    """Logits f32[B, T, V] of hidden states [B, T, D]."""
    count_trace("head_step")
    return model.apply(params, hidden, method="logits")


def prefill_step(
    model: Any, params: Any, tokens: jax.Array, counts: jax.Array, cache: Cache
) -> tuple[jax.Array, Cache]:
    """Append a chunk like `extend_step`; logits f32[B, V] after each sequence's last real token."""
    hidden, cache = extend_step(model, params, tokens, counts, cache)
    return head_step(model, params, _last(hidden, counts))[:, 0], cache


def score_step(
    model: Any, params: Any, tokens: jax.Array, counts: jax.Array, cache: Cache
) -> tuple[jax.Array, Cache]:
    """Append a chunk like `extend_step`; logits f32[B, T, V] of every token."""
    hidden, cache = extend_step(model, params, tokens, counts, cache)
    return head_step(model, params, hidden), cache


@functools.partial(jax.jit, static_argnames=("model",), donate_argnames=("cache",))
def decode_step(
    model: Any, params: Any, tokens: jax.Array, active: jax.Array, cache: Cache
) -> tuple[jax.Array, Cache]:
    """Append one token to each active sequence.

    Args:
        model: a `Transformer`; static.
        params: its parameters.
        tokens: i32[B].
        active: bool[B]; the others are neither stored nor seen.
        cache: donated.

    Returns:
        logits f32[B, V] and the cache.
    """
    count_trace("decode_step")
    return one_token(model, params, tokens, active, cache)


def one_token(model, params, tokens, active, cache) -> tuple[jax.Array, Cache]:
    """The body of `decode_step`, for use inside other jitted loops."""
    positions = jnp.where(active, cache.lengths, -1)[:, None]
    logits, cache = model.apply(params, tokens[:, None], positions, cache)
    return logits[:, 0], cache.advance(active.astype(jnp.int32))


def chunk_positions(lengths: jax.Array, counts: jax.Array, T: int) -> jax.Array:
    """Positions i32[B, T] of a chunk whose first `counts` tokens are real; -1 is padding."""
    t = jnp.arange(T, dtype=jnp.int32)[None]
    return jnp.where(t < counts[:, None], lengths[:, None] + t, -1)


@jax.jit
def _last(hidden: jax.Array, counts: jax.Array) -> jax.Array:
    """Hidden states [B, 1, D] of each sequence's last real token."""
    select = jnp.maximum(counts - 1, 0)[:, None, None]
    return jnp.take_along_axis(hidden, select, axis=1, mode="clip")
