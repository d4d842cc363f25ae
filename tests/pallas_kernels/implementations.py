"""Implementations that the kernel tests run on this machine."""

from collections.abc import Iterable

import jax

from pallas_kernels._common.implementations import ACCELERATORS


def runnable(known: Iterable[str]) -> list[str]:
    """Portable ones, and the kernels: interpreted, or native on the device that they are for."""
    backend = jax.default_backend()
    names = []
    for name in known:
        device = name.removesuffix("_interpreted")
        native = device == name
        if device not in ACCELERATORS or native == (backend == device):
            names.append(name)
    return names
