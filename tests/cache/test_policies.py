"""Rings are long enough whatever the capacity asked for; slots and positions are inverse."""

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import KeepAll, SinkWindow, Window

POLICIES = [KeepAll(), Window(window=5), Window(window=12), SinkWindow(sinks=4, window=5)]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: type(p).__name__)
@pytest.mark.parametrize("slack", [0, 3])
@pytest.mark.parametrize("group", [1, 4])
def test_what_a_query_may_see_after_a_rollback_is_still_there(policy, slack, group):
    for max_len in range(1, 16):
        slots = policy.num_slots(max_len, slack, group)
        capacity = policy.capacity(max_len)
        longest = 40 if capacity is None else capacity
        for length in range(1, longest + 1):
            held = {}  # slot to newest position: what a store of this length holds
            for position in range(length):
                held[int(policy.slots(jnp.int32(position), slots))] = position
            for query in range(max(length - slack, 0), length + 1):
                start = int(policy.window_start(jnp.int32(query)))
                seen = {p for p in range(min(query, length)) if p >= start or p < policy.sinks}
                assert seen <= set(held.values()), (max_len, length, query)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: type(p).__name__)
def test_slot_positions_invert_slots(policy):
    slots = policy.num_slots(40, 0, 1)
    for length in range(41):
        held = np.full(slots, -1)
        for position in range(length):
            held[int(policy.slots(jnp.int32(position), slots))] = position
        told = np.asarray(policy.slot_positions(jnp.array([length], jnp.int32), slots))[0]
        np.testing.assert_array_equal(told, held)
