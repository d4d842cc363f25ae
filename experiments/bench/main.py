"""`kvjax bench`: decode and prefill speed beside what a user would pick instead.

Every cell is a process of its own; kvjax and the peers take turns, so that a machine that drifts
drifts for all. What is published are ratios of medians.
"""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from typing import Annotated

import tyro
from rich.console import Console
from rich.table import Table

import kvjax
from kvjax.checkpoints.named import load_checkpoint
from kvjax.data import load_text
from kvjax.errors import ConfigError

HERE = pathlib.Path(__file__).parent
CELLS = "f32:1x128 f32:1x1024 f32:8x128 f32:8x1024 bf16:8x128 bf16:8x1024"
DTYPES = {"f32": "float32", "bf16": "bfloat16"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bench:
    """Time kvjax's decode and prefill, and those of peers beside it.

    Peers run in environments of their own, which you name by their Python:

        python3 -m venv peers && peers/bin/pip install -c constraints.txt torch transformers gguf \
            accelerate
        kvjax bench --transformers peers/bin/python

    Attributes:
        cells: dtype:batch x prompt, several.
        transformers: Python that has torch, transformers, gguf and accelerate.
        llama_cpp: Python that has llama-cpp-python.
        caches: transformers caches: dynamic, static, static-compiled.
        new_tokens: tokens that each sequence generates.
        repetitions: counted runs of each cell in its process.
        rounds: processes of each cell; the best-placed figure is the median over them.
        out: folder for decode.json and decode.md.
    """

    cells: tuple[str, ...] = tuple(CELLS.split())
    transformers: Annotated[pathlib.Path | None, tyro.conf.arg(metavar="PYTHON")] = None
    llama_cpp: Annotated[pathlib.Path | None, tyro.conf.arg(metavar="PYTHON")] = None
    caches: tuple[str, ...] = ("dynamic", "static")
    new_tokens: int = 64
    repetitions: int = 2
    rounds: int = 1
    out: pathlib.Path = pathlib.Path("runs/bench")


def run(argv: list[str]) -> int:
    """Run the benchmark from command line arguments."""
    bench = tyro.cli(Bench, args=argv, prog="kvjax bench", description=Bench.__doc__)
    bench.out.mkdir(parents=True, exist_ok=True)
    console = Console()
    checkpoint = load_checkpoint("smollm2-135m", "float32")
    assert checkpoint.tokenizer is not None
    ids = checkpoint.tokenizer.encode(load_text("python-reference"))
    gguf = str(checkpoint.source_path)
    del checkpoint
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for name in bench.cells:
            dtype, B, P = _parse(name)
            cell = {
                "model": "smollm2-135m",
                "gguf": gguf,
                "dtype": dtype,
                "scratch": scratch,
                "threads": os.cpu_count(),
                "prompts": [ids[b * P : (b + 1) * P] for b in range(B)],
                "new_tokens": bench.new_tokens,
                "repetitions": bench.repetitions,
            }
            for _ in range(bench.rounds):
                for label, python, script, extra in _contestants(bench):
                    result = _child(python, script, {**cell, **extra})
                    rows.append({"cell": name, "who": label, **result})
                    console.print(
                        f"{name:12s} {label:24s} decode {result['decode']:7.1f} tok/s   "
                        f"prefill {result['prefill']:7.0f} tok/s"
                    )
    report = {"threads": os.cpu_count(), "kvjax": kvjax.__version__, "rows": rows}
    (bench.out / "decode.json").write_text(json.dumps(report, indent=1) + "\n")
    table = _table(rows)
    (bench.out / "decode.md").write_text(_markdown(table, rows))
    console.print(_rich(table))
    console.print(f"written to {bench.out}/decode.md and decode.json")
    return 0


def _contestants(bench: Bench):
    yield "kvjax", sys.executable, "kvjax_cell.py", {}
    if bench.transformers:
        for cache in bench.caches:
            python = str(bench.transformers)
            yield f"transformers {cache}", python, "transformers_cell.py", {"cache": cache}
    if bench.llama_cpp:
        yield "llama.cpp", str(bench.llama_cpp), "llama_cpp_cell.py", {}


def _parse(name: str) -> tuple[str, int, int]:
    try:
        dtype, shape = name.split(":")
        B, P = map(int, shape.split("x"))
        return DTYPES[dtype], B, P
    except (ValueError, KeyError):
        raise ConfigError(f"cell {name!r} must look like f32:1x128 or bf16:8x1024") from None


def _child(python: str, script: str, cell: dict) -> dict:
    done = subprocess.run(
        [python, str(HERE / script)], input=json.dumps(cell), capture_output=True, text=True
    )
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise ConfigError(f"{script} under {python} failed: {last[0]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def _table(rows: list[dict]) -> list[list[str]]:
    """Header and lines: kvjax, and for each kind of peer its best and the ratio to it."""
    peers = sorted({row["who"].split()[0] for row in rows} - {"kvjax"})
    header = ["cell", "figure", "kvjax"]
    for peer in peers:
        header += [peer, "ratio"]
    lines = [header]
    for cell in dict.fromkeys(row["cell"] for row in rows):
        for figure in ("decode", "prefill"):
            own = _best(rows, cell, "kvjax", figure)
            line = [cell, f"{figure} tok/s", f"{own:.1f}"]
            for peer in peers:
                other = _best(rows, cell, peer, figure)
                line += [f"{other:.1f}", f"{own / other:.2f}"]
            lines.append(line)
    return lines


def _best(rows: list[dict], cell: str, who: str, figure: str) -> float:
    """Median over the rounds of the fastest variant of a contestant."""
    by_label: dict[str, list[float]] = {}
    for row in rows:
        if row["cell"] == cell and row["who"].split()[0] == who:
            by_label.setdefault(row["who"], []).append(row[figure])
    return max(sorted(values)[len(values) // 2] for values in by_label.values())


def _markdown(table: list[list[str]], rows: list[dict]) -> str:
    versions: dict[str, str] = {}
    for row in rows:
        versions |= row["versions"]
    named = ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
    head, *body = ["| " + " | ".join(line) + " |" for line in table]
    rule = "|" + " --- |" * len(table[0])
    return "\n".join([head, rule, *body, "", f"Versions: {named}; {os.cpu_count()} threads.", ""])


def _rich(table: list[list[str]]) -> Table:
    view = Table(*table[0])
    for line in table[1:]:
        view.add_row(*line)
    return view
