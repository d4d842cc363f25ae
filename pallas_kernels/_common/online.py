"""Attention block by block in XLA: a block's part of the softmax, and the loop over live blocks."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._common.rotation import angles_of, rotate
from pallas_kernels._common.visibility import Visibility
from pallas_kernels._common.words import keep_where

BLOCK = 512  # slots per step of `streamed`


class State(NamedTuple):
    """Online softmax: rows are the T*G queries that share a stored head."""

    output: jax.Array  # f32[B*K, T*G, Hv], not yet divided by total
    top: jax.Array  # f32[B*K, T*G, 1], running maximum
    total: jax.Array  # f32[B*K, T*G, 1], running sum of exp(score - top)


def nothing(rows: tuple[int, int], value_width: int) -> State:
    """The state of rows (B*K, T*G) before any key has been seen."""
    BK, TG = rows
    return State(
        jnp.zeros((BK, TG, value_width), jnp.float32),
        jnp.full((BK, TG, 1), jnp.finfo(jnp.float32).min),
        jnp.zeros((BK, TG, 1), jnp.float32),
    )


def score(q: jax.Array, k: jax.Array, *, transposed: bool) -> jax.Array:
    """Products f32[B*K, T*G, S] of q [B*K, T*G, H] with a block k [B*K, S, H], or transposed."""
    q, k = _same_dtype(q, k)
    contract = 1 if transposed else 2
    return _dot(q, k, contract)


def attend(scores, v, mask, *, B: int, T: int, scale, softcap) -> State:
    """Attend over one block: scores f32[B*K, T*G, S], v [B*K, S, Hv], mask bool[B, T, S]."""
    BK, TG, S = scores.shape
    K, G = BK // B, TG // T
    scores = scores * scale
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    seen = jnp.broadcast_to(mask[:, None, :, None, :], (B, K, T, G, S)).reshape(BK, TG, S)
    scores = jnp.where(seen, scores, -jnp.inf)
    top = scores.max(-1, keepdims=True)
    top = jnp.where(jnp.isneginf(top), jnp.finfo(jnp.float32).min, top)
    weights = jnp.where(seen, jnp.exp(scores - top), 0.0)
    # Dead slots may hold anything, and 0 * NaN is NaN: they are selected away.
    alive = jnp.broadcast_to(mask.any(1)[:, None], (B, K, S)).reshape(BK, S, 1)
    # The weights stay f32: narrowed to bf16 they would lose more than the values have.
    v = keep_where(alive, v).astype(jnp.float32)
    if T == 1:
        output = _mix(weights, v)
    else:
        # One query's value may be another's dead slot: what is not finite goes round the product.
        finite = jnp.isfinite(v)
        output = _mix(weights, jnp.where(finite, v, 0.0))
        output = lax.cond(finite.all(), lambda o, *_: o, _spoil, output, seen, v)
    return State(output, top, weights.sum(-1, keepdims=True))


def finish(state: State) -> tuple[jax.Array, jax.Array]:
    """Output f32[B*K, T*G, Hv] and logsumexp f32[B*K, T*G, 1]; 0 and -inf of an empty row."""
    empty = state.total == 0
    output = state.output / jnp.where(empty, 1.0, state.total)
    lse = jnp.where(empty, -jnp.inf, state.top + jnp.log(jnp.where(empty, 1.0, state.total)))
    return output, lse


def streamed(
    body: Callable[..., State],
    load: Callable[..., tuple],
    visibility: Visibility,
    key_positions: jax.Array,  # i32[B, S]
    start: State,
    block: int,
) -> State:
    """Walk the blocks that hold what some query may see, with an online softmax.

    Args:
        body: the state of one block alone, from all that `load` gives, and its mask.
        load: what a block holds, from its first slot and its number of slots.
        visibility, key_positions: as of the op.
        start: what has been seen before.
        block: slots of a step.
    """
    S = key_positions.shape[1]
    size = min(block, S)
    live = visibility.live(key_positions).any(0)
    slots = jnp.arange(S, dtype=jnp.int32)
    first = jnp.min(jnp.where(live, slots, S)) // size
    last = (jnp.max(jnp.where(live, slots, -1)) + size) // size

    def step(carry):
        i, state = carry
        # The last block starts earlier where S is no multiple of the block; what an earlier
        # block has seen is masked.
        at = jnp.minimum(i * size, S - size)
        loaded = load(at, size)
        positions = slice_positions(key_positions, at, size)
        fresh = at + jnp.arange(size, dtype=jnp.int32) >= i * size
        mask = visibility.mask(jnp.where(fresh, positions, -1))
        return i + 1, combine(state, body(*loaded, mask))

    if size == S:
        return body(*load(0, S), visibility.mask(key_positions))
    return lax.while_loop(lambda c: c[0] < last, step, (first, start))[1]


def combine(a: State, b: State) -> State:
    """The state of both, over disjoint slots."""
    top = jnp.maximum(a.top, b.top)
    weight_a, weight_b = jnp.exp(a.top - top), jnp.exp(b.top - top)
    return State(
        a.output * weight_a + b.output * weight_b,
        top,
        a.total * weight_a + b.total * weight_b,
    )


def slice_positions(key_positions, start, size: int):
    """Positions of the slots of one block, i32[B, size]."""
    if type(start) is int:
        return key_positions[:, start : start + size]
    return lax.dynamic_slice_in_dim(key_positions, start, size, axis=1)


def rotate_keys(k, positions, key_rotation, transposed: bool):
    """Rotate k [B*K, size, H] (or transposed) at positions i32[B, size]."""
    B = positions.shape[0]
    angles = angles_of(positions - key_rotation.base[:, None], key_rotation.inverse_frequencies)
    k = k.swapaxes(1, 2) if transposed else k
    BK, size, H = k.shape
    k = k.astype(jnp.float32).reshape(B, BK // B, size, H)
    k = rotate(k, angles[:, None]).reshape(BK, size, H)
    return k.swapaxes(1, 2) if transposed else k


def _mix(weights, v):
    """Weights f32[B*K, T*G, S] times values f32[B*K, S, Hv]."""
    return _dot(weights, v, 1)


def _dot(a, b, contract: int):
    """Products of a [n, m, c] with b, over its axis `contract`; f32 as such, never TF32 or bf16."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return lax.dot_general(
        a,
        b,
        (((2,), (contract,)), ((0,), (0,))),
        precision=precision,
        preferred_element_type=jnp.float32,
    )


def _spoil(output, seen, v):
    """Put NaN and infinities where a query sees a value that holds them."""
    holds = jnp.concatenate([jnp.isnan(v), jnp.isposinf(v), jnp.isneginf(v)], axis=-1)
    counts = _mix(seen.astype(jnp.float32), holds.astype(jnp.float32))
    nan, high, low = jnp.split(counts > 0, 3, axis=-1)
    output = jnp.where(high, jnp.inf, jnp.where(low, -jnp.inf, output))
    return jnp.where(nan | (high & low), jnp.nan, output)


def _same_dtype(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Bring both operands of a dot to one dtype: that of narrow ones only if both are narrow."""
    if a.dtype == b.dtype:
        return a, b
    return a.astype(jnp.float32), b.astype(jnp.float32)
