"""Packing of small codes into bytes: 4 bits two a byte, 2 bits four a byte.

The width is split in equal runs rather than in neighbours: with 4 bits, byte i holds code i in its
low nibble and code i + ceil(H/2) in its high one. Unpacking then lays whole runs side by side (no
interleave), which vectorises on every backend. Odd widths are padded with code 0, and
the padding is cut off again before any arithmetic.
"""

import jax
import jax.numpy as jnp


def packed_width(width: int, bits: int) -> int:
    """Bytes that `width` codes of `bits` bits take.

    >>> packed_width(5, 4), packed_width(5, 2), packed_width(5, 8)
    (3, 2, 5)
    """
    per_byte = 8 // bits
    return -(-width // per_byte)


def pack(codes: jax.Array, bits: int) -> jax.Array:
    """Pack unsigned codes u8[..., H], each below 2**bits, into u8[..., packed_width(H, bits)].

    >>> pack(jnp.array([10, 2], jnp.uint8), 4).tolist() == [0x2A]
    True
    """
    *_, H = codes.shape
    per_byte = 8 // bits
    if per_byte == 1:
        return codes
    run = packed_width(H, bits)
    padding = [(0, 0)] * (codes.ndim - 1) + [(0, run * per_byte - H)]
    padded = jnp.pad(codes, padding)
    packed = padded[..., :run]
    for i in range(1, per_byte):
        packed = packed | (padded[..., i * run : (i + 1) * run] << jnp.uint8(bits * i))
    return packed


def unpack_runs(packed: jax.Array, bits: int) -> list[jax.Array]:
    """Codes of each run, u8[..., packed_width] each; side by side they are the padded width.

    >>> [run.tolist() for run in unpack_runs(jnp.array([0x2A], jnp.uint8), 4)]
    [[10], [2]]
    """
    if bits == 8:
        return [packed]
    mask = jnp.uint8(2**bits - 1)
    return [(packed >> jnp.uint8(shift)) & mask for shift in range(0, 8, bits)]


def unpack(packed: jax.Array, bits: int, width: int) -> jax.Array:
    """Undo `pack`: u8[..., packed_width] to u8[..., width].

    >>> unpack(jnp.array([0x2A], jnp.uint8), 4, 2).tolist()
    [10, 2]
    """
    return jnp.concatenate(unpack_runs(packed, bits), axis=-1)[..., :width]
