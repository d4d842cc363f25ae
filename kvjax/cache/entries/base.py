"""The contract of an entry kind: how queries of attention meet what is stored."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from kvjax.cache.base import Basis
from pallas_kernels._common.operand import Operand
from pallas_kernels._common.visibility import Visibility
from pallas_kernels.attention import KeyRotation


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sight:
    """Which slots the queries see, and how their scores are made.

    Attributes:
        visibility: positions that each query sees.
        key_positions: i32[B, S], position that each slot holds; -1 is empty.
        page_table: i32[B, M] of paged operands.
        scale: factor on scores; None is the kind's own.
        softcap: cap on scaled scores.
        key_rotation: rotation of stored keys on read.
        first_slots: no slot from this one on is visible.
        implementation: which attention implementation runs.
        bases: basis that each field is decoded to, in the order of the entry; None is the model's.
        widths: channels of each field in the model.
    """

    visibility: Visibility
    key_positions: jax.Array
    page_table: jax.Array | None
    scale: float | jax.Array | None
    softcap: float | None
    key_rotation: KeyRotation | None = None
    first_slots: int | None = None
    implementation: str = "auto"
    bases: tuple[Basis | None, ...]
    widths: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class EntryKind:
    """One kind of entry.

    Attributes:
        turned: the field that rotary positions turn.
        rotate: (query, rotary, positions) -> the query turned.
        attend: (query, operands, sight) -> output f32[B, T, N, Hv] and logsumexp f32[B, T, N], over
            stored fields in the order of the entry.
        attend_fresh: the same over tokens of the chunk itself, if that is done in another way; None
            if it is not.
        resolve: (implementation, *operands) -> the name of the one that runs, or raises.
    """

    turned: str
    rotate: Callable[[Any, Any, jax.Array], Any]
    attend: Callable[[Any, list[Operand], Sight], tuple[jax.Array, jax.Array]]
    attend_fresh: Callable[[Any, list[Operand], Sight], tuple[jax.Array, jax.Array]] | None = None
    resolve: Callable[..., str]


def to_basis(basis: Basis | None, query: jax.Array) -> jax.Array:
    """Bring queries [..., W] to the basis of stored keys, in their dtype."""
    return query if basis is None else basis.forward(query).astype(query.dtype)


def from_basis(basis: Basis | None, output: jax.Array, width: int) -> jax.Array:
    """Bring a mix of stored values f32[..., W] back to the model's basis."""
    return output if basis is None else basis.inverse(output, width)
