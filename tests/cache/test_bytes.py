"""Group N of the field cases: memory accounting."""

import jax
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvjax import (
    CacheConfig,
    Codecs,
    Contiguous,
    Int,
    KeepAll,
    LayerPattern,
    Paged,
    Raw,
    SinkWindow,
    Window,
)
from kvjax.dims import CacheDims
from kvjax.errors import ConfigError

LAYOUTS = st.one_of(
    st.just(Contiguous()), st.builds(Paged, page_size=st.sampled_from([1, 3, 4, 16]))
)
INTS = st.builds(
    Int,
    bits=st.sampled_from([8, 4, 2]),
    axis=st.sampled_from(["token", "channel"]),
    group_size=st.sampled_from([1, 2, 4, 5, 32]),
    symmetric=st.booleans(),
    scale_dtype=st.sampled_from(["float16", "float32"]),
)
CODECS = st.one_of(st.builds(Raw, dtype=st.sampled_from([None, "bfloat16"])), INTS)
WINDOWS = st.integers(1, 40)
POLICIES = st.one_of(
    st.just(KeepAll()),
    st.builds(Window, window=WINDOWS),
    st.builds(SinkWindow, sinks=st.sampled_from([1, 4]), window=WINDOWS),
)


@st.composite
def configs(draw) -> CacheConfig:
    try:
        return CacheConfig(
            layout=draw(LAYOUTS),
            codec=draw(st.one_of(CODECS, st.builds(Codecs, k=CODECS, v=CODECS))),
            policy=draw(POLICIES),
            slack=draw(st.sampled_from([0, 3])),
        )
    except ConfigError:
        assume(False)
        raise


@given(
    default=configs(),
    last=configs(),
    width=st.integers(1, 9),
    batch=st.sampled_from([1, 3]),
    max_len=st.integers(1, 50),
)
def test_predicted_bytes_are_the_buffers(default, last, width: int, batch: int, max_len: int):
    dims = CacheDims(num_layers=2, num_heads=6, num_kv_heads=2, head_dim=7, value_dim=width)
    config = LayerPattern(default, {-1: last})
    predicted = config.predict_nbytes(dims, batch, max_len)
    cache = config.init(dims, batch, max_len)
    assert cache.nbytes() == predicted
    assert predicted.total == sum(x.nbytes for x in jax.tree.leaves(cache))
    assert min(predicted.as_dict().values()) >= 0


@given(
    layout=LAYOUTS,
    bits=st.sampled_from([8, 4, 2]),
    width=st.integers(1, 70),
    max_len=st.integers(1, 60),
)
def test_payload_and_scales_are_what_the_method_stores(layout, bits, width: int, max_len: int):
    """Codes of `bits` bits and two halves for each 32 channels; pages and odd nibbles apart."""
    dims = CacheDims(num_layers=3, num_heads=2, num_kv_heads=2, head_dim=width, dtype="bfloat16")
    report = CacheConfig(layout=layout, codec=Int(bits=bits)).predict_nbytes(dims, 2, max_len)
    rows = 3 * 2 * 2 * 2 * max_len  # layers, K and V, sequences, heads, tokens
    assert report.scales == rows * 2 * 2 * -(-width // 32)
    assert report.payload <= rows * width * bits / 8 < report.payload + 6 * 1 + 1
    assert report.tail == 0


def test_bytes_of_a_token_come_from_the_head_dim_itself():
    """36 layers, 8 KV heads of 128 in bf16; hidden / heads would give 80 (B160)."""
    dims = CacheDims(num_layers=36, num_heads=32, num_kv_heads=8, head_dim=128, dtype="bfloat16")
    assert CacheConfig().predict_nbytes(dims, 1, 1).payload == 147_456
    longer, shorter = (CacheConfig().predict_nbytes(dims, 1, n).total for n in (1001, 1000))
    assert longer - shorter == 147_456


def test_windowed_layers_count():
    """36 layers, every other one with a window: one token is in all of them (B162)."""
    dims = CacheDims(num_layers=36, num_heads=16, num_kv_heads=8, head_dim=64, dtype="bfloat16")
    windowed = CacheConfig(policy=Window(window=128))
    config = LayerPattern(CacheConfig(), {i: windowed for i in range(0, 36, 2)})
    assert config.predict_nbytes(dims, 1, 1).payload == 73_728
    assert config.predict_nbytes(dims, 1, 1000).payload == 73_728 // 2 * (1000 + 128)


@pytest.mark.parametrize(
    ("config", "lines"),
    [
        (CacheConfig(), {"payload": 2 * 10 * (7 + 5) * 4}),
        (
            CacheConfig(layout=Paged(page_size=4)),
            {"payload": 2 * 10 * (7 + 5) * 4, "padding": 2 * 2 * (7 + 5) * 4, "tables": 3 * 4},
        ),
        (
            CacheConfig(codec=Int(bits=4)),  # 7 codes take 4 bytes, 5 take 3: half a byte each idle
            {"payload": 70 + 50, "padding": 10 + 10, "scales": 2 * 10 * 2 * 2 * 2},
        ),
        (
            CacheConfig(codec=Int(bits=8, symmetric=True), slack=2),
            {"payload": 2 * 10 * 12, "scales": 2 * 10 * 2 * 2, "tail": 2 * 5 * 12 * 4},
        ),
        (CacheConfig(policy=SinkWindow(sinks=1, window=3)), {"payload": 2 * 4 * 12 * 4}),
    ],
    ids=["raw", "paged", "int4", "int8-slack", "sinks"],
)
def test_lines_of_the_report(config, lines: dict[str, int]):
    dims = CacheDims(num_layers=1, num_heads=2, num_kv_heads=2, head_dim=7, value_dim=5)
    report = config.predict_nbytes(dims, 1, 10).as_dict()
    empty = dict.fromkeys(("payload", "scales", "tail", "tables", "padding"), 0)
    expected = {**empty, "metadata": 3 * 4, **lines}
    assert report == {**expected, "total": sum(expected.values())}
