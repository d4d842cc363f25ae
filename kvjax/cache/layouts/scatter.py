"""Put one window of rows for each index into a buffer, in place."""

import jax
import jax.numpy as jnp
from jax import lax


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
