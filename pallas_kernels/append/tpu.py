"""TPU: read, merge and write back only the blocks that receive rows.

HBM is written in whole tiles of 8 x 128 words, so one new row costs a block of 8, 16 or 32 rows (of
32, 16 or 8 bits), or of 128 where rows are lanes. XLA lists the (sequence, block) pairs that
receive rows and puts them first; the grid (pairs, groups of heads) is as long as that list, and its
length is read at run time. No two steps touch one block. The output is the buffer itself: a block
out of the list is neither read nor written.

XLA also shifts the new rows to where they lie in their blocks; a lone row needs no shift, the
kernel spreads it over the block. Which rows of a block are new are two scalars a pair.

The kernel takes rows as sublanes (or, transposed, as lanes). XLA:TPU by itself lays out a buffer
whose W is no multiple of 128 the other way, since that pads less. A program then copies it on the
way in and out, once, however often it appends in a loop, unless its arguments and results are given
row-major formats.

Bytes moved: each listed block twice (old, merged), and the new rows.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.append.tuning import tpu_tiles


class _Work(NamedTuple):
    """One entry a pair of a sequence and a block, those that receive rows first; i32 each."""

    sequence: jax.Array
    piece: jax.Array  # which block of the sequence's window it is
    page: jax.Array  # where in the buffer: page or sequence, and block in it
    block: jax.Array
    low: jax.Array  # rows [low, high) of the block are new
    high: jax.Array


def append(
    buffer: jax.Array,  # [B*K, S', W], [B*K, W, S'] or [P, K, Z', W]
    rows: jax.Array,  # [B, K, n, W]
    start: jax.Array,  # i32[B]
    *,
    page_table=None,
    transposed: bool = False,
    interpret=False,
) -> jax.Array:
    """See `op.append`; `interpret` may also be `pltpu.InterpretParams`."""
    B, K, n, W = rows.shape
    paged = page_table is not None
    num_rows = buffer.shape[2] if paged or transposed else buffer.shape[1]
    tiles = tpu_tiles(n, K, W, num_rows, buffer.dtype.itemsize, paged=paged, transposed=transposed)
    pages = buffer.shape[0] if paged else B
    table = page_table if paged else jnp.arange(B, dtype=jnp.int32)[:, None]
    work, count, shift, pieces = _work_list(start, table, pages, num_rows, tiles.rows, n)
    groups = K // tiles.heads
    rows = rows[:, :, None] if n == 1 else _shifted(rows, shift, tiles.rows, pieces)
    rows = rows.swapaxes(3, 4) if transposed else rows

    def new_block(i, g, work):
        return work.sequence[i], g, 0 if n == 1 else work.piece[i], 0, 0

    def old_block(i, g, work):
        if paged:
            return work.page[i], g, work.block[i], 0
        place = (0, work.block[i]) if transposed else (work.block[i], 0)
        return work.page[i] * groups + g, *place

    block = (tiles.heads, *((W, tiles.rows) if transposed else (tiles.rows, W)))
    old = pl.BlockSpec((1, *block) if paged else block, old_block)
    dtype = buffer.dtype
    buffer, rows = _as_mosaic_takes(buffer), _as_mosaic_takes(rows)
    out = pl.pallas_call(
        functools.partial(_kernel, row_axis=buffer.ndim - (1 if transposed else 2)),
        out_shape=jax.ShapeDtypeStruct(buffer.shape, buffer.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(count, groups),
            in_specs=[pl.BlockSpec((1, tiles.heads, 1, *rows.shape[3:]), new_block), old],
            out_specs=old,
        ),
        input_output_aliases={len(work) + 1: 0},
        interpret=interpret,
        name="append",
    )(work, rows, buffer)
    return out if out.dtype == dtype else lax.bitcast_convert_type(out, dtype)


def _kernel(work, new_ref, old_ref, out_ref, *, row_axis: int):
    i = pl.program_id(0)
    row = lax.broadcasted_iota(jnp.int32, old_ref.shape, row_axis)
    fresh = (row >= work.low[i]) & (row < work.high[i])
    new, old = _wide(new_ref[0, :, 0]), _wide(old_ref[...])
    merged = jnp.where(fresh, jnp.broadcast_to(new, old.shape), old)
    out_ref[...] = _narrow(merged, out_ref.dtype)


def _work_list(start, table, pages: int, num_rows: int, block: int, n: int):
    """The pairs, the length of the grid, each window's first row in its first block, and pieces."""
    B, M = table.shape
    per_page = -(-num_rows // block)
    fits = (start >= 0) & (start <= M * num_rows - n)
    start = jnp.where(fits, start, 0)
    first, last = start // block, (start + n - 1) // block
    shift = start % block
    pieces = min((n + 2 * block - 2) // block, M * per_page)
    piece = jnp.broadcast_to(jnp.arange(pieces, dtype=jnp.int32)[None], (B, pieces))
    at = first[:, None] + piece
    needed = fits[:, None] & (at <= last[:, None])
    at = jnp.minimum(at, M * per_page - 1)
    page = jnp.take_along_axis(table, at // per_page, axis=1, mode="clip")
    needed &= (page >= 0) & (page < pages)
    low = shift[:, None] - piece * block
    work = _Work(
        sequence=jnp.broadcast_to(jnp.arange(B, dtype=jnp.int32)[:, None], (B, pieces)),
        piece=piece,
        page=jnp.clip(page, 0, pages - 1),
        block=at % per_page,
        low=low,
        high=jnp.where(needed, low + n, low),
    )
    order = jnp.argsort(~needed.reshape(-1), stable=True)
    work = _Work(*(x.reshape(-1)[order] for x in work))
    # Where nothing is to be written, one step puts one block back as it was: no empty grid.
    count = jnp.maximum(needed.sum(dtype=jnp.int32), 1)
    return work, count, shift, pieces


def _shifted(rows, shift, block: int, pieces: int):
    """[B, K, pieces, block, W]: rows from `shift` on, anything around them."""
    B, K, n, W = rows.shape
    size = pieces * block
    padded = jnp.pad(rows, ((0, 0), (0, 0), (block, size - n), (0, 0)))
    shifted = jax.vmap(lambda x, i: lax.dynamic_slice_in_dim(x, i, size, axis=1))(
        padded, block - shift
    )
    return shifted.reshape(B, K, pieces, block, W)


def _as_mosaic_takes(x: jax.Array) -> jax.Array:
    """Mosaic takes no float16. XLA:TPU makes a pass over the array of this: store words instead."""
    return lax.bitcast_convert_type(x, jnp.int16) if x.dtype == jnp.float16 else x


def _wide(x):
    """The bits as 32-bit elements: not every TPU has masks of narrower ones."""
    if x.dtype.itemsize == 4:
        return x
    if jnp.issubdtype(x.dtype, jnp.floating):
        x = lax.bitcast_convert_type(x, jnp.dtype(f"int{8 * x.dtype.itemsize}"))
    return x.astype(jnp.int32)


def _narrow(x, dtype):
    """Undo `_wide`."""
    if dtype.itemsize == 4:
        return x
    if jnp.issubdtype(dtype, jnp.floating):
        x = x.astype(jnp.dtype(f"int{8 * dtype.itemsize}"))
        return lax.bitcast_convert_type(x, dtype)
    return x.astype(dtype)
