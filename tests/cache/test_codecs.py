"""Group G of the field cases: quantized caches, and what every codec owes its values."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvjax import CacheConfig, Int, Paged, Raw
from kvjax.cache.base import decode_to_model
from kvjax.cache.codecs import CODECS
from kvjax.testing.conformance import COMPILER_OPTIONS
from tests.cache.layer import H, K, Text, dims, feed, feed_in_chunks, label

EXAMPLES = [codec for cls in CODECS.values() for codec in cls.examples()]
INTS = [
    Int(bits=bits, axis=axis, group_size=4, symmetric=symmetric, scale_dtype=dtype)
    for bits, axis, symmetric, dtype in (
        (8, "token", False, "float16"),
        (4, "token", True, "float32"),
        (4, "token", False, "bfloat16"),
        (2, "token", False, "float32"),
        (8, "channel", True, "float16"),
        (4, "channel", False, "float32"),
        (2, "channel", False, "float16"),
    )
]


@functools.cache
def coder(codec):
    """Jitted x [..., S, W] -> (parts, decoded f32 [..., S, W], bound)."""

    def there_and_back(x: jax.Array):
        parts = codec.encode(x)
        decoded = decode_to_model(codec, parts, x.shape[-1]).astype(jnp.float32)
        return parts, decoded, codec.bound(x).astype(jnp.float32)

    return jax.jit(there_and_back, compiler_options=COMPILER_OPTIONS)


def decode(codec, x: np.ndarray) -> np.ndarray:
    return np.asarray(coder(codec)(x)[1])


class TestRoundTrip:
    @pytest.mark.parametrize("codec", dict.fromkeys([*EXAMPLES, *INTS]), ids=label)
    @given(data=st.data())
    def test_error_stays_within_the_bound(self, codec, data):
        """Random widths, scales and offsets, odd ones too."""
        width = data.draw(st.sampled_from([5, 36]))
        scale = 10.0 ** data.draw(st.integers(-6, 4))
        offset = data.draw(st.sampled_from([0.0, -3.0, 1000.0]))
        rng = np.random.default_rng(data.draw(st.integers(0, 2**16)))
        x = (scale * rng.standard_normal((2, 8, width)) + offset).astype(np.float32)
        parts, decoded, bound = coder(codec)(x)
        assert (np.abs(decoded - x) <= bound).all()
        for part, spec in zip(parts, codec.parts(width, "float32"), strict=True):
            assert part.shape == (2, 8 // spec.tokens_per_row, spec.width)
            assert part.dtype == spec.dtype

    @pytest.mark.parametrize("codec", INTS, ids=label)
    def test_half_a_step_is_lost_and_no_more(self, codec):
        """Unit variance, with scales that are exact: the bound itself is not slack (f32)."""
        codec = dataclasses.replace(codec, scale_dtype="float32")
        x = np.random.default_rng(0).standard_normal((2, 8, 36)).astype(np.float32)
        groups = grouped(codec, x)
        spread = np.ptp(groups, axis=-1) / (2**codec.bits - 1)
        if codec.symmetric:
            spread = np.abs(groups).max(-1) / (2 ** (codec.bits - 1) - 1)
        error = np.abs(grouped(codec, decode(codec, x)) - groups).max(-1)
        assert (error <= spread / 2 * (1 + 1e-5) + 1e-6).all()
        _, _, bound = coder(codec)(x)
        assert (grouped(codec, np.asarray(bound)).max(-1) <= spread / 2 * 1.01 + 1e-5).all()

    def test_raw_is_the_value_itself(self):
        x = np.random.default_rng(0).standard_normal((2, 4, 5)).astype(np.float32)
        x[0, 0, :3] = np.nan, np.inf, -0.0
        np.testing.assert_array_equal(decode(Raw(), x), x)

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_narrow_raw_saturates_and_shows_nan(self, dtype: str):
        x = np.array([[1.0, 1e6, -3.4e38, np.inf, -np.inf, np.nan]], np.float32)
        got = decode(Raw(dtype=dtype), x)[0]
        assert np.isfinite(got[:5]).all() and np.isnan(got[5])
        assert got[0] == 1 and got[3] == -got[4] == float(jnp.finfo(dtype).max)


def grouped(codec, x: np.ndarray) -> np.ndarray:
    """Values [..., g] of each whole group along the codec's axis."""
    x = np.swapaxes(x, -1, -2) if codec.axis == "channel" else x
    return x.reshape(*x.shape[:-1], -1, codec.group_size)


class TestOddValues:
    @pytest.mark.parametrize("codec", INTS, ids=label)
    @pytest.mark.parametrize("value", [0.0, 0.5, -3.0, 1000.0, 1.17e-38, 1e-42])
    def test_constants(self, codec, value: float):
        """A constant that the scale's dtype holds comes back; without a zero, to half a step."""
        x = np.full((2, 4, 8), value, np.float32)
        _, got, bound = coder(codec)(x)
        if abs(value) < 1e-30:  # denormal, or so near that a backend may flush it
            assert (np.abs(got) <= 1e-30).all()
        elif codec.symmetric and value:
            assert (np.abs(got - x) <= bound).all()
        else:
            np.testing.assert_array_equal(got, x)

    @pytest.mark.parametrize("codec", INTS, ids=label)
    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e38, -3.4e38])
    def test_one_bad_value_stays_where_it_is(self, codec, value: float):
        """No other group of the token, no other token or head changes; nothing becomes NaN."""
        x = np.random.default_rng(1).standard_normal((2, 8, 12)).astype(np.float32)
        bad = x.copy()
        bad[0, 5, 6] = value
        clean, got = decode(codec, x), decode(codec, bad)
        assert np.isfinite(got).all()
        same = np.ones_like(x, bool)
        same[(0, slice(4, 8), 6) if codec.axis == "channel" else (0, 5, slice(4, 8))] = False
        np.testing.assert_array_equal(got[same], clean[same])

    @pytest.mark.parametrize("codec", INTS, ids=label)
    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
    def test_groups_that_are_not_finite_at_all(self, codec, value: float):
        assert np.isfinite(decode(codec, np.full((1, 4, 8), value, np.float32))).all()

    @pytest.mark.parametrize("codec", INTS, ids=label)
    def test_an_outlier_costs_only_its_group(self, codec):
        x = np.random.default_rng(2).standard_normal((2, 8, 12)).astype(np.float32)
        x[1, 2, 3] = 1e4
        _, got, bound = coder(codec)(x)
        assert (np.abs(got - x) <= bound).all()
        others = np.ones_like(x, bool)
        others[(1, slice(0, 4), 3) if codec.axis == "channel" else (1, 2, slice(0, 4))] = False
        step = 10 / (2 ** (codec.bits - 1) - 1)  # of groups within +-5, the widest step
        assert np.abs(got - x)[others].max() <= step / 2


class TestPacking:
    """Packed signed codes (B74), through the symmetric codec of step 1."""

    CODEC = Int(bits=4, symmetric=True, group_size=64, scale_dtype="float32")

    def through(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Bytes and decoded values; a column of 7 makes every row's step exactly 1."""
        with_unit = np.concatenate([x, np.full((*x.shape[:-1], 1), 7)], axis=-1)
        parts, decoded, _ = coder(self.CODEC)(with_unit.astype(np.float32))
        assert (np.asarray(parts[1]) == 1).all()
        return np.asarray(parts[0]), np.asarray(decoded)[..., :-1]

    def test_all_signed_pairs(self):
        low, high = np.meshgrid(np.arange(-7, 8), np.arange(-7, 8))
        pairs = np.stack([low.reshape(-1), high.reshape(-1)], axis=-1)
        for wide in (pairs, np.insert(pairs, 1, 0, axis=1)):  # neighbours, and in one byte
            np.testing.assert_array_equal(self.through(wide)[1], wide)

    def test_the_lowest_code_too(self):
        """Code -8 is only stored where rounding asks for it; decoding knows it."""
        low, high = np.divmod(np.arange(256), 16)
        packed = jnp.asarray((low | high << 4)[:, None], jnp.uint8)
        scale = jnp.ones((256, 1), jnp.float32)
        got = self.CODEC.decode((packed, scale), 2)
        signed = np.where(np.arange(16) < 8, np.arange(16), np.arange(16) - 16)
        np.testing.assert_array_equal(got, np.stack([signed[low], signed[high]], axis=1))

    def test_a_known_byte(self):
        """(-6, 2) is 0x2A, low nibble first."""
        codes, decoded = self.through(np.array([[-6.0, 0.0, 2.0]]))
        assert codes[0, 0] == 0x2A  # codes i and i + 2 share a byte
        assert decoded[0].tolist() == [-6, 0, 2]

    def test_values_between_and_beyond_the_codes(self):
        """A scale that is rounded down leaves the largest value past the last code: it clamps."""
        codec = Int(bits=4, symmetric=True, group_size=8, scale_dtype="bfloat16")
        x = np.array([[7.6, -7.6, 8.0, -9.0, 0.4, 0.5, 1.5, -0.6]], np.float32) * 1.01
        parts, decoded, bound = coder(codec)(x)
        step = float(parts[1][0, 0])
        levels = np.asarray(decoded)[0] / step
        np.testing.assert_allclose(levels, np.clip(np.round(x[0] / step), -8, 7), atol=1e-5)
        assert (np.abs(decoded - x) <= bound).all()

    @pytest.mark.parametrize("width", [1, 3, 5])
    def test_odd_widths(self, width: int):
        """Width 5 takes 3 bytes, and the pad nibble never counts."""
        x = np.random.default_rng(width).integers(-7, 8, (4, width)).astype(np.float32)
        parts, decoded, _ = coder(self.CODEC)(x)
        assert parts[0].shape == (4, -(-width // 2))
        (codes, *_) = self.CODEC.parts(width, "float32")
        assert (codes.width, codes.padding_bits) == (-(-width // 2), 4)
        dirty = np.array(parts[0])
        dirty[:, -1] |= 0xF0
        got = self.CODEC.decode((jnp.asarray(dirty), *parts[1:]), width)
        np.testing.assert_array_equal(got, decoded)


@pytest.mark.parametrize("group_size", [32, 64])
@pytest.mark.parametrize("width", [80, 96, 100, 192, 36])
def test_a_short_last_group_has_its_own_range(width: int, group_size: int):
    """80 = 2 * 32 + 16: padding zeros would widen a range far from 0 (B76)."""
    codec = Int(bits=4, group_size=group_size, scale_dtype="float32")
    x = np.random.default_rng(0).uniform(100, 101, (2, 3, width)).astype(np.float32)
    parts, decoded, _ = coder(codec)(x)
    assert parts[1].shape[-1] == parts[2].shape[-1] == -(-width // group_size)
    assert np.abs(decoded - x).max() <= 1 / 15 / 2 + 1e-4
    tail = x[..., width // group_size * group_size :]
    if tail.size:
        np.testing.assert_array_equal(parts[2][..., -1], tail.min(-1))


def test_a_head_dim_of_36_decodes_token_by_token():
    """... and not only at construction: a prompt, then single tokens (B76)."""
    codec = Int(bits=8, group_size=32)
    sizes = dims(value_dim=36)
    text = Text.random(1, 12, value_dim=36)
    cache = CacheConfig(codec=codec, layout=Paged(page_size=4)).init(sizes, 1, 12)
    outputs, cache = feed_in_chunks(cache, text, 8, 8)
    exact, _ = feed_in_chunks(CacheConfig().init(sizes, 1, 12), text, 12, 12)
    assert np.abs(outputs - exact[:, :8]).max() < 0.05
    for p in range(8, 12):
        output, cache = feed(cache, text, np.array([[p]], np.int32))
        assert np.abs(output[:, 0] - exact[:, p]).max() < 0.05


class TestTail:
    """What is in full precision, and for how long: `slack` newest tokens and the open group."""

    def test_codes_of_single_tokens_need_none(self):
        spec = CacheConfig(codec=Int(bits=8)).init(dims(), 1, 170).spec.stores[0]
        assert (spec.group, spec.has_tail, spec.tail_slots) == (1, False, 0)

    @pytest.mark.parametrize(("slack", "group"), [(0, 4), (1, 1), (32, 4), (100, 1), (101, 4)])
    def test_the_newest_tokens_are_bit_equal_to_the_input(self, slack: int, group: int):
        """Prompt 100, then 70 steps: after each, encoded(n) tokens are codes, no more (B68)."""
        axis = "channel" if group > 1 else "token"
        config = CacheConfig(codec=Int(bits=8, axis=axis, group_size=4), slack=slack)
        text = Text.random(1, 170)
        _, cache = feed_in_chunks(config.init(dims(), 1, 170), text, 100, 100)
        spec = cache.spec.stores[0]
        assert spec.group == group
        steps = (100, 101, 102, 103, 104, 131, 132, 169)
        for n in range(100, 170):
            encoded = max(n - slack, 0) // group * group
            assert spec.encoded(cache.lengths).tolist() == [encoded]
            if n in steps:
                for field, x in (("k", None), ("v", text.v)):
                    tail = tail_of(cache, field)
                    newest = np.arange(encoded, n)
                    assert len(newest) >= min(slack, n)
                    if x is not None:  # keys are stored rotated
                        want = x[0, newest].swapaxes(0, 1)
                        np.testing.assert_array_equal(tail[:, newest % spec.tail_slots], want)
            _, cache = feed(cache, text, np.array([[n]], np.int32))

    def test_the_tail_does_not_grow(self):
        """Slack 16, groups of 8, 500 steps: never more than 16 + 8 - 1 tokens (B70)."""
        config = CacheConfig(codec=Int(bits=8, axis="channel", group_size=8), slack=16)
        cache = config.init(dims(), 1, 512)
        spec, before = cache.spec.stores[0], cache.nbytes()
        assert spec.tail_slots <= 16 + 8 + 16  # what may be forgotten and come again
        text = Text.random(1, 500)
        longest = 0
        for n in range(1, 501):
            _, cache = feed(cache, text, np.array([[n - 1]], np.int32))
            longest = max(longest, n - int(spec.encoded(cache.lengths)[0]))
        assert longest == 16 + 8 - 1
        assert cache.nbytes() == before
        per_token = config.predict_nbytes(dims(), 1, 2**20).total / 2**20
        packed = K * (H + 6) * (1 + 2 * 2 / 8)  # 8-bit codes; scale and zero, f16, of 8 tokens
        assert per_token == pytest.approx(packed, rel=1e-3)


def tail_of(cache, field: str) -> np.ndarray:
    """The full-precision ring of a field of a batch of one, [K, slots, W]."""
    ring = np.asarray(cache.stores[0][field].tail[0])
    return ring.reshape(K, cache.spec.stores[0].tail_slots, -1)


@pytest.mark.parametrize(
    "config",
    [
        CacheConfig(codec=Int(bits=8)),
        CacheConfig(codec=Int(bits=2, axis="channel", group_size=4)),
        CacheConfig(codec=Int(bits=8), slack=4),  # seen in full precision first
        CacheConfig(),
        CacheConfig(layout=Paged(page_size=4)),
    ],
    ids=label,
)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_bad_token_spoils_no_other_sequence_or_head(config, value: float):
    """One value of one head of one sequence is not finite: who cannot see it is not touched."""
    text = Text.random(2, 12)
    bad = Text(text.q, text.k, text.v.copy())
    bad.v[0, 3, 0, 2] = value
    clean, _ = feed_in_chunks(config.init(dims(), 2, 12), text, 12, 12)
    got, _ = feed_in_chunks(config.init(dims(), 2, 12), bad, 12, 12)
    np.testing.assert_array_equal(got[1], clean[1])
    np.testing.assert_array_equal(got[0, :, 2:], clean[0, :, 2:])  # heads of the other KV head
    np.testing.assert_array_equal(got[0, :3], clean[0, :3])  # earlier tokens
