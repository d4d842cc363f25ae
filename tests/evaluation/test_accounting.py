import dataclasses

import pytest

from kvjax import CacheConfig, Codecs, Int, LayerPattern, Paged, Raw, SinkWindow, Window
from kvjax.cache.accounting import ByteReport
from kvjax.dims import CacheDims
from kvjax.evaluation import bytes_per_token, check_prediction, effective_bits, measured_nbytes

DIMS = CacheDims(num_layers=3, num_heads=4, num_kv_heads=2, head_dim=16)
CACHES = {
    "contiguous": CacheConfig(),
    "paged": CacheConfig(layout=Paged(page_size=16)),
    "int4": CacheConfig(codec=Int(bits=4)),
    "channel": CacheConfig(codec=Codecs(k=Int(bits=2, axis="channel"), v=Int(bits=4))),
    "window": CacheConfig(policy=Window(window=8)),
    "sinks": CacheConfig(policy=SinkWindow(sinks=4, window=12), positions="unrotated_slot"),
    "pattern": LayerPattern(CacheConfig(codec=Int(bits=4)), {0: CacheConfig(), -1: CacheConfig()}),
}


@pytest.mark.parametrize("label", CACHES)
def test_prediction_is_what_is_allocated(label: str) -> None:
    report = check_prediction(CACHES[label], DIMS, batch=2, max_len=37)
    assert report.total == measured_nbytes(CACHES[label].init(DIMS, batch=2, max_len=37))
    assert bytes_per_token(report, 37) == report.total / 37


def test_a_wrong_prediction_is_not_passed_over() -> None:
    class Liar:
        label = "liar"

        def predict_nbytes(self, dims, batch, max_len) -> ByteReport:
            right = CacheConfig().predict_nbytes(dims, batch, max_len)
            return dataclasses.replace(right, payload=right.payload - 1)

        def init(self, dims, batch, max_len):
            return CacheConfig().init(dims, batch, max_len)

    with pytest.raises(RuntimeError, match="do not add up"):
        check_prediction(Liar(), DIMS, batch=1, max_len=8)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("cache", "bits"),
    [
        (CacheConfig(), 32),
        (CacheConfig(codec=Raw(dtype="bfloat16")), 16),
        (CacheConfig(codec=Int(bits=8, group_size=16)), 8 + 32 / 16),
        (CacheConfig(codec=Int(bits=4, symmetric=True, group_size=16)), 4 + 16 / 16),
        (CacheConfig(codec=Int(bits=2, axis="channel", group_size=32)), 2 + 32 / 32),
        (CacheConfig(policy=Window(window=4)), 32),
        (LayerPattern(CacheConfig(codec=Int(bits=8, group_size=16)), {0: CacheConfig()}), 52 / 3),
    ],
    ids=["raw", "bf16", "int8", "int4-symmetric", "int2-channel", "window", "pattern"],
)
def test_effective_bits(cache, bits: float) -> None:
    assert effective_bits(cache, DIMS) == pytest.approx(bits)


def test_odd_widths_count_used_bits_only() -> None:
    odd = CacheDims(num_layers=1, num_heads=1, num_kv_heads=1, head_dim=9)
    config = CacheConfig(codec=Int(bits=4, group_size=9))
    assert effective_bits(config, odd) == pytest.approx(4 + 32 / 9)
