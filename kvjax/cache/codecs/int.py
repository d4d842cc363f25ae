"""Uniform integer codes, per token (groups along the head dim) or per channel (along tokens)."""

import dataclasses

import jax
import jax.numpy as jnp

from kvjax.cache.base import PartSpec, check_at_least
from kvjax.errors import ConfigError
from pallas_kernels._common.packing import pack, packed_width, unpack_runs

SCALE_DTYPES = ("float16", "bfloat16", "float32")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Int:
    """b-bit codes with a scale and, unless symmetric, a zero point for each group.

    Affine: zero = min, scale = (max - min) / (2^b - 1), code = round((x - zero) / scale).
    Symmetric: scale = max|x| / (2^(b-1) - 1), code = round(x / scale), clamped.
    Scale and zero point are rounded to `scale_dtype` first, so the codes fit what is stored.
    Values that are not finite are saturated to the range of the finite ones of their group (a NaN
    to 0), and never reach another token.

    axis="token": each token has its own groups of `group_size` channels; a head dim that is no
    multiple ends in a shorter group of its own.
    axis="channel": each channel has its own groups of `group_size` consecutive tokens (KIVI keys,
    arXiv 2402.02750); tokens of an open group wait in the full-precision tail.

    Attributes:
        bits: 8, 4 or 2; codes are packed.
        axis: "token" or "channel".
        group_size: values that share a scale.
        symmetric: no zero point.
        scale_dtype: dtype of scale and zero point.
        residual: newest tokens that stay in full precision, beyond those of an open group.

    >>> Int(bits=4).parts(64, "float32")[0].width
    32
    """

    bits: int = 8
    axis: str = "token"
    group_size: int = 32
    symmetric: bool = False
    scale_dtype: str = "float16"
    residual: int = 0

    basis = None
    lossless = False

    def __post_init__(self) -> None:
        if self.bits not in (8, 4, 2):
            raise ConfigError(f"Int.bits={self.bits!r}; known: 8, 4, 2")
        if self.axis not in ("token", "channel"):
            raise ConfigError(f"Int.axis={self.axis!r}; known: token, channel")
        if self.scale_dtype not in SCALE_DTYPES:
            raise ConfigError(
                f"Int.scale_dtype={self.scale_dtype!r}; known: {', '.join(SCALE_DTYPES)}"
            )
        check_at_least(self, group_size=1, residual=0)

    @property
    def group(self) -> int:
        return self.group_size if self.axis == "channel" else 1

    def parts(self, width: int, dtype: str) -> tuple[PartSpec, ...]:
        W = packed_width(width, self.bits)
        scales = width if self.axis == "channel" else -(-width // self.group_size)

        def scale_part(name: str) -> PartSpec:
            return PartSpec(
                name=name,
                kind="scales",
                width=scales,
                dtype=self.scale_dtype,
                tokens_per_row=self.group,
            )

        codes = PartSpec(
            name="codes",
            kind="payload",
            width=W,
            dtype="uint8",
            padding_bits=8 * W - self.bits * width,
        )
        return (codes, scale_part("scale"), *([] if self.symmetric else [scale_part("zero")]))

    def encode(self, x: jax.Array) -> tuple[jax.Array, ...]:
        *_, S, H = x.shape
        x = x.astype(jnp.float32)
        finite = jnp.isfinite(x)
        low = self._group_reduce(jnp.where(finite, x, jnp.inf), jnp.min)
        high = self._group_reduce(jnp.where(finite, x, -jnp.inf), jnp.max)
        low, high = (jnp.where(jnp.isfinite(e), e, 0.0) for e in (low, high))
        limit = float(jnp.finfo(self.scale_dtype).max)
        if self.symmetric:
            peak = jnp.maximum(jnp.abs(low), jnp.abs(high))
            rows = (peak / (2 ** (self.bits - 1) - 1),)
        else:
            # Halves first: the range of two finite numbers may overflow.
            rows = ((high / 2 - low / 2) / ((2**self.bits - 1) / 2), low)
        rows = tuple(jnp.clip(row, -limit, limit).astype(self.scale_dtype) for row in rows)
        scale, zero = self._spread(rows, S, H)
        saturated = jnp.nan_to_num(x, nan=0.0)
        offset = saturated if zero is None else saturated - zero
        levels = offset / jnp.where(scale > 0, scale, 1.0)
        lowest, highest = self._code_range
        codes = jnp.clip(jnp.round(levels), lowest, highest).astype(jnp.int32)
        codes = (codes & (2**self.bits - 1)).astype(jnp.uint8)
        return (pack(codes, self.bits), *rows)

    def decode(self, parts: tuple[jax.Array, ...], width: int) -> jax.Array:
        packed, *rows = parts
        *_, S, W = packed.shape
        scale, zero = self._spread(tuple(rows), S, width)
        values = []
        # Run by run: XLA:CPU vectorises this and not the unpacked whole; nor u8 to f32 directly.
        for i, codes in enumerate(unpack_runs(packed, self.bits)):
            span = slice(i * W, min((i + 1) * W, width))
            levels = codes[..., : span.stop - span.start].astype(jnp.int32)
            if self.symmetric:
                half = 2 ** (self.bits - 1)
                levels = ((levels + half) & (2 * half - 1)) - half
            values.append(levels.astype(jnp.float32) * scale[..., span])
            if zero is not None:
                values[-1] += zero[..., span]
        return values[0] if len(values) == 1 else jnp.concatenate(values, axis=-1)

    @property
    def runs(self) -> int:
        return 8 // self.bits

    def channels_per_column(self, width: int) -> tuple[int, ...]:
        channels = 1 if self.axis == "channel" else self.group_size
        return (channels,) if self.symmetric else (channels, channels)

    def levels(self, payload: jax.Array, run) -> jax.Array:
        codes = (payload >> (self.bits * run)) & (2**self.bits - 1)
        if self.symmetric:
            half = 2 ** (self.bits - 1)
            codes = ((codes + half) & (2 * half - 1)) - half
        return codes.astype(jnp.float32).astype(jnp.bfloat16)

    def bound(self, x: jax.Array) -> jax.Array:
        """Half a step, and what rounding of scale and zero point takes off the ends."""
        *_, S, H = x.shape
        wide = x.astype(jnp.float32)
        low = self._group_reduce(wide, jnp.min)
        high = self._group_reduce(wide, jnp.max)
        info = jnp.finfo(self.scale_dtype)
        eps, tiny = float(info.eps), float(info.tiny)
        peak = jnp.maximum(jnp.abs(low), jnp.abs(high))
        _, top = self._code_range
        span = peak if self.symmetric else high - low
        steps = top if self.symmetric else 2**self.bits - 1
        bound = span / steps * (0.5 + eps) + eps * (span + peak) + steps * tiny
        return self._spread((bound,), S, H)[0]

    @classmethod
    def examples(cls) -> tuple["Int", ...]:
        return (
            cls(bits=8),
            cls(bits=4, group_size=4),
            cls(bits=4, symmetric=True, scale_dtype="float32"),
            cls(bits=2, axis="channel", group_size=4),
        )

    @property
    def _code_range(self) -> tuple[int, int]:
        if self.symmetric:
            half = 2 ** (self.bits - 1)
            return -half, half - 1
        return 0, 2**self.bits - 1

    def _group_reduce(self, x: jax.Array, reduce) -> jax.Array:
        """Reduce each group of [..., S, H]: to [..., S / g, H] or [..., S, ceil(H / g)]."""
        *lead, S, H = x.shape
        g = self.group_size
        if self.axis == "channel":
            return reduce(x.reshape(*lead, S // g, g, H), axis=-2)
        whole = H // g * g
        out = reduce(x[..., :whole].reshape(*lead, S, whole // g, g), axis=-1)
        if whole == H:
            return out
        tail = reduce(x[..., whole:], axis=-1, keepdims=True)
        return jnp.concatenate([out, tail], axis=-1)

    def _spread(self, rows: tuple[jax.Array, ...], S: int, H: int):
        """Scale and zero point of every value, f32[..., S, H]; None if there is no zero point."""

        def spread(row: jax.Array) -> jax.Array:
            row = row.astype(jnp.float32)
            if self.axis == "channel":
                return jnp.repeat(row, self.group_size, axis=-2, total_repeat_length=S)
            return jnp.repeat(row, self.group_size, axis=-1)[..., :H]

        wide = [spread(row) for row in rows]
        return wide[0], wide[1] if len(wide) > 1 else None
