"""Names of implementations: what each op calls its own, and whether one can run here.

"reference" and "xla" run anywhere; "tpu" and "gpu" are compiled kernels; "tpu_interpreted" and
"gpu_interpreted" are the same kernels run by Pallas' interpreter on any machine: right results, no
speed. They are names of their own so that a result says what ran.
"""

import functools
import warnings
from collections.abc import Callable, Mapping

import jax

ACCELERATORS = ("tpu", "gpu")


class ImplementationUnavailable(ValueError):
    """The implementation exists, but this process has no device that runs it."""


def resolve(op: str, name: str, known: Mapping[str, Callable], unsupported=None) -> str:
    """Name of the implementation of `op` that runs for `name`.

    "auto" is the kernel of the device at hand, if there is one that can do this call, else "xla".

    Args:
        op: the op's name, for messages.
        name: one of `known`, or "auto".
        known: implementations by name.
        unsupported: what keeps an implementation from this call, or None: a function of its name.

    Raises:
        ValueError: no such implementation.
        ImplementationUnavailable: a kernel for a device that this process does not have.
        NotImplementedError: a kernel that cannot do this call, with what it can.

    >>> resolve("append", "auto", {"xla": print})
    'xla'
    """
    backend = jax.default_backend()
    if name == "auto":
        if backend not in ACCELERATORS or backend not in known:
            return "xla"
        reason = unsupported(backend) if unsupported else None
        if reason is None:
            return backend
        _warn_once(f"{op} runs on 'xla' instead of {backend!r}: {reason}")
        return "xla"
    if name not in known:
        listed = ", ".join(["auto", *known])
        raise ValueError(f"unknown {op} implementation {name!r}; known: {listed}")
    if name in ACCELERATORS and name != backend:
        raise ImplementationUnavailable(
            f"{op}: implementation={name!r} needs a {name.upper()}; this process runs on {backend} "
            f"(use 'auto' or 'xla', or '{name}_interpreted' to check results without speed)"
        )
    reason = unsupported(name) if unsupported else None
    if reason is not None:
        raise NotImplementedError(f"{op}, implementation={name!r}: {reason}")
    return name


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=4)
