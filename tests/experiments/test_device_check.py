import argparse
import functools
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from experiments.device import plan, torch_peer
from experiments.device.kernel_tests import KernelTests, outcomes
from experiments.device.plan import CODECS, FULL, TINY, checks, usable, works
from experiments.device.report import Bar, Results, Row, plain
from experiments.device.stores import Layout, bytes_per_token, num_copies, random_store
from experiments.device.timing import Clock, Pool, calls_and_groups, chain, measure
from experiments.device_check import INTERPRETED, Run, main, parse

ROOT = Path(__file__).resolve().parents[2]
PAGED = "page 64"


@pytest.mark.slow
def test_tiny_runs_all_of_it(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "experiments.device_check", "--tiny", "--no-tests"]
    environment = {**os.environ, "OUT": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [*command, "--seconds", "150"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == INTERPRETED
    data = json.loads((tmp_path / "device_check.json").read_text())
    assert data["label"] == INTERPRETED and not data["skipped"] and len(data["checks"]) == 7
    assert all(check["good"] for check in data["checks"])
    errors = {row["implementation"] for row in data["rows"] if row["error"]}
    assert errors == {"nn-cudnn"} | ({"torch"} & errors)
    timed = {(row["op"], row["implementation"]) for row in data["rows"] if row["ms"]}
    assert timed >= {
        ("decode", "xla"),
        ("decode", "jax-gqa"),
        ("decode", "nn-xla"),
        ("prefill", "nn-xla"),
        ("step with append", "xla"),
        ("latent decode", "xla"),
    }
    text = (tmp_path / "device_check.md").read_text()
    assert INTERPRETED in text and "cuDNN is not detected" in text and "## Bars" in text


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    if jax.default_backend() == "gpu":
        pytest.skip("there is a GPU")
    assert main([]) == 2
    assert "no GPU: JAX runs on cpu (--tiny" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("codec", "expected"),
    # Of 2 x 8 heads of 128 channels; scale and zero of 2 bytes for 32 channels, or 32 tokens.
    [
        ("bf16", 16 * 256),
        ("float8_e4m3fn", 16 * 128),
        ("int8", 16 * (128 + 4 * 4)),
        ("int4", 16 * (64 + 4 * 4)),
        ("kivi4", 8 * (64 + 128 * 4 // 32) + 8 * (64 + 4 * 4)),
    ],
)
def test_bytes_of_a_token(codec: str, expected: int) -> None:
    assert bytes_per_token(codec) == expected
    for page in (0, 32):
        layout = Layout(codec=codec, B=2, S=64, page=page)
        store = jax.eval_shape(functools.partial(random_store, layout, 1, False), jnp.uint32(0))
        parts = [*store.key.parts, *store.value.parts]
        assert layout.bytes == sum(x.size * x.dtype.itemsize for x in parts) == 128 * expected


def test_caches_are_rotated_past_the_l2() -> None:
    assert num_copies(8_388_608, 60_000_000, 32) == 29
    assert num_copies(4 * 10**9, 60_000_000, 32) == 1
    for copies in range(1, 33):
        calls, groups = calls_and_groups(copies, 4)
        assert {i for group in groups for i in group} == set(range(copies))
        assert {len(group) for group in groups} == {min(copies, 4)}
        assert calls % len(groups[0]) == 0


def test_the_plan_is_whole_and_fits() -> None:
    planned = list(works(FULL, "gpu"))
    labels = [work.label for work in planned]
    assert len(set(labels)) == len(labels)
    assert max(work.layout.bytes for work in planned) <= 6 * 10**9
    bar = next(work for work in planned if work.layout.codec == "bf16")
    assert 4 * 10**9 < bar.layout.bytes < 4.5 * 10**9
    assert FULL.bar == (bar.layout.B, bar.layout.S)
    decodes = [w.layout for w in planned if (w.op, w.implementation) == ("decode", "gpu")]
    assert {at.codec for at in decodes} == set(CODECS)
    assert {at.page for at in decodes} == {0, 64}
    assert {at.B for at in decodes} == {1, 8, 64}
    assert {at.S for at in decodes} == {2048, 8192, 32768, 131072}
    assert {w.implementation for w in planned} == {
        "gpu", "xla", "jax-gqa", "jax-paged", "nn-xla", "nn-cudnn",
    }  # fmt: skip
    assert {w.op for w in planned} == {
        "decode", "prefill", "latent decode", "step with append", "step without append",
    }  # fmt: skip
    assert {check.most for check in checks(FULL, "gpu")} == {0.0, 2e-3, 3e-2}


def test_a_codec_that_cannot_be_imported_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def codecs_of(name: str):
        if name.startswith("int"):
            raise ImportError("No module named 'x'")

    monkeypatch.setattr(plan, "codecs_of", codecs_of)
    sizes, missing = usable(FULL)
    assert sizes.codecs == sizes.checked == ("bf16", "float8_e4m3fn", "kivi4")
    assert missing == [f"codec int{bits}: No module named 'x'" for bits in (8, 4)]


def row(codec: str, ms: float | None, **changes) -> Row:
    given = dict(op="decode", implementation="gpu", layout=PAGED, B=8, S=16, live_bytes=1000)
    return Row(codec=codec, ms=ms, **{**given, **changes})


def test_shares_ratios_and_bars() -> None:
    ours, codes = row("bf16", 1.0), row("int8", 0.5, live_bytes=500)
    rows = [
        ours,
        codes,
        row("bf16", 3.0, implementation="xla"),
        row("bf16", 2.0, implementation="jax-gqa", layout="contiguous"),
        row("bf16", None, implementation="nn-cudnn", error="refused"),
        row("bf16", 1.0, op="step with append"),
        row("bf16", 0.96, op="step without append"),
    ]
    results = Results(rows, "gpu", copy_bytes_per_s=1.25e6)
    assert ours.bytes_per_s == 1e6 and results.share(ours) == pytest.approx(0.8)
    assert results.over_bf16(codes) == 2 and results.over_bf16(row("int4", None)) is None
    assert results.over_peer(ours, "xla") == 3 and results.over_peer(codes, "xla") is None
    assert results.over_peer(codes, "jax-gqa") == 4
    assert results.over_peer(ours, "nn-cudnn") is None
    bars = {bar.name: bar for bar in results.bars((8, 16), (PAGED,))}
    assert [bar.verdict for bar in bars.values()] == ["missed", "met", "not measured", "met"]
    assert bars[f"append, bf16 {PAGED}, share of a step"].value == pytest.approx(0.04)
    assert Bar("x", 0.05, 0.05, below=True).verdict == "missed"
    assert Results(rows, "gpu", None).share(ours) is None
    table = plain(results.table())
    assert "over jax-gqa" in table and "nn-cudnn" not in table
    assert table.splitlines()[2].split()[:2] == ["decode", "int8"]
    assert len(results.table([(1, 1)])) == 3  # the header, and the steps


def test_a_chain_is_timed_call_by_call() -> None:
    ticks = iter(range(100))
    found = measure(
        jax.jit(chain(lambda carry, x: carry + x, 4)),
        jnp.float32(0),
        [(jnp.float32(1), jnp.float32(2)), (jnp.float32(3), jnp.float32(4))],
        4,
        repetitions=5,
        seconds=0.0,
        least=3.0,
        now=lambda: float(next(ticks)),
    )
    assert found.seconds == (1 / (3 * 2 * 4),) * 3  # three rounds of two groups of four calls
    assert float(found.carry) == (2 + 3 * 3) * (2 * 3 + 2 * 7)
    assert found.median == found.seconds[0]


def test_the_pool_gives_results_errors_and_up() -> None:
    def fails():
        raise ValueError("no")

    go = threading.Event()
    pool = Pool(1)
    good, bad, slow, late = map(pool.submit, (lambda: 5, fails, go.wait, lambda: 6))
    pool.wait(Clock(0.3).left)
    assert good.result()[0] == 5 and isinstance(bad.exception(), ValueError)
    assert not slow.done() and pool.busy and late.cancelled()
    pool.wait(Clock(0).left, grace=0.1)
    go.set()
    assert slow.result(timeout=10)[0] is True


def a_run(out: Path, clock: Clock) -> Run:
    return Run(argparse.Namespace(tiny=True, no_tests=True, out=out), clock)


def test_what_comes_after_the_deadline_is_listed(tmp_path: Path) -> None:
    now = [0.0]
    run = a_run(tmp_path, Clock(20, now=lambda: now[0]))
    work = next(works(TINY, "xla"))
    compiled = run._compile(work)
    run.pool.wait(Clock(60).left)
    run._time(compiled)
    now[0] = 13.0
    run._time(compiled)
    assert [r.error for r in run.rows] == [None] and run.rows[0].ms
    assert run.report["skipped"] == [work.label]
    run.finish()
    assert work.label in (tmp_path / "device_check.md").read_text()


def test_what_was_not_compiled_in_time_says_so(tmp_path: Path) -> None:
    run = a_run(tmp_path, Clock(60))
    compiled = run._compile(next(works(TINY, "xla")))
    for future in run.pool.futures:
        future.cancel()
    run._time(compiled)
    assert run.rows[0].error in ("not compiled in time", None)  # or the thread was faster


def test_outcomes_of_pytest() -> None:
    text = "a.py::t[x y] PASSED [ 5%]\n[gw1] [ 9%] FAILED b.py::u[1]\na.py::w SKIPPED (why)\n"
    end = "===== short test summary info =====\nFAILED b.py::u[1] - no\n== 1 failed, 1 passed ==\n"
    assert outcomes(text + end) == {
        "counts": {"passed": 1, "failed": 1, "skipped": 1},
        "failures": ["b.py::u[1]"],
        "last_line": "1 failed, 1 passed",
    }
    assert outcomes(text)["counts"] == outcomes(text + end)["counts"]
    assert outcomes("")["last_line"] == ""


def test_kernel_tests_end_at_their_limit(tmp_path: Path) -> None:
    (tmp_path / "test_slow.py").write_text("import time\ndef test_a():\n    time.sleep(60)\n")
    start = time.monotonic()
    tests = KernelTests(
        tmp_path / "log", [str(tmp_path / "test_slow.py"), f"--rootdir={tmp_path}"], 1
    )
    found = tests.result(Clock(1).left)
    assert found["status"] == "stopped at the time limit" and time.monotonic() - start < 30
    assert not tests.running


def test_options() -> None:
    assert parse(["--tiny", "--out", "x"]).out == Path("x")
    assert not parse([]).tiny and parse([]).seconds < 360


def test_the_peer_process_needs_nothing_of_kvjax() -> None:
    assert "kvjax" not in Path(torch_peer.__file__).read_text().replace("of kvjax", "")
