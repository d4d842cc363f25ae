"""Eight-bit floats with a scale for each token of each head."""

import dataclasses

import jax
import jax.numpy as jnp

from kvjax.cache.base import PartSpec
from kvjax.errors import ConfigError

FORMATS = ("e4m3fn", "e5m2")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Float8:
    """x is stored as float8(x / scale), scale = max|x| / the format's largest number.

    The scale of a token and head uses the whole range of the format; values beyond 65,504 times
    that range, the largest scale, saturate. Without scales values beyond the range itself saturate
    to it. A NaN becomes 0, so that it never reaches another token.

    Attributes:
        format: "e4m3fn" (3 bits of mantissa, up to 448) or "e5m2" (2 bits, up to 57,344).
        scaled: store a 16-bit scale with each token and head.

    >>> [part.width for part in Float8().parts(64, "float32")]
    [64, 1]
    """

    format: str = "e4m3fn"
    scaled: bool = True

    group = 1
    residual = 0
    lossless = False
    basis = None
    runs = 1

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise ConfigError(f"Float8.format={self.format!r}; known: {', '.join(FORMATS)}")
        if type(self.scaled) is not bool:
            raise ConfigError(f"Float8.scaled={self.scaled!r}, expected True or False")

    @property
    def dtype(self) -> jnp.dtype:
        """Of the codes."""
        return jnp.dtype(f"float8_{self.format}")

    def parts(self, width: int, dtype: str) -> tuple[PartSpec, ...]:
        codes = PartSpec(name="codes", kind="payload", width=width, dtype=self.dtype.name)
        scale = PartSpec(name="scale", kind="scales", width=1, dtype="float16")
        return (codes, scale) if self.scaled else (codes,)

    def encode(self, x: jax.Array) -> tuple[jax.Array, ...]:
        x = x.astype(jnp.float32)
        largest = float(jnp.finfo(self.dtype).max)
        if not self.scaled:
            return (self._cast(x),)
        peak = jnp.max(jnp.where(jnp.isfinite(x), jnp.abs(x), 0.0), axis=-1, keepdims=True)
        limit = float(jnp.finfo(jnp.float16).max)
        scale = jnp.clip(peak / largest, 0.0, limit).astype(jnp.float16)
        wide = scale.astype(jnp.float32)
        return self._cast(x / jnp.where(wide > 0, wide, 1.0)), scale

    def _cast(self, x: jax.Array) -> jax.Array:
        largest = float(jnp.finfo(self.dtype).max)
        return jnp.clip(jnp.where(jnp.isnan(x), 0.0, x), -largest, largest).astype(self.dtype)

    def decode(self, parts: tuple[jax.Array, ...], width: int) -> jax.Array:
        values = parts[0].astype(jnp.float32)
        return values * parts[1].astype(jnp.float32) if self.scaled else values

    def channels_per_column(self, width: int) -> tuple[int, ...]:
        return (width,) if self.scaled else ()

    def levels(self, payload: jax.Array, run) -> jax.Array:
        return payload.astype(jnp.bfloat16)

    def bound(self, x: jax.Array) -> jax.Array:
        """Half a unit in the last place, what saturates, and what rounding the scale takes off."""
        info = jnp.finfo(self.dtype)
        magnitude = jnp.abs(x.astype(jnp.float32))
        eps, tiny, largest = float(info.eps), float(info.smallest_subnormal), float(info.max)
        if not self.scaled:
            return magnitude * eps / 2 + tiny / 2 + jnp.maximum(magnitude - largest, 0.0)
        peak = jnp.max(magnitude, axis=-1, keepdims=True)
        half = jnp.finfo(jnp.float16)
        rounded = float(half.eps) * peak + largest * float(half.smallest_subnormal)
        return magnitude * eps / 2 + peak / largest * tiny + rounded

    @classmethod
    def examples(cls) -> tuple["Float8", ...]:
        return (cls(), cls(format="e5m2", scaled=False))
