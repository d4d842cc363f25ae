"""One latent and one rotary key for all heads (MLA, arXiv 2405.04434).

With W_k and W_v a head's up-projections, its key of a token is [k_rope, W_k c] and its value W_v c.
Expanded attention forms them. Absorbed attention uses q . W_k c = (W_k^T q) . c and moves W_v
behind the mix, so that latents are keys and values and nothing is formed per head and token.
Stored tokens are attended absorbed; tokens of the chunk at hand expanded, which is a third of the
work there (DeepSeek-V3: 320 against 1,088 products a pair of query and key).
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kvjax.cache.entries.base import EntryKind, Sight, from_basis, to_basis
from pallas_kernels._common.operand import Operand
from pallas_kernels._common.rotation import angles_of, rotate
from pallas_kernels.attention import attention
from pallas_kernels.latent_attention import latent_attention, resolve_implementation


class Latent(NamedTuple):
    """Latents, and unrotated rotary keys, of T new tokens."""

    c: jax.Array  # [B, T, 1, C]
    k_rope: jax.Array  # [B, T, 1, R]


class LatentQuery(NamedTuple):
    """Queries of T new tokens, and the up-projections that they are absorbed with."""

    nope: jax.Array  # [B, T, N, Hn]
    rope: jax.Array  # [B, T, N, R]
    key_up: jax.Array  # [N, Hn, C]
    value_up: jax.Array  # [N, Hv, C]


def expand(query: LatentQuery, c: jax.Array, k_rope: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Form keys and values of all heads.

    Args:
        query: whose up-projections are used.
        c: [B, S, 1, C].
        k_rope: [B, S, 1, R].

    Returns:
        keys [B, S, N, R + Hn], rotary channels first, and values [B, S, N, Hv], in c's dtype.
    """
    B, S, _, R = k_rope.shape
    N, _, _ = query.key_up.shape
    key = _product("bsc,nhc->bsnh", c[:, :, 0], query.key_up).astype(c.dtype)
    value = _product("bsc,nhc->bsnh", c[:, :, 0], query.value_up).astype(c.dtype)
    return jnp.concatenate([jnp.broadcast_to(k_rope, (B, S, N, R)), key], axis=-1), value


def _product(equation: str, x: jax.Array, weights: jax.Array) -> jax.Array:
    return jnp.einsum(equation, x, weights, preferred_element_type=jnp.float32)


def _scale(query: LatentQuery, sight: Sight):
    """Factor on scores: of the heads before they were absorbed, unless it is given."""
    width = query.nope.shape[-1] + query.rope.shape[-1]
    return 1 / math.sqrt(width) if sight.scale is None else sight.scale


def _rotate(query: LatentQuery, rotary, positions: jax.Array) -> LatentQuery:
    return query._replace(rope=rotary.apply_to_query(query.rope, positions))


def _attend(query: LatentQuery, operands: list[Operand], sight: Sight):
    """Absorbed."""
    latent, rope_key = operands
    latent_basis, rope_basis = sight.bases
    absorbed = _product("btnh,nhc->btnc", query.nope, query.key_up).astype(query.nope.dtype)
    output, lse = latent_attention(
        to_basis(latent_basis, absorbed),
        to_basis(rope_basis, query.rope),
        latent,
        rope_key,
        sight.visibility,
        sight.key_positions,
        scale=_scale(query, sight),
        page_table=sight.page_table,
        softcap=sight.softcap,
        key_rotation=sight.key_rotation,
        implementation=sight.implementation,
    )
    output = from_basis(latent_basis, output, sight.widths[0])
    return _product("btnc,nhc->btnh", output, query.value_up.astype(jnp.float32)), lse


def _attend_fresh(query: LatentQuery, operands: list[Operand], sight: Sight):
    """Expanded, over raw or encoded tokens that lie together [B, S, W]."""
    dtype = query.nope.dtype
    S = sight.key_positions.shape[1]
    c, k_rope = (
        from_basis(basis, operand.load(0, S, None), width).astype(dtype)
        for operand, basis, width in zip(operands, sight.bases, sight.widths, strict=True)
    )
    if sight.key_rotation is not None:
        turns = sight.key_positions - sight.key_rotation.base[:, None]
        k_rope = rotate(k_rope, angles_of(turns, sight.key_rotation.inverse_frequencies))
    # Slots without a token may hold anything: it must not come through the product.
    filled = (sight.key_positions >= 0)[..., None, None]
    c, k_rope = (jnp.where(filled, x[:, :, None], 0) for x in (c, k_rope))
    key, value = expand(query, c, k_rope)
    B, S, N, H = key.shape
    return attention(
        jnp.concatenate([query.rope, query.nope], axis=-1),
        Operand.raw(key.swapaxes(1, 2).reshape(B * N, S, H)),
        Operand.raw(value.swapaxes(1, 2).reshape(B * N, S, -1)),
        sight.visibility,
        sight.key_positions,
        scale=_scale(query, sight),
        softcap=sight.softcap,
    )


KIND = EntryKind(
    turned="k_rope",
    rotate=_rotate,
    attend=_attend,
    attend_fresh=_attend_fresh,
    resolve=resolve_implementation,
)
