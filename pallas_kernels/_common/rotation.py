"""Rotary embedding of a block of keys or queries (arXiv 2104.09864; half-split pairs)."""

import jax
import jax.numpy as jnp


def rotate(x: jax.Array, angles: jax.Array) -> jax.Array:
    """Rotate pairs (i, i + R/2) of the first R channels by `angles`, in f32; the rest passes.

    Args:
        x: [..., H].
        angles: f32[..., R/2], position times inverse frequency, broadcast against x's leading axes.

    Returns:
        [..., H] in x's dtype.
    """
    half = angles.shape[-1]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    xf = x.astype(jnp.float32)
    low, high = xf[..., :half], xf[..., half : 2 * half]
    turned = [low * cos - high * sin, high * cos + low * sin]
    if x.shape[-1] > 2 * half:
        turned.append(xf[..., 2 * half :])
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def angles_of(positions: jax.Array, inverse_frequencies: jax.Array) -> jax.Array:
    """Angles f32[..., R/2] of `positions` i32[...]."""
    wide = positions.astype(jnp.float32)[..., None]
    return wide * jnp.expand_dims(inverse_frequencies, tuple(range(positions.ndim)))
