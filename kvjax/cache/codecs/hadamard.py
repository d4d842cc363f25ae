"""Random rotation, then a codebook that is optimal for a Gaussian: no data, no outliers.

TurboQuant's first stage (arXiv 2504.19874): a randomized Hadamard rotation makes the channels of
any vector nearly Gaussian and alike, so one scalar codebook fits all; the vector's norm is
stored beside the codes. Scores do not need keys in their own basis: queries are rotated instead,
and the mix of values is rotated back once for each query.
"""

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache.base import PartSpec
from kvjax.errors import ConfigError
from pallas_kernels._common.packing import pack, packed_width, unpack_runs

_SEED = 20_250_428


@dataclasses.dataclass(frozen=True)
class RandomHadamard:
    """x -> H_n (signs * x) / sqrt(n), x padded with zeros to a power of two n; orthogonal."""

    def width(self, width: int) -> int:
        """Channels after the rotation.

        >>> RandomHadamard().width(80)
        128
        """
        return 1 << (width - 1).bit_length()

    def forward(self, x: jax.Array) -> jax.Array:
        """Rotate [..., W] to f32[..., n]."""
        n = self.width(x.shape[-1])
        padded = jnp.pad(x.astype(jnp.float32), [(0, 0)] * (x.ndim - 1) + [(0, n - x.shape[-1])])
        return jnp.matmul(padded, jnp.asarray(_matrix(n)), precision=jax.lax.Precision.HIGHEST)

    def inverse(self, y: jax.Array, width: int) -> jax.Array:
        """Rotate f32[..., n] back to [..., width]."""
        matrix = jnp.asarray(_matrix(y.shape[-1]).T[:, :width])
        return jnp.matmul(y.astype(jnp.float32), matrix, precision=jax.lax.Precision.HIGHEST)


@functools.cache
def _matrix(n: int) -> np.ndarray:
    """The rotation as a matrix that rows are multiplied with, f32[n, n]."""
    hadamard = np.ones((1, 1))
    while len(hadamard) < n:
        hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]])
    signs = np.random.default_rng(_SEED).choice([-1.0, 1.0], n)
    return (signs[:, None] * hadamard / math.sqrt(n)).astype(np.float32)


@functools.cache
def gaussian_codebook(bits: int) -> tuple[float, ...]:
    """Levels of the least mean squared error for N(0, 1) (Lloyd and Max), rounded to bf16.

    >>> [round(level, 2) for level in gaussian_codebook(2)]
    [-1.51, -0.45, 0.45, 1.51]
    """

    def density(x: float) -> float:
        return math.exp(-x * x / 2) / math.sqrt(2 * math.pi) if math.isfinite(x) else 0.0

    def mass(x: float) -> float:
        return 0.5 * (1 + math.erf(x / math.sqrt(2)))

    levels = np.linspace(-2.5, 2.5, 2**bits)
    for _ in range(2000):  # each step halves the distance to the fixed point or better
        edges = [-math.inf, *((levels[1:] + levels[:-1]) / 2).tolist(), math.inf]
        cells = list(itertools.pairwise(edges))
        levels = np.array([(density(a) - density(b)) / (mass(b) - mass(a)) for a, b in cells])
    return tuple(levels.astype(jnp.bfloat16).astype(np.float32).tolist())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hadamard:
    """Codes of the rotated vector over its root mean square, and that as a scale.

    A head dim that is no power of two is padded to one, which is stored and counted. Keys have to
    be rotated by their positions before they are stored: in another basis there are no pairs.
    Infinities and NaN count as 0 for their token.

    Attributes:
        bits: 2 or 4.
        scale_dtype: of the root mean square.

    >>> [part.width for part in Hadamard(bits=4).parts(64, "float32")]
    [32, 1]
    """

    bits: int = 4
    scale_dtype: str = "float16"

    group = 1
    residual = 0
    lossless = False
    basis = RandomHadamard()

    def __post_init__(self) -> None:
        if self.bits not in (4, 2):
            raise ConfigError(f"Hadamard.bits={self.bits!r}; known: 4, 2")
        known = ("float16", "bfloat16", "float32")
        if self.scale_dtype not in known:
            raise ConfigError(f"Hadamard.scale_dtype={self.scale_dtype!r}; known: {known}")

    @property
    def runs(self) -> int:
        return 8 // self.bits

    def parts(self, width: int, dtype: str) -> tuple[PartSpec, ...]:
        W = packed_width(self.basis.width(width), self.bits)
        codes = PartSpec(
            name="codes",
            kind="payload",
            width=W,
            dtype="uint8",
            padding_bits=8 * W - self.bits * width,
        )
        return codes, PartSpec(name="scale", kind="scales", width=1, dtype=self.scale_dtype)

    def encode(self, x: jax.Array) -> tuple[jax.Array, ...]:
        x = x.astype(jnp.float32)
        y = self.basis.forward(jnp.where(jnp.isfinite(x), x, 0.0))
        peak = jnp.max(jnp.abs(y), axis=-1, keepdims=True)
        unit = y / jnp.where(peak > 0, peak, 1.0)  # squares of large numbers overflow
        size = peak * jnp.sqrt(jnp.mean(unit * unit, axis=-1, keepdims=True))
        limit = float(jnp.finfo(self.scale_dtype).max)
        # What is beyond the largest scale saturates.
        scale = jnp.minimum(size, limit).astype(self.scale_dtype)
        wide = scale.astype(jnp.float32)
        levels = np.asarray(gaussian_codebook(self.bits), np.float32)
        edges = (levels[1:] + levels[:-1]) / 2
        relative = y / jnp.where(wide > 0, wide, 1.0)
        codes = jnp.zeros(relative.shape, jnp.uint8)
        for edge in edges:
            codes += (relative > float(edge)).astype(jnp.uint8)
        return pack(codes, self.bits), scale

    def decode(self, parts: tuple[jax.Array, ...], width: int) -> jax.Array:
        packed, scale = parts
        runs = [self._level(codes.astype(jnp.int32)) for codes in unpack_runs(packed, self.bits)]
        values = runs[0] if len(runs) == 1 else jnp.concatenate(runs, axis=-1)
        return values[..., :width] * scale.astype(jnp.float32)

    def channels_per_column(self, width: int) -> tuple[int, ...]:
        return (width,)

    def levels(self, payload: jax.Array, run) -> jax.Array:
        codes = (payload >> (self.bits * run)) & (2**self.bits - 1)
        return self._level(codes).astype(jnp.bfloat16)

    def _level(self, codes: jax.Array) -> jax.Array:
        """Level of each code, f32; by selection, since kernels have no lookup."""
        levels = gaussian_codebook(self.bits)
        value = jnp.full(codes.shape, levels[0], jnp.float32)
        for code, level in enumerate(levels[1:], start=1):
            value = jnp.where(codes == code, jnp.float32(level), value)
        return value

    def bound(self, x: jax.Array) -> jax.Array:
        """The error of the whole vector, which any of its channels may have.

        A rotated channel lies within its cell or beyond the last level: it is at most sqrt(n) times
        the root mean square.
        """
        n = self.basis.width(x.shape[-1])
        wide = x.astype(jnp.float32)
        size = jnp.sqrt(jnp.sum(wide * wide, axis=-1, keepdims=True) / n)
        levels = gaussian_codebook(self.bits)
        cell = max(b - a for a, b in itertools.pairwise(levels)) / 2
        inside = cell * math.sqrt(n)
        # All of the norm in one rotated channel is the worst that can happen.
        beyond = math.sqrt(n) - levels[-1]
        tiny = float(jnp.finfo(self.scale_dtype).tiny)
        worst = size * (max(inside, beyond) + inside) * (1 + float(jnp.finfo(self.scale_dtype).eps))
        return jnp.broadcast_to(worst + tiny * n, x.shape)

    @classmethod
    def examples(cls) -> tuple["Hadamard", ...]:
        return (cls(bits=4, scale_dtype="float32"), cls(bits=2))
