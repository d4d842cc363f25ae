"""One layer of a cache driven by hand: random text against the oracle, PROBE and POISON.

PROBE: with q = 0 and value t = one-hot(t) the output is 1/n on exactly the n tokens that a query
sees, so every fault of a mask shows at sight. POISON: what must not be read is filled with NaN, and
with 1e4; not one bit of the output may change.
"""

import dataclasses
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import Contiguous, Paged
from kvjax.cache.cache import Cache
from kvjax.cache.entries import KV
from kvjax.dims import CacheDims
from kvjax.nn.rotary import Rotary
from kvjax.testing import oracle
from kvjax.testing.conformance import COMPILER_OPTIONS
from tests.tolerances import ATTENTION, ELEMENTWISE

N, K, H = 4, 2, 8
ROTARY = Rotary.default(H, 100.0)
FREQUENCIES = np.asarray(ROTARY.inverse_frequencies)
LAYOUTS = [Contiguous(), Paged(page_size=1), Paged(page_size=4), Paged(page_size=16)]
POISONS = (np.nan, 1e4)


def label(config) -> str:
    """Test id of a config or a member."""
    return str(getattr(config, "label", config)).replace(" ", "")


def dims(value_dim: int = 6, **changes) -> CacheDims:
    """One layer, N query heads over K heads of width H."""
    base = CacheDims(num_layers=1, num_heads=N, num_kv_heads=K, head_dim=H, value_dim=value_dim)
    return dataclasses.replace(base, **changes)


def _step(cache: Cache, q, k, v, positions, rotary):
    output, cache = cache.attend(0, q, KV(k, v), positions, rotary=rotary)
    return output, cache.advance((positions >= 0).sum(1))


step = jax.jit(_step, compiler_options=COMPILER_OPTIONS)
fork = jax.jit(Cache.fork, compiler_options=COMPILER_OPTIONS)
reorder = jax.jit(Cache.reorder, compiler_options=COMPILER_OPTIONS)
rollback = jax.jit(Cache.rollback, compiler_options=COMPILER_OPTIONS)


def chunk_positions(starts: Sequence[int], ends: Sequence[int], width: int, left: bool = False):
    """Positions i32[B, width] from starts[b] up to at most ends[b]; -1 pads right (or left)."""
    positions = np.full((len(starts), width), -1, np.int32)
    for b, (start, end) in enumerate(zip(starts, ends, strict=True)):
        run = np.arange(start, min(end, start + width))
        span = slice(width - len(run), width) if left else slice(0, len(run))
        positions[b, span] = run
    return positions


def poisoned(cache: Cache, value: float) -> Cache:
    """Fill every buffer: floats (words too) with `value`, codes with their largest one."""

    def fill(x: jax.Array) -> jax.Array:
        if x.dtype == jnp.uint16:  # words of a narrow float
            word = np.asarray(value).astype(jnp.bfloat16).view(np.uint16)
            return jnp.full_like(x, word)
        if jnp.issubdtype(x.dtype, jnp.floating):
            return jnp.full_like(x, value)
        return jnp.full_like(x, 0 if value == 0 else jnp.iinfo(x.dtype).max)

    return dataclasses.replace(cache, stores=jax.tree.map(fill, cache.stores))


def probe(cache: Cache, positions: np.ndarray) -> tuple[np.ndarray, Cache]:
    """Feed probe tokens at `positions` [B, T]; returns weights [B, T, tokens] of the first head."""
    B, T = positions.shape
    W = cache.spec.dims.fields["v"]
    v = np.eye(W, dtype=np.float32)[np.maximum(positions, 0)][:, :, None]
    v = np.repeat(np.where(positions[:, :, None, None] < 0, np.nan, v), K, axis=2)
    q, k = np.zeros((B, T, N, H), np.float32), np.ones((B, T, K, H), np.float32)
    output, cache = step(cache, q, k, v, positions, ROTARY)
    output = np.asarray(output)
    np.testing.assert_array_equal(output, np.broadcast_to(output[:, :, :1], output.shape))
    return output[:, :, 0], cache


def assert_sees(weights: np.ndarray, tokens: Iterable[int], what: str = "") -> None:
    """One query's weights [W] are uniform on exactly `tokens`."""
    tokens = list(tokens)
    want = np.zeros_like(weights)
    want[tokens] = 1 / len(tokens)
    np.testing.assert_array_equal(np.flatnonzero(weights), tokens, err_msg=what)
    np.testing.assert_allclose(weights, want, atol=ELEMENTWISE, rtol=0, err_msg=what)


@dataclasses.dataclass(frozen=True)
class Text:
    """Random queries, keys and values of B sequences, [B, S, heads, width] each."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray

    @classmethod
    def random(cls, batch: int, length: int, value_dim: int = 6, seed: int = 0) -> "Text":
        """Unit variance."""
        rng = np.random.default_rng(seed)
        shapes = ((N, H), (K, H), (K, value_dim))
        draws = (rng.standard_normal((batch, length, *shape)) for shape in shapes)
        return cls(*(x.astype(np.float32) for x in draws))

    def at(self, positions: np.ndarray, padding: float = np.nan) -> list[np.ndarray]:
        """Entries at `positions` [B, T]; `padding` where they are -1."""
        rows = np.arange(len(positions))[:, None]
        pad = positions[:, :, None, None] < 0
        return [
            np.where(pad, padding, x[rows, np.maximum(positions, 0)]).astype(np.float32)
            for x in (self.q, self.k, self.v)
        ]

    def rows(self, index) -> "Text":
        """Other sequences, in the order of `index`."""
        return Text(self.q[index], self.k[index], self.v[index])


def feed(
    cache: Cache, text: Text, positions: np.ndarray, padding: float = np.nan
) -> tuple[np.ndarray, Cache]:
    """Append text[b, positions[b]]; returns outputs [B, T, N, Hv], and the cache."""
    output, cache = step(cache, *text.at(positions, padding), positions, ROTARY)
    return np.asarray(output), cache


def feed_in_chunks(cache: Cache, text: Text, length: int, width: int):
    """Feed the first `length` tokens of every sequence, `width` at a time."""
    outputs, B = [], len(text.q)
    for start in range(0, length, width):
        positions = chunk_positions([start] * B, [length] * B, width)
        output, cache = feed(cache, text, positions)
        outputs.append(output[:, : min(width, length - start)])
    return np.concatenate(outputs, axis=1), cache


def recompute(
    text: Text, b: int, p: int, seen: Sequence[int] | None = None, ranks: bool = False
) -> np.ndarray:
    """What a query at p of sequence b gets from the tokens `seen` (all up to p), [N, Hv].

    With `ranks` the tokens stand at 0, 1, 2, ... instead of at their positions.
    """
    seen = list(range(p + 1)) if seen is None else list(seen)
    at = np.arange(len(seen)) if ranks else np.array(seen)
    q = oracle.rotate(text.q[b, p], np.full(1, at[-1]), FREQUENCIES)
    k = oracle.rotate(text.k[b, seen], at[:, None], FREQUENCIES)
    return oracle.attend(q, k, text.v[b, seen], np.full(len(seen), True))[0]


def assert_close(got, want, what: str = "") -> None:
    """Equal within the f32 tolerance of attention."""
    np.testing.assert_allclose(got, want, atol=ATTENTION["float32"], rtol=0, err_msg=what)


def read(cache: Cache, field: str, part: int = 0) -> np.ndarray:
    """Rows [B, K, rows, W] of one part of a field, wherever the layout put them."""
    spec = cache.spec.stores[0]
    place = spec.places(field)[part]
    table = cache.tables[spec.table][0] if cache.tables[spec.table] else None
    buffer, start = cache.stores[0][field].parts[part], jnp.zeros(spec.batch, jnp.int32)
    return np.asarray(spec.config.layout.read(buffer, place, table, start, place.num_rows))
