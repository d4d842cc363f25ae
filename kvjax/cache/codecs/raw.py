"""Store entries as they are, in the model's dtype or a narrower one."""

import dataclasses

import jax
import jax.numpy as jnp

from kvjax.cache.base import PartSpec
from kvjax.errors import ConfigError

DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Raw:
    """Entries as they are, in the dtype of the model or a narrower one.

    Attributes:
        dtype: stored dtype; None is the dtype that the model computes in, without any loss.

    >>> Raw(dtype="bfloat16").encode(jnp.ones((1, 2)))[0].dtype
    dtype(bfloat16)
    """

    dtype: str | None = None

    group = 1
    basis = None
    residual = 0
    runs = 1

    def __post_init__(self) -> None:
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ConfigError(f"Raw.dtype={self.dtype!r}; known: None, {', '.join(DTYPES)}")

    @property
    def lossless(self) -> bool:
        return self.dtype is None

    def parts(self, width: int, dtype: str) -> tuple[PartSpec, ...]:
        return (PartSpec(name="raw", kind="payload", width=width, dtype=self.dtype or dtype),)

    def encode(self, x: jax.Array) -> tuple[jax.Array, ...]:
        if self.dtype is None:
            return (x,)
        limit = float(jnp.finfo(self.dtype).max)
        wide = x.astype(jnp.float32)
        # Saturate infinities and what is too large, but let NaN be seen.
        return (jnp.clip(wide, -limit, limit).astype(self.dtype),)

    def decode(self, parts: tuple[jax.Array, ...], width: int) -> jax.Array:
        return parts[0]

    def channels_per_column(self, width: int) -> tuple[int, ...]:
        return ()

    def levels(self, payload: jax.Array, run) -> jax.Array:
        return payload

    def bound(self, x: jax.Array) -> jax.Array:
        if self.dtype is None:
            return jnp.zeros_like(x)
        info = jnp.finfo(self.dtype)
        return jnp.abs(x) * float(info.eps) / 2 + float(info.tiny)

    @classmethod
    def examples(cls) -> tuple["Raw", ...]:
        return (cls(), cls(dtype="bfloat16"))
