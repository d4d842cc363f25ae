"""Groups B and D of the field cases: rotary positions after eviction, and padded batches."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import CacheConfig, Contiguous, Int, KeepAll, Paged, SinkWindow, Window
from kvjax.errors import ConfigError
from tests.cache.layer import (
    ROTARY,
    Text,
    assert_close,
    chunk_positions,
    dims,
    feed,
    feed_in_chunks,
    fork,
    label,
    read,
    recompute,
    step,
)

STREAMS = [
    SinkWindow(sinks=1, window=1),
    SinkWindow(sinks=4, window=12),
    SinkWindow(sinks=3, window=2),
    Window(window=5),
]


def kept(policy, p: int) -> list[int]:
    """Positions that a query at p sees: the sinks and the newest `window`."""
    return sorted({*range(min(policy.sinks, p + 1)), *range(max(0, p - policy.window + 1), p + 1)})


class TestEviction:
    """Group B."""

    @pytest.mark.parametrize("positions", ["unrotated_slot", "rotated_absolute"])
    @pytest.mark.parametrize("policy", STREAMS, ids=label)
    def test_a_stream_equals_a_recompute_of_what_it_kept(self, policy, positions: str):
        """Slot positions stand for ranks 0, 1, 2, ... of the kept tokens; others do not (B10)."""
        config = CacheConfig(layout=Paged(page_size=4), policy=policy, positions=positions)
        text = Text.random(2, 48)
        outputs, _ = feed_in_chunks(config.init(dims(), 2, max_len=64), text, 48, 7)
        for b, p in np.ndindex(2, 48):
            want = recompute(text, b, p, kept(policy, p), ranks=positions == "unrotated_slot")
            assert_close(outputs[b, p], want, f"sequence {b}, token {p}")

    @pytest.mark.parametrize(
        ("codec", "positions"),
        [(Int(bits=8), "unrotated_slot"), (Int(bits=4, group_size=4), "rotated_absolute")],
        ids=["int8-slot", "int4-absolute"],
    )
    def test_quantized_keys_go_on_past_the_first_eviction(self, codec, positions: str):
        """Three tokens past sinks + window, singly and at once (B12)."""
        policy = SinkWindow(sinks=4, window=12)
        text = Text.random(1, 19)
        outputs = []
        for width in (1, 19):
            config = CacheConfig(codec=codec, policy=policy, positions=positions)
            outputs.append(feed_in_chunks(config.init(dims(), 1, 64), text, 19, width)[0])
        assert_close(outputs[0], outputs[1])
        exact = CacheConfig(policy=policy, positions=positions)
        wanted, _ = feed_in_chunks(exact.init(dims(), 1, 64), text, 19, 19)
        plain = CacheConfig(codec=codec)
        quantized, _ = feed_in_chunks(plain.init(dims(), 1, 64), text, 19, 19)
        unevicted, _ = feed_in_chunks(CacheConfig().init(dims(), 1, 64), text, 19, 19)
        usual = np.abs(quantized - unevicted).max()
        assert 0 < np.abs(outputs[0] - wanted).max() < 2 * usual

    def test_the_next_token_after_an_eviction(self):
        """9 tokens seen, 5 kept beside the new one: position 9, or rank 5 (B14)."""
        policy = SinkWindow(sinks=2, window=4)
        text = Text.random(1, 10)
        for positions, ranks in (("rotated_absolute", False), ("unrotated_slot", True)):
            config = CacheConfig(policy=policy, positions=positions)
            _, cache = feed_in_chunks(config.init(dims(), 1, 16), text, 9, 9)
            assert cache.lengths.tolist() == [9]
            output, cache = feed(cache, text, np.array([[9]], np.int32))
            assert cache.lengths.tolist() == [10]
            want = recompute(text, 0, 9, [0, 1, 6, 7, 8, 9], ranks=ranks)
            assert_close(output[0, 0], want, positions)
        assert 9 - policy.shift(jnp.array([9], jnp.int32)).item() == 5

    @pytest.mark.parametrize("window", [1, 2, 7])
    @pytest.mark.parametrize("sinks", [0, 1, 5])
    def test_small_caches_are_never_empty(self, sinks: int, window: int):
        """Whatever the text's length, a token sees at least itself (B16)."""
        policy = SinkWindow(sinks=sinks, window=window) if sinks else Window(window=window)
        for max_len in range(1, 9):
            spec = CacheConfig(policy=policy).init(dims(), 1, max_len).spec.stores[0]
            for n in range(1, max_len + 1):
                held = set(spec.slot_positions(jnp.array([n], jnp.int32))[0].tolist())
                assert set(kept(policy, n - 1)) <= held, (max_len, n)

    @pytest.mark.parametrize(
        ("member", "knobs"),
        [
            (Window, {"window": 0}),
            (SinkWindow, {"window": 0}),
            (SinkWindow, {"sinks": 0, "window": 4}),
        ],
    )
    def test_windows_that_keep_nothing_are_refused(self, member, knobs: dict):
        with pytest.raises(ConfigError, match=f"{member.__name__}.*=0 must be .* at least 1"):
            member(**knobs)

    def test_a_text_longer_than_the_cache_may_come_at_once(self):
        """48 tokens into 4 sinks and a window of 12: any chunking, the same cache (B18)."""
        policy = SinkWindow(sinks=4, window=12)
        config = CacheConfig(policy=policy, positions="unrotated_slot")
        text = Text.random(1, 48)
        empty = config.init(dims(), 1, max_len=64)
        runs = [feed_in_chunks(empty, text, 48, width) for width in (48, 7, 1)]
        held = runs[0][1].spec.stores[0].slot_positions(jnp.array([48], jnp.int32))
        assert sorted(held[0].tolist()) == [*range(4), *range(36, 48)]
        for outputs, cache in runs:
            assert_close(outputs[:, -1], runs[0][0][:, -1])
            for field in ("k", "v"):
                assert_close(read(cache, field), read(runs[0][1], field))
            assert cache.nbytes() == empty.nbytes()


class TestPaddedBatches:
    """Group D."""

    @pytest.mark.parametrize("layout", [Contiguous(), Paged(page_size=4)], ids=label)
    def test_left_padding_and_a_second_turn(self, layout):
        """Lengths 7, 3 and 1; 8 decoded tokens; then 2, 5 and 4 more, all padded left (B32)."""
        text = Text.random(3, 24)
        cache = CacheConfig(layout=layout).init(dims(), 3, max_len=24)
        at = [0, 0, 0]

        def turn(cache, ends, width):
            positions = chunk_positions(at, ends, width, left=True)
            outputs, cache = feed(cache, text, positions)
            for b, t in zip(*np.nonzero(positions >= 0), strict=True):
                p = positions[b, t]
                assert_close(outputs[b, t], recompute(text, b, p), f"sequence {b}, token {p}")
            at[:] = ends
            return cache

        cache = turn(cache, [7, 3, 1], 7)
        for _ in range(8):
            cache = turn(cache, [p + 1 for p in at], 1)
        cache = turn(cache, [p + n for p, n in zip(at, (2, 5, 4), strict=True)], 7)
        cache = turn(cache, [p + 1 for p in at], 1)
        assert cache.check().lengths.tolist() == [18, 17, 14]

    @pytest.mark.parametrize("page_size", [1, 4, 16])
    def test_pairs_of_requests_in_pages(self, page_size: int):
        """Lengths that do and do not fill pages of 4 (B34)."""
        text = Text.random(2, 10)
        empty = CacheConfig(layout=Paged(page_size=page_size)).init(dims(), 2, max_len=10)
        for lengths in ([5, 3], [4, 4], [1, 8]):
            positions = chunk_positions([0, 0], lengths, 8)
            outputs, cache = feed(empty, text, positions)
            last, _ = feed(cache, text, np.array(lengths, np.int32)[:, None])
            for b, n in enumerate(lengths):
                for p in range(n):
                    assert_close(outputs[b, p], recompute(text, b, p), f"{lengths}, {b}, {p}")
                assert_close(last[b, 0], recompute(text, b, n), f"{lengths}, {b}, token {n}")

    @pytest.mark.parametrize(
        "config",
        [
            CacheConfig(),
            CacheConfig(layout=Paged(page_size=4), policy=Window(window=4)),
            CacheConfig(codec=Int(bits=4), slack=2),
        ],
        ids=label,
    )
    def test_padding_is_neither_stored_nor_seen(self, config):
        """A row padded by 4; what stands in the padding changes no bit for 5 steps (B36)."""
        text = Text.random(2, 16)
        wanted = None
        for padding in (0.0, 1e3, np.nan):
            cache = config.init(dims(), 2, max_len=16)
            positions = chunk_positions([0, 0], [7, 3], 7, left=True)
            outputs, cache = feed(cache, text, positions, padding)
            assert (outputs[positions < 0] == 0).all()
            run, at = [outputs[positions >= 0]], [7, 3]
            for _ in range(5):
                # The second sequence rests: a step that is all padding for it.
                output, cache = feed(cache, text, np.array([[at[0]], [-1]], np.int32), padding)
                run.append(output)
                at[0] += 1
            output, cache = feed(cache, text, np.array(at, np.int32)[:, None], padding)
            run.append(output)
            wanted = run if wanted is None else wanted
            for a, b in zip(run, wanted, strict=True):
                np.testing.assert_array_equal(a, b, err_msg=f"{padding=}")
        assert cache.check().lengths.tolist() == [13, 4]

    @pytest.mark.parametrize(
        "config",
        [
            CacheConfig(),
            CacheConfig(layout=Paged(page_size=4), codec=Int(bits=4, axis="channel", group_size=4)),
            CacheConfig(policy=SinkWindow(sinks=2, window=6), positions="unrotated_slot"),
        ],
        ids=label,
    )
    def test_a_prefix_serves_many_suffixes(self, config):
        """Suffix A, B, then A again from one prefix; the prefix is left as it was (B38)."""
        text = Text.random(3, 16)
        text = Text(*(np.concatenate([x[[0, 0, 0], :9], x[:, 9:]], 1) for x in fields(text)))
        _, prefix = feed_in_chunks(config.init(dims(), 1, max_len=16), text.rows([0]), 9, 9)
        before = [np.array(x) for x in jax.tree.leaves(prefix)]
        one = jnp.zeros(1, jnp.int32)
        outputs = [feed_suffix(fork(prefix, one), text.rows([b])) for b in (0, 1, 0)]
        np.testing.assert_array_equal(outputs[2], outputs[0])
        assert np.abs(outputs[1] - outputs[0]).max() > 0.1
        for b in (0, 1):
            whole, _ = feed_in_chunks(config.init(dims(), 1, 16), text.rows([b]), 16, 16)
            assert_close(outputs[b], whole[:, 9:], f"suffix {b}")
        together = feed_suffix(fork(prefix, jnp.zeros(3, jnp.int32)), text)
        for b in (0, 1):
            assert_close(together[b], outputs[b][0], f"suffix {b} beside the others")
        for old, new in zip(before, jax.tree.leaves(prefix), strict=True):
            np.testing.assert_array_equal(old, new)


def fields(text: Text) -> tuple[np.ndarray, ...]:
    return text.q, text.k, text.v


def feed_suffix(cache, text: Text) -> np.ndarray:
    """Tokens 9 to 15 of every sequence, as one chunk."""
    B = len(text.q)
    return feed(cache, text, chunk_positions([9] * B, [16] * B, 7))[0]


@pytest.mark.parametrize("policy", [KeepAll(), SinkWindow(sinks=2, window=6)], ids=label)
def test_unrotated_and_rotated_keys_give_the_same_scores(policy):
    """Where the rotation happens is nobody's business: absolute positions, either way."""
    text = Text.random(2, 24)
    outputs = [
        feed_in_chunks(CacheConfig(policy=policy, positions=rule).init(dims(), 2, 24), text, 24, 8)[
            0
        ]
        for rule in ("rotated_absolute", "unrotated_absolute")
    ]
    assert_close(*outputs)


def test_slot_positions_stay_small_in_a_long_stream():
    """Position 2^24 + 1 is no f32, but a stream's own positions are at most sinks + window."""
    policy = SinkWindow(sinks=2, window=6)
    config = CacheConfig(policy=policy, positions="unrotated_slot")
    text = Text.random(1, 30)
    near, _ = feed_in_chunks(config.init(dims(), 1, 32), text, 30, 1)
    # The same 24 newest tokens after a stream 2^24 tokens longer, a multiple of the ring.
    cache = config.init(dims(), 1, 32)
    _, cache = feed_in_chunks(cache, text, 6, 6)
    far = 2**24 // 6 * 6
    jumped = jnp.array([6 + far], jnp.int32)
    cache = dataclasses.replace(cache, lengths=jumped, peaks=jumped)
    outputs = []
    for p in range(6, 30):
        entry = text.at(np.array([[p]]))
        output, cache = step(cache, *entry, np.array([[p + far]], np.int32), ROTARY)
        outputs.append(np.asarray(output)[0, 0])
    # After 6 steps the ring holds what it would have held.
    assert_close(np.stack(outputs)[8:], near[0, 14:])
    assert cache.check().lengths.tolist() == [30 + far]
