"""Rotary position embedding (Su et al., arXiv 2104.09864) and its scalings, half-split pairs.

A scaling changes the frequencies of the pairs, once and for all positions. Those that a library
would change with the length of the text (dynamic NTK, LongRoPE) are settled when a checkpoint is
loaded, for the context length that is asked for: a cached key cannot follow a change.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.errors import ConfigError
from kvjax.nn.checks import check_positive
from pallas_kernels._common.rotation import angles_of, rotate


@dataclasses.dataclass(frozen=True, kw_only=True)
class Linear:
    """Positions divided by `factor` (position interpolation, arXiv 2306.15595)."""

    factor: float

    def frequencies(self, base: np.ndarray, theta: float) -> np.ndarray:
        """Scale the frequencies f64[R/2]."""
        del theta
        return base / self.factor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama3:
    """Slow pairs are interpolated by `factor`, fast ones kept, those between blended (Llama 3.1).

    Attributes:
        factor: Of the slow pairs.
        low_freq_factor: Turns within the original context below which a pair is slow.
        high_freq_factor: Turns above which it is fast.
        original_len: Context before the scaling.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_len: int

    def __post_init__(self) -> None:
        if not self.low_freq_factor < self.high_freq_factor:
            raise ConfigError(
                f"low_freq_factor={self.low_freq_factor} must be below "
                f"high_freq_factor={self.high_freq_factor}"
            )

    def frequencies(self, base: np.ndarray, theta: float) -> np.ndarray:
        """Scale the frequencies f64[R/2]."""
        del theta
        turns = self.original_len * base / (2 * math.pi)
        span = self.high_freq_factor - self.low_freq_factor
        fast = np.clip((turns - self.low_freq_factor) / span, 0, 1)
        return fast * base + (1 - fast) * base / self.factor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Yarn:
    """Blend of kept and interpolated pairs, linear in the pair (YaRN, arXiv 2309.00071).

    Attributes:
        factor: Of the slow pairs.
        original_len: Context before the scaling.
        beta_fast: Turns within the original context from which a pair is kept.
        beta_slow: Turns up to which it is interpolated.
        truncate: The ends of the blend are whole pairs.
    """

    factor: float
    original_len: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def frequencies(self, base: np.ndarray, theta: float) -> np.ndarray:
        """Scale the frequencies f64[R/2]."""
        half = len(base)

        def pair_that_turns(times: float) -> float:
            return half * math.log(self.original_len / (times * 2 * math.pi)) / math.log(theta)

        low, high = pair_that_turns(self.beta_fast), pair_that_turns(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        # 2 * half - 1 and the least span are what the authors' code has.
        low, high = max(low, 0), min(high, 2 * half - 1)
        span = high - low if high != low else 0.001
        slow = np.clip((np.arange(half) - low) / span, 0, 1)
        return slow * base / self.factor + (1 - slow) * base


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairFactors:
    """Each pair's frequency divided by its own factor (LongRoPE, arXiv 2402.13753)."""

    factors: tuple[float, ...]

    def frequencies(self, base: np.ndarray, theta: float) -> np.ndarray:
        """Scale the frequencies f64[R/2]."""
        del theta
        if len(self.factors) != len(base):
            raise ConfigError(
                f"{len(self.factors)} rotary factors for {len(base)} pairs of channels"
            )
        return base / np.asarray(self.factors, np.float64)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Frequencies:
    """Frequencies of the pairs, stated one by one in radians per position."""

    values: tuple[float, ...]

    def frequencies(self, base: np.ndarray, theta: float) -> np.ndarray:
        """Return the stated frequencies f64[R/2]."""
        del theta
        if len(self.values) != len(base):
            raise ConfigError(f"{len(self.values)} frequencies for {len(base)} pairs of channels")
        return np.asarray(self.values, np.float64)


_MOST_DIMS = 1 << 16  # a damaged file may ask for billions

Scaling = Linear | Llama3 | Yarn | PairFactors | Frequencies


@dataclasses.dataclass(frozen=True, kw_only=True)
class RotaryConfig:
    """How a layer turns its queries and keys.

    Attributes:
        dims: R, the first channels of a head, which are turned; even. The rest pass.
        theta: Base of the frequencies theta ** (-2i / R).
        scaling: What changes them; None leaves them.
        magnitude: Factor on turned queries and on turned keys (YaRN's and LongRoPE's attention
            factor), so scores of turned channels grow by its square.

    >>> RotaryConfig(dims=4, theta=1e4).frequencies.tolist()
    [1.0, 0.01]
    """

    dims: int
    theta: float = 10_000.0
    scaling: Scaling | None = None
    magnitude: float = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.dims, int) or not 2 <= self.dims <= _MOST_DIMS or self.dims % 2:
            raise ConfigError(
                f"rotary dims={self.dims!r}: rotary positions turn pairs of channels, so an even "
                f"number from 2 to {_MOST_DIMS} (head_dim, if it is the whole head)"
            )
        check_positive(self, "theta", "magnitude")
        with np.errstate(over="ignore"):
            narrow = self.frequencies.astype(np.float32)  # as they are used
        if not np.isfinite(narrow).all():
            raise ConfigError(f"rotary frequencies of {self} are not finite")

    @property
    def frequencies(self) -> np.ndarray:
        """Radians per position of each pair, f64[R/2]."""
        base = self.theta ** -(np.arange(0, self.dims, 2, dtype=np.float64) / self.dims)
        return base if self.scaling is None else self.scaling.frequencies(base, self.theta)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rotary:
    """How a model turns queries and keys; a cache applies it where its position rule says.

    Attributes:
        inverse_frequencies: f32[R/2], radians per position of each pair.
        gain: factor on the scores of turned channels. Queries carry all of it, so that keys are
            stored and read without.
    """

    inverse_frequencies: jax.Array
    gain: float = dataclasses.field(default=1.0, metadata=dict(static=True))

    @classmethod
    def of(cls, config: RotaryConfig) -> "Rotary":
        """Arrays of a config."""
        return cls(jnp.asarray(config.frequencies, jnp.float32), config.magnitude**2)

    @classmethod
    def default(cls, head_dim: int, theta: float) -> "Rotary":
        """Inverse frequencies theta ** (-2i / H) of the pairs i."""
        return cls.of(RotaryConfig(dims=head_dim, theta=theta))

    def apply(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        """Rotate keys x [B, T, heads, H] to `positions` i32[B, T]; in f32, back in x's dtype.

        >>> x = jnp.ones((1, 1, 1, 4))
        >>> Rotary.default(4, 1e4).apply(x, jnp.zeros((1, 1), jnp.int32)).tolist()
        [[[[1.0, 1.0, 1.0, 1.0]]]]
        """
        return rotate(x, angles_of(positions, self.inverse_frequencies)[:, :, None, :])

    def apply_to_query(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        """Rotate queries, with the gain on the channels that are turned."""
        turned = self.apply(x, positions)
        if self.gain == 1.0:
            return turned
        (half,) = self.inverse_frequencies.shape
        grown = turned[..., : 2 * half].astype(jnp.float32) * jnp.float32(self.gain)
        return jnp.concatenate([grown.astype(x.dtype), turned[..., 2 * half :]], axis=-1)
