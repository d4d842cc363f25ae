"""`kvjax kernels`: which kernel compiles for which accelerator, and what it needs there."""

import asyncio
import dataclasses
import functools
import json
import platform
import shlex
import time
from collections.abc import Sequence
from importlib import metadata

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from experiments.cli import Kernels
from experiments.kernels import report
from experiments.kernels.case import Case
from experiments.kernels.cases import select_cases
from experiments.kernels.child import (
    BACKENDS,
    BYTES,
    Cell,
    backend_module,
    check_packages,
    compile_cells,
)
from experiments.progress import duration
from kvjax.errors import ConfigError

CASES_PER_CHILD = 5
VERSIONS = ("kvjax", "jax", "jaxlib")


def run(command: Kernels, console: Console) -> int:
    """Compile the matrix, show it and write it."""
    targets = resolve_targets(command.targets)
    cases = select_cases(command.only)
    if command.timeout <= 0 or command.jobs < 1:
        raise ConfigError(f"{command.timeout=} must be above 0 and {command.jobs=} at least 1")
    for backend in targets:
        check_packages(backend)
    command.out.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    cells = asyncio.run(_compile_all(command, cases, targets, console))
    result = report.Result(
        command=command_line(command),
        versions=_versions(targets),
        targets=targets,
        cases=cases,
        cells=cells,
    )
    for table in report.tables(result):
        console.print(table)
    (command.out / "kernels.json").write_text(json.dumps(report.as_json(result), indent=1) + "\n")
    (command.out / "kernels.md").write_text(report.markdown(result))
    bad = [cell for cell in cells.values() if not cell.good]
    for cell in bad:
        line = f"{cell.case} for {cell.target}: {cell.status}, {cell.reason}"
        console.print(escape(line), style="red", soft_wrap=True, highlight=False)
    took = duration(time.perf_counter() - started)
    console.print(
        f"{len(cells) - len(bad)} of {len(cells)} cells are good; "
        f"written to {command.out}/kernels.md and kernels.json in {took}"
    )
    return 1 if bad else 0


def resolve_targets(names: tuple[str, ...]) -> dict[str, list[str]]:
    """Targets of each backend, in their own order.

    >>> resolve_targets(("v6e", "sm_90", "v4"))
    {'cuda': ['sm_90'], 'tpu': ['v4', 'v6e']}
    """
    known = {backend: list(backend_module(backend).TARGETS) for backend in BACKENDS}
    chosen = {
        backend: [t for t in targets if t in names or backend in names]
        for backend, targets in known.items()
    }
    unknown = set(names) - set(known) - {t for targets in known.values() for t in targets}
    if unknown or not names:
        every = [name for backend in known for name in (backend, *known[backend])]
        wrong = ", ".join(map(repr, sorted(unknown))) or "none"
        raise ConfigError(f"targets: {wrong} given; known: {', '.join(every)}")
    return {backend: targets for backend, targets in chosen.items() if targets}


def command_line(command: Kernels) -> str:
    """The command as a user would type it."""
    words = ["kvjax", "kernels"]
    for field in dataclasses.fields(command):
        value = getattr(command, field.name)
        if value != field.default:
            values = value if field.name == "targets" else () if value is True else (value,)
            words += [f"--{field.name}", *map(str, values)]
    return shlex.join(words)


async def _compile_all(
    command: Kernels, cases: dict[str, Case], targets: dict[str, list[str]], console: Console
) -> dict[tuple[str, str], Cell]:
    """Cells by "op/name" and by target, or by "bytes:" and backend."""
    cells: dict[tuple[str, str], Cell] = {}
    total = len(cases) * sum(1 + len(each) for each in targets.values())
    progress = Progress(
        TextColumn("[bold]{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    task = progress.add_task("", total=total)
    turn = asyncio.Semaphore(command.jobs)

    def note(backend: str, cell: Cell) -> None:
        target = f"{BYTES}:{backend}" if cell.target == BYTES else cell.target
        cells[cell.case, target] = cell
        progress.update(task, advance=1, description=f"{cell.case} {target}")
        if not console.is_terminal:
            line = f"[{len(cells)}/{total}] {cell.case} {target}: {cell.status}"
            line += f", {cell.reason}" if cell.reason else ""
            line += f" ({duration(cell.seconds)})"
            console.print(escape(line), highlight=False, soft_wrap=True)

    async def fill(backend: str, names: Sequence[str]) -> None:
        jobs = [(name, target) for name in names for target in (BYTES, *targets[backend])]
        limits = {(name, t): why for name in names for t, why in cases[name].limits.items()}
        async with turn:
            for job in jobs:
                if job in limits:
                    note(backend, Cell(*job, "limit", limits[job]))
            await compile_cells(
                backend,
                [job for job in jobs if job not in limits],
                timeout=command.timeout,
                report=functools.partial(note, backend),
                cycles=command.cycles,
            )

    names = list(cases)
    shares = [names[i : i + CASES_PER_CHILD] for i in range(0, len(names), CASES_PER_CHILD)]
    with progress:
        async with asyncio.TaskGroup() as group:
            for share in shares:
                for backend in targets:
                    group.create_task(fill(backend, share))
    return cells


def _versions(targets: dict[str, list[str]]) -> dict[str, str]:
    names = [*VERSIONS, *(p for backend in targets for p in backend_module(backend).PACKAGES)]
    versions = {"python": platform.python_version()}
    for name in names:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions
