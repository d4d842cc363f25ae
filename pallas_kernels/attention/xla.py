"""The fast portable path: XLA alone; its cost follows the live length, not the capacity.

Two drivers share one block body:

* `_bucketed`, for few queries over raw contiguous keys: `lax.switch` picks the smallest length
  bucket that covers the live slots, and the branch reads that prefix in one dot. On XLA:CPU this
  adds nothing to a plain dot and leaves the cache uncopied.
* `online.streamed`, for everything else: a `lax.while_loop` over blocks with an online softmax;
  each block is loaded through the page table or decoded from its codes, so neither a decoded cache
  nor a matrix of T x S scores is ever formed.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._common import online
from pallas_kernels._common.online import BLOCK, State
from pallas_kernels._common.operand import Operand
from pallas_kernels._common.visibility import Visibility

BUCKET = 256  # smallest length bucket, in slots
FEW_QUERIES = 16  # largest T for which all scores of a bucket are formed at once


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

    def body(rows, k, v, mask):
        scores = online.score(rows, k, transposed=key.transposed)
        return online.attend(scores, v, mask, B=B, T=T, scale=scale, softcap=softcap)

    def load(start, size: int):
        k = key.load(start, size, page_table)
        if key_rotation is not None:
            positions = online.slice_positions(key_positions, start, size)
            k = online.rotate_keys(k, positions, key_rotation, key.transposed)
        return k, value.load(start, size, page_table)

    raw = len(key.parts) == len(value.parts) == 1
    if raw and T <= FEW_QUERIES and not key.paged and key_rotation is None:
        state = _bucketed(body, rows, key, value, visibility, key_positions)
    else:
        unit = math.lcm(key.unit, value.unit)
        block = max(unit, BLOCK // unit * unit)
        start = online.nothing((B * K, T * G), value.width)
        of_rows = functools.partial(body, rows)
        state = online.streamed(of_rows, load, visibility, key_positions, start, block)
    output, lse = online.finish(state)

    def unfold(x):  # [B*K, T*G, W] -> [B, T, N, W]
        W = x.shape[-1]
        return x.reshape(B, K, T, G, W).transpose(0, 2, 1, 3, 4).reshape(B, T, N, W)

    return unfold(output), unfold(lse)[..., 0]


def _bucketed(body, rows, key, value, visibility: Visibility, key_positions) -> State:
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
            return online.nothing(rows.shape[:2], value.width)
        k, v = key.load(0, size, None), value.load(0, size, None)
        return body(rows, k, v, mask[:, :, :size])

    branches = [functools.partial(branch, size) for size in buckets]
    return lax.switch(index, branches, rows, key, value, mask)


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
