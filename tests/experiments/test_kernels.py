import asyncio
import json
import re
from importlib import metadata
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from experiments.cli import Kernels, main
from experiments.kernels import child, report
from experiments.kernels.cases import CASES
from experiments.kernels.child import BACKENDS, BYTES, Cell, backend_module, compile_cells
from experiments.kernels.main import command_line, resolve_targets
from kvjax import Int
from kvjax.errors import ConfigError
from pallas_kernels._common.operand import Operand
from pallas_kernels._common.traffic import Traffic, attention_traffic
from pallas_kernels._common.visibility import Visibility

FAKE_CHILD = """
import json, os, sys, time
backend, plan, *jobs = sys.argv[1:]
for job in jobs:
    case, target = job.split(":")
    if target == "sm_80" or (target, plan) == ("v6e", "cycles"):
        print("noise\\nLLVM ERROR: no such thing in /some/where/x.cc", file=sys.stderr, flush=True)
        os.abort()
    if target == "sm_90" or target == "sm_120" and not os.path.exists(__file__ + ".hung"):
        open(__file__ + ".hung", "w").close()
        time.sleep(60)
    print(json.dumps({"status": "compiled", "figures": {"plan": plan}}), flush=True)
"""


@pytest.fixture
def fake_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "fake_child.py").write_text(FAKE_CHILD)
    monkeypatch.syspath_prepend(tmp_path)
    return "fake_child"


def compile_with(
    module: str, backend: str, targets: list[str], timeout: float, **options
) -> dict[str, Cell]:
    cells: dict[str, Cell] = {}

    def note(cell: Cell) -> None:
        assert cell.target not in cells
        cells[cell.target] = cell

    jobs = [("op/case", target) for target in targets]
    asyncio.run(
        compile_cells(backend, jobs, timeout=timeout, report=note, module=module, **options)
    )
    return cells


def test_a_child_that_dies_or_hangs_is_a_cell(fake_child: str) -> None:
    cells = compile_with(fake_child, "cuda", ["sm_80", "sm_90", "sm_100", BYTES], timeout=2)
    assert cells["sm_80"].status == "died"
    assert cells["sm_80"].reason == "SIGABRT: LLVM ERROR: no such thing in x.cc"
    assert (cells["sm_90"].status, cells["sm_90"].reason) == ("timeout", "not done after 2 s")
    assert cells["sm_100"] == Cell("op/case", "sm_100", "compiled", figures={"plan": "plain"})
    assert not cells["sm_80"].good and cells[BYTES].good


def test_what_hangs_once_gets_a_second_chance(fake_child: str) -> None:
    cells = compile_with(fake_child, "cuda", ["sm_120", "sm_100"], timeout=2)
    assert all(cell.status == "compiled" for cell in cells.values())


def test_a_kernel_without_an_estimate_of_cycles_still_compiles(fake_child: str) -> None:
    cells = compile_with(fake_child, "tpu", ["v4", "v5p", "v6e"], timeout=30, cycles=True)
    plans = {target: cell.figures["plan"] for target, cell in cells.items()}
    assert plans == {"v4": "plain", "v5p": "cycles", "v6e": "plain"}


def test_a_child_that_cannot_start_says_why() -> None:
    cells = compile_with("no_such_module", "cuda", ["sm_100"], timeout=30)
    assert cells["sm_100"].status == "died"
    assert "No module named no_such_module" in cells["sm_100"].reason


@pytest.mark.parametrize("name", CASES)
def test_every_case_builds(name: str) -> None:
    case = CASES[name]
    assert case.reason and case.codec and case.layout
    targets = {target for backend in BACKENDS for target in backend_module(backend).TARGETS}
    assert case.limits.keys() <= targets
    for backend in BACKENDS:
        function, arguments = case.build(backend_module(backend).IMPLEMENTATION)
        assert callable(function)
        leaves = jax.tree.leaves(arguments)
        assert leaves and all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)


@pytest.mark.parametrize("implementation", ["gpu", "tpu"])
@pytest.mark.parametrize("name", ["bf16-page16", "int4", "kivi2", "window1k-sinks4"])
def test_bytes_of_a_case_are_few(name: str, implementation: str) -> None:
    traffic = CASES[f"attention/{name}"].traffic(implementation)
    assert 1 < traffic.ratio < 1.5
    stored = traffic.parts["keys"] + traffic.parts["values"]
    assert traffic.live <= stored <= 1.5 * traffic.live


def test_bytes_moved_by_hand() -> None:
    # B = 2 sequences of 5 and 3 of S = 16 slots in blocks of 4: blocks 0 and 1, and block 0.
    B, K, N, H, S, Z = 2, 2, 4, 8, 16, 2
    codec = Int(bits=4, group_size=8)  # 4 bytes of codes, 2 of scale, 2 of zero a slot
    specs = codec.parts(H, "float32")
    store = Operand(
        parts=tuple(jnp.zeros((B * S // Z, K, Z, spec.width), spec.dtype) for spec in specs),
        tokens_per_row=(1, 1, 1),
        dtypes=tuple(spec.dtype for spec in specs),
        width=H,
        format=codec,
        paged=True,
    )
    slots = jnp.arange(S, dtype=jnp.int32)
    lengths = jnp.array([[5], [3]], jnp.int32)
    positions = jnp.where(slots[None] < lengths, slots[None], -1)
    zero = jnp.zeros_like(lengths)
    query = jax.ShapeDtypeStruct((B, 1, N, H), jnp.float32)
    traffic = attention_traffic(
        query, store, store, Visibility(zero, zero, lengths - 1), positions,
        rows=2, block=4, splits=2,
    )  # fmt: skip
    programs = B * K * 2
    assert traffic.live == 2 * K * 8 * (5 + 3)
    assert traffic.parts == {
        "keys": K * 8 * 12,
        "values": K * 8 * 12,
        "positions": K * 4 * 12,
        "page_table": K * 4 * 6,
        "block_list": K * 4 * 3 + programs * 4,
        "queries": programs * 2 * (H * 4 + 12),
        "outputs": programs * 2 * (H + 1) * 4,
    }
    together = attention_traffic(
        query, store, store, Visibility(zero, zero, lengths - 1), positions,
        rows=2, block=4, heads=K,
    )  # fmt: skip
    assert together.parts["positions"] == 4 * 12
    assert together.parts["keys"] == traffic.parts["keys"]
    assert Traffic(parts={"keys": 1}, live=0).ratio == float("inf")


def test_scales_that_tokens_share_count_once() -> None:
    codec = Int(bits=2, axis="channel", group_size=4)
    specs = codec.parts(8, "float32")
    shapes = [(1, 16 // spec.tokens_per_row, spec.width) for spec in specs]
    store = Operand(
        parts=tuple(jnp.zeros(s, spec.dtype) for s, spec in zip(shapes, specs, strict=True)),
        tokens_per_row=tuple(spec.tokens_per_row for spec in specs),
        dtypes=tuple(spec.dtype for spec in specs),
        width=8,
        format=codec,
    )
    positions = jnp.where(jnp.arange(16) < 6, jnp.arange(16), -1).astype(jnp.int32)[None]
    zero = jnp.zeros((1, 1), jnp.int32)
    traffic = attention_traffic(
        jax.ShapeDtypeStruct((1, 1, 1, 8), jnp.float32), store, store,
        Visibility(zero, zero, zero + 5), positions, rows=1, block=8,
    )  # fmt: skip
    assert traffic.live == 2 * (6 * 2 + 2 * 2 * 16)  # codes, and two groups of scale and zero
    assert traffic.parts["keys"] == 8 * 2 + 2 * 2 * 16


def test_missing_compilers_name_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def none(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(child.metadata, "version", none)
    assert main(["kernels", "--out", str(tmp_path / "out"), "--targets", "v4"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "libtpu" in error and "deviceless" in error and "make kernels" in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--targets", "v7"], "'v7' given; known: cuda, sm_80"),
        (["--only", "nothing"], "known: attention/bf16"),
        (["--jobs", "0"], "at least 1"),
    ],
)
def test_wrong_options_say_what_is_known(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["kernels", *argv]) == 2
    assert message in capsys.readouterr().err


def test_targets_and_command_line() -> None:
    assert resolve_targets(("tpu",)) == {"tpu": ["v4", "v5e", "v5p", "v6e", "7x"]}
    with pytest.raises(ConfigError, match="none given"):
        resolve_targets(())
    command = Kernels(targets=("v4", "cuda"), only="int4")
    assert command_line(command) == "kvjax kernels --targets v4 cuda --only int4"


def test_the_report_shows_what_failed_and_where_bytes_go() -> None:
    name, long = "attention/int8", "the compiler | wants something that is " + 40 * "very " + "long"
    size = {"temp_bytes": 8, "argument_bytes": 100}
    figures = {"registers": 255, "shared_bytes": 20480, "spill_bytes": 12, **size}
    parts = {"keys": 60, "values": 50, "outputs": 10}
    cells = [
        Cell(name, "sm_80", "limit", "no such type"),
        Cell(name, "sm_90", "compiled", figures=figures),
        Cell(name, "sm_100", "failed", long),
        Cell(name, f"{BYTES}:cuda", "compiled", figures=dict(parts=parts, live=100, ratio=1.2)),
    ]
    result = report.Result(
        command="kvjax kernels",
        versions={"jax": "1"},
        targets={"cuda": ["sm_80", "sm_90", "sm_100"]},
        cases={name: CASES[name]},
        cells={(cell.case, cell.target): cell for cell in cells},
    )
    text = report.markdown(result)
    row = next(line for line in text.splitlines() if line.startswith(f"| {name} |"))
    assert re.split(r"(?<!\\)\|", row)[4:6] == [
        " no: no such type ",
        " 255 r / 20 KiB, spills 12 B, temp 0 MiB ",
    ]
    assert f"| {name} | 1.200 ! |" in text
    assert "outputs 10.0, dead slots and repeated blocks 10.0." in text
    assert f"- failed: {long} ({name} for sm_100)" in text
    (entry,) = json.loads(json.dumps(report.as_json(result)))["cases"]
    assert entry["targets"]["sm_90"]["figures"]["registers"] == 255
    assert entry["targets"]["sm_80"] == {"status": "limit", "reason": "no such type"}


def installed(backend: str) -> bool:
    try:
        child.check_packages(backend)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_real_compilation(backend: str, tmp_path: Path) -> None:
    if not installed(backend):
        pytest.skip("the compilers of the extra `deviceless` are not installed")
    target = {"cuda": "sm_90", "tpu": "v6e"}[backend]
    argv = ["--only", "attention/bf16-page64", "--targets", target, "--out", str(tmp_path)]
    assert main(["kernels", *argv]) == 0
    (entry,) = json.loads((tmp_path / "kernels.json").read_text())["cases"]
    figures = entry["targets"][target]["figures"]
    assert figures["kernels"] == 1
    assert figures.get("registers") or figures["vmem_bytes"]
    assert entry["bytes"][backend]["figures"]["ratio"] > 1
