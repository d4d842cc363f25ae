"""Narrow floats as integer words, for ops that only move values.

XLA:CPU has no 16-bit float scatter or select: it widens the whole buffer to f32 and back around
them. On words of the same size the ops run as they are, and in place. So buffers that are updated
in place hold words on a CPU, and are reinterpreted block by block when they are read.
"""

import jax
import jax.numpy as jnp
from jax import lax


def to_words(x: jax.Array) -> jax.Array:
    """Reinterpret a float array of fewer than 32 bits as unsigned integers; others pass.

    >>> to_words(jnp.ones(2, jnp.bfloat16)).dtype
    dtype('uint16')
    """
    if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize >= 4:
        return x
    return lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))


def storage_dtype(dtype) -> jnp.dtype:
    """Dtype in which a buffer of `dtype` is kept on this backend."""
    dtype = jnp.dtype(dtype)
    narrow = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
    backend = jax.default_backend()
    # Mosaic takes no float16, and conversion around a kernel would read and write the buffer.
    if narrow and (backend == "cpu" or (backend == "tpu" and dtype == jnp.float16)):
        return jnp.dtype(f"uint{8 * dtype.itemsize}")
    return dtype


def to_storage(x: jax.Array, dtype, stored) -> jax.Array:
    """Cast x to `dtype`, then reinterpret it as the dtype in which it is `stored`."""
    x = x.astype(dtype)
    return x if x.dtype == stored else lax.bitcast_convert_type(x, stored)


def from_words(x: jax.Array, dtype) -> jax.Array:
    """Undo `to_words` or `to_storage`."""
    return x if x.dtype == dtype else lax.bitcast_convert_type(x, dtype)


def keep_where(keep: jax.Array, x: jax.Array) -> jax.Array:
    """Select x where `keep`, else 0: never by multiplication, since 0 * NaN is NaN."""
    words = to_words(x)
    return from_words(jnp.where(keep, words, jnp.zeros((), words.dtype)), x.dtype)
