"""How the next token is drawn."""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from kvjax.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """Settings of one sequence, applied in the order of the fields.

    Attributes:
        repetition_penalty: divides positive and multiplies negative logits of tokens that the
            prompt or the output already holds (arXiv 1909.05858); 1 is off.
        temperature: divides the logits; 0 is greedy, whatever follows.
        top_k: keep the k most likely tokens; 0 is off.
        top_p: keep the fewest most likely tokens that reach this probability; 1 is off.
        min_p: drop tokens less likely than this fraction of the likeliest; 0 is off.
        seed: of this sequence's own stream of random numbers: a sequence draws the same tokens
            alone and in any batch.

    >>> Sampling().greedy
    True
    """

    repetition_penalty: float = 1.0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        checks = {
            "repetition_penalty": 0 < self.repetition_penalty < math.inf,
            "temperature": 0 <= self.temperature < math.inf,
            "top_k": self.top_k >= 0 and type(self.top_k) is int,
            "top_p": 0 < self.top_p <= 1,
            "min_p": 0 <= self.min_p <= 1,
            "seed": type(self.seed) is int and 0 <= self.seed < 2**32,
        }
        for name, good in checks.items():
            if not good:
                raise ConfigError(f"Sampling.{name}={getattr(self, name)!r} is out of range")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self.temperature == 0

    @property
    def filters(self) -> bool:
        """Whether the vocabulary has to be sorted."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampler:
    """Settings of a batch as arrays [B], so that new values never compile.

    Only which stages are needed at all is static.
    """

    penalty: jax.Array
    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    keys: jax.Array
    draws: bool = dataclasses.field(metadata=dict(static=True))
    filters: bool = dataclasses.field(metadata=dict(static=True))
    penalizes: bool = dataclasses.field(metadata=dict(static=True))

    @classmethod
    def of(cls, settings: Sequence[Sampling]) -> "Sampler":
        """Collect the settings of each sequence."""

        def column(name: str, dtype) -> jax.Array:
            return jnp.array([getattr(s, name) for s in settings], dtype)

        return cls(
            penalty=column("repetition_penalty", jnp.float32),
            temperature=column("temperature", jnp.float32),
            top_k=column("top_k", jnp.int32),
            top_p=column("top_p", jnp.float32),
            min_p=column("min_p", jnp.float32),
            keys=jax.vmap(jax.random.key)(column("seed", jnp.uint32)),
            draws=not all(s.greedy for s in settings),
            filters=any(s.filters for s in settings),
            penalizes=any(s.repetition_penalty != 1 for s in settings),
        )

    def sample(self, logits: jax.Array, step: jax.Array, seen: jax.Array) -> jax.Array:
        """Draw i32[B] from logits f32[B, V]; `seen` bool[B, V] is read only for the penalty."""
        if self.penalizes:
            penalty = self.penalty[:, None]
            punished = jnp.where(logits > 0, logits / penalty, logits * penalty)
            logits = jnp.where(seen, punished, logits)
        greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        if not self.draws:
            return greedy
        is_greedy = self.temperature == 0
        logits = logits / jnp.where(is_greedy, 1.0, self.temperature)[:, None]
        if self.filters:
            logits = self._filter(logits)
        keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(self.keys, step)
        drawn = jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)
        return jnp.where(is_greedy, greedy, drawn)

    def _filter(self, logits: jax.Array) -> jax.Array:
        """Set what top-k, then top-p, then min-p drop to -inf; the likeliest always stays."""
        _, V = logits.shape
        # Ranks, not thresholds: of equal logits no more are kept than were asked for.
        order = jnp.argsort(-logits, axis=-1, stable=True)
        ordered = jnp.take_along_axis(logits, order, axis=-1)
        rank = jnp.arange(V, dtype=jnp.int32)[None]
        k = jnp.where(self.top_k > 0, jnp.minimum(self.top_k, V), V)[:, None]
        kept = rank < k
        probability = jax.nn.softmax(jnp.where(kept, ordered, -jnp.inf), axis=-1)
        before = jnp.cumsum(probability, axis=-1) - probability
        kept &= (before < self.top_p[:, None]) | (rank == 0)
        kept &= (probability >= self.min_p[:, None] * probability[:, :1]) | (rank == 0)
        kept = jnp.take_along_axis(kept, jnp.argsort(order, axis=-1), axis=-1)
        return jnp.where(kept, logits, -jnp.inf)
