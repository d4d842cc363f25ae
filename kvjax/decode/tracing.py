"""Count how often each step function is traced: a trace is a compilation that someone waits for."""

import collections
import contextlib
from collections.abc import Iterator

_COUNTS: collections.Counter[str] = collections.Counter()


def count_trace(name: str) -> None:
    """Call inside a jitted function: runs once a trace, never in a compiled step."""
    _COUNTS[name] += 1


def trace_counts() -> dict[str, int]:
    """Traces so far of each step function."""
    return dict(_COUNTS)


@contextlib.contextmanager
def assert_max_traces(**limits: int) -> Iterator[None]:
    """Fail if a step function is traced more often than `limits` says within the block.

    Functions: `extend_step` (prefill, scoring), `head_step`, `decode_step`, `generate_loop`. Those
    that are not named may be traced at will.

    Raises:
        AssertionError: names the function, the limit and the count.

    >>> with assert_max_traces(decode_step=0):
    ...     pass
    """
    before = collections.Counter(_COUNTS)
    yield
    for name, limit in limits.items():
        traced = _COUNTS[name] - before[name]
        if traced > limit:
            raise AssertionError(f"{name} was traced {traced} times, at most {limit} allowed")
