"""Calls of the attention op: inputs as they lie in memory, and what the oracle says of them.

What must not be read is poisoned, slots hold positions in any order, pages lie anywhere in a pool
with foreign pages between them, and table entries of dead pages point outside the pool.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache.codecs import Raw
from kvjax.testing import oracle
from kvjax.testing.conformance import COMPILER_OPTIONS
from pallas_kernels._common.operand import Operand
from pallas_kernels._common.visibility import Visibility
from pallas_kernels.attention import KeyRotation, attention, resolve_implementation

K = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One compiled call; each of `rounds` gives it the lengths of its sequences.

    Attributes:
        page: Z; 0 is contiguous.
        transposed: keys lie [W, S].
        shuffled: slots hold positions in random order, as in a ring that has wrapped.
        rotated: keys are rotated when they are read, from a random base.
        first_slots: only these slots hold anything.
    """

    T: int = 1
    G: int = 3
    H: int = 64
    Hv: int | None = None
    S: int = 80
    page: int = 0
    transposed: bool = False
    shuffled: bool = False
    codec: Any = Raw()
    dtype: str = "float32"
    window: int | None = None
    sinks: int = 0
    softcap: float | None = None
    rotated: bool = False
    first_slots: int | None = None
    seed: int = 0

    def __str__(self) -> str:
        """Readable in a log, and after `-k`."""
        bits = getattr(self.codec, "bits", None)
        codec = f"int{bits}-{self.codec.axis}" if bits else "raw"
        codec += "-symmetric" if getattr(self.codec, "symmetric", False) else ""
        words = [f"T{self.T}", f"G{self.G}", f"H{self.H}"]
        words += [f"v{self.Hv}"] if self.Hv else []
        words += [f"S{self.S}", f"page{self.page}" if self.page else "rows"]
        for name in ("transposed", "shuffled", "rotated"):
            words += [name] if getattr(self, name) else []
        for name in ("window", "sinks", "softcap", "first_slots"):
            words += [f"{name}{getattr(self, name):g}"] if getattr(self, name) else []
        return "-".join([*words, codec, self.dtype])

    @property
    def rounds(self) -> list[list[int]]:
        """Lengths around every border; then no sequence longer than this, for each bucket."""
        Z = self.page or 16
        borders = [0, 1, Z - 1, Z, Z + 1, 63, self.S]
        if self.first_slots:
            borders = [min(n, self.first_slots) for n in borders]
        borders = [min(n, self.S) for n in borders]
        caps = [n for n in (200, 256, 257, 513) if n < self.S]
        return [borders] + [[min(n, cap) for n in borders] for cap in caps]


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Arguments of one call, and the decoded values behind them."""

    query: np.ndarray  # [B, T, N, H]
    keys: np.ndarray  # [B, S, K, H], decoded
    values: np.ndarray  # [B, S, K, Hv], decoded
    positions: np.ndarray  # i32[B, T]
    held: np.ndarray  # i32[B, S]
    arguments: tuple  # of `attention`, as arrays
    rotation: KeyRotation | None


def build(case: Case, lengths: Sequence[int], poison: float = np.nan) -> Inputs:
    """Random inputs of unit variance for sequences of `lengths`."""
    rng = np.random.default_rng(case.seed)
    B, T, N, H, Hv, S = len(lengths), case.T, case.G * K, case.H, case.Hv or case.H, case.S
    held = np.where(np.arange(S) < np.array(lengths)[:, None], np.arange(S), -1).astype(np.int32)
    if case.shuffled:
        held = rng.permuted(held, axis=1)
    positions = np.array(lengths)[:, None] - T + np.arange(T)
    positions = np.maximum(positions, -1).astype(np.int32)
    query = _stored(rng.standard_normal((B, T, N, H)), case.dtype)
    keys, key = _operand(case, rng, held, H, case.transposed, poison)
    values, value = _operand(case, rng, held, Hv, False, poison)
    start = np.zeros_like(positions) if case.window is None else positions - case.window + 1
    visible = Visibility(
        *map(jnp.asarray, (np.zeros_like(positions), start, positions)), case.sinks
    )
    table, key, value = _paged(case, rng, held, (key, value), poison)
    rotation = None
    if case.rotated:
        frequencies = 100.0 ** -(np.arange(H // 2) / (H // 2))
        base = rng.integers(0, 40, B).astype(np.int32)
        rotation = KeyRotation(jnp.asarray(frequencies, jnp.float32), jnp.asarray(base))
    arguments = (jnp.asarray(query), key, value, visible, jnp.asarray(held), table, rotation)
    return Inputs(query, keys, values, positions, held, arguments, rotation)


@functools.cache
def compiled(case: Case, implementation: str):
    """The jitted call of a case."""

    def call(query, key, value, visible, held, table, rotation):
        return attention(
            query,
            key,
            value,
            visible,
            held,
            page_table=table,
            softcap=case.softcap,
            key_rotation=rotation,
            first_slots=case.first_slots,
            implementation=implementation,
        )

    return jax.jit(call, compiler_options=COMPILER_OPTIONS)


def run(case: Case, implementation: str, inputs: Inputs) -> tuple[np.ndarray, np.ndarray]:
    """Output [B, T, N, Hv] and logsumexp [B, T, N]."""
    output, lse = compiled(case, implementation)(*inputs.arguments)
    assert output.dtype == lse.dtype == jnp.float32
    return np.asarray(output), np.asarray(lse)


def skip_unsupported(implementation: str, inputs: Inputs) -> None:
    """Skip a call that the kernel refuses before any launch, with the reason."""
    _, key, value, *_ = inputs.arguments
    try:
        resolve_implementation(implementation, key, value)
    except NotImplementedError as error:
        pytest.skip(str(error))


def expected(case: Case, inputs: Inputs) -> tuple[np.ndarray, np.ndarray]:
    """What the dense f64 oracle says."""
    B, T, N, _ = inputs.query.shape
    output, lse = np.zeros((B, T, N, case.Hv or case.H)), np.zeros((B, T, N))
    for b in range(B):
        held, keys = inputs.held[b], inputs.keys[b].astype(np.float64)
        if inputs.rotation is not None:
            offsets = held - int(inputs.rotation.base[b])
            keys = oracle.rotate(
                keys, offsets[:, None], np.asarray(inputs.rotation.inverse_frequencies)
            )
        for t in range(T):
            p = inputs.positions[b, t]
            near = held > p - case.window if case.window else np.full(case.S, True)
            visible = (held >= 0) & (held <= p) & (near | (held < case.sinks))
            output[b, t], lse[b, t] = oracle.attend(
                inputs.query[b, t].astype(np.float64),
                keys,
                inputs.values[b].astype(np.float64),
                visible,
                softcap=case.softcap,
            )
    return output, lse


def _stored(x: np.ndarray, dtype: str) -> np.ndarray:
    return x.astype(np.float32).astype(jnp.dtype(dtype))


def _operand(case: Case, rng, held, width: int, transposed: bool, poison: float):
    """Decoded values [B, S, K, W], and the contiguous operand with all dead slots poisoned."""
    B, S = held.shape
    codec, specs = case.codec, case.codec.parts(width, case.dtype)
    x = _stored(rng.standard_normal((B, K, S, width)), case.dtype)
    rows, decoded = _coder(codec)(x)
    decoded = np.asarray(decoded).swapaxes(1, 2)
    parts = []
    for spec, part in zip(specs, rows, strict=True):
        dead = (held.reshape(B, -1, spec.tokens_per_row) < 0).all(-1)[:, None, :, None]
        filled = np.where(dead, _poison(part.dtype, poison), np.asarray(part))
        flat = filled.reshape(B * K, *filled.shape[2:])
        parts.append(jnp.asarray(flat.swapaxes(1, 2) if transposed else flat))
    operand = Operand(
        parts=tuple(parts),
        tokens_per_row=tuple(spec.tokens_per_row for spec in specs),
        dtypes=tuple(part.dtype.name for part in rows),
        width=width,
        format=codec,
        transposed=transposed,
    )
    return decoded, operand


@functools.cache
def _coder(codec):
    def encode(x: jax.Array):
        rows = codec.encode(x)
        return rows, codec.decode(rows, x.shape[-1])

    return jax.jit(encode, compiler_options=COMPILER_OPTIONS)


def _poison(dtype, value: float):
    """`value` in a float part; the largest code in a part of codes."""
    if jnp.issubdtype(dtype, jnp.floating):
        return np.asarray(value).astype(dtype)
    return np.asarray(0 if value == 0 else jnp.iinfo(dtype).max).astype(dtype)


def _paged(case: Case, rng, held, operands: Sequence[Operand], poison: float):
    """Move contiguous operands into pools; returns the page table and the operands."""
    if not case.page:
        return None, *operands
    B, S = held.shape
    M = S // case.page
    P = B * M + 3
    table = rng.permutation(P)[: B * M].reshape(B, M).astype(np.int32)
    moved = []
    for operand in operands:
        pools = []
        for part, r in zip(operand.parts, operand.tokens_per_row, strict=True):
            W, rows = part.shape[-1], case.page // r
            pool = np.full((P, K, rows, W), _poison(part.dtype, poison), part.dtype)
            pages = np.asarray(part).reshape(B, K, M, rows, W).transpose(0, 2, 1, 3, 4)
            pool[table] = pages
            pools.append(jnp.asarray(pool))
        moved.append(dataclasses.replace(operand, parts=tuple(pools), paged=True))
    dead = (held.reshape(B, M, case.page) < 0).all(-1)
    outside = rng.choice(np.array([-1, P, P + 7, 2**31 - 1], np.int32), (B, M))
    return jnp.asarray(np.where(dead, outside, table)), *moved
