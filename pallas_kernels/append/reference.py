"""What the op means: row by row, select it wherever the buffer has its place."""

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
    B, K, _, W = rows.shape
    if page_table is not None:
        return _append(buffer, rows, start, page_table)
    # One page a sequence, in order.
    pool = buffer.swapaxes(1, 2) if transposed else buffer
    pool = pool.reshape(B, K, -1, W)
    pool = _append(pool, rows, start, jnp.arange(B, dtype=jnp.int32)[:, None])
    pool = pool.reshape(B * K, -1, W)
    return pool.swapaxes(1, 2) if transposed else pool


def _append(pool, rows, start, page_table):
    """Append to a pool [P, K, Z', W]."""
    P, _, Z, _ = pool.shape
    B, M = page_table.shape
    n = rows.shape[2]
    pages = jnp.arange(P, dtype=jnp.int32)[:, None]
    places = jnp.arange(Z, dtype=jnp.int32)[None, :]

    def put(item, pool):
        b, i = item // n, item % n
        fits = (start[b] >= 0) & (start[b] <= M * Z - n)
        row = jnp.where(fits, start[b] + i, 0)
        here = fits & (pages == page_table[b, row // Z]) & (places == row % Z)
        return jnp.where(here[:, None, :, None], rows[b, :, i][None, :, None, :], pool)

    return lax.fori_loop(0, B * n, put, pool)
