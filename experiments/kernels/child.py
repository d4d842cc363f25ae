"""Compile in another process: what a target does not support often aborts the compiler.

`python -m experiments.kernels.child BACKEND PLAN CASE:TARGET...` compiles one after the other and
writes a line of JSON for each. `compile_cells` starts it, puts a limit on the time of each line,
and when one dies, starts another for those that are left.
"""

import asyncio
import contextlib
import dataclasses
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

from kvjax.errors import MissingPackageError

BACKENDS = {"cuda": "experiments.kernels.compile_cuda", "tpu": "experiments.kernels.compile_tpu"}
BYTES = "bytes"  # stands among the targets of a child: count the traffic, compile nothing
ROOT = Path(__file__).resolve().parents[2]


@dataclasses.dataclass(frozen=True)
class Cell:
    """What came of one case for one target.

    Attributes:
        status: "compiled"; "limit", the hardware cannot, as the case states; "unsupported", the
            kernel or JAX refuses; "failed", the compiler does; "died" or "timeout", the process.
        reason: one line; empty if compiled.
        figures: of the compiled kernel, as the module of the backend names them.
        seconds: that it took; not of the result, and not compared.
    """

    case: str
    target: str
    status: str
    reason: str = ""
    figures: dict[str, Any] = dataclasses.field(default_factory=dict)
    seconds: float = dataclasses.field(default=0.0, compare=False)

    @property
    def good(self) -> bool:
        """Compiled, or stated to be impossible."""
        return self.status in ("compiled", "limit")


def backend_module(name: str) -> ModuleType:
    """The module that compiles for a backend."""
    return importlib.import_module(BACKENDS[name])


def check_packages(name: str) -> None:
    """Raise MissingPackageError if the compilers of a backend are not installed."""
    missing = []
    for package in backend_module(name).PACKAGES:
        try:
            metadata.version(package)
        except metadata.PackageNotFoundError:
            missing.append(package)
    if missing:
        raise MissingPackageError(
            f"compiling for {name} needs {', '.join(missing)}: `make kernels` installs and uses "
            "them, or install the extra `deviceless` (pip install -e '.[deviceless]')"
        )


async def compile_cells(
    backend: str,
    jobs: Sequence[tuple[str, str]],
    *,
    timeout: float,
    report: Callable[[Cell], None],
    cycles: bool = False,
    module: str = "experiments.kernels.child",
) -> None:
    """Compile cases for targets of one backend in child processes; report a cell for each.

    Jobs share a child, since a third of the time would go to its imports, until one kills it. What
    takes too long gets a second chance: libtpu was seen to hang once in some hundred compilations.

    Args:
        backend: "cuda" or "tpu".
        jobs: (op/name of a case, target of that backend or BYTES), several.
        timeout: seconds for each job; the first of a child pays for the imports, too.
        report: called with each cell as it comes.
        cycles: ask for an estimate of cycles, too, where a compiler has one.
        module: what the child runs.
    """
    plans = backend_module(backend).plans
    estimated = {job: cycles and job[1] != BYTES for job in jobs}
    waiting = [(job, plans(job[1]) if estimated[job] else ("plain",)) for job in jobs]
    retried: set[tuple[str, str]] = set()
    while waiting:
        plan = waiting[0][1][0]
        batch = [entry for entry in waiting if entry[1][0] == plan]
        waiting = [entry for entry in waiting if entry[1][0] != plan]
        async with _child(module, backend, plan, [job for job, _ in batch]) as next_cell:
            while batch:
                job, left = batch.pop(0)
                started = time.perf_counter()
                cell = await next_cell(*job, timeout)
                cell = dataclasses.replace(cell, seconds=time.perf_counter() - started)
                if cell.status in ("died", "timeout"):
                    waiting = batch + waiting  # for another child
                    batch = []
                    again = cell.status == "timeout" and job not in retried
                    if left[1:] or again:
                        retried.add(job)
                        waiting.append((job, left[1:] or left))
                        continue
                report(cell)


@contextlib.asynccontextmanager
async def _child(
    module: str, backend: str, plan: str, jobs: list[tuple[str, str]]
) -> AsyncIterator[Callable[[str, str, float], Awaitable[Cell]]]:
    """Start a child; yields the function that waits for its next cell. Ends it in any case."""
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        errors = scratch / "stderr"
        variables = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",  # and never ask a plugin for a device
            "JAX_ENABLE_COMPILATION_CACHE": "false",  # what is not compiled dumps nothing
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
            "TMPDIR": folder,
            **backend_module(backend).environment(plan, scratch),
        }
        with errors.open("w") as stderr:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                module,
                backend,
                plan,
                *map(":".join, jobs),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=variables,
                start_new_session=True,  # so that ptxas ends with it
            )
        assert process.stdout is not None
        lines = process.stdout

        async def next_cell(case: str, target: str, timeout: float) -> Cell:
            try:
                line = await asyncio.wait_for(lines.readline(), timeout)
            except TimeoutError:
                return Cell(case, target, "timeout", f"not done after {timeout:g} s")
            if not line:
                code = await process.wait()
                return Cell(case, target, "died", _last_words(errors.read_text(), code))
            return Cell(case, target, **json.loads(line))

        try:
            yield next_cell
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


def _last_words(errors: str, code: int) -> str:
    """Why a process ended, from its standard error and exit code."""
    try:
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    except ValueError:
        how = f"signal {-code}"
    lines = [line for line in errors.splitlines() if line.strip()]
    telling = [line for line in lines if re.search(r"LLVM ERROR|^F\d{4} |Check failed", line)]
    word = (telling[:1] or [line for line in lines[-1:] if code >= 0] or [""])[0]
    return _one_line(f"{how}: {word}" if word else how)


def _one_line(text: str, limit: int = 300) -> str:
    r"""The gist of a message, without what differs from machine to machine.

    >>> _one_line("F1130 13:35:20.249308    5213 a/b.cc:15] it failed in /some/where/x.py:3\n at")
    'it failed in x.py:3'
    """
    line = next((line for line in text.splitlines() if line.strip()), "").strip()
    line = re.sub(r"[FEWI]\d{4} [\d:.]+ +\d+ \S+\] ", "", line)
    line = re.sub(r"(?<![\w.])(/[\w.+-]+)+/(?=[\w.])", "", line)
    line = re.sub(r"0x[0-9a-f]{6,}", "0x...", line)
    line = " ".join(line.split())
    return line if len(line) <= limit else line[: limit - 3] + "..."


def main(argv: list[str]) -> None:
    """Compile one job after the other, one line of JSON on standard output each."""
    # Compilers print; what they print must not land among the lines.
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    backend, plan, *jobs = argv
    for job in jobs:
        case, _, target = job.rpartition(":")
        print(json.dumps(_cell(case, backend, plan, target)), file=lines, flush=True)


def _cell(name: str, backend: str, plan: str, target: str) -> dict[str, Any]:
    """Fields of a `Cell`."""
    try:
        from experiments.kernels.cases import CASES

        case, compiler = CASES[name], backend_module(backend)
        if target == BYTES:
            traffic = case.traffic(compiler.IMPLEMENTATION)
            figures = {**dataclasses.asdict(traffic), "ratio": round(traffic.ratio, 4)}
        else:
            function, arguments = case.build(compiler.IMPLEMENTATION)
            import jax

            jitted = jax.jit(function, donate_argnums=case.donated)
            figures = compiler.compile_for(target, jitted, arguments, case.op, plan)
    except NotImplementedError as error:
        return {"status": "unsupported", "reason": _one_line(str(error))}
    except Exception as error:  # a compiler may raise anything, and that is a result
        reason = str(error) or "no message"
        return {"status": "failed", "reason": _one_line(f"{type(error).__name__}: {reason}")}
    return {"status": "compiled", "figures": figures}


if __name__ == "__main__":
    main(sys.argv[1:])
