"""Group E of the field cases: paged storage and page tables."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import CacheConfig, Codecs, Contiguous, Int, KeepAll, Paged, Raw, SinkWindow, Window
from kvjax.cache.base import PartSpec, Place
from kvjax.dims import CacheDims
from kvjax.errors import CapacityError
from tests.cache.layer import (
    POISONS,
    Text,
    assert_close,
    chunk_positions,
    dims,
    feed,
    feed_in_chunks,
    label,
    poisoned,
    reorder,
    step,
)

CHANNEL = Codecs(k=Int(bits=4, axis="channel", group_size=4), v=Int(bits=4))
CODECS = [Raw(), Int(bits=8), CHANNEL]
codecs = pytest.mark.parametrize("codec", CODECS, ids=["raw", "int8", "channel"])
LENGTHS = (21, 8, 1)


def run(cache, text: Text) -> tuple[list[np.ndarray], object]:
    """A ragged prompt in one chunk, then three decoded tokens."""
    positions = chunk_positions([0] * 3, LENGTHS, 21)
    output, cache = feed(cache, text, positions)
    outputs = [output[positions >= 0]]
    for i in range(3):
        output, cache = feed(cache, text, np.array(LENGTHS, np.int32)[:, None] + i)
        outputs.append(output)
    return outputs, cache


@pytest.mark.parametrize(
    ("codec", "page_size"),
    [(Raw(), 1), (Raw(), 4), (Raw(), 16), (Int(bits=8), 4), (CHANNEL, 4), (CHANNEL, 16)],
    ids=["raw-1", "raw-4", "raw-16", "int8-4", "channel-4", "channel-16"],
)
def test_pages_equal_one_run_of_slots(codec, page_size: int):
    text = Text.random(3, 24)
    config = CacheConfig(layout=Contiguous(), codec=codec)
    wanted, _ = run(config.init(dims(), 3, 24), text)
    config = config.replace(layout=Paged(page_size=page_size))
    got, _ = run(config.init(dims(), 3, 24), text)
    for a, b in zip(got, wanted, strict=True):
        assert_close(a, b)


@codecs
def test_no_result_depends_on_where_the_pages_are(codec):
    text = Text.random(3, 24)
    cache = CacheConfig(layout=Paged(page_size=4), codec=codec).init(dims(), 3, 24)
    ((table,),) = cache.tables
    assert sorted(table.reshape(-1).tolist()) == list(range(18))
    wanted, _ = run(cache, text)
    for seed in range(3):
        pages = np.random.default_rng(seed).permutation(18).reshape(3, 6)
        moved = dataclasses.replace(cache, tables=((jnp.asarray(pages, jnp.int32),),))
        got, _ = run(moved, text)
        for a, b in zip(got, wanted, strict=True):
            np.testing.assert_array_equal(a, b)


@codecs
@pytest.mark.parametrize("policy", [KeepAll(), Window(window=6)], ids=["keep_all", "window"])
def test_pages_that_nobody_wrote_are_never_read(codec, policy):
    """Unwritten pages, those behind a window, those of resting sequences (B42)."""
    config = CacheConfig(layout=Paged(page_size=4), codec=codec, policy=policy)
    text, empty = Text.random(3, 24), config.init(dims(), 3, 24)
    wanted, _ = run(empty, text)
    for poison in POISONS:
        got, _ = run(poisoned(empty, poison), text)
        for a, b in zip(got, wanted, strict=True):
            np.testing.assert_array_equal(a, b, err_msg=f"{poison=}")


@pytest.mark.parametrize(
    ("layout", "codec"),
    [(Contiguous(), Raw()), (Paged(page_size=4), Int(bits=8)), (Paged(page_size=4), CHANNEL)],
    ids=["contiguous-raw", "paged-int8", "paged-channel"],
)
def test_padded_rows_write_nothing(layout, codec):
    """A step that is all padding leaves every buffer as it is (B42)."""
    config = CacheConfig(layout=layout, codec=codec)
    text = Text.random(3, 24)
    _, cache = run(config.init(dims(), 3, 24), text)
    before = [np.array(x) for x in jax.tree.leaves(cache)]
    for width in (1, 21):
        _, cache = feed(cache, text, np.full((3, width), -1, np.int32))
        for old, new in zip(before, jax.tree.leaves(cache), strict=True):
            np.testing.assert_array_equal(old, new)


def test_a_pool_that_int32_cannot_index_is_refused():
    """Pages of 16, 8 heads of width 128: 2^31 elements are 131,072 pages (B44)."""
    sizes = CacheDims(num_layers=1, num_heads=8, num_kv_heads=8, head_dim=128, dtype="bfloat16")
    for layout in (Paged(page_size=16), Contiguous()):
        config = CacheConfig(layout=layout)
        largest = 16 * 131_071
        assert config.predict_nbytes(sizes, 1, largest).payload == largest * 8 * 128 * 2 * 2
        with pytest.raises(CapacityError, match=r"batch=1 .* 2147483648 elements .* lower batch"):
            config.init(sizes, 1, largest + 16)
        with pytest.raises(CapacityError, match=r"batch=131072 "):
            config.init(sizes, 131_072, 16)


@pytest.mark.parametrize("max_len", [1, 15, 16, 17, 100])
def test_waste_is_under_one_page_a_sequence(max_len: int):
    config = CacheConfig(layout=Paged(page_size=16))
    token = 2 * 2 * 8 * 4  # K and V, K heads, width 8, f32
    report = config.predict_nbytes(dims(value_dim=8), 3, max_len)
    assert report.payload == 3 * max_len * token
    assert 0 <= report.padding < 3 * 16 * token


@pytest.mark.parametrize("layout", [Contiguous(), Paged(page_size=4)], ids=label)
@pytest.mark.parametrize("transposed", [False, True])
def test_scatter_drops_what_is_out_of_range(layout, transposed: bool):
    """-1 is a no-op, not the last slot; so are n, n + 3 and a run that only partly fits (B102)."""
    place = Place(
        batch=3,
        heads=2,
        num_slots=8,
        part=PartSpec(name="raw", kind="payload", width=3, dtype="float32"),
        transposed=transposed and layout.can_transpose(),
    )
    tables = layout.tables(3, 8)
    table = tables[0] if tables else None
    rng = np.random.default_rng(0)
    filled = rng.standard_normal((3, 2, 8, 3)).astype(np.float32)
    zero = jnp.zeros(3, jnp.int32)
    buffer = layout.write(layout.allocate(place), place, table, zero, jnp.asarray(filled))

    def scatter(rows: list[int], size: int):
        new = rng.standard_normal((3, 2, size, 3)).astype(np.float32)
        at = jnp.array(rows, jnp.int32)
        changed = layout.scatter(buffer, place, table, at, jnp.asarray(new))
        return new, np.asarray(layout.read(changed, place, table, zero, 8))

    np.testing.assert_array_equal(layout.read(buffer, place, table, zero, 8), filled)
    for outside in ([-1, 8, 11], [-8, -9, 2**31 - 1]):
        np.testing.assert_array_equal(scatter(outside, 1)[1], filled)
    new, got = scatter([7, -1, 0], 1)
    want = filled.copy()
    want[0, :, 7], want[2, :, 0] = new[0, :, 0], new[2, :, 0]
    np.testing.assert_array_equal(got, want)
    # Runs within a page: one that ends at the end, one beyond it, one before the beginning.
    new, got = scatter([6, 7, -1], 2)
    want = filled.copy()
    want[0, :, 6:] = new[0]
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    ("layout", "codec"),
    [(Contiguous(), Raw()), (Paged(page_size=4), CHANNEL)],
    ids=["contiguous-raw", "paged-channel"],
)
def test_beams_follow_their_own_parents(layout, codec):
    """Sizes that are equal along batch, length and heads cannot hide a wrong axis (B132, B134)."""
    config = CacheConfig(layout=layout, codec=codec, policy=SinkWindow(sinks=4, window=8))
    sizes = dims(num_heads=3, num_kv_heads=3)
    q, k, v = (np.zeros((3, 3, 3, w), np.float32) for w in (8, 8, 6))
    for r in range(3):  # keys are marked r, values 100 + r
        k[r], v[r] = r, 100 + r
    positions = chunk_positions([0] * 3, [3] * 3, 3)
    _, cache = step(config.init(sizes, 3, 32), q, k, v, positions, None)
    moved = reorder(cache, jnp.array([1, 1, 0], jnp.int32))
    assert moved.lengths.tolist() == [3, 3, 3]
    new_v = np.full((3, 1, 3, 6), 50.0, np.float32)
    output, _ = step(moved, q[:, :1], k[:, :1], new_v, np.full((3, 1), 3, np.int32), None)
    want = (3 * np.array([101, 101, 100]) + 50) / 4
    np.testing.assert_allclose(np.asarray(output)[:, 0, 0, 0], want, rtol=1e-3)


def test_a_chunk_over_several_pages_starts_anywhere():
    text = Text.random(1, 40)
    config = CacheConfig(layout=Paged(page_size=4))
    outputs, _ = feed_in_chunks(config.init(dims(), 1, 40), text, 40, 7)
    wanted, _ = feed_in_chunks(config.init(dims(), 1, 40), text, 40, 40)
    assert_close(outputs, wanted)
