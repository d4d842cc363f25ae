"""The op: validate, resolve the implementation, call it."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

from pallas_kernels._common.checks import (
    check_query,
    check_slots,
    check_softcap,
    check_visibility,
)
from pallas_kernels._common.implementations import resolve
from pallas_kernels._common.operand import Operand
from pallas_kernels._common.softmax import with_sinks
from pallas_kernels._common.visibility import Visibility
from pallas_kernels.attention import gpu, reference, tpu, xla

IMPLEMENTATIONS = {
    "reference": reference.attention,
    "xla": xla.attention,
    "tpu": tpu.attention,
    "gpu": gpu.attention,
    "tpu_interpreted": functools.partial(tpu.attention, interpret=True),
    "gpu_interpreted": functools.partial(gpu.attention, interpret=True),
}
UNSUPPORTED = {"tpu": tpu.unsupported, "gpu": gpu.unsupported}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KeyRotation:
    """Rotation of stored, unrotated keys when they are read.

    A key at position j turns by (j - base) * inverse_frequencies; only differences of positions
    matter to a score, so `base` keeps the angles small in a long stream.
    """

    inverse_frequencies: jax.Array  # f32[R/2]
    base: jax.Array  # i32[B]


def resolve_implementation(
    name: str = "auto", key: Operand | None = None, value: Operand | None = None
) -> str:
    """Name of the implementation that runs for `name`, over these operands if they are given.

    Raises:
        ValueError: it is not known, or there is no such device here.
        NotImplementedError: it cannot run over these operands, with what it can.

    >>> resolve_implementation("xla")
    'xla'
    """

    def unsupported(name: str) -> str | None:
        check = UNSUPPORTED.get(name.removesuffix("_interpreted"))
        return check(key, value) if check and key is not None and value is not None else None

    return resolve("attention", name, IMPLEMENTATIONS, unsupported)


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
    sink_logits: jax.Array | None = None,  # f32[N]
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
        sink_logits: f32[N], a logit of each head that takes part in the softmax and has no value
            (attention sinks of GPT-OSS, arXiv 2508.10925). Give them to one part only of attention
            that is merged from parts.
        implementation: "auto" or one of `IMPLEMENTATIONS`.

    Returns:
        output f32[B, T, N, Hv] and logsumexp f32[B, T, N].

    Raises:
        ValueError: shapes, dtypes or the implementation do not fit.
        NotImplementedError: a kernel that was asked for by name cannot do this.
    """
    _validate(query, key, value, visibility, key_positions, page_table)
    check_softcap(softcap)
    run = IMPLEMENTATIONS[resolve_implementation(implementation, key, value)]
    if first_slots is not None:
        unit = math.lcm(key.unit, value.unit)
        key_positions = key_positions[:, : -(-first_slots // unit) * unit]
    if scale is None:
        scale = query.shape[-1] ** -0.5
    with jax.named_scope("attention"):
        output, lse = run(
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
        return (output, lse) if sink_logits is None else with_sinks(output, lse, sink_logits)


def _validate(
    query, key: Operand, value: Operand, visibility: Visibility, key_positions, page_table
) -> None:
    check_query("query", query, "[B, T, N, H]")
    B, T, N, H = query.shape
    check_visibility(visibility, B, T)
    if key.paged != value.paged or key.paged != (page_table is not None):
        raise ValueError(f"{key.paged=}, {value.paged=}: both paged with a page table, or neither")
    check_slots(key_positions, page_table, B)
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
