"""Which query rows go together, and which blocks of slots they need: a kernel's work list.

Queries of one stored head are flattened to rows (t, g), padded and cut into tiles. A block of slots
that no row of a tile can see is left out of the tile's list, so no kernel ever fetches it.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels._common.visibility import Visibility, visible


class Rows(NamedTuple):
    """What each row sees, i32[B, tiles, rows] each; rows that pad a tile see nothing."""

    first: jax.Array
    window_start: jax.Array
    last: jax.Array


class Blocks(NamedTuple):
    """Blocks that some row of a tile may see: index[b, tile, :count[b, tile]], ascending."""

    index: jax.Array  # i32[B, tiles, blocks]
    count: jax.Array  # i32[B, tiles]


def first_positions(key_positions: jax.Array, block: int) -> jax.Array:
    """Position of the first slot of each block whose slots hold p, p + 1, ...; else -1.

    A kernel need not load the positions of such blocks one by one.

    Args:
        key_positions: i32[B, S].
        block: slots of a block; a last one that is cut is never such a block.

    Returns:
        i32[B, blocks].
    """
    B, S = key_positions.shape
    held = jnp.pad(key_positions, ((0, 0), (0, -S % block)), constant_values=-1)
    held = held.reshape(B, -1, block)
    first = held[..., 0]
    expected = first[..., None] + jnp.arange(block, dtype=jnp.int32)[None, None]
    return jnp.where((held == expected).all(-1) & (first >= 0), first, -1)


def tile_queries(query: jax.Array, num_kv_heads: int, tile: int = 1) -> jax.Array:
    """[B, T, N, H] to rows [B, K, tiles * tile, H] of each stored head, padded with zeros."""
    B, T, N, H = query.shape
    K = num_kv_heads
    rows = query.reshape(B, T, K, N // K, H).swapaxes(1, 2).reshape(B, K, T * (N // K), H)
    return jnp.pad(rows, ((0, 0), (0, 0), (0, -rows.shape[2] % tile), (0, 0)))


def untile(rows: jax.Array, T: int, N: int) -> jax.Array:
    """Undo `tile_queries`: [B, K, tiles * tile, W] to [B, T, N, W]."""
    B, K, _, W = rows.shape
    G = N // K
    return rows[:, :, : T * G].reshape(B, K, T, G, W).swapaxes(1, 2).reshape(B, T, N, W)


def tile_rows(visibility: Visibility, G: int, tile: int) -> Rows:
    """What each row of `tile_queries` sees."""

    def spread(x: jax.Array, padding: int) -> jax.Array:
        B, T = x.shape
        rows = jnp.repeat(x, G, axis=1)
        rows = jnp.pad(rows, ((0, 0), (0, -T * G % tile)), constant_values=padding)
        return rows.reshape(B, -1, tile)

    top = jnp.iinfo(jnp.int32).max
    return Rows(
        spread(visibility.first, top),
        spread(visibility.window_start, top),
        spread(visibility.last, -1),
    )


def visible_blocks(rows: Rows, sinks: int, key_positions: jax.Array, block: int) -> Blocks:
    """Blocks of `block` slots that hold a position which a row of the tile may see.

    Args:
        rows: what the rows see.
        sinks: positions below it are seen whatever the window.
        key_positions: i32[B, S], -1 is empty.
        block: slots of a block; the last may be shorter.
    """
    B, S = key_positions.shape
    tiles = rows.last.shape[1]
    j = key_positions[:, None, :]
    first, start, last = (
        reduce(x, axis=2)[..., None]
        for reduce, x in ((jnp.min, rows.first), (jnp.min, rows.window_start), (jnp.max, rows.last))
    )
    live = visible(j, first, start, last, sinks)
    live = jnp.pad(live, ((0, 0), (0, 0), (0, -S % block)))
    needed = live.reshape(B, tiles, -1, block).any(-1)
    index = jnp.argsort(~needed, axis=-1, stable=True).astype(jnp.int32)
    return Blocks(index, needed.sum(-1, dtype=jnp.int32))
