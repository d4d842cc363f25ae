"""The fast portable path: XLA alone; its cost follows the live length, not the capacity.

Two drivers share one block body:

* `_bucketed`, for few queries over raw contiguous keys: `lax.switch` picks the smallest length
  bucket that covers the live slots, and the branch reads that prefix in one dot. On XLA:CPU this
  adds nothing to a plain dot and leaves the cache uncopied.
* `_streamed`, for everything else: a `lax.while_loop` over blocks of slots with an online softmax;
  each block is loaded through the page table or decoded from its codes, so neither a decoded cache
  nor a matrix of T x S scores is ever formed.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._common.operand import Operand
from pallas_kernels._common.rotation import angles_of, rotate
from pallas_kernels._common.visibility import Visibility
from pallas_kernels._common.words import keep_where

BUCKET = 256  # smallest length bucket, in slots
BLOCK = 512  # slots per step of the streamed driver
FEW_QUERIES = 16  # largest T for which all scores of a bucket are formed at once


class _State(NamedTuple):
    """Online softmax: rows are the T*G queries that share a stored head."""

    output: jax.Array  # f32[B*K, T*G, Hv], not yet divided by total
    top: jax.Array  # f32[B*K, T*G, 1], running maximum
    total: jax.Array  # f32[B*K, T*G, 1], running sum of exp(score - top)


def attention(
    query: jax.Array,  # [B, T, N, H]
    key: Operand,
    value: Operand,
    visibility: Visibility,
    key_positions: jax.Array,  # i32[B, S]
    *,
    page_table,
    scale,
    softcap,
    key_rotation,
) -> tuple[jax.Array, jax.Array]:
    """See `op.attention`."""
    B, T, N, H = query.shape
    K = key.num_kv_heads(B)
    G = N // K
    rows = query.reshape(B, T, K, G, H).transpose(0, 2, 1, 3, 4).reshape(B * K, T * G, H)
    body = functools.partial(
        _attend_block, B=B, T=T, transposed=key.transposed, scale=scale, softcap=softcap
    )

    def load(start, size: int):
        k = key.load(start, size, page_table)
        if key_rotation is not None:
            positions = _slice_positions(key_positions, start, size)
            k = _rotate_keys(k, positions, key_rotation, key.transposed)
        return k, value.load(start, size, page_table)

    raw = len(key.parts) == len(value.parts) == 1
    if raw and T <= FEW_QUERIES and not key.paged and key_rotation is None:
        state = _bucketed(body, rows, key, value, visibility, key_positions)
    else:
        unit = math.lcm(key.unit, value.unit)
        block = max(unit, BLOCK // unit * unit)
        state = _streamed(body, rows, load, visibility, key_positions, value.width, block)
    empty = state.total == 0
    output = state.output / jnp.where(empty, 1.0, state.total)
    lse = jnp.where(empty, -jnp.inf, state.top + jnp.log(jnp.where(empty, 1.0, state.total)))

    def unfold(x):  # [B*K, T*G, W] -> [B, T, N, W]
        W = x.shape[-1]
        return x.reshape(B, K, T, G, W).transpose(0, 2, 1, 3, 4).reshape(B, T, N, W)

    return unfold(output), unfold(lse)[..., 0]


def _attend_block(q, k, v, mask, *, B: int, T: int, transposed: bool, scale, softcap) -> _State:
    """Attend over one block: q [B*K, T*G, H], k and v of `size` slots, mask bool[B, T, size]."""
    BK, TG, _ = q.shape
    K, G, S = BK // B, TG // T, mask.shape[-1]
    q, k = _same_dtype(q, k)
    contract = 1 if transposed else 2
    scores = lax.dot_general(
        q, k, (((2,), (contract,)), ((0,), (0,))), preferred_element_type=jnp.float32
    )
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
    return _State(output, top, weights.sum(-1, keepdims=True))


def _mix(weights, v):
    """Weights f32[B*K, T*G, S] times values f32[B*K, S, Hv]."""
    return lax.dot_general(weights, v, (((2,), (1,)), ((0,), (0,))))


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


def _bucketed(body, rows, key, value, visibility: Visibility, key_positions) -> _State:
    S = key_positions.shape[1]
    buckets = [0, *length_buckets(S)]
    live = visibility.live(key_positions).any(0)
    last = jnp.max(jnp.where(live, jnp.arange(1, S + 1, dtype=jnp.int32), 0))
    index = jnp.sum(last > jnp.array(buckets[:-1], jnp.int32), dtype=jnp.int32)
    # The mask enters the branches as an operand, hence as a buffer: inside, XLA:CPU would fuse it
    # into the selection of the values and find it again for every channel of every value.
    mask = visibility.mask(key_positions)

    def branch(size: int, rows, key, value, mask):
        if size == 0:
            return _nothing(rows, value.width)
        k, v = key.load(0, size, None), value.load(0, size, None)
        return body(rows, k, v, mask[:, :, :size])

    branches = [functools.partial(branch, size) for size in buckets]
    return lax.switch(index, branches, rows, key, value, mask)


def _nothing(rows, value_width: int) -> _State:
    """The state before any key has been seen."""
    BK, TG, _ = rows.shape
    return _State(
        jnp.zeros((BK, TG, value_width), jnp.float32),
        jnp.full((BK, TG, 1), jnp.finfo(jnp.float32).min),
        jnp.zeros((BK, TG, 1), jnp.float32),
    )


def length_buckets(S: int) -> list[int]:
    """Lengths at which the bucketed driver may stop: powers of two and the steps half-way.

    >>> length_buckets(1100)
    [256, 512, 768, 1024, 1100]
    """
    buckets, size = [], BUCKET
    while size < S:
        buckets.append(size)
        if size >= 2 * BUCKET and size * 3 // 2 < S:
            buckets.append(size * 3 // 2)
        size *= 2
    return [*buckets, S]


def _streamed(body, rows, load, visibility, key_positions, value_width: int, block: int) -> _State:
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
        start = jnp.minimum(i * size, S - size)
        k, v = load(start, size)
        positions = _slice_positions(key_positions, start, size)
        fresh = start + jnp.arange(size, dtype=jnp.int32) >= i * size
        mask = visibility.mask(jnp.where(fresh, positions, -1))
        return i + 1, _combine(state, body(rows, k, v, mask))

    if size == S:
        k, v = load(0, S)
        return body(rows, k, v, visibility.mask(key_positions))
    start = (first, _nothing(rows, value_width))
    return lax.while_loop(lambda c: c[0] < last, step, start)[1]


def _combine(a: _State, b: _State) -> _State:
    top = jnp.maximum(a.top, b.top)
    weight_a, weight_b = jnp.exp(a.top - top), jnp.exp(b.top - top)
    return _State(
        a.output * weight_a + b.output * weight_b,
        top,
        a.total * weight_a + b.total * weight_b,
    )


def _slice_positions(key_positions, start, size: int):
    if type(start) is int:
        return key_positions[:, start : start + size]
    return lax.dynamic_slice_in_dim(key_positions, start, size, axis=1)


def _rotate_keys(k, positions, key_rotation, transposed: bool):
    """Rotate k [B*K, size, H] (or transposed) at positions i32[B, size]."""
    B = positions.shape[0]
    angles = angles_of(positions - key_rotation.base[:, None], key_rotation.inverse_frequencies)
    k = k.swapaxes(1, 2) if transposed else k
    BK, size, H = k.shape
    k = k.astype(jnp.float32).reshape(B, BK // B, size, H)
    k = rotate(k, angles[:, None]).reshape(BK, size, H)
    return k.swapaxes(1, 2) if transposed else k
