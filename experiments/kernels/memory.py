"""Temporary memory around a kernel, which tells of copies that the kernel does not show."""

from typing import Any

MIB = 2**20
SHARE = 0.05  # of the arguments; less is the queries, the results and the work list


def temporary(figures: dict[str, Any]) -> str:
    """Say how much temporary memory there is, if it is too much for a work list and results.

    XLA copies the store before a kernel that wants another layout or dtype than the store has, and
    such a copy costs more than the kernel.

    >>> temporary({"temp_bytes": 20 << 20, "argument_bytes": 90 << 20})
    ', temp 20 MiB'
    >>> temporary({"temp_bytes": 1 << 20, "argument_bytes": 90 << 20})
    ''
    """
    if figures["temp_bytes"] <= SHARE * figures["argument_bytes"]:
        return ""
    return f", temp {figures['temp_bytes'] / MIB:.0f} MiB"
