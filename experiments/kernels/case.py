"""What every kernel call that `kvjax kernels` compiles has in common."""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import jax
import numpy as np

from kvjax import Int, Raw
from kvjax.cache.base import PartSpec
from pallas_kernels._common.operand import AsItIs, Operand
from pallas_kernels._common.traffic import Traffic

# Lengths of the sequences of a batch, as shares of S: bytes are counted on a ragged batch.
RAGGED = (1.0, 0.61, 0.13)


def shape_of(shape: tuple[int, ...], dtype) -> Any:
    """Stand-in of an array: all that a compiler needs."""
    return jax.ShapeDtypeStruct(shape, dtype)


def ragged_lengths(B: int, S: int) -> np.ndarray:
    """Lengths of a batch, i32[B]."""
    return np.array([int(RAGGED[b % len(RAGGED)] * S) for b in range(B)], np.int32)


class Case(Protocol):
    """One call of one kernel."""

    @property
    def name(self) -> str:
        """Name within the op; `--only` matches op/name."""
        ...

    @property
    def op(self) -> str:
        """Op, and what the names of its kernels in a compiled program begin with."""
        ...

    @property
    def codec(self) -> str:
        """How the store is encoded, in a word."""
        ...

    @property
    def layout(self) -> str:
        """How the store lies in memory, in a word."""
        ...

    @property
    def reason(self) -> str:
        """Why the case is here."""
        ...

    @property
    def donated(self) -> tuple[int, ...]:
        """Arguments that the call may write its results into."""
        ...

    @property
    def limits(self) -> dict[str, str]:
        """Targets whose hardware cannot run it, and why: these are not compiled."""
        ...

    @property
    def decode(self) -> bool:
        """Whether the bar on bytes moved over live bytes holds for it."""
        ...

    def build(self, implementation: str) -> tuple[Callable, tuple]:
        """The function of an implementation ("gpu", "tpu"), and jax.ShapeDtypeStructs for it."""
        ...

    def traffic(self, implementation: str) -> Traffic:
        """Bytes that one call moves, on a ragged batch."""
        ...


@dataclasses.dataclass(frozen=True)
class Plain:
    """A store of one narrow float, for which no codec of kvjax stands yet."""

    dtype: str

    def parts(self, width: int, dtype: str) -> tuple[PartSpec, ...]:
        """One part of that dtype."""
        return (PartSpec(name="raw", kind="payload", width=width, dtype=self.dtype),)


Stored = Raw | Int | Plain


def operand_of(
    codec: Stored, width: int, dtype: str, *, B: int, K: int, S: int, page_size: int
) -> Operand:
    """Shapes of a store as a device holds it: every dtype as such."""
    specs = codec.parts(width, dtype)

    def shape(rows: int, columns: int) -> tuple[int, ...]:
        if not page_size:
            return (B * K, S // rows, columns)
        return (B * S // page_size, K, page_size // rows, columns)

    parts = [shape_of(shape(spec.tokens_per_row, spec.width), spec.dtype) for spec in specs]
    return Operand(
        parts=tuple(parts),
        tokens_per_row=tuple(spec.tokens_per_row for spec in specs),
        dtypes=tuple(spec.dtype for spec in specs),
        width=width,
        format=AsItIs() if isinstance(codec, Plain) else codec,
        paged=bool(page_size),
    )


def codec_name(codec: Stored, dtype: str) -> str:
    """A codec in a word."""
    payload, *_ = codec.parts(1, dtype)
    bits, axis = getattr(codec, "bits", 0), getattr(codec, "axis", "token")
    if not bits:
        return payload.dtype
    return f"int{bits}" + (" by channel" if axis == "channel" else "")
