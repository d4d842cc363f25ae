"""Forgetting the newest tokens (field case B138), and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import CacheConfig, Codecs, Int, Paged, Window
from kvjax.errors import CapacityError, ConfigError
from tests.cache.layer import (
    POISONS,
    Text,
    assert_close,
    chunk_positions,
    dims,
    feed,
    feed_in_chunks,
    label,
    recompute,
    rollback,
    step,
)

CAPACITY = 32


@pytest.mark.parametrize(
    "config",
    [
        CacheConfig(),
        CacheConfig(layout=Paged(page_size=4), codec=Int(bits=8, scale_dtype="float32")),
        CacheConfig(policy=Window(window=32), slack=4),
    ],
    ids=label,
)
def test_forgotten_tokens_are_gone_and_the_room_is_back(config):
    """Capacity 32, length 10, back to 7: what stood in slots 7 to 9 changes no bit (B138)."""
    text = Text.random(1, CAPACITY)
    empty = config.init(dims(), 1, CAPACITY)
    shapes = [x.shape for x in jax.tree.leaves(empty)]
    outputs = []
    for forgotten in (1.0, *POISONS):
        cache = feed_in_chunks(empty, text, 7, 7)[1]
        poison = Text(*(np.full_like(x, forgotten) for x in (text.q, text.k, text.v)))
        for p in (7, 8, 9):
            _, cache = feed(cache, poison, np.array([[p]], np.int32))
        cache = rollback(cache, jnp.array([7], jnp.int32)).check()
        assert [x.shape for x in jax.tree.leaves(cache)] == shapes
        traces = step._cache_size()
        run = []
        for p in range(7, 12):
            output, cache = feed(cache, text, np.array([[p]], np.int32))
            run.append(output[0, 0])
        assert step._cache_size() == traces
        assert cache.check().lengths.tolist() == [12]
        outputs.append(np.stack(run))
    for other in outputs[1:]:
        np.testing.assert_array_equal(other, outputs[0])
    tolerance = 0 if config.codec.lossless else 0.1
    for i, p in enumerate(range(7, 12)):
        np.testing.assert_allclose(outputs[0][i], recompute(text, 0, p), atol=tolerance + 2e-5)


def test_limits_of_a_rollback():
    """To 0 is allowed; below 0, forwards and beyond the slack leave a sequence as it is."""
    text = Text.random(5, 12)
    positions = chunk_positions([0] * 5, [10] * 5, 10)
    _, cache = feed(CacheConfig().init(dims(), 5, CAPACITY), text, positions)
    moved = rollback(cache, jnp.array([10, 7, 0, -1, 11], jnp.int32))
    assert moved.lengths.tolist() == [10, 7, 0, 10, 10]
    assert (moved.status != 0).tolist() == [False, False, False, True, True]
    with pytest.raises(CapacityError, match=r"sequence 3: .*rollback"):
        moved.check()
    _, cache = feed(
        CacheConfig(policy=Window(window=4), slack=3).init(dims(), 5, CAPACITY), text, positions
    )
    moved = rollback(cache, jnp.array([10, 7, 6, 0, 11], jnp.int32))
    assert moved.lengths.tolist() == [10, 7, 10, 10, 10]
    # Two rollbacks count together: the ring has forgotten what lies before 7.
    again = rollback(moved, jnp.array([8, 6, 10, 10, 10], jnp.int32))
    assert again.lengths.tolist() == [8, 7, 10, 10, 10]


def test_forgetting_past_a_flush_of_a_group():
    """Tokens that are codes by now are never forgotten: the tail is long enough for the slack."""
    codec = Codecs(k=Int(bits=4, axis="channel", group_size=4), v=Int(bits=8))
    config = CacheConfig(codec=codec, slack=5)
    text, other = Text.random(1, 24), Text.random(1, 24, seed=1)
    for length in (12, 13, 16, 17):
        _, cache = feed_in_chunks(config.init(dims(), 1, CAPACITY), text, length, 24)
        cache = rollback(cache, jnp.array([length - 5], jnp.int32)).check()
        joined = Text(
            *(
                np.concatenate([a[:, : length - 5], b[:, length - 5 :]], axis=1)
                for a, b in zip(vars(text).values(), vars(other).values(), strict=True)
            )
        )
        positions = chunk_positions([length - 5], [24], 24)
        output, _ = feed(cache, joined, positions)
        wanted, _ = feed_in_chunks(config.init(dims(), 1, CAPACITY), joined, 24, 24)
        assert_close(output[positions >= 0], wanted[0, length - 5 :], f"{length=}")


@pytest.mark.parametrize("slack", [-1, 1.5, True, "2"])
def test_slack_must_be_a_count(slack):
    with pytest.raises(ConfigError, match="slack"):
        CacheConfig(slack=slack)
