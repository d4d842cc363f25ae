"""GPU: one Triton body for contiguous, transposed and paged buffers.

Grid (B * K, blocks of rows). A program loads a tile of new rows of one head and stores it where it
belongs, row by row an address of its own; what falls outside a sequence or the pool is masked. It
writes into the buffer that it was given and reads nothing of it.

Bytes moved: the new rows, twice.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels._common import triton
from pallas_kernels.append.tuning import GpuTiles, gpu_tiles


def append(
    buffer: jax.Array,  # [B*K, S', W], [B*K, W, S'] or [P, K, Z', W]
    rows: jax.Array,  # [B, K, n, W]
    start: jax.Array,  # i32[B]
    *,
    page_table=None,
    transposed: bool = False,
    interpret: bool = False,
) -> jax.Array:
    """See `op.append`."""
    B, K, n, W = rows.shape
    tiles = gpu_tiles(n, W)
    return triton.call(
        functools.partial(_kernel, tiles=tiles, transposed=transposed),
        dict(buffer=buffer, rows=rows, start=start, table=page_table),
        jax.ShapeDtypeStruct(buffer.shape, buffer.dtype),
        grid=(B * K, pl.cdiv(n, tiles.rows)),
        num_warps=tiles.num_warps,
        num_stages=1,
        interpret=interpret,
        name="append",
        aliases={"buffer": 0},
    )


def _kernel(refs, out_ref, *, tiles: GpuTiles, transposed: bool):
    _, K, n, W = refs["rows"].shape
    bk = pl.program_id(0)
    b, k = bk // K, bk % K
    i = pl.program_id(1) * tiles.rows + jnp.arange(tiles.rows, dtype=jnp.int32)
    column = jnp.arange(tiles.columns, dtype=jnp.int32)
    start, table = refs["start"][b], refs["table"]
    given = (i < n)[:, None] & (column < W)[None]
    new = triton.load(refs["rows"].at[b, k, i[:, None], column[None]], given, None)
    row = start + i
    if table is not None:
        P, _, Z, _ = out_ref.shape
        M = table.shape[1]
        fits = (start >= 0) & (start <= M * Z - n)
        page = triton.load(table.at[b, row // Z], fits & (i < n), P)
        inside = (page >= 0) & (page < P)
        page = jnp.where(inside, page, P)  # the interpreter wraps -1 even where it is masked
        at = out_ref.at[page[:, None], k, (row % Z)[:, None], column[None]]
        triton.store(at, new, given & inside[:, None])
        return
    S = out_ref.shape[2 if transposed else 1]
    fits = (start >= 0) & (start <= S - n)
    place = (column[None], row[:, None]) if transposed else (row[:, None], column[None])
    triton.store(out_ref.at[bk, *place], new, given & fits)
