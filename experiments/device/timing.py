"""Deadlines, compilation ahead of time on many threads, and the timing of chains of calls."""

import dataclasses
import queue
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


class Clock:
    """Time that is left of a fixed number of seconds.

    >>> clock = Clock(10, now=iter([0.0, 4.0]).__next__)
    >>> clock.left()
    6.0
    """

    def __init__(self, seconds: float, now: Callable[[], float] = time.monotonic):
        self.now = now
        self.end = now() + seconds

    def left(self) -> float:
        """Seconds, below 0 when it is over."""
        return self.end - self.now()


class Pool:
    """Threads that compile in the order in which programs were submitted.

    Daemons: a compilation that hangs must not keep the process alive.
    """

    def __init__(self, threads: int):
        self.tasks: queue.Queue = queue.Queue()
        self.futures: list[Future] = []
        for _ in range(threads):
            threading.Thread(target=self._work, daemon=True).start()

    def submit(self, compile_it: Callable[[], Any]) -> Future:
        """A future of what `compile_it` returns and of the seconds that it took."""
        future: Future = Future()
        self.futures.append(future)
        self.tasks.put((future, compile_it))
        return future

    def wait(self, until: Callable[[], float], grace: float = 0.0) -> None:
        """Wait for everything submitted, or until `until()` seconds are 0; the rest is dropped.

        What runs then cannot be stopped, and gets `grace` more seconds to end.
        """
        while until() > 0 and not all(future.done() for future in self.futures):
            time.sleep(0.05)
        for future in self.futures:
            future.cancel()
        while self.busy and until() > -grace:
            time.sleep(0.05)

    @property
    def busy(self) -> bool:
        """Whether a thread still compiles."""
        return any(future.running() for future in self.futures)

    def _work(self) -> None:
        while True:
            future, compile_it = self.tasks.get()
            if not future.set_running_or_notify_cancel():
                continue
            start = time.monotonic()
            try:
                future.set_result((compile_it(), time.monotonic() - start))
            except BaseException as error:
                future.set_exception(error)


@dataclasses.dataclass(frozen=True)
class Measured:
    """Seconds of one call in each repetition, and the carry of the last."""

    seconds: tuple[float, ...]
    carry: Any

    @property
    def median(self) -> float:
        """Median seconds."""
        return statistics.median(self.seconds)


def chain(step: Callable, calls: int) -> Callable:
    """A program of `calls` steps, each waiting for the one before, over inputs in turn."""
    inner = jax.jit(step)  # traced and lowered once

    def program(carry, inputs: tuple):
        for i in range(calls):
            carry = inner(carry, inputs[i % len(inputs)])
        return carry

    return program


def calls_and_groups(copies: int, calls: int) -> tuple[int, list[list[int]]]:
    """Steps of a program, and the copies that each of its runs rotates through.

    >>> calls_and_groups(1, 8), calls_and_groups(3, 8), calls_and_groups(9, 8)
    ((8, [[0]]), (6, [[0, 1, 2]]), (8, [[0, 1, 2, 3, 4, 5, 6, 7], [8, 0, 1, 2, 3, 4, 5, 6]]))
    """
    size = min(copies, calls)
    groups = [[(start + i) % copies for i in range(size)] for start in range(0, copies, size)]
    return calls // size * size, groups


def measure(
    program: Callable,
    carry: Any,
    groups: Sequence[tuple],
    calls: int,
    *,
    repetitions: int,
    seconds: float,
    least: float,
    now: Callable[[], float] = time.perf_counter,
) -> Measured:
    """Time runs of a compiled chain, dispatched back to back, with one wait at the end of each.

    Args:
        program: takes and returns the carry, which it may overwrite.
        groups: inputs of each run; one round goes through all.
        calls: steps of a run.
        repetitions: timed rounds.
        seconds: stop after about this long.
        least: seconds that a repetition lasts at least, by more rounds.
    """

    def round_trip(carry, rounds: int):
        start = now()
        for _ in range(rounds):
            for group in groups:
                carry = program(carry, group)
        carry = jax.block_until_ready(carry)
        return carry, now() - start

    carry, _ = round_trip(carry, 1)
    carry, once = round_trip(carry, 1)
    rounds = max(1, min(1000, int(least / max(once, 1e-7))))
    repetitions = max(3, min(repetitions, int(seconds / max(rounds * once, 1e-7))))
    taken = []
    for _ in range(repetitions):
        carry, spent = round_trip(carry, rounds)
        taken.append(spent / (rounds * len(groups) * calls))
    return Measured(tuple(taken), carry)


def copy_bandwidth(nbytes: int, repetitions: int = 10) -> dict[str, float]:
    """Bytes per second that copies of an array of `nbytes` move, read and written together.

    "copy" is what XLA makes of a copy, "kernel" an elementwise kernel that must read and write all;
    "read" only sums, for comparison: decode reads and hardly writes.
    """
    x = jnp.zeros(nbytes // 4, jnp.uint32)
    kinds = {
        "copy": (jnp.copy, 2),
        "kernel": (lambda x: lax.bitwise_xor(x, jnp.uint32(1)), 2),
        "read": (lambda x: lax.reduce_max(x, (0,)), 1),
    }
    found = {}
    for name, (function, passes) in kinds.items():
        call = jax.jit(function)
        jax.block_until_ready(call(x))
        taken = []
        for _ in range(repetitions):
            start = time.perf_counter()
            for _ in range(4):
                result = call(x)
            jax.block_until_ready(result)
            taken.append((time.perf_counter() - start) / 4)
        found[name] = passes * nbytes / statistics.median(taken)
    return found
