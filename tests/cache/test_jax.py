"""Group I of the field cases: tracing, donation, dtypes, indices."""

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import CacheConfig, Codecs, Contiguous, Int, Paged, Raw, SinkWindow, Window
from kvjax.cache.cache import FULL
from kvjax.decode import (
    Sampling,
    assert_max_traces,
    decode_step,
    prefill_step,
    trace_counts,
)
from kvjax.errors import CapacityError
from tests.cache.layer import Text, chunk_positions, dims, feed, feed_in_chunks, label, read
from tests.models import tiny

ROOT = Path(__file__).resolve().parents[2]


def test_decoding_with_64_bit_types():
    """A process of its own runs with them: same tokens, and caches keep their dtypes (B98)."""
    flags = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.cache.x64_decode"],
        cwd=ROOT,
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    narrow, wide = json.loads(done.stdout).values()
    np.testing.assert_allclose(wide.pop("logprobs"), narrow.pop("logprobs"), atol=2e-4)
    assert wide == narrow
    assert not {"float64", "int64", "uint64"} & {x for leaves in wide["dtypes"] for x in leaves}


class TestPastTheEnd:
    """Slots that hold something are never overwritten, whatever comes (B100)."""

    @pytest.mark.parametrize(
        "config",
        [
            CacheConfig(),
            CacheConfig(layout=Paged(page_size=4)),
            CacheConfig(policy=Window(window=9)),  # a ring that must not wrap: it would lose 0
        ],
        ids=label,
    )
    def test_two_tokens_too_many(self, config):
        text = Text.random(3, 12)
        positions = chunk_positions([0] * 3, [7, 3, 0], 8)
        _, cache = feed(config.init(dims(), 3, 8), text, positions)
        for i in range(3):
            at = np.array([[7 + i], [3 + i], [0 + i]], np.int32)
            # The full row goes on asking for its next place: 8.
            at[0] = min(at[0, 0], 8)
            outputs, cache = feed(cache, text, at)
            if i == 0:
                before = [read(cache, field)[0] for field in ("k", "v")]
        assert cache.lengths.tolist() == [8, 6, 3]
        assert cache.status.tolist() == [FULL, 0, 0]
        with pytest.raises(CapacityError, match="sequence 0: the cache was full"):
            cache.check()
        for field, old in zip(("k", "v"), before, strict=True):
            np.testing.assert_array_equal(read(cache, field)[0], old)
        want, _ = feed_in_chunks(CacheConfig().init(dims(), 3, 12), text, 6, 6)
        np.testing.assert_allclose(outputs[1, 0], want[1, 5], atol=2e-5)

    @pytest.mark.parametrize("layout", [Contiguous(), Paged(page_size=4)], ids=label)
    @pytest.mark.parametrize("codec", [Raw(), Int(bits=8)], ids=label)
    def test_a_chunk_that_only_partly_fits(self, layout, codec):
        """Three tokens at length 6 of 8: two are stored, the third nowhere."""
        text = Text.random(1, 12)
        config = CacheConfig(layout=layout, codec=codec)
        _, cache = feed(config.init(dims(), 1, 8), text, chunk_positions([0], [6], 8))
        _, over = feed(cache, text, np.array([[6, 7, 8]], np.int32))
        _, fits = feed(cache, text, np.array([[6, 7, -1]], np.int32))
        assert over.status.tolist() == [FULL] and fits.status.tolist() == [0]
        assert over.lengths.tolist() == fits.lengths.tolist() == [8]
        for a, b in zip(*(jax.tree.leaves(c.stores) for c in (over, fits)), strict=True):
            np.testing.assert_array_equal(a, b)


# Scatters whose indices are in range by construction, so that they need no mode.
IN_RANGE = {
    ("kvjax/cache/layouts/paged.py", "reorder"): "a page table is a permutation of the pool",
    ("kvjax/decode/generate.py", "take"): "a token that was drawn is in the vocabulary",
}


def scatters() -> Iterator[tuple[str, str, ast.Call]]:
    """Yield (path, function, call) of every `x.at[...].set(...)` and of its like."""
    updates = {"set", "add", "subtract", "multiply", "divide", "min", "max", "apply", "power"}
    for path in sorted([*ROOT.glob("kvjax/**/*.py"), *ROOT.glob("pallas_kernels/**/*.py")]):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
        for function in functions:
            for node in ast.walk(function):
                match node:
                    case ast.Call(
                        func=ast.Attribute(
                            value=ast.Subscript(value=ast.Attribute(attr="at")), attr=name
                        )
                    ) if name in updates:
                        yield str(path.relative_to(ROOT)), function.name, node


def test_scatters_drop_what_is_out_of_range():
    """By default a scatter wraps -1 and drops the rest: each says what it wants (B102)."""
    found = list(scatters())
    assert len(found) >= 3
    loose = {
        (path, function)
        for path, function, call in found
        if not any(
            word.arg == "mode" and ast.unparse(word.value) == "'drop'" for word in call.keywords
        )
    }
    # A nested function is seen under its own name and under that of the outer one.
    outer = {(path, name) for path, name in loose if name in ("generate_loop",)}
    assert loose - outer <= IN_RANGE.keys(), sorted(loose - outer)


def test_nothing_is_written_by_a_clamped_slice():
    """`dynamic_update_slice` clamps by definition: past the end it would hit the last slots."""
    for path in [*ROOT.glob("kvjax/**/*.py"), *ROOT.glob("pallas_kernels/**/*.py")]:
        assert "dynamic_update_slice" not in path.read_text(encoding="utf-8"), path


class TestTraces:
    """New prompt lengths and contents never compile beyond the stated buckets (B104)."""

    CONFIG = CacheConfig(layout=Paged(page_size=8), codec=Int(bits=8))

    def test_generate(self):
        lm = tiny(num_layers=1)
        with assert_max_traces(extend_step=1, generate_loop=1, decode_step=0):
            lm.generate([[1, 2, 3], [4]], self.CONFIG, max_new_tokens=3)
        assert trace_counts()["generate_loop"] >= 1
        prompts = [
            [list(range(16)), [5]],
            [np.arange(7), np.array([3, 4], np.int64)],
            [jnp.arange(9), [np.int64(1), np.int32(2), 3]],
            ["some text", "more"],
        ]
        with assert_max_traces(extend_step=0, generate_loop=0):
            for i, pair in enumerate(prompts):
                lm.generate(pair, self.CONFIG, max_new_tokens=1 + 5 * i, stop=[[i], []])
            lm.generate([[7], [8]], self.CONFIG, max_new_tokens=4, on_token=lambda b, token: None)
            lm.generate([[1, 2], [8]], self.CONFIG, max_new_tokens=4, max_len=64)
        with assert_max_traces(extend_step=1, generate_loop=0):  # the next chunk length
            lm.generate([[1] * 17, [2]], self.CONFIG, max_new_tokens=4)
            lm.generate([[1] * 40, [2] * 39], self.CONFIG, max_new_tokens=4)

    def test_sampling_settings_are_data(self):
        lm = tiny(num_layers=1)
        first = [Sampling(temperature=1.0, top_k=5), Sampling()]
        with assert_max_traces(generate_loop=1):
            lm.generate([[1], [2]], self.CONFIG, max_new_tokens=3, sampling=first)
            for setting in (
                Sampling(temperature=0.5, top_p=0.9, seed=7),
                Sampling(temperature=2.0, min_p=0.1),
                Sampling(temperature=1.5, top_k=100, top_p=0.5, min_p=0.2, seed=2**31),
            ):
                lm.generate([[1], [2]], self.CONFIG, max_new_tokens=3, sampling=setting)

    def test_steps(self):
        """Ten tokens, counts and lengths of any integer kind: one trace."""
        lm = tiny(num_layers=1)
        cache = self.CONFIG.init(lm.dims, 2, 64)
        with assert_max_traces(extend_step=1, decode_step=1):
            for kind in (np.int32, np.int64):
                tokens, counts = np.ones((2, 16), kind), np.array([9, 16], kind)
                _, cache = prefill_step(lm.model, lm.params, tokens, counts, cache)
            for kind in (np.int32, np.int64, jnp.int32):
                for active in (np.array([True, False]), jnp.array([True, True])):
                    tokens = jnp.array([1, 2], kind) if kind is jnp.int32 else np.ones(2, kind)
                    _, cache = decode_step(lm.model, lm.params, tokens, active, cache)
        for lengths in ([3, 3], np.array([3, 2], np.int64), jnp.array([1, 1], jnp.int32)):
            cache = cache.rollback(lengths)
            assert cache.lengths.dtype == jnp.int32 and not cache.lengths.weak_type
        cache = cache.advance(np.array([1, 1], np.int64))
        with assert_max_traces(decode_step=0):
            decode_step(lm.model, lm.params, np.ones(2, np.int32), np.ones(2, bool), cache)

    def test_the_helper_counts(self):
        lm = tiny(num_layers=1)
        message = "extend_step was traced 1 times, at most 0"
        with pytest.raises(AssertionError, match=message), assert_max_traces(extend_step=0):
            lm.log_likelihood([[1, 2, 3]], CacheConfig(), chunk=3, max_len=77)


class TestDonation:
    @pytest.mark.parametrize(
        "config",
        [
            CacheConfig(),
            CacheConfig(layout=Paged(page_size=8), codec=Int(bits=4)),
            CacheConfig(
                codec=Codecs(k=Int(bits=4, axis="channel", group_size=4), v=Int(bits=8)),
                policy=SinkWindow(sinks=4, window=24),
            ),
        ],
        ids=label,
    )
    def test_steps_update_the_buffers_in_place(self, config):
        """The old cache is gone after each step, and the new one lies where it lay."""
        lm = tiny(num_layers=1)
        cache = config.init(lm.dims, 2, 64)
        tokens, counts = np.ones((2, 16), np.int32), np.array([9, 16], np.int32)
        active = np.ones(2, bool)
        for step, arguments in (
            (prefill_step, (tokens, counts)),
            (decode_step, (tokens[:, 0], active)),
            (decode_step, (tokens[:, 0], active)),
        ):
            old = jax.tree.leaves(cache.stores)
            places = [x.unsafe_buffer_pointer() for x in old]
            _, cache = step(lm.model, lm.params, *arguments, cache)
            assert all(x.is_deleted() for x in old)
            new = jax.tree.leaves(cache.stores)
            assert [x.unsafe_buffer_pointer() for x in new] == places
        assert cache.lengths.tolist() == [11, 18]
