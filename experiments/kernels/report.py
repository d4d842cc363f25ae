"""The matrix of `kvjax kernels` as tables, markdown and JSON."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from rich.markup import escape
from rich.table import Table

from experiments.kernels.case import Case
from experiments.kernels.child import BYTES, Cell, backend_module

BAR = 1.05  # most bytes moved over live bytes of a decode kernel
SHORT = 44  # characters of a reason that stand in a table; all of it stands below
TITLES = {"cuda": "CUDA", "tpu": "TPU"}
TEMPORARY = (
    "`temp`: temporary memory around the kernel of more than 5 % of its arguments, as for a copy "
    "of the store into another layout."
)
LEGENDS = {
    "cuda": (
        "`96 r / 20 KiB`: registers of a thread and shared memory of a block; `spills`: bytes that "
        "a thread stores and loads for want of registers. " + TEMPORARY
    ),
    "tpu": (
        "`3.0 MiB / 40+250 b / 11 kc`: VMEM of the kernel; bundles of its static schedule, those "
        "that run once, those of the grid loop, those of loops within; thousands of estimated "
        "cycles where the compiler gives an estimate, which knows nothing of lengths. " + TEMPORARY
    ),
}
HEAD = """# Kernels, compiled for accelerators that are not here

Every Pallas kernel, compiled by the compilers of each target on a machine without any accelerator.
It says that a kernel compiles and what it needs; nothing was run, so it says nothing of speed.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """What a run found."""

    command: str
    versions: dict[str, str]
    targets: dict[str, list[str]]
    cases: dict[str, Case]
    cells: dict[tuple[str, str], Cell]


def as_json(result: Result) -> dict[str, Any]:
    """Everything, for programs."""
    cases = [
        {
            "case": name,
            "codec": case.codec,
            "layout": case.layout,
            "reason": case.reason,
            "targets": {
                target: _without_names(result.cells[name, target])
                for targets in result.targets.values()
                for target in targets
            },
            "bytes": {
                backend: _without_names(result.cells[name, f"{BYTES}:{backend}"])
                for backend in result.targets
            },
        }
        for name, case in result.cases.items()
    ]
    return {"command": result.command, "versions": result.versions, "cases": cases}


def _without_names(cell: Cell) -> dict[str, Any]:
    fields = dataclasses.asdict(cell)
    return {key: fields[key] for key in ("status", "reason", "figures") if fields[key]}


def tables(result: Result) -> Iterator[Table]:
    """One table a backend, for a terminal."""
    for backend in result.targets:
        header, *lines = _grid(result, backend, bytes_too=True)
        table = Table(*header, title=f"Pallas kernels for {TITLES[backend]}")
        for line in lines:
            table.add_row(*(_styled(text) for text in line))
        yield table


def _styled(text: str) -> str:
    style = (
        "red" if text.startswith("no:") else "yellow" if "spills" in text or "temp" in text else ""
    )
    return f"[{style}]{escape(text)}[/]" if style else escape(text)


def markdown(result: Result) -> str:
    """Everything, for people."""
    versions = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    lines = [HEAD, f"Command: `{result.command}`", "", f"Versions: {versions}.", ""]
    for backend in result.targets:
        lines += [f"## {TITLES[backend]}", "", LEGENDS[backend], ""]
        lines += [*_markdown_table(_grid(result, backend, bytes_too=False)), ""]
    lines += ["## Bytes moved over live bytes", "", *_bytes_section(result), ""]
    lines += ["## Why these cases", ""]
    lines += [f"- `{name}`: {case.reason}." for name, case in result.cases.items()]
    if notes := list(_notes(result)):
        lines += ["", "## Notes", "", *notes]
    return "\n".join(lines) + "\n"


def _grid(result: Result, backend: str, *, bytes_too: bool) -> list[list[str]]:
    """Header and lines of the table of a backend."""
    module, targets = backend_module(backend), result.targets[backend]
    header = ["case", "codec", "layout", *(module.TITLES[target] for target in targets)]
    lines = [header + (["moved / live"] if bytes_too else [])]
    for name, case in result.cases.items():
        cells = [_text(result.cells[name, target], module) for target in targets]
        ratio = [_ratio_text(result, name, backend)] if bytes_too else []
        lines.append([name, case.codec, case.layout, *cells, *ratio])
    return lines


def _text(cell: Cell, module) -> str:
    if cell.status == "compiled":
        return module.cell(cell.figures)
    reason = cell.reason if len(cell.reason) <= SHORT else cell.reason[: SHORT - 3] + "..."
    return f"no: {reason}"


def _markdown_table(grid: list[list[str]]) -> list[str]:
    head, *body = [
        "| " + " | ".join(text.replace("|", "\\|") for text in line) + " |" for line in grid
    ]
    return [head, "|" + " --- |" * len(grid[0]), *body]


def _ratio_text(result: Result, name: str, backend: str) -> str:
    cell = result.cells[name, f"{BYTES}:{backend}"]
    if cell.status != "compiled":
        return _text(cell, None)
    ratio = cell.figures["ratio"]
    return f"{ratio:.3f}" + (" !" if result.cases[name].decode and ratio > BAR else "")


def _bytes_section(result: Result) -> list[str]:
    """The table of ratios, and where each that misses the bar loses."""
    lines = [
        "Counted from the list of blocks of a batch of ragged lengths (all of 8192 slots, 61 %, "
        "13 %), and what else the kernel loads and stores: positions, page table, queries, results "
        "of splits. Live is what no kernel can do without: the slots of the store that a query "
        "sees; for `append`, the new rows, read and written once.",
        f"Decode is to stay at or below {BAR}; `!` marks what does not. Caches between memory and "
        "kernel, which save re-reading, are left out. *Padding* is what the layout of a TPU's "
        "memory adds to the arguments, on top.",
        "",
    ]
    tpu = result.targets.get("tpu", [])
    header = [
        "case",
        *(TITLES[backend] for backend in result.targets),
        *(["padding"] if tpu else []),
    ]
    grid = [header]
    for name in result.cases:
        ratios = [_ratio_text(result, name, backend) for backend in result.targets]
        paddings = [result.cells[name, target].figures.get("padding") for target in tpu]
        padding = max((x for x in paddings if x is not None), default=None)
        shown = [] if not tpu else ["" if padding is None else f"{padding:.2f}"]
        grid.append([name, *ratios, *shown])
    lines += _markdown_table(grid)
    losses = [
        f"- `{name}`, {TITLES[backend]}: {loss}"
        for name, case in result.cases.items()
        for backend in result.targets
        if case.decode and (loss := _losses(result.cells[name, f"{BYTES}:{backend}"].figures))
    ]
    if losses:
        lines += ["", "Where the bar is missed, in per cent of the live bytes:", "", *losses]
    return lines


def _losses(figures: dict[str, Any]) -> str:
    """What is moved beyond the live bytes, largest first; empty if the bar holds.

    >>> _losses({"ratio": 1.1, "live": 100, "parts": {"keys": 52, "values": 50, "outputs": 8}})
    'outputs 8.0, dead slots and repeated blocks 2.0.'
    """
    if figures.get("ratio", 0) <= BAR:
        return ""
    parts = dict(figures["parts"])
    stored = sum(parts.pop(name, 0) for name in ("keys", "values", "store"))
    parts["dead slots and repeated blocks"] = stored - figures["live"]
    largest = sorted(parts.items(), key=lambda item: -item[1])
    shares = [(name.replace("_", " "), 100 * size / figures["live"]) for name, size in largest]
    return ", ".join(f"{name} {share:.1f}" for name, share in shares if share >= 0.05) + "."


def _notes(result: Result) -> Iterator[str]:
    """Reasons in full, each once with the cells that it explains."""
    where: dict[tuple[str, str], list[str]] = {}
    for (case, target), cell in result.cells.items():
        if cell.status != "compiled":
            where.setdefault((cell.status, cell.reason), []).append(f"{case} for {target}")
    for (status, reason), names in sorted(where.items()):
        yield f"- {status}: {reason} ({', '.join(sorted(names))})"
