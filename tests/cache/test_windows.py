"""Group A of the field cases: sliding windows and rings."""

import numpy as np
import pytest

from kvjax import CacheConfig, Paged, SinkWindow, Window
from tests.cache.layer import (
    LAYOUTS,
    POISONS,
    Text,
    assert_close,
    assert_sees,
    chunk_positions,
    dims,
    feed,
    feed_in_chunks,
    label,
    poisoned,
    probe,
    recompute,
)

layouts = pytest.mark.parametrize("layout", LAYOUTS, ids=label)
two_layouts = pytest.mark.parametrize("layout", LAYOUTS[::2], ids=label)


@pytest.mark.parametrize("width", [3, 1])
@pytest.mark.parametrize(
    ("layout", "positions"),
    [
        *((layout, "rotated_absolute") for layout in LAYOUTS),
        (LAYOUTS[2], "unrotated_absolute"),
        (LAYOUTS[0], "unrotated_slot"),
    ],
    ids=label,
)
def test_warm_up_sees_written_slots_only(layout, positions: str, width: int):
    """A ring of 8 with 3 tokens in it (B2)."""
    config = CacheConfig(layout=layout, policy=Window(window=8), positions=positions)
    empty = config.init(dims(value_dim=16), batch=1, max_len=64)
    outputs = []
    for poison in (0.0, *POISONS):
        cache, rows = poisoned(empty, poison), []
        for start in range(0, 3, width):
            weights, cache = probe(cache, chunk_positions([start], [3], width))
            rows.append(weights[0])
        outputs.append(np.concatenate(rows))
    for p in range(3):
        assert_sees(outputs[0][p], range(p + 1))
    for other in outputs[1:]:
        np.testing.assert_array_equal(other, outputs[0])


@two_layouts
@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize("window", [1, 4, 9])
def test_window_counts_the_own_token(layout, implementation: str, window: int):
    """W = 4: row 5 sees 2..5; W = 1 is the own value; W >= T is plain causal (B4)."""
    config = CacheConfig(layout=layout, policy=Window(window=window), implementation=implementation)
    cache = config.init(dims(value_dim=6), batch=1, max_len=6)
    weights, _ = probe(cache, chunk_positions([0], [6], 6))
    for p in range(6):
        assert_sees(weights[0, p], range(max(0, p - window + 1), p + 1), f"row {p}")
    if window == 1:
        np.testing.assert_array_equal(weights[0], np.eye(6, dtype=np.float32))


@pytest.mark.parametrize(
    ("layout", "batch", "width"),
    [
        *((layout, 3, width) for layout in LAYOUTS[::2] for width in (4, 5, 8, 24)),
        *((layout, 1, 8) for layout in LAYOUTS),
    ],
    ids=label,
)
def test_chunks_longer_than_the_window_lose_nothing(layout, batch: int, width: int):
    """W = 4 in a ring of 8; a chunk of 8 must read what it is about to overwrite (B6)."""
    config = CacheConfig(layout=layout, policy=Window(window=4), slack=4)
    text = Text.random(batch, 24)
    cache = config.init(dims(), batch=batch, max_len=64)
    assert cache.spec.stores[0].policy_slots == 8
    outputs, _ = feed_in_chunks(cache, text, 24, width)
    for b in range(batch):
        for p in range(24):
            want = recompute(text, b, p, range(max(0, p - 3), p + 1))
            assert_close(outputs[b, p], want, f"sequence {b}, token {p}")


@two_layouts
def test_every_chunking_sees_the_same_tokens(layout):
    policy = SinkWindow(sinks=2, window=4)
    cache = CacheConfig(layout=layout, policy=policy).init(dims(value_dim=24), 1, max_len=64)
    for width in (1, 8, 24):
        state = cache
        for start in range(0, 24, width):
            weights, state = probe(state, chunk_positions([start], [24], width))
            for t in range(width):
                p = start + t
                seen = {*range(min(policy.sinks, p + 1)), *range(max(0, p - 3), p + 1)}
                assert_sees(weights[0, t], sorted(seen), f"chunks of {width}, token {p}")


@pytest.mark.parametrize("width", [64, 1])
def test_a_window_works_without_any_other_mask(width: int):
    """W = 1 and W = 32 differ, and W = 1 is the own value (B8)."""
    text = Text.random(1, 64)
    outputs = {
        window: feed_in_chunks(
            CacheConfig(policy=Window(window=window)).init(dims(), 1, 64), text, 64, width
        )[0]
        for window in (1, 32)
    }
    own = np.repeat(text.v, 2, axis=2)  # the query heads of one KV head
    np.testing.assert_array_equal(outputs[1], own)
    assert np.abs(outputs[1] - outputs[32]).max() > 0.1


@two_layouts
def test_rings_wrap_at_their_own_pace(layout):
    """Sequences of unequal lengths wrap at different steps of one batch."""
    config = CacheConfig(layout=layout, policy=Window(window=5))
    cache = config.init(dims(value_dim=32), batch=3, max_len=64)
    _, cache = probe(cache, chunk_positions([0] * 3, [7, 2, 16], 16))
    at = [7, 2, 16]
    for _ in range(8):
        weights, cache = probe(cache, np.array(at, np.int32)[:, None])
        for b, p in enumerate(at):
            assert_sees(weights[b, 0], range(max(0, p - 4), p + 1), f"sequence {b}, token {p}")
        at = [p + 1 for p in at]
    assert cache.lengths.tolist() == at


def test_memory_of_a_window_is_bounded():
    config = CacheConfig(layout=Paged(page_size=16), policy=Window(window=40))
    totals = {config.predict_nbytes(dims(), 1, n).total for n in (64, 4096, 2**20)}
    assert len(totals) == 1


def test_a_window_longer_than_the_text_is_the_exact_cache():
    text = Text.random(2, 20)
    positions = chunk_positions([0, 0], [20, 9], 20)
    exact, windowed = (
        feed(config.init(dims(), 2, 20), text, positions)[0]
        for config in (CacheConfig(), CacheConfig(policy=Window(window=20)))
    )
    assert_close(exact, windowed)
    longer = CacheConfig(policy=Window(window=99)).init(dims(), 2, 20)
    assert longer.nbytes() == CacheConfig().init(dims(), 2, 20).nbytes()
