"""The kernel tests, run by pytest in a child process with a time limit."""

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# Interpreted kernels are tested without a GPU; here only native ones are of interest.
NATIVE = ("tests/pallas_kernels", "-k", "not interpreted and not simulator")
OUTCOME = re.compile(r"\b(PASSED|FAILED|ERROR|SKIPPED)\b")
TEST = re.compile(r"\S+\.py(?:::\S+)?")


class KernelTests:
    """A run of pytest in the background."""

    def __init__(self, log: Path, selection: Sequence[str], processes: int):
        self.log, self.start = log, time.monotonic()
        self.child = None
        if importlib.util.find_spec("pytest") is None:
            return
        command = [sys.executable, "-m", "pytest", "-v", "--tb=short", "-p", "no:cacheprovider"]
        command += ["-p", "no:benchmark", "-o", "minversion=1"]
        if processes > 1 and importlib.util.find_spec("xdist") is not None:
            command += ["-n", str(processes)]
        environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        with log.open("w") as output:
            self.child = subprocess.Popen(
                [*command, *selection],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    @property
    def running(self) -> bool:
        """Whether it still runs."""
        return self.child is not None and self.child.poll() is None

    def result(self, left: Callable[[], float]) -> dict[str, Any]:
        """Wait until it ends or `left()` seconds are 0; counts, failures and the last line."""
        if self.child is None:
            return {"status": "pytest is not installed"}
        while self.running and left() > 0:
            time.sleep(0.05)
        status = f"exit code {self.child.poll()}"
        if self.running:
            os.killpg(self.child.pid, signal.SIGKILL)
            self.child.wait()
            status = "stopped at the time limit"
        seconds = round(time.monotonic() - self.start, 1)
        return {"status": status, "seconds": seconds, **outcomes(self.log.read_text())}


def outcomes(text: str) -> dict[str, Any]:
    r"""Counts of outcomes in verbose output of pytest, also of a run that was cut off.

    >>> outcomes("a.py::t[x] PASSED\n[gw0] [ 9%] FAILED a.py::u\n== 1 failed ==")["failures"]
    ['a.py::u']
    """
    counts: dict[str, int] = {}
    failures = []
    for line in text.splitlines():
        if line.startswith(("=", "FAILED", "ERROR", "SKIPPED")):
            if line.startswith(("=====", "!!!!")) and "summary" in line:
                break  # from here on everything is said again
            continue
        outcome, test = OUTCOME.search(line), TEST.search(line)
        if not outcome or not test:
            continue
        word = outcome.group(1).lower()
        counts[word] = counts.get(word, 0) + 1
        if word in ("failed", "error"):
            failures.append(test.group(0))
    lines = [line.strip("= ") for line in text.splitlines() if line.strip("= ")]
    return {"counts": counts, "failures": failures, "last_line": lines[-1] if lines else ""}
