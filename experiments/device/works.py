"""What is timed and what is checked: each op as a step of a chain, beside what else could run."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from experiments.device.peers import Peer
from experiments.device.stores import (
    Layout,
    Store,
    codecs_of,
    next_query,
    random_query,
    random_store,
)
from pallas_kernels._common.operand import Operand
from pallas_kernels.append import append
from pallas_kernels.attention import attention

LATENT_SCALE = 192**-0.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """One thing to time.

    Attributes:
        implementation: one of the op's own, or the name of a peer.
        queries: T.
        inputs: of a step, from a seed; traceable.
        carry: of a chain of steps, from a seed; traceable.
        step: one call, from a carry and inputs to the next carry.
        rotate: whether copies of the inputs are rotated past the L2.
        flops: products and sums of a call, 0 where memory bounds it.
    """

    op: str
    implementation: str
    layout: Layout
    queries: int = 1
    inputs: Callable[[jax.Array], Any]
    carry: Callable[[jax.Array], Any]
    step: Callable[[Any, Any], Any]
    rotate: bool = True
    flops: int = 0

    @property
    def label(self) -> str:
        """Op, codec, layout, size and implementation."""
        at = self.layout
        return f"{self.op} {at.codec} {at.word} {at.B}x{at.S} {self.implementation}"


def attend(query: jax.Array, store: Store, implementation: str) -> jax.Array:
    """Output f32[B, T, N, H] of our op over a store."""
    output, _ = attention(
        query,
        store.key,
        store.value,
        store.visibility(query),
        store.positions,
        page_table=store.table,
        implementation=implementation,
    )
    return output


def attention_work(
    layout: Layout, N: int, implementation: str, *, T: int = 1, op: str = "decode"
) -> Work:
    """T queries at the end of each sequence."""

    def step(query, store: Store):
        return next_query(query, attend(query, store, implementation))

    return Work(
        op=op,
        implementation=implementation,
        layout=layout,
        queries=T,
        inputs=functools.partial(random_store, layout, T, False),
        carry=functools.partial(random_query, (layout.B, T, N, layout.width)),
        step=step,
        flops=attention_flops(layout, N, T) if T > 16 else 0,
    )


def attention_flops(layout: Layout, N: int, T: int) -> int:
    """Two products of all visible pairs.

    >>> attention_flops(Layout(codec="bf16", B=1, S=4, width=8), N=2, T=3)
    576
    """
    pairs = sum(range(layout.S - T + 1, layout.S + 1))
    return 4 * layout.B * N * layout.width * pairs


def peer_work(layout: Layout, N: int, peer: Peer, interpret: bool, work: Work) -> Work:
    """The same as `work`, by a peer."""

    def inputs(seed: jax.Array):
        return peer.prepare(work.inputs(seed), layout)

    def step(query, arrays):
        return next_query(query, peer.call(query, arrays, interpret))

    return dataclasses.replace(work, implementation=peer.name, inputs=inputs, step=step)


def append_work(layout: Layout, N: int, implementation: str, *, appends: bool) -> Work:
    """A step of attention over a store that takes one new token first, or does not."""

    def carry(seed: jax.Array):
        store = random_store(layout, 1, False, seed)
        return random_query((layout.B, 1, N, layout.width), seed), store

    def step(carry, _):
        query, store = carry
        if appends:
            store = _append(query, store, layout, implementation)
        return next_query(query, attend(query, store, implementation)), store

    return Work(
        op="step with append" if appends else "step without append",
        implementation=implementation,
        layout=layout,
        inputs=lambda seed: (),
        carry=carry,
        step=step,
        rotate=False,
    )


def _append(query: jax.Array, store: Store, layout: Layout, implementation: str) -> Store:
    """Encode a new token, which is made of the query, and put it into the last slot."""
    row = query[:, :, : layout.heads].swapaxes(1, 2)  # [B, K, 1, H]

    def added(operand: Operand, codec) -> Operand:
        encode = getattr(codec, "encode", lambda x: (x,))
        parts = (
            append(
                part,
                new.astype(part.dtype),
                store.last[:, 0],
                page_table=store.table,
                implementation=implementation,
            )
            for part, new in zip(operand.parts, encode(row), strict=True)
        )
        return dataclasses.replace(operand, parts=tuple(parts))

    key, value = codecs_of(layout.codec)
    return dataclasses.replace(store, key=added(store.key, key), value=added(store.value, value))


def latent_work(layout: Layout, N: int, implementation: str) -> Work:
    """Absorbed latent attention: keys are C wide, the rotary ones R."""

    def step(queries, store: Store):
        latent, rope = queries
        return next_query(latent, attend_latent(queries, store, implementation)), rope

    return Work(
        op="latent decode",
        implementation=implementation,
        layout=layout,
        inputs=functools.partial(random_store, layout, 1, False),
        carry=functools.partial(_latent_queries, layout, N),
        step=step,
    )


def _latent_queries(layout: Layout, N: int, seed: jax.Array) -> tuple[jax.Array, jax.Array]:
    latent, rope = (random_query((layout.B, 1, N, width), seed) for width in layout.widths)
    return latent, rope


def attend_latent(queries, store: Store, implementation: str) -> jax.Array:
    """Output f32[B, T, N, C] of our op over a latent store."""
    from pallas_kernels.latent_attention import latent_attention

    latent, rope = queries
    output, _ = latent_attention(
        latent,
        rope,
        store.key,
        store.value,
        store.visibility(latent),
        store.positions,
        page_table=store.table,
        scale=LATENT_SCALE,
        implementation=implementation,
    )
    return output


@dataclasses.dataclass(frozen=True)
class Check:
    """A small call of which two implementations must say the same.

    Attributes:
        label: what is compared.
        difference: largest absolute one, from a seed; traceable.
        most: how large it may be.
    """

    label: str
    difference: Callable[[jax.Array], jax.Array]
    most: float


def attention_check(
    layout: Layout, N: int, T: int, implementation: str, peer: Peer | None = None
) -> Check:
    """Ours against "xla" in full precision over ragged lengths; a peer over full ones."""

    def difference(seed: jax.Array) -> jax.Array:
        store = random_store(layout, T, peer is None, seed)
        query = random_query((layout.B, T, N, layout.width), seed)
        with jax.default_matmul_precision("highest"):
            wanted = attend(query, store, "xla")
        if peer is None:
            return _largest(attend(query, store, implementation), wanted)
        interpret = implementation.endswith("interpreted")
        return _largest(peer.call(query, peer.prepare(store, layout), interpret), wanted)

    name = peer.name if peer else implementation
    label = f"{name} attention, {layout.codec}, {layout.word}, T={T}"
    # Peers round outputs, and some of them weights, to bf16.
    return Check(label, difference, 3e-2 if peer else 2e-3)


def append_check(layout: Layout, implementation: str) -> Check:
    """Every byte of all parts after an append, against "xla"."""

    def difference(seed: jax.Array) -> jax.Array:
        store = random_store(layout, 1, True, seed)
        query = random_query((layout.B, 1, layout.heads, layout.width), seed)
        ours, wanted = (_append(query, store, layout, x) for x in (implementation, "xla"))
        before = [*store.key.parts, *store.value.parts]
        after = [*ours.key.parts, *ours.value.parts]
        expected = [*wanted.key.parts, *wanted.value.parts]
        pairs = zip(after, expected, strict=True)
        wrong = sum(jnp.sum(_bits(a) != _bits(b)) for a, b in pairs)
        moved = sum(jnp.sum(_bits(a) != _bits(b)) for a, b in zip(after, before, strict=True))
        return jnp.where(moved == 0, jnp.inf, jnp.asarray(wrong).astype(jnp.float32))

    return Check(f"{implementation} append, {layout.codec}, {layout.word}", difference, 0.0)


def latent_check(layout: Layout, N: int, implementation: str) -> Check:
    """Ours against "xla" in full precision."""

    def difference(seed: jax.Array) -> jax.Array:
        store = random_store(layout, 1, True, seed)
        queries = _latent_queries(layout, N, seed)
        with jax.default_matmul_precision("highest"):
            wanted = attend_latent(queries, store, "xla")
        return _largest(attend_latent(queries, store, implementation), wanted)

    label = f"{implementation} latent attention, {layout.codec}, {layout.word}"
    return Check(label, difference, 2e-3)


def _largest(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.max(jnp.abs(a.astype(jnp.float32) - b.astype(jnp.float32)))


def _bits(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
