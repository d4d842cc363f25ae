"""The op: validate, resolve the implementation, call it."""

import dataclasses
import math

import jax
import jax.numpy as jnp

from pallas_kernels._common.operand import Operand
from pallas_kernels._common.visibility import Visibility
from pallas_kernels.attention import reference, xla

IMPLEMENTATIONS = {"reference": reference.attention, "xla": xla.attention}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KeyRotation:
    """Rotation of stored, unrotated keys when they are read.

    A key at position j turns by (j - base) * inverse_frequencies; only differences of positions
    matter to a score, so `base` keeps the angles small in a long stream.
    """

    inverse_frequencies: jax.Array  # f32[R/2]
    base: jax.Array  # i32[B]


def resolve_implementation(name: str = "auto") -> str:
    """Name of the implementation that runs for `name`; raises ValueError if it cannot run here.

    >>> resolve_implementation("auto")
    'xla'
    """
    if name == "auto":
        return "xla"
    if name not in IMPLEMENTATIONS:
        known = ", ".join(["auto", *IMPLEMENTATIONS])
        raise ValueError(f"unknown attention implementation {name!r}; known: {known}")
    return name


def attention(
    query: jax.Array,  # [B, T, N, H]
    key: Operand,
    value: Operand,
    visibility: Visibility,
    key_positions: jax.Array,  # i32[B, S]
    *,
    page_table: jax.Array | None = None,  # i32[B, M]
    scale: float | jax.Array | None = None,
    softcap: float | None = None,
    key_rotation: KeyRotation | None = None,
    first_slots: int | None = None,
    implementation: str = "auto",
) -> tuple[jax.Array, jax.Array]:
    """Attend from new queries over stored keys and values.

    softmax over the visible slots s of (scale * q . k_s), soft-capped as c * tanh(x / c) before the
    mask if `softcap` is given, times v. G = N // K query heads share one stored head; nothing is
    repeated. A query that sees nothing gives 0 and -inf.

    Args:
        query: [B, T, N, H], rotated if it has to be.
        key: stored keys, width H.
        value: stored values, width Hv.
        visibility: which positions each query sees.
        key_positions: i32[B, S], the position that each slot holds; -1 is empty.
        page_table: i32[B, M], the page in the pool of each page of a sequence; needed iff the
            operands are paged.
        scale: factor on the scores; None is H ** -0.5. May be traced.
        softcap: cap on the scaled scores; None is off.
        key_rotation: rotate the keys on read.
        first_slots: no slot from this one on is visible, so it need not be read; None is S.
        implementation: "auto", "reference" or "xla".

    Returns:
        output f32[B, T, N, Hv] and logsumexp f32[B, T, N].

    Raises:
        ValueError: shapes, dtypes or the implementation do not fit.
    """
    _validate(query, key, value, visibility, key_positions, page_table)
    if softcap is not None and not softcap > 0:
        raise ValueError(f"{softcap=} must be above 0; None is off")
    run = IMPLEMENTATIONS[resolve_implementation(implementation)]
    if first_slots is not None:
        unit = math.lcm(key.unit, value.unit)
        key_positions = key_positions[:, : -(-first_slots // unit) * unit]
    if scale is None:
        scale = query.shape[-1] ** -0.5
    with jax.named_scope("attention"):
        return run(
            query,
            key,
            value,
            visibility,
            key_positions,
            page_table=page_table,
            scale=jnp.asarray(scale, jnp.float32),
            softcap=softcap,
            key_rotation=key_rotation,
        )


def _validate(
    query, key: Operand, value: Operand, visibility: Visibility, key_positions, page_table
) -> None:
    if query.ndim != 4:
        raise ValueError(f"query must be [B, T, N, H], got {query.shape=}")
    B, T, N, H = query.shape
    for name in ("first", "window_start", "last"):
        array = getattr(visibility, name)
        if array.shape != (B, T) or array.dtype != jnp.int32:
            raise ValueError(f"visibility.{name} must be int32[{B}, {T}], got {array.aval}")
    if key.paged != value.paged or key.paged != (page_table is not None):
        raise ValueError(f"{key.paged=}, {value.paged=}: both paged with a page table, or neither")
    for name, array in (("key_positions", key_positions), ("page_table", page_table)):
        if array is None:
            continue
        if array.dtype != jnp.int32:
            raise ValueError(f"{name} must be int32, got {array.dtype}")
        if array.ndim != 2 or array.shape[0] != B:
            raise ValueError(f"{name} must be [B={B}, ...], got {array.shape}")
    K = key.num_kv_heads(B)
    if N % K or value.num_kv_heads(B) != K:
        raise ValueError(
            f"{N=} query heads need a divisor of KV heads, the same for keys and values; "
            f"got {K} and {value.num_kv_heads(B)}"
        )
    if key.width != H:
        raise ValueError(f"{key.width=} differs from the query's {H=}")
    S = key.num_slots(page_table)
    if value.num_slots(page_table) != S or key_positions.shape[1] != S:
        raise ValueError(
            f"slots differ: keys {S}, values {value.num_slots(page_table)}, "
            f"positions {key_positions.shape[1]}"
        )
