"""Linear layers, norm and gated MLP: what attention is surrounded by."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from kvjax.nn.config import MLPConfig, NormConfig


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
    """A matrix product, with or without a bias.

    Attributes:
        features: width of the output.
        bias: add a trained vector.
    """

    features: int
    bias: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map [..., D] to [..., features]."""
        shape = (x.shape[-1], self.features)
        axes = (-2, -1)
        if outputs_first(x.dtype):
            shape, axes = shape[::-1], axes[::-1]
        init = nn.initializers.lecun_normal(*axes)
        out = matmul(x, self.param("kernel", init, shape, x.dtype))
        if self.bias:
            bias = self.param("bias", nn.initializers.zeros, (self.features,), x.dtype)
            out = out + along_last(bias.astype(jnp.float32), out)
        return out.astype(x.dtype)


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


def along_last(vector: jax.Array, like: jax.Array) -> jax.Array:
    """Give a vector [W] the rank of `like` [..., W]."""
    return jnp.expand_dims(vector, tuple(range(like.ndim - 1)))


class RMSNorm(nn.Module):
    """x / rms(x) * scale, computed in f32 (Zhang & Sennrich, arXiv 1910.07467).

    Attributes:
        epsilon: added to the mean square.
        offset: the parameter is the scale less 1, added in f32 (Gemma).
    """

    epsilon: float
    offset: bool = False

    @classmethod
    def of(cls, config: NormConfig, name: str | None = None) -> "RMSNorm":
        """The norm that a config describes."""
        return cls(config.epsilon, config.offset, name=name)

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalise [..., D]."""
        init = nn.initializers.zeros if self.offset else nn.initializers.ones
        scale = along_last(self.param("scale", init, (x.shape[-1],), x.dtype), x)
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.epsilon)
        if self.offset:
            return (wide * (1 + scale.astype(jnp.float32))).astype(x.dtype)
        return wide.astype(x.dtype) * scale


# Constants of GPT-OSS's gate (arXiv 2508.10925).
_SWIGLU_LIMIT, _SWIGLU_SLOPE = 7.0, 1.702


def gated(x: jax.Array, activation: str) -> jax.Array:
    """Gate and up side by side [..., 2F] to activation(gate) * up, [..., F]."""
    gate, up = jnp.split(x, 2, axis=-1)
    match activation:
        case "silu":
            return jax.nn.silu(gate) * up
        case "gelu_tanh":
            return jax.nn.gelu(gate, approximate=True) * up
        case "clamped_swiglu":
            gate = jnp.minimum(gate, _SWIGLU_LIMIT)
            up = jnp.clip(up, -_SWIGLU_LIMIT, _SWIGLU_LIMIT)
            return gate * jax.nn.sigmoid(gate * _SWIGLU_SLOPE) * (up + 1)
    raise ValueError(f"unknown activation {activation!r}")


class GatedMLP(nn.Module):
    """down(activation(gate(x)) * up(x)), gate and up in one matrix (arXiv 2002.05202).

    Attributes:
        config: inner width and activation.
    """

    config: MLPConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map [..., D] to [..., D]."""
        config, D = self.config, x.shape[-1]
        inner = Linear(2 * config.d_ff, config.bias, name="gate_up")(x)
        return Linear(D, config.bias, name="down")(gated(inner, config.activation))
