"""The op: validate, resolve the implementation, call it."""

import functools

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
from pallas_kernels.attention import KeyRotation
from pallas_kernels.latent_attention import gpu, reference, tpu, xla

IMPLEMENTATIONS = {
    "reference": reference.latent_attention,
    "xla": xla.latent_attention,
    "tpu": tpu.latent_attention,
    "gpu": gpu.latent_attention,
    "tpu_interpreted": functools.partial(tpu.latent_attention, interpret=True),
    "gpu_interpreted": functools.partial(gpu.latent_attention, interpret=True),
}
UNSUPPORTED = {"tpu": tpu.unsupported, "gpu": gpu.unsupported}


def resolve_implementation(
    name: str = "auto", latent: Operand | None = None, rope_key: Operand | None = None
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
        return check(latent, rope_key) if check and latent and rope_key else None

    return resolve("latent_attention", name, IMPLEMENTATIONS, unsupported)


def latent_attention(
    query_latent: jax.Array,  # [B, T, N, C]
    query_rope: jax.Array,  # [B, T, N, R]
    latent: Operand,
    rope_key: Operand,
    visibility: Visibility,
    key_positions: jax.Array,  # i32[B, S]
    *,
    scale: float | jax.Array,
    page_table: jax.Array | None = None,  # i32[B, M]
    softcap: float | None = None,
    key_rotation: KeyRotation | None = None,
    sink_logits: jax.Array | None = None,  # f32[N]
    implementation: str = "auto",
) -> tuple[jax.Array, jax.Array]:
    """Attend from new queries over stored latents: the absorbed form of MLA (arXiv 2405.04434).

    A token stores one latent c_s and one rotary key r_s for all heads. Softmax over the visible
    slots s of scale * (q_latent . c_s + q_rope . r_s), soft-capped as x -> c * tanh(x / c) before
    the mask if `softcap` is given, times c_s: the values are the latents themselves. A query that
    sees nothing gives 0 and -inf.

    Args:
        query_latent: [B, T, N, C], queries times the up-projection of the keys.
        query_rope: [B, T, N, R] of the same dtype, rotated if it has to be.
        latent: stored latents, one head of width C.
        rope_key: stored rotary keys, one head of width R; encoded in a way of its own.
        visibility: which positions each query sees.
        key_positions: i32[B, S], the position that each slot holds; -1 is empty.
        scale: factor on the scores, (nope + rope) ** -0.5 of the heads before they were absorbed,
            which these shapes do not tell. May be traced.
        page_table: i32[B, M], the page in the pools of each page of a sequence, the same for both
            operands; needed iff they are paged.
        softcap: cap on the scaled scores; None is off.
        key_rotation: rotate the rotary keys on read.
        sink_logits: f32[N], see `attention`.
        implementation: "auto" or one of `IMPLEMENTATIONS`.

    Returns:
        output f32[B, T, N, C], to be multiplied by the up-projection of the values, and logsumexp
        f32[B, T, N].

    Raises:
        ValueError: shapes, dtypes or the implementation do not fit.
        NotImplementedError: a kernel that was asked for by name cannot do this.

    >>> latents, keys = Operand.raw(jnp.ones((1, 3, 4))), Operand.raw(jnp.ones((1, 3, 2)))
    >>> all_three = Visibility(*(jnp.full((1, 1), p, jnp.int32) for p in (0, 0, 2)))
    >>> queries = jnp.zeros((1, 1, 5, 4)), jnp.zeros((1, 1, 5, 2))
    >>> positions = jnp.arange(3, dtype=jnp.int32)[None]
    >>> latent_attention(*queries, latents, keys, all_three, positions, scale=0.5)[0].shape
    (1, 1, 5, 4)
    """
    _validate(query_latent, query_rope, latent, rope_key, visibility, key_positions, page_table)
    check_softcap(softcap)
    run = IMPLEMENTATIONS[resolve_implementation(implementation, latent, rope_key)]
    with jax.named_scope("latent_attention"):
        output, lse = run(
            query_latent,
            query_rope,
            latent,
            rope_key,
            visibility,
            key_positions,
            page_table=page_table,
            scale=jnp.asarray(scale, jnp.float32),
            softcap=softcap,
            key_rotation=key_rotation,
        )
        return (output, lse) if sink_logits is None else with_sinks(output, lse, sink_logits)


def _validate(
    query_latent,
    query_rope,
    latent: Operand,
    rope_key: Operand,
    visibility: Visibility,
    key_positions,
    page_table,
) -> None:
    check_query("query_latent", query_latent, "[B, T, N, C]")
    check_query("query_rope", query_rope, "[B, T, N, R]")
    B, T, _, C = query_latent.shape
    R = query_rope.shape[-1]
    if query_latent.shape[:3] != query_rope.shape[:3] or query_latent.dtype != query_rope.dtype:
        raise ValueError(
            f"query_latent and query_rope must have the same B, T, N and dtype, got "
            f"{query_latent.aval} and {query_rope.aval}"
        )
    check_visibility(visibility, B, T)
    if latent.paged != rope_key.paged or latent.paged != (page_table is not None):
        raise ValueError(
            f"{latent.paged=}, {rope_key.paged=}: both paged with a page table, or neither"
        )
    check_slots(key_positions, page_table, B)
    for name, operand, width in (("latent", latent, C), ("rope_key", rope_key, R)):
        if operand.transposed:
            raise ValueError(f"{name}.transposed: rows of a token lie together here, [B, S, W]")
        if operand.width != width:
            raise ValueError(f"{name}.width={operand.width} differs from the query's {width}")
        shape = operand.parts[0].shape
        if shape[1 if operand.paged else 0] != (1 if operand.paged else B):
            raise ValueError(
                f"{name} must be stored once for all heads, [B={B}, S, W] or [P, 1, Z, W]; "
                f"got {shape}"
            )
    if latent.paged and latent.page_size != rope_key.page_size:
        raise ValueError(f"page sizes differ: {latent.page_size=}, {rope_key.page_size=}")
    if latent.paged and latent.parts[0].shape[0] != rope_key.parts[0].shape[0]:
        raise ValueError(
            f"pools differ: {latent.parts[0].shape[0]} and {rope_key.parts[0].shape[0]} pages"
        )
    S = latent.num_slots(page_table)
    if rope_key.num_slots(page_table) != S or key_positions.shape[1] != S:
        raise ValueError(
            f"slots differ: latents {S}, rotary keys {rope_key.num_slots(page_table)}, "
            f"positions {key_positions.shape[1]}"
        )
