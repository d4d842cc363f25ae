"""The portable path: one scatter, which XLA does in place."""

import jax
import jax.numpy as jnp
from jax import lax


def append(
    buffer: jax.Array,  # [B*K, S', W], [B*K, W, S'] or [P, K, Z', W]
    rows: jax.Array,  # [B, K, n, W]
    start: jax.Array,  # i32[B]
    *,
    page_table=None,
    transposed: bool = False,
) -> jax.Array:
    """See `op.append`."""
    if page_table is not None:
        return _append_to_pages(buffer, rows, start, page_table)
    B, K, n, W = rows.shape
    axis = 2 if transposed else 1
    windows = rows.reshape(B * K, n, W)
    windows = windows.swapaxes(1, 2) if transposed else windows
    S = buffer.shape[axis]
    fits = (start >= 0) & (start <= S - n)
    at = jnp.repeat(jnp.where(fits, start, S), K)
    bk = jnp.arange(B * K, dtype=jnp.int32)
    return scatter_windows(buffer, jnp.stack([bk, at], axis=1), windows, axis)


def _append_to_pages(pool, rows, start, page_table):
    """One window a row: a window of several rows may cross into another page."""
    P, K, Z, W = pool.shape
    B, M = page_table.shape
    n = rows.shape[2]
    fits = (start >= 0) & (start <= M * Z - n)
    row = jnp.where(fits, start, 0)[:, None] + jnp.arange(n, dtype=jnp.int32)[None]  # [B, n]
    page = jnp.take_along_axis(page_table, row // Z, axis=1, mode="clip")
    page = jnp.where(fits[:, None], page, P)  # P is out of range: dropped
    index = jnp.stack([page, row % Z], axis=2).reshape(B * n, 2)
    windows = rows.swapaxes(1, 2).reshape(B * n, K, 1, W)
    return scatter_windows(pool, index, windows, axis=2)


def scatter_windows(
    buffer: jax.Array, index: jax.Array, windows: jax.Array, axis: int
) -> jax.Array:
    """Write windows[i] at buffer[index[i, 0]], from `index[i, 1]` on along `axis`.

    Args:
        buffer: any shape, rank R.
        index: i32[n, 2], all different; a window that is not wholly inside writes nothing.
        windows: [n, ...], rank R: of the buffer's shape but for `axis` and the first.
        axis: axis of the buffer that the second index counts.
    """
    if index.shape[0] == 1:
        # XLA rewrites a lone window to a dynamic-update-slice, repeats that inside whatever reads
        # the buffer, and copies the buffer for it. A second window, out of range, prevents it.
        outside = jnp.full_like(index, buffer.shape[0])
        index = jnp.concatenate([index, outside])
        windows = jnp.concatenate([windows, windows])
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=tuple(range(1, buffer.ndim)),
        inserted_window_dims=(0,),
        scatter_dims_to_operand_dims=(0, axis),
    )
    return lax.scatter(
        buffer,
        index,
        windows,
        numbers,
        unique_indices=True,
        mode=lax.GatherScatterMode.FILL_OR_DROP,
    )
