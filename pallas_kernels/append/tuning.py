"""Tile sizes: how many rows and heads a step of a kernel moves."""

import dataclasses

from jax.experimental import pallas as pl

SUBLANES = 8  # rows of a TPU tile of 32-bit elements; narrower ones pack more
LANES = 128
BLOCK_BYTES = 1 << 20  # of a TPU block in VMEM; pipelining holds six


@dataclasses.dataclass(frozen=True, kw_only=True)
class TpuTiles:
    """Sizes of the Mosaic body.

    Attributes:
        rows: rows of a block: whole tiles, or the whole axis.
        heads: heads of a block, a divisor of K.
    """

    rows: int
    heads: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuTiles:
    """Sizes of the Triton body.

    Attributes:
        rows: rows of a program, a power of two.
        columns: W, padded to a power of two.
        num_warps: warps of a program.
    """

    rows: int
    columns: int
    num_warps: int


def tpu_tiles(
    n: int, K: int, W: int, num_rows: int, itemsize: int, *, paged: bool, transposed: bool
) -> TpuTiles:
    """Tiles for windows of n rows in buffers of `num_rows` rows a page or sequence.

    A block is as short as tiles allow for one row, since all of it is read and written back; it
    grows with the window, whose inner blocks are wholly new anyway.

    >>> tpu_tiles(1, 8, 128, 8192, 2, paged=False, transposed=False)
    TpuTiles(rows=16, heads=8)
    >>> tpu_tiles(300, 8, 128, 8192, 2, paged=False, transposed=False)
    TpuTiles(rows=256, heads=8)
    """
    aligned = LANES if transposed else SUBLANES * 4 // itemsize
    other = SUBLANES * 4 // itemsize if transposed else LANES
    row_bytes = -(-W // other) * other * itemsize
    if num_rows <= aligned or (paged and num_rows % aligned):
        rows = num_rows  # the whole axis needs no alignment, and blocks must not cross pages
    else:
        rows = aligned
        while 2 * rows <= min(n, num_rows) and 2 * rows * row_bytes * K <= BLOCK_BYTES:
            if paged and num_rows % (2 * rows):
                break
            rows *= 2
    heads = max(1, min(K, BLOCK_BYTES // (rows * row_bytes)))
    return TpuTiles(rows=rows, heads=next(h for h in range(heads, 0, -1) if K % h == 0))


def gpu_tiles(n: int, W: int) -> GpuTiles:
    """Tiles for windows of n rows: some 4096 elements a program, 8 a thread.

    >>> gpu_tiles(1, 80), gpu_tiles(500, 128)  # doctest: +NORMALIZE_WHITESPACE
    (GpuTiles(rows=1, columns=128, num_warps=1), GpuTiles(rows=32, columns=128, num_warps=8))
    """
    columns = pl.next_power_of_2(W)
    rows = min(pl.next_power_of_2(n), max(1, 4096 // columns))
    return GpuTiles(rows=rows, columns=columns, num_warps=max(1, min(8, rows * columns // 256)))
