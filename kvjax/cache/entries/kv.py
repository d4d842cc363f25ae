"""Keys and values of K heads (MHA, GQA and MQA); the query is an array [B, T, N, H]."""

from typing import NamedTuple

import jax

from kvjax.cache.entries.base import EntryKind, Sight, from_basis, to_basis
from pallas_kernels._common.operand import Operand
from pallas_kernels.attention import attention, resolve_implementation


class KV(NamedTuple):
    """Unrotated keys, and values, of T new tokens."""

    k: jax.Array  # [B, T, K, H]
    v: jax.Array  # [B, T, K, Hv]


def _attend(query: jax.Array, operands: list[Operand], sight: Sight):
    key, value = operands
    key_basis, value_basis = sight.bases
    # The scale is that of the model's width, whatever the basis pads it to.
    scale = query.shape[-1] ** -0.5 if sight.scale is None else sight.scale
    output, lse = attention(
        to_basis(key_basis, query),
        key,
        value,
        sight.visibility,
        sight.key_positions,
        page_table=sight.page_table,
        scale=scale,
        softcap=sight.softcap,
        key_rotation=sight.key_rotation,
        first_slots=sight.first_slots,
        implementation=sight.implementation,
    )
    return from_basis(value_basis, output, sight.widths[1]), lse


KIND = EntryKind(
    turned="k",
    rotate=lambda query, rotary, positions: rotary.apply_to_query(query, positions),
    attend=_attend,
    resolve=resolve_implementation,
)
