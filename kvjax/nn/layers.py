"""Linear layers, norm and gated MLP: what attention is surrounded by."""

import flax.linen as nn
import jax
import jax.numpy as jnp


def outputs_first(dtype) -> bool:
    """Whether matrices of `dtype` are stored [out, in] rather than [in, out].

    The product of a few rows with a matrix is a third faster so on XLA:CPU, for 16-bit dtypes the
    one way and for f32 the other (docs/decisions.md). All matrices follow: those of the layers,
    the head, and the embedding, which is the head of a tied model.

    >>> outputs_first("bfloat16"), outputs_first("float32")
    (True, False)
    """
    return jnp.dtype(dtype).itemsize == 2


class Linear(nn.Module):
    """A matrix product without bias.

    Attributes:
        features: width of the output.
    """

    features: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map [..., D] to [..., features]."""
        shape = (x.shape[-1], self.features)
        axes = (-2, -1)
        if outputs_first(x.dtype):
            shape, axes = shape[::-1], axes[::-1]
        init = nn.initializers.lecun_normal(*axes)
        return matmul(x, self.param("kernel", init, shape, x.dtype)).astype(x.dtype)


def matmul(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Multiply x [..., D] with a matrix stored as `outputs_first` says; f32[..., out].

    XLA:CPU has a fast product of 16-bit operands only where the result is f32, and only for two
    rows or more: otherwise it widens the whole matrix in every call (docs/decisions.md). So a
    single row in a 16-bit dtype is padded to two.
    """
    *lead, D = x.shape
    rows = x.reshape(-1, D)
    count = rows.shape[0]
    if count == 1 and rows.dtype.itemsize == 2:
        rows = jnp.concatenate([rows, rows])
    axis = 1 if outputs_first(kernel.dtype) else 0
    out = jax.lax.dot_general(
        rows, kernel, (((1,), (axis,)), ((), ())), preferred_element_type=jnp.float32
    )
    return out[:count].reshape(*lead, out.shape[-1])


class RMSNorm(nn.Module):
    """x / rms(x) * scale, computed in f32 (Zhang & Sennrich, arXiv 1910.07467).

    Attributes:
        epsilon: added to the mean square.
    """

    epsilon: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalise [..., D]."""
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],), x.dtype)
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.epsilon)
        return wide.astype(x.dtype) * jnp.expand_dims(scale, tuple(range(x.ndim - 1)))


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), gate and up in one matrix (SwiGLU, arXiv 2002.05202).

    Attributes:
        d_ff: F, inner width.
    """

    d_ff: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map [..., D] to [..., D]."""
        D = x.shape[-1]
        gate, up = jnp.split(Linear(2 * self.d_ff, name="gate_up")(x), 2, axis=-1)
        return Linear(D, name="down")(jax.nn.silu(gate) * up)
