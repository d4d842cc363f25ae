"""Rotary position embedding (Su et al., arXiv 2104.09864), Hugging Face's half-split pairs."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels._common.rotation import angles_of, rotate


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rotary:
    """How a model turns queries and keys; a cache applies it where its position rule says.

    Attributes:
        inverse_frequencies: f32[R/2], radians per position of each pair.
    """

    inverse_frequencies: jax.Array

    @classmethod
    def default(cls, head_dim: int, theta: float) -> "Rotary":
        """Inverse frequencies theta ** (-2i / H) of the pairs i."""
        exponents = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
        return cls(jnp.asarray(theta**-exponents, jnp.float32))

    def apply(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        """Rotate x [B, T, heads, H] to `positions` i32[B, T]; in f32, back in x's dtype.

        >>> x = jnp.ones((1, 1, 1, 4))
        >>> Rotary.default(4, 1e4).apply(x, jnp.zeros((1, 1), jnp.int32)).tolist()
        [[[[1.0, 1.0, 1.0, 1.0]]]]
        """
        return rotate(x, angles_of(positions, self.inverse_frequencies)[:, :, None, :])
