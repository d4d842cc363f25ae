"""The conformance suite: what every legal cache must do, run over the whole algebra.

A new member joins by being registered: its `examples()` enter the products of `legal_configs()`.
The checks work on one layer with random entries of each kind, against a dense float64 oracle on
the *decoded* values, so that tolerances stay tight for lossy codecs too. A suite object compiles
three step shapes once and shares them between its checks.
"""

import dataclasses
import functools
import itertools
import tempfile
from collections.abc import Iterable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache.base import PositionRule, decode_to_model
from kvjax.cache.cache import BAD_POSITIONS, BAD_ROLLBACK, FULL, Cache
from kvjax.cache.codecs import CODECS
from kvjax.cache.config import CacheConfig, Codecs
from kvjax.cache.layouts import LAYOUTS
from kvjax.cache.legality import illegal_reasons
from kvjax.cache.policies import POLICIES
from kvjax.cache.saving import restore_cache, save_cache
from kvjax.errors import ConfigError
from kvjax.nn.rotary import Rotary
from kvjax.testing import oracle
from kvjax.testing.entry_cases import CASES, KVCase, LatentCase, Text

TOLERANCE = 2e-5  # f32, unit-variance inputs
CHUNK = 16  # tokens of a padded chunk: longer than some rings of the examples
SLACK = 3
# The suite compiles hundreds of small programs: LLVM's expensive passes would be most of its time.
COMPILER_OPTIONS = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def legal_configs(entry: str = "kv") -> Iterator[CacheConfig]:
    """Every legal product of the registered members' examples, every other one with slack."""
    slack = 0
    codecs = [codec for cls in CODECS.values() for codec in cls.examples()]
    first, second = CASES[entry]().dims.fields
    mixed = [Codecs(**{first: codec, second: codecs[0]}) for codec in codecs if codec.group > 1]
    for layout in _examples(LAYOUTS):
        for codec in [*codecs, *mixed]:
            for policy in _examples(POLICIES):
                for name in PositionRule.NAMES:
                    try:
                        yield CacheConfig(
                            layout=layout,
                            codec=codec,
                            policy=policy,
                            positions=PositionRule.parse(name),
                            slack=slack,
                        )
                        slack = SLACK - slack
                    except ConfigError:
                        continue


def covering(configs: Iterable[CacheConfig]) -> list[CacheConfig]:
    """Few of `configs` in which every two members that occur together still do."""
    left, chosen = [], []
    for config in configs:
        members = (config.layout, config.codec, config.policy, config.positions)
        left.append((config, set(itertools.combinations(members, 2))))
    wanted = set().union(*(pairs for _, pairs in left))
    while wanted:
        config, pairs = max(left, key=lambda item: len(item[1] & wanted))
        chosen.append(config)
        wanted -= pairs
    return chosen


def _examples(registry) -> list:
    return [member for cls in registry.values() for member in cls.examples()]


class Conformance:
    """The checks of one config; each raises AssertionError with what differs."""

    def __init__(
        self,
        config: CacheConfig,
        case: KVCase | LatentCase,
        *,
        seed: int = 0,
        lengths: tuple[int, ...] = (40, 23, 9),
    ):
        self.config, self.case, self.dims, self.lengths = config, case, case.dims, lengths
        self.max_len = max(self.lengths)
        self.text = self.random(seed)
        self.rotary = Rotary.default(case.rotary_dim, 100.0)
        self.traces = 0

        def step(cache: Cache, text: Text, positions):
            self.traces += 1
            output, cache = cache.attend(
                0, case.query(text), case.entry(text), positions, rotary=self.rotary
            )
            return output, cache.advance((positions >= 0).sum(1))

        every = jnp.arange(self.max_len, dtype=jnp.int32)
        self._rotate = jax.jit(lambda x: self.rotary.apply(x[None], every[None])[0])
        self.step = jax.jit(step, compiler_options=COMPILER_OPTIONS)
        self._reorder = jax.jit(Cache.reorder, compiler_options=COMPILER_OPTIONS)
        self._fork = jax.jit(Cache.fork, compiler_options=COMPILER_OPTIONS)

    # Driving a cache

    def random(self, seed: int, length: int | None = None) -> Text:
        """Unit-variance queries and entries of all sequences."""
        rng = np.random.default_rng(seed)
        heads = dict.fromkeys(self.case.query_widths, self.dims.num_heads)
        heads |= dict.fromkeys(self.dims.fields, self.dims.num_kv_heads)
        widths = self.case.query_widths | self.dims.fields
        shape = len(self.lengths), length or self.max_len
        return {
            name: rng.standard_normal((*shape, heads[name], width)).astype(np.float32)
            for name, width in widths.items()
        }

    def empty(self, batch: int | None = None, **changes) -> Cache:
        """A fresh cache."""
        config = self.config.replace(**changes)
        return config.init(self.dims, batch or len(self.lengths), self.max_len)

    def feed(
        self,
        cache: Cache,
        text: Text,
        starts: Sequence[int],
        ends: Sequence[int],
        width: int,
        *,
        left: bool = False,
    ) -> tuple[list[np.ndarray], Cache]:
        """Append text[b, starts[b] : ends[b]] in chunks of `width`, padded right or left.

        Returns:
            each sequence's outputs [tokens, N, Hv], and the cache.
        """
        outputs: list[list[np.ndarray]] = [[] for _ in starts]
        at = list(starts)
        while any(a < e for a, e in zip(at, ends, strict=True)):
            counts = [min(width, e - a) for a, e in zip(at, ends, strict=True)]
            index = np.zeros((len(at), width), np.int32)
            positions = np.full((len(at), width), -1, np.int32)
            spans = []
            for b, (a, n) in enumerate(zip(at, counts, strict=True)):
                span = slice(width - n, width) if left else slice(0, n)
                index[b, span] = positions[b, span] = np.arange(a, a + n)
                spans.append(span)
            rows = np.arange(len(at))[:, None]
            new = {name: x[rows, index] for name, x in text.items()}
            # Padding must not matter: it is NaN.
            for x in new.values():
                x[positions < 0] = np.nan
            output, cache = self.step(cache, new, positions)
            for b, span in enumerate(spans):
                outputs[b].append(np.asarray(output)[b, span])
            padded = np.asarray(output)[positions < 0]
            assert not padded.size or (padded == 0).all(), "output at padding is not 0"
            at = [a + n for a, n in zip(at, counts, strict=True)]
        return [np.concatenate(x) if x else np.zeros((0,)) for x in outputs], cache

    def feed_all(self, width: int, **options) -> tuple[list[np.ndarray], Cache]:
        """The whole ragged text into a fresh cache."""
        zeros = [0] * len(self.lengths)
        return self.feed(self.empty(), self.text, zeros, self.lengths, width, **options)

    def expected(self, b: int, text: Text | None = None, length: int | None = None) -> np.ndarray:
        """What the oracle says of sequence b: [tokens, N, Hv]."""
        text = text or self.text
        n = self.lengths[b] if length is None else length
        spec = self.empty(batch=1).spec.stores[0]
        config, policy = self.config, self.config.policy
        frequencies = np.asarray(self.rotary.inverse_frequencies)
        at = np.arange(n)
        raw = {name: text[name][b] for name in self.dims.fields}
        queries = self.case.oracle_query({name: x[b] for name, x in text.items()})
        every = jnp.arange(self.max_len, dtype=jnp.int32)
        if config.positions.rotated:
            turned = spec.kind.turned
            raw[turned] = np.asarray(self._rotate(raw[turned]))
        coded = {name: _round_trip(spec.codecs[name], x, spec.group) for name, x in raw.items()}
        raw, coded = ({name: x[:n] for name, x in both.items()} for both in (raw, coded))
        encoded = np.asarray(spec.encoded(every + 1))
        starts = np.asarray(policy.window_start(every))
        shifts = np.asarray(policy.shift(every))
        outputs = []
        for p in range(n):
            as_codes = (at < encoded[p])[:, None, None]
            k, v = self.case.heads({f: np.where(as_codes, coded[f], raw[f]) for f in raw})
            visible = (at <= p) & ((at >= starts[p]) | (at < policy.sinks))
            slot = p - shifts[p] if config.positions.slot else p
            rank = np.where(at < policy.sinks, at, at - (p - slot))
            if not config.positions.rotated:
                k = oracle.rotate(k, rank[:, None], frequencies)
            q = oracle.rotate(queries[p], np.full(1, slot), frequencies)
            outputs.append(oracle.attend(q, k, v, visible)[0])
        return np.stack(outputs)

    # The checks

    def check_oracle(self) -> None:
        """Chunks and single tokens equal the oracle; so does left padding."""
        expected = [self.expected(b) for b in range(len(self.lengths))]
        for width, left in ((CHUNK, False), (CHUNK, True), (1, False)):
            outputs, cache = self.feed_all(width, left=left)
            for b, (got, want) in enumerate(zip(outputs, expected, strict=True)):
                _close(got, want, f"sequence {b}, chunks of {width}, left={left}")
            assert cache.lengths.tolist() == list(self.lengths)
            cache.check()

    def check_alone(self) -> None:
        """A sequence gets the same output whoever its batch mates are."""
        together, _ = self.feed_all(CHUNK)
        b = 1
        n = self.lengths[b]
        mates = self.random(9)
        text = {name: _with_row(mates[name], x, b) for name, x in self.text.items()}
        ends = [3, n, self.max_len]
        among, _ = self.feed(self.empty(), text, [0] * 3, ends, CHUNK)
        _close(among[b], together[b], "with other batch mates", exact=True)

    def check_poison(self) -> None:
        """Nothing that was not written is ever read: NaN and 1e3 there change no bit."""
        clean = self.empty()
        wanted, _ = self._prompt_and_decode(clean)
        for poison in (np.nan, 1e3):
            filled = jax.tree.map(functools.partial(_fill, value=poison), clean.stores)
            got, _ = self._prompt_and_decode(dataclasses.replace(clean, stores=filled))
            for b, (x, y) in enumerate(zip(got, wanted, strict=True)):
                _close(x, y, f"sequence {b}, unwritten slots hold {poison}", exact=True)

    def check_rollback(self) -> None:
        """Forgetting tokens and going on with others equals never having seen them."""
        limit = self.empty().spec.stores[0].max_rollback
        back = SLACK if limit is None else limit
        other = self.random(5)
        n = [30, 17, 8]
        starts = [x - back for x in n]
        text = {
            name: np.stack([_joined(x[b], other[name][b], starts[b]) for b in range(3)])
            for name, x in self.text.items()
        }
        for width in (CHUNK, 1):
            # The last chunk holds one token: what is forgotten lies partly before it.
            _, cache = self.feed(self.empty(), self.text, [0] * 3, [x - 1 for x in n], width)
            _, cache = self.feed(cache, self.text, [x - 1 for x in n], n, width)
            cache = cache.rollback(jnp.array(starts, jnp.int32)).check()
            ends = [x + 6 for x in n]
            got, cache = self.feed(cache, text, starts, ends, width)
            for b in range(3):
                want = self.expected(b, text, ends[b])[starts[b] :]
                _close(got[b], want, f"sequence {b} after a rollback of {back}")
        if limit is not None:
            far = cache.rollback(cache.lengths - limit - 1)
            assert (far.status == BAD_ROLLBACK).all(), "a rollback beyond the slack was taken"
            assert (far.lengths == cache.lengths).all()

    def check_reorder_and_fork(self) -> None:
        """A copied sequence goes on as its source would, and the original is left alone."""
        index = [2, 0, 0]
        _, cache = self.feed(self.empty(), self.text, [0] * 3, [20, 13, 9], CHUNK)
        before = [np.array(x) for x in jax.tree.leaves(cache)]
        text = {name: x[index] for name, x in self.text.items()}
        starts = [9, 20, 20]
        ends = [x + 5 for x in starts]
        for moved in (self._reorder(cache, jnp.array(index)), self._fork(cache, jnp.array(index))):
            got, _ = self.feed(moved, text, starts, ends, 1)
            for b in range(3):
                want = self.expected(b, text, ends[b])[starts[b] :]
                _close(got[b], want, f"sequence {b} copied from {index[b]}")
        wide = self._fork(cache, jnp.array([1, 1, 0, 2, 0]))
        assert wide.lengths.tolist() == [13, 13, 20, 9, 20]
        for old, new in zip(before, jax.tree.leaves(cache), strict=True):
            np.testing.assert_array_equal(old, new)

    def check_past_the_end(self) -> None:
        """A full sequence is flagged, keeps its content, and does not disturb the others."""
        full = [self.max_len, 12, 0]
        _, cache = self.feed(self.empty(), self.text, [0] * 3, full, CHUNK)
        before = jax.device_get(self._reorder(cache, jnp.array([0, 0, 0])))
        one = {name: x[:, :1] for name, x in self.random(3, length=4).items()}
        _, cache = self.step(cache, one, cache.lengths[:, None])
        if self.config.policy.capacity(self.max_len) is None:
            assert (cache.status == 0).all()
            return
        assert cache.status.tolist() == [FULL, 0, 0]
        assert cache.lengths.tolist() == [self.max_len, 13, 1]
        after = jax.device_get(self._reorder(cache, jnp.array([0, 0, 0])))
        for x, y in zip(jax.tree.leaves(before.stores), jax.tree.leaves(after.stores), strict=True):
            np.testing.assert_array_equal(x, y)

    def check_bad_positions(self) -> None:
        """Positions that do not continue a sequence are flagged."""
        one = {name: x[:, :1] for name, x in self.text.items()}
        positions = jnp.array([[0], [1], [-1]], jnp.int32)
        _, cache = self.step(self.empty(), one, positions)
        assert cache.status.tolist() == [0, BAD_POSITIONS, 0]

    def check_structure(self) -> None:
        """One trace a shape; the same treedef and dtypes; nothing weakly typed."""
        cache = self.empty()
        _, once = self._prompt_and_decode(cache)
        traces = self.traces
        _, twice = self._prompt_and_decode(self.empty())
        assert self.traces == traces, "a second text of the same shapes was traced again"
        assert jax.tree.structure(once) == jax.tree.structure(cache)
        for a, b in zip(jax.tree.leaves(cache), jax.tree.leaves(twice), strict=True):
            assert (a.shape, a.dtype, a.weak_type) == (b.shape, b.dtype, b.weak_type)

    def check_bytes(self) -> None:
        """Predicted bytes are the measured buffers, line by line."""
        cache = self.empty()
        report = cache.nbytes()
        assert report == self.config.predict_nbytes(self.dims, len(self.lengths), self.max_len)
        assert report.total == sum(x.nbytes for x in jax.tree.leaves(cache))
        assert min(report.as_dict().values()) >= 0

    def check_saving(self) -> None:
        """A cache that was saved and restored goes on as the original, from equal buffers."""
        n = [20, 13, 9]
        _, cache = self.feed(self.empty(), self.text, [0] * 3, n, CHUNK)
        with tempfile.TemporaryDirectory() as scratch:
            save_cache(cache, f"{scratch}/cache")
            restored = restore_cache(f"{scratch}/cache", like=self.empty())
        for x, y in zip(jax.tree.leaves(cache), jax.tree.leaves(restored), strict=True):
            np.testing.assert_array_equal(x, y)
        ends = [x + 2 for x in n]
        wanted, _ = self.feed(cache, self.text, n, ends, 1)
        got, _ = self.feed(restored, self.text, n, ends, 1)
        for b in range(3):
            _close(got[b], wanted[b], f"sequence {b} after a restore", exact=True)

    def check_codes_are_final(self) -> None:
        """What has been encoded never changes while it is stored."""
        if not self.config.policy.linear:
            return
        _, cache = self.feed(self.empty(), self.text, [0] * 3, [32, 16, 8], CHUNK)
        spec = cache.spec.stores[0]
        done = int(spec.encoded(cache.lengths)[0])
        before = self._codes(cache, done)
        _, cache = self.feed(cache, self.text, [32, 16, 8], [40, 23, 9], 1)
        for x, y in zip(before, self._codes(cache, done), strict=True):
            np.testing.assert_array_equal(x, y)

    # Helpers

    def _codes(self, cache: Cache, length: int) -> list[np.ndarray]:
        spec = cache.spec.stores[0]
        table = cache.tables[spec.table][0] if cache.tables[spec.table] else None
        start = jnp.zeros(spec.batch, jnp.int32)
        rows = []
        for name, field in cache.stores[0].items():
            for buffer, place in zip(field.parts, spec.places(name), strict=True):
                read = spec.config.layout.read(buffer, place, table, start, place.num_rows)
                rows.append(np.asarray(read)[0, :, : length // place.part.tokens_per_row])
        return rows

    def _prompt_and_decode(self, cache: Cache) -> tuple[list[np.ndarray], Cache]:
        prompt = [min(n, 19) for n in self.lengths]
        first, cache = self.feed(cache, self.text, [0] * 3, prompt, CHUNK)
        second, cache = self.feed(cache, self.text, prompt, self.lengths, 1)
        joined = [
            np.concatenate([a, b]) if b.size else a for a, b in zip(first, second, strict=True)
        ]
        return joined, cache


CHECKS = tuple(name for name in vars(Conformance) if name.startswith("check_"))


@functools.cache
def suite(config: CacheConfig, entry: str = "kv") -> Conformance:
    """The suite of a config, shared so that its steps compile once."""
    assert not illegal_reasons(config)
    return Conformance(config, CASES[entry]())


def _with_row(mates: np.ndarray, text: np.ndarray, b: int) -> np.ndarray:
    out = mates.copy()
    out[b] = text[b]
    return out


def _joined(first: np.ndarray, second: np.ndarray, at: int) -> np.ndarray:
    return np.concatenate([first[:at], second[at:]])


def _fill(x: jax.Array, value: float) -> jax.Array:
    """Fill floats with `value`; codes with their largest one."""
    if jnp.issubdtype(x.dtype, jnp.floating):
        return jnp.full_like(x, value)
    return jnp.full_like(x, jnp.iinfo(x.dtype).max)


def _round_trip(codec, x: np.ndarray, group: int) -> np.ndarray:
    """Decode(encode(x)) of x [S, K, W], by whole groups; the open group stays as it is."""
    S, _, _ = x.shape
    whole = S // group * group
    return np.concatenate([np.asarray(_coder(codec)(x[:whole])), x[whole:]])


@functools.cache
def _coder(codec):
    def there_and_back(x: jax.Array) -> jax.Array:
        heads = x.swapaxes(0, 1)
        decoded = decode_to_model(codec, codec.encode(heads), x.shape[-1])
        return decoded.astype(jnp.float32).swapaxes(0, 1)

    return jax.jit(there_and_back)


def _close(got: np.ndarray, want: np.ndarray, what: str, exact: bool = False) -> None:
    if exact:
        np.testing.assert_array_equal(got, want, err_msg=what)
    else:
        np.testing.assert_allclose(got, want, atol=TOLERANCE, rtol=0, err_msg=what)
