"""What the ops share: packing, exact merge, rotation, visibility."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvjax.testing import oracle
from pallas_kernels._common.merge import merge
from pallas_kernels._common.packing import pack, packed_width, unpack
from pallas_kernels._common.rotation import angles_of, rotate
from pallas_kernels._common.visibility import Visibility, causal
from tests.tolerances import ELEMENTWISE


class TestPacking:
    def test_all_pairs_of_nibbles_round_trip(self):
        low, high = np.divmod(np.arange(256, dtype=np.uint8), 16)
        codes = np.stack([low, high], axis=1)
        packed = pack(jnp.asarray(codes), 4)
        assert packed.shape == (256, 1)
        np.testing.assert_array_equal(packed[:, 0], low | high << 4)
        np.testing.assert_array_equal(unpack(packed, 4, 2), codes)

    def test_all_bytes_of_two_bits_round_trip(self):
        codes = np.stack([np.arange(256) >> shift & 3 for shift in (0, 2, 4, 6)], axis=1)
        packed = pack(jnp.asarray(codes, jnp.uint8), 2)
        np.testing.assert_array_equal(packed[:, 0], np.arange(256))
        np.testing.assert_array_equal(unpack(packed, 2, 4), codes)

    @pytest.mark.parametrize("bits", [8, 4, 2])
    @pytest.mark.parametrize("width", [1, 2, 3, 5, 7, 64, 80])
    def test_any_width_round_trips(self, bits: int, width: int):
        codes = np.random.default_rng(width).integers(0, 2**bits, (3, 2, width)).astype(np.uint8)
        packed = pack(jnp.asarray(codes), bits)
        assert packed.dtype == jnp.uint8
        assert packed.shape == (3, 2, packed_width(width, bits)) == (3, 2, -(-width * bits // 8))
        np.testing.assert_array_equal(unpack(packed, bits, width), codes)

    @pytest.mark.parametrize(("bits", "pad"), [(4, 0xF0), (2, 0xC0)])
    def test_padding_of_odd_widths_is_never_seen(self, bits: int, pad: int):
        width = 8 // bits * 3 - 1  # the last run is one code short
        codes = np.random.default_rng(0).integers(0, 2**bits, width).astype(np.uint8)
        packed = np.array(pack(jnp.asarray(codes), bits))
        packed[-1] |= pad
        np.testing.assert_array_equal(unpack(jnp.asarray(packed), bits, width), codes)


def attend_part(scores: np.ndarray, values: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """Attention of one part in f64, rounded to f32: output [R, W] and logsumexp [R]."""
    if scores.shape[1] == 0:
        empty = np.full(len(scores), -np.inf, np.float32)
        return jnp.zeros((len(scores), values.shape[1])), jnp.asarray(empty)
    top = scores.max(1)
    weights = np.exp(scores - top[:, None])
    total = weights.sum(1)
    output = weights @ values / total[:, None]
    return jnp.asarray(output, jnp.float32), jnp.asarray(top + np.log(total), jnp.float32)


class TestMerge:
    @given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(0, 2**16))
    def test_parts_make_the_whole(self, sizes: list[int], seed: int):
        rng = np.random.default_rng(seed)
        n = sum(sizes)
        scores, values = 3 * rng.standard_normal((4, n)), rng.standard_normal((n, 5))
        cuts = np.cumsum(sizes)[:-1]
        parts = [
            attend_part(s, v)
            for s, v in zip(np.split(scores, cuts, 1), np.split(values, cuts), strict=True)
        ]
        whole, lse = attend_part(scores, values)
        got, got_lse = merge(parts)
        np.testing.assert_allclose(got, whole, atol=2 * ELEMENTWISE, rtol=0)
        np.testing.assert_allclose(got_lse, lse, atol=2 * ELEMENTWISE, rtol=ELEMENTWISE)
        assert got.dtype == got_lse.dtype == jnp.float32

    def test_empty_parts_add_nothing(self):
        rng = np.random.default_rng(0)
        part = attend_part(rng.standard_normal((3, 4)), rng.standard_normal((4, 5)))
        empty = jnp.zeros((3, 5)), jnp.full(3, -jnp.inf)
        for parts in ([part, empty], [empty, part], [empty, part, empty]):
            output, lse = merge(parts)
            np.testing.assert_array_equal(output, part[0])
            np.testing.assert_allclose(lse, part[1], rtol=ELEMENTWISE)

    @pytest.mark.parametrize("count", [1, 2, 3])
    def test_nothing_merged_with_nothing_is_nothing(self, count: int):
        output, lse = merge([(jnp.zeros((3, 5)), jnp.full(3, -jnp.inf))] * count)
        assert (output == 0).all() and jnp.isneginf(lse).all()

    def test_rows_are_empty_one_by_one(self):
        a = jnp.ones((2, 1)), jnp.array([0.0, -jnp.inf])
        b = jnp.full((2, 1), 3.0), jnp.array([-jnp.inf, -jnp.inf])
        output, lse = merge([a, b])
        assert output.tolist() == [[1.0], [0.0]]
        assert lse.tolist() == [0.0, -np.inf]

    @pytest.mark.parametrize("level", [-1e4, 0.0, 1e4])
    def test_large_scores_neither_overflow_nor_vanish(self, level: float):
        a = jnp.ones((1, 1)), jnp.full(1, level)
        b = jnp.full((1, 1), 2.0), jnp.full(1, level)
        output, lse = merge([a, b])
        assert output.item() == 1.5
        np.testing.assert_allclose(lse, level + np.log(2), rtol=ELEMENTWISE)


FREQUENCIES = np.float32(100.0) ** -(np.arange(4, dtype=np.float32) / 4)


class TestRotation:
    @pytest.mark.parametrize("width", [8, 11, 16])
    def test_matches_the_oracle_and_leaves_the_rest(self, width: int):
        rng = np.random.default_rng(width)
        x = rng.standard_normal((2, 5, 3, width)).astype(np.float32)
        positions = rng.integers(0, 300, (2, 5)).astype(np.int32)
        angles = angles_of(jnp.asarray(positions), jnp.asarray(FREQUENCIES))[:, :, None]
        got = np.asarray(rotate(jnp.asarray(x), angles))
        want = oracle.rotate(x, positions[:, :, None], FREQUENCIES)
        # The angle itself is an f32: 300 radians are known to 1.5e-5.
        np.testing.assert_allclose(got, want, atol=6e-5, rtol=0)
        np.testing.assert_array_equal(got[..., 8:], x[..., 8:])

    def test_scores_depend_on_distance_alone(self):
        rng = np.random.default_rng(1)
        q, k = (jnp.asarray(rng.standard_normal((1, 8)), jnp.float32) for _ in range(2))

        def score(i: int, j: int) -> float:
            turned = [
                rotate(x, angles_of(jnp.array([p], jnp.int32), jnp.asarray(FREQUENCIES)))
                for x, p in ((q, i), (k, j))
            ]
            return float((turned[0] * turned[1]).sum())

        np.testing.assert_allclose(score(9, 4), score(5, 0), atol=1e-5)
        np.testing.assert_allclose(score(-3, -8), score(5, 0), atol=1e-5)
        assert abs(score(9, 4) - score(9, 5)) > 1e-3

    def test_position_0_changes_nothing_and_the_dtype_stays(self):
        x = jnp.asarray(np.random.default_rng(2).standard_normal((3, 8)), jnp.bfloat16)
        turned = rotate(x, angles_of(jnp.zeros(3, jnp.int32), jnp.asarray(FREQUENCIES)))
        assert turned.dtype == jnp.bfloat16
        np.testing.assert_array_equal(turned, x)


class TestVisibility:
    @given(st.integers(0, 2**16), st.integers(0, 4))
    def test_mask_is_the_rule_and_live_covers_it(self, seed: int, sinks: int):
        rng = np.random.default_rng(seed)
        first, start, last = (rng.integers(-3, 12, (2, 5)).astype(np.int32) for _ in range(3))
        held = rng.integers(-1, 12, (2, 9)).astype(np.int32)
        visible = Visibility(*map(jnp.asarray, (first, start, last)), sinks=sinks)
        mask = np.asarray(visible.mask(jnp.asarray(held)))
        for b, t, s in np.ndindex(2, 5, 9):
            j = held[b, s]
            inside = j >= 0 and first[b, t] <= j <= last[b, t]
            assert mask[b, t, s] == (inside and (j >= start[b, t] or j < sinks))
        live = np.asarray(visible.live(jnp.asarray(held)))
        assert not (mask.any(1) & ~live).any()

    def test_one_query_is_live_exactly_where_it_sees(self):
        visible = Visibility(
            jnp.array([[0]], jnp.int32), jnp.array([[4]], jnp.int32), jnp.array([[6]], jnp.int32), 2
        )
        held = jnp.array([[-1, 0, 1, 2, 3, 4, 5, 6, 7]], jnp.int32)
        np.testing.assert_array_equal(visible.live(held), visible.mask(held)[:, 0])
        assert visible.live(held)[0].tolist() == [
            False,
            True,
            True,
            False,
            False,
            *[True] * 3,
            False,
        ]

    def test_causal_padding_sees_nothing(self):
        mask = causal(jnp.array([[0, 1, -1]], jnp.int32)).mask(jnp.array([[0, 1, -1]], jnp.int32))
        assert mask[0].tolist() == [[True, False, False], [True, True, False], [False] * 3]
