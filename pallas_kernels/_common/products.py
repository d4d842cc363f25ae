"""Matrix products of kernels: what is exact, and what f32 costs on units that multiply bf16."""

import jax
import jax.numpy as jnp
from jax import lax


def product(a: jax.Array, b: jax.Array, *, narrow: bool, transposed: bool = False) -> jax.Array:
    """Product of a [m, c] and b [c, n] (or b [n, c], transposed), summed in f32.

    Two operands of the same 16-bit type are multiplied as they are: exact in f32. In a model that
    computes in 16 bits (`narrow`) an f32 operand becomes two bf16 terms, which is exact to 2^-16 of
    it; else products are those of full f32.
    """
    a, b = _widen(a), _widen(b)
    if not narrow:
        return _product(a.astype(jnp.float32), b.astype(jnp.float32), transposed)
    if a.dtype == b.dtype != jnp.float32:
        return _product(a, b, transposed)
    pairs = [(x, y) for i, x in enumerate(_terms(a)) for j, y in enumerate(_terms(b)) if i + j < 2]
    parts = [_product(x, y, transposed) for x, y in pairs]
    return sum(parts[1:], parts[0])


def _product(a, b, transposed: bool):
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dimensions = (((1,), (1 if transposed else 0,)), ((), ()))
    return lax.dot_general(
        a, b, dimensions, precision=precision, preferred_element_type=jnp.float32
    )


def _widen(x: jax.Array) -> jax.Array:
    """float8 as bf16, which holds all its values."""
    return x.astype(jnp.bfloat16) if x.dtype.itemsize == 1 else x


def _terms(x: jax.Array) -> list[jax.Array]:
    """bf16 terms that add up to x, but for 2^-16 of it.

    The first is cut off, not rounded, by clearing bits: compilers may drop a conversion to bf16 and
    back, and with it the second term.
    """
    if x.dtype == jnp.bfloat16:
        return [x]
    x = x.astype(jnp.float32)
    bits = lax.bitcast_convert_type(x, jnp.int32) & jnp.int32(-65536)
    high = lax.bitcast_convert_type(bits, jnp.float32)
    return [high.astype(jnp.bfloat16), (x - high).astype(jnp.bfloat16)]
