"""Codecs that are no uniform integers: float8 with scales, rotated Gaussian codebooks."""

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import KIVI, CacheConfig, CacheDims, Codecs, Float8, Hadamard, Int
from kvjax.cache.base import decode_to_model
from kvjax.cache.codecs.hadamard import RandomHadamard, gaussian_codebook
from kvjax.errors import ConfigError
from kvjax.evaluation import effective_bits
from tests.tolerances import ELEMENTWISE

DIMS = CacheDims(num_layers=1, num_heads=2, num_kv_heads=1, head_dim=64)


def there_and_back(codec, x: np.ndarray) -> np.ndarray:
    x = jnp.asarray(x)
    return np.asarray(decode_to_model(codec, codec.encode(x), x.shape[-1]), np.float64)


class TestFloat8:
    @pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
    def test_the_scale_follows_the_token(self, scale: float) -> None:
        """Whatever the size of a token, e4m3 keeps 4 bits of it: 6.25 % of each value at most."""
        x = scale * np.random.default_rng(0).standard_normal((3, 5, 64)).astype(np.float32)
        x[..., 0] = 0.0
        error = np.abs(there_and_back(Float8(), x) - x)
        peak = np.abs(x).max(-1, keepdims=True)
        assert (error <= 0.0635 * np.abs(x) + 2e-6 * peak + 1e-9).all()

    @pytest.mark.parametrize("format", ["e4m3fn", "e5m2"])
    def test_saturation_is_explicit(self, format: str) -> None:
        largest = float(jnp.finfo(f"float8_{format}").max)
        x = np.array([[[1.0, 1e9, -np.inf, np.nan]]], np.float32)
        got = there_and_back(Float8(format=format, scaled=False), x)[0, 0]
        assert got.tolist() == [1.0, largest, -largest, 0.0]

    def test_one_bad_value_stays_in_its_token(self) -> None:
        x = np.random.default_rng(1).standard_normal((2, 4, 16)).astype(np.float32)
        clean = there_and_back(Float8(), x)
        for value in (np.nan, np.inf, -np.inf):
            bad = x.copy()
            bad[1, 2, 3] = value
            got = there_and_back(Float8(), bad)
            same = np.ones_like(x, bool)
            same[1, 2] = False
            assert np.isfinite(got).all()
            np.testing.assert_array_equal(got[same], clean[same])

    def test_bits(self) -> None:
        assert effective_bits(CacheConfig(codec=Float8()), DIMS) == 8.25
        assert effective_bits(CacheConfig(codec=Float8(scaled=False)), DIMS) == 8


class TestHadamard:
    @pytest.mark.parametrize(("bits", "theory"), [(2, 0.1175), (4, 0.009497)])
    @pytest.mark.parametrize("width", [64, 128])
    def test_the_error_is_that_of_the_theory(self, bits: int, theory: float, width: int) -> None:
        """Mean squared error of a Gaussian under its best scalar code of that rate (Max, 1960)."""
        x = np.random.default_rng(2).standard_normal((500, width)).astype(np.float32)
        error = np.square(there_and_back(Hadamard(bits=bits), x) - x).mean()
        assert error == pytest.approx(theory, rel=0.05)

    def test_an_outlier_channel_costs_no_more_than_its_share(self) -> None:
        """Where codes by token lose everything: a channel a hundred times the others."""
        x = np.random.default_rng(3).standard_normal((300, 64)).astype(np.float32)
        x[:, 7] *= 100
        error = np.square(there_and_back(Hadamard(bits=4), x) - x).sum() / np.square(x).sum()
        assert error < 0.0105

    @pytest.mark.parametrize("width", [1, 2, 5, 64, 80])
    def test_the_basis_is_orthogonal(self, width: int) -> None:
        basis = RandomHadamard()
        x, y = np.random.default_rng(4).standard_normal((2, 9, width)).astype(np.float32)
        turned = [np.asarray(basis.forward(jnp.asarray(z)), np.float64) for z in (x, y)]
        np.testing.assert_allclose((turned[0] * turned[1]).sum(-1), (x * y).sum(-1), atol=1e-5)
        back = basis.inverse(jnp.asarray(turned[0], jnp.float32), width)
        np.testing.assert_allclose(back, x, atol=5 * ELEMENTWISE)

    def test_levels_are_the_centres_of_their_cells(self) -> None:
        """Lloyd's condition, by a large sample; levels are bf16 numbers."""
        sample = np.random.default_rng(5).standard_normal(1_000_000)
        levels = np.array(gaussian_codebook(4))
        cell = np.searchsorted((levels[1:] + levels[:-1]) / 2, sample)
        centres = np.array([sample[cell == i].mean() for i in range(16)])
        np.testing.assert_allclose(levels, centres, atol=0.02)
        np.testing.assert_array_equal(levels, levels.astype(jnp.bfloat16).astype(np.float64))

    def test_zeros_and_bad_values(self) -> None:
        x = np.zeros((3, 16), np.float32)
        x[1, 2], x[2] = np.nan, 1e30
        got = there_and_back(Hadamard(scale_dtype="float32"), x)
        assert (got[:2] == 0).all() and np.isfinite(got).all()
        assert np.abs(there_and_back(Hadamard(), x)).max() <= 16 * 65504 * 3  # saturates

    def test_padding_is_counted(self) -> None:
        dims = CacheDims(num_layers=1, num_heads=1, num_kv_heads=1, head_dim=80)
        report = CacheConfig(codec=Hadamard(bits=4)).predict_nbytes(dims, 1, 10)
        assert (report.payload, report.padding) == (2 * 10 * 40, 2 * 10 * 24)
        assert effective_bits(CacheConfig(codec=Hadamard(bits=4)), DIMS) == 4.25

    def test_keys_that_turn_on_read_are_refused(self) -> None:
        with pytest.raises(ConfigError, match="another basis"):
            CacheConfig(codec=Hadamard(), positions="unrotated_absolute")
        values_only = Codecs(k=Int(bits=4), v=Hadamard())
        assert CacheConfig(codec=values_only, positions="unrotated_absolute")


def test_kivi_keeps_its_newest_tokens() -> None:
    cache = CacheConfig(codec=KIVI(bits=2, group_size=4, residual=6)).init(DIMS, 1, 40)
    spec = cache.spec.stores[0]
    lengths = jnp.arange(20, dtype=jnp.int32)
    assert spec.encoded(lengths).tolist() == [max(n - 6, 0) // 4 * 4 for n in range(20)]
    assert spec.tail_slots >= 6 + 4
    for wrong in ({"bits": 3}, {"residual": -1}):
        with pytest.raises(ConfigError):
            KIVI(**wrong)


@pytest.mark.parametrize("change", [{"format": "e4m3"}, {"scaled": 1}])
def test_unknown_float8(change) -> None:
    with pytest.raises(ConfigError, match=r"Float8\."):
        Float8(**change)


@pytest.mark.parametrize("change", [{"bits": 3}, {"scale_dtype": "int8"}])
def test_unknown_hadamard(change) -> None:
    with pytest.raises(ConfigError, match=r"Hadamard\."):
        Hadamard(**change)
