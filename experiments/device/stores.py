"""Random caches as they lie in the memory of a GPU, and how many bytes they take.

Codes are random bits and scales are small positive numbers, so that gigabytes need no encoding.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels._common.operand import AsItIs, Operand
from pallas_kernels._common.visibility import Visibility

SPAN = 3.46  # a uniform variable over this width has variance 1
HUGE = 1e30  # no query reaches it


@dataclasses.dataclass(frozen=True)
class PlainPart:
    """The only part of a store of one float dtype."""

    width: int
    dtype: str
    name: str = "raw"
    tokens_per_row: int = 1


@dataclasses.dataclass(frozen=True)
class Plain:
    """A store of one float dtype, as it is."""

    dtype: str

    def parts(self, width: int, dtype: str) -> tuple[PlainPart, ...]:
        """One part of that dtype."""
        return (PlainPart(width, self.dtype),)


def codecs_of(name: str) -> tuple[Any, Any]:
    """Codecs of keys and of values.

    >>> codecs_of("bf16")[0]
    Plain(dtype='bfloat16')
    """
    if name in ("bf16", "float8_e4m3fn"):
        plain = Plain({"bf16": "bfloat16"}.get(name, name))
        return plain, plain
    from kvjax.cache.codecs.int import Int  # raw stores can be timed where kvjax lacks a package

    token = Int(bits=8 if name == "int8" else 4)
    known = {"int8": token, "int4": token, "kivi4": Int(bits=4, axis="channel", group_size=32)}
    if name not in known:
        raise ValueError(f"unknown codec {name!r}; known: bf16, float8_e4m3fn, {', '.join(known)}")
    return known[name], token


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """A full cache; the letters are those of DESIGN.md.

    Attributes:
        B, S: sequences, and tokens of each.
        page: Z; 0 is contiguous.
        heads: K, stored heads.
        width: H, of keys; C of a latent store.
        value_width: of values, 0 as the keys; R of a latent store's rotary keys.
    """

    codec: str
    B: int
    S: int
    page: int = 0
    heads: int = 8
    width: int = 128
    value_width: int = 0

    @property
    def widths(self) -> tuple[int, int]:
        """Of keys and of values."""
        return self.width, self.value_width or self.width

    @property
    def word(self) -> str:
        """The layout in a word or two."""
        return f"page {self.page}" if self.page else "contiguous"

    @property
    def bytes(self) -> int:
        """Bytes of keys and values, scales included: what a decode step has to read."""
        return self.B * self.S * self.heads * self._bits_per_token // 8

    @property
    def _bits_per_token(self) -> int:
        """Of one stored head."""
        return sum(
            8 * part.width * jnp.dtype(part.dtype).itemsize // part.tokens_per_row
            for codec, width in zip(codecs_of(self.codec), self.widths, strict=True)
            for part in codec.parts(width, "bfloat16")
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Store:
    """A filled cache and what a call needs beside it."""

    key: Operand
    value: Operand
    positions: jax.Array  # i32[B, S]
    last: jax.Array  # i32[B, T], position of each query
    table: jax.Array | None  # i32[B, M]

    def visibility(self, query: jax.Array) -> Visibility:
        """Causal; depends on the query in name only, so that no call can share another's work."""
        moved = (query[:, :, 0, 0] > HUGE).astype(jnp.int32)
        zero = jnp.zeros_like(self.last)
        return Visibility(zero, zero, self.last + moved)


def random_store(layout: Layout, T: int, ragged: bool, seed: jax.Array) -> Store:
    """A random store of `layout` for T queries at the end of each sequence; traceable."""
    key = jax.random.wrap_key_data(jnp.full(4, seed, jnp.uint32), impl="rbg")
    of_key, of_value, of_table = jax.random.split(key, 3)
    key_codec, value_codec = codecs_of(layout.codec)
    B, S = layout.B, layout.S
    lengths = jnp.asarray([max(T, S - 13 * b - 1) if ragged else S for b in range(B)], jnp.int32)
    slots = jnp.arange(S, dtype=jnp.int32)[None]
    table = None
    if layout.page:
        M = S // layout.page
        table = jax.random.permutation(of_table, B * M).reshape(B, M).astype(jnp.int32)
    return Store(
        key=random_operand(layout, key_codec, layout.widths[0], of_key),
        value=random_operand(layout, value_codec, layout.widths[1], of_value),
        positions=jnp.where(slots < lengths[:, None], slots, -1),
        last=lengths[:, None] - T + jnp.arange(T, dtype=jnp.int32)[None],
        table=table,
    )


def random_operand(layout: Layout, codec, width: int, key: jax.Array) -> Operand:
    """Random parts of unit variance once decoded."""
    specs = codec.parts(width, "bfloat16")
    bits = getattr(codec, "bits", 0)
    parts = []
    for i, spec in enumerate(specs):
        r, W = spec.tokens_per_row, spec.width
        shape = (layout.B * layout.heads, layout.S // r, W)
        if layout.page:
            pages = layout.B * layout.S // layout.page
            shape = (pages, layout.heads, layout.page // r, W)
        noise = jax.random.bits(jax.random.fold_in(key, i), shape, jnp.uint8)
        parts.append(_part(noise, spec, bits))
    return Operand(
        parts=tuple(parts),
        tokens_per_row=tuple(spec.tokens_per_row for spec in specs),
        dtypes=tuple(spec.dtype for spec in specs),
        width=width,
        format=codec if bits else AsItIs(),
        paged=bool(layout.page),
    )


def _part(noise: jax.Array, spec, bits: int) -> jax.Array:
    if spec.dtype == "uint8":
        return noise
    uniform = noise.astype(jnp.float32) / 255  # 0 to 1
    if spec.name == "scale":
        return ((0.8 + 0.4 * uniform) * SPAN / (2**bits - 1)).astype(spec.dtype)
    if spec.name == "zero":
        return ((0.8 + 0.4 * uniform) * -SPAN / 2).astype(spec.dtype)
    return ((uniform - 0.5) * SPAN).astype(spec.dtype)


def random_query(shape: tuple[int, ...], seed: jax.Array) -> jax.Array:
    """bf16 of unit variance; traceable."""
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(jnp.bfloat16)


def next_query(query: jax.Array, output: jax.Array) -> jax.Array:
    """The query of the next call of a chain: waits for the output, and is about the same."""
    return (query.astype(jnp.float32) + 1e-6 * output.astype(jnp.float32)).astype(query.dtype)


def num_copies(nbytes: int, l2_bytes: int, most: int) -> int:
    """Caches to rotate through, so that none is still in the L2 when its turn comes again.

    >>> num_copies(10, 60, 32), num_copies(100, 60, 32), num_copies(1, 60, 32)
    (24, 3, 32)
    """
    return min(most, max(1, -(-4 * l2_bytes // nbytes)))


@functools.cache
def bytes_per_token(codec: str, heads: int = 8, width: int = 128) -> int:
    """Bytes of keys and values of one token.

    >>> bytes_per_token("bf16"), bytes_per_token("int4")
    (4096, 1280)
    """
    return Layout(codec=codec, B=1, S=32, heads=heads, width=width).bytes // 32
