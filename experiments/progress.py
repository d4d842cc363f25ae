"""Tell how a run is doing: a live bar with the time left on a terminal, plain lines elsewhere."""

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class RunProgress:
    """Progress over the variants of a run; use as a context manager."""

    def __init__(self, console: Console, total: int):
        self._console, self._total = console, total
        self._done = 0
        self._spent = 0.0
        self._started = time.perf_counter()
        self._label = ""
        self._live = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._live.add_task("", total=total, note="", left="")

    def __enter__(self) -> "RunProgress":
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._live.stop()

    def start(self, label: str) -> None:
        """A variant (or the preparation) begins."""
        self._label, self._started = label, time.perf_counter()
        self._live.update(self._task, description=escape(label), note="", left=self.time_left())

    def stage(self, note: str) -> None:
        """What the variant is doing now."""
        self._live.update(self._task, note=note, left=self.time_left())

    def finish(self, row: Mapping[str, Any]) -> None:
        """A variant has its row."""
        self._done += 1
        self._spent += time.perf_counter() - self._started
        self._started = time.perf_counter()
        self._live.update(self._task, completed=self._done, left=self.time_left())
        line = f"[{self._done}/{self._total}] {self._label}: {summary(row)}"
        if self._done < self._total:
            line += f"; {self.time_left()}"
        style = "" if row["status"] == "ok" else "red"
        self._console.print(escape(line), style=style, soft_wrap=True, highlight=False)

    def time_left(self) -> str:
        """How long the variants to come will take if they are like those that are done.

        >>> RunProgress(Console(quiet=True), total=3).time_left()
        ''
        """
        if not self._done:
            return ""
        running = time.perf_counter() - self._started
        mean = self._spent / self._done
        seconds = max(0.0, mean * (self._total - self._done) - min(running, mean))
        return f"about {duration(seconds)} left"


def duration(seconds: float) -> str:
    """Write a time as people say it.

    >>> duration(8.3), duration(200), duration(7300)
    ('8 s', '3 min 20 s', '2 h 1 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def summary(row: Mapping[str, Any]) -> str:
    """Say in one line what a row found.

    >>> summary({"status": "failed", "error": "out of memory", "seconds": 2.0})
    'failed: out of memory'
    """
    if row["status"] != "ok":
        return f"{row['status']}: {row['error']}"
    parts = [
        f"{row['bytes_per_token']:,.0f} bytes/token",
        f"perplexity {row['perplexity']:.3f}",
        f"KL {row['kl']:.2g}",
    ]
    if row.get("decode_tokens_per_s") is not None:
        parts.append(f"decode {row['decode_tokens_per_s']:.1f} tokens/s")
    return ", ".join([*parts, duration(row["seconds"])])
