"""What else JAX offers for the same tokens in bf16: each from the arrays of a bf16 store."""

import dataclasses
import functools
import importlib
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from experiments.device.stores import Layout, Store


@dataclasses.dataclass(frozen=True)
class Peer:
    """One function of JAX.

    Attributes:
        name: as the table shows it.
        paged: whether it reads pages.
        decodes_only: whether it takes one query a sequence at most.
        prepare: its own arrays, from a store.
        call: output [B, T, N, H] for a query; the last argument asks for the interpreter.
    """

    name: str
    paged: bool
    decodes_only: bool
    prepare: Callable[[Store, Layout], Any]
    call: Callable[[jax.Array, Any, bool], jax.Array]


def _jax_kernel(module: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return importlib.import_module(f"jax.experimental.pallas.ops.gpu.{module}")


def _heads_first(store: Store, layout: Layout):
    """Keys and values [B, K, S, H], and lengths i32[B]."""
    shape = (layout.B, layout.heads, layout.S, layout.width)
    (k,), (v,) = store.key.parts, store.value.parts
    return k.reshape(shape), v.reshape(shape), store.last[:, -1] + 1


def _tokens_first(store: Store, layout: Layout):
    """Keys and values [B, S, K, H], and a mask bool[B, 1, T, S] where there are many queries."""
    k, v, _ = _heads_first(store, layout)
    mask = None
    if store.last.shape[1] > 1:
        mask = (store.positions[:, None] <= store.last[:, :, None])[:, None]
    return k.swapaxes(1, 2), v.swapaxes(1, 2), mask


def _pools(store: Store, layout: Layout):
    """Pools [K, P, Z, H], the page table and lengths."""
    (k,), (v,) = store.key.parts, store.value.parts
    return k.swapaxes(0, 1), v.swapaxes(0, 1), store.table, store.last[:, -1] + 1


def _gqa(query, arrays, interpret: bool):
    k, v, lengths = arrays
    # It swaps these axes back: nothing moves.
    k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
    gqa = _jax_kernel("decode_attention").gqa
    return gqa(query[:, 0], k, v, kv_seq_len=lengths, interpret=interpret)[:, None]


def _paged(query, arrays, interpret: bool):
    """With blocks of 128 tokens, as `gqa` takes: 8 pages of 64, its default, are too many here."""
    k, v, table, lengths = arrays
    pages = max(1, 128 // k.shape[2])
    scaled = (query[:, 0].astype(jnp.float32) * query.shape[-1] ** -0.5).astype(query.dtype)
    call = _jax_kernel("paged_attention").paged_attention
    output = call(scaled, k, v, table, lengths, pages_per_compute_block=pages, interpret=interpret)
    return output[:, None]


def _dot_product(query, arrays, interpret: bool, *, implementation: Any):
    k, v, mask = arrays
    return jax.nn.dot_product_attention(query, k, v, mask=mask, implementation=implementation)


def _nn(name: str, implementation: str) -> Peer:
    call = functools.partial(_dot_product, implementation=implementation)
    return Peer(name, False, False, _tokens_first, call)


PEERS = (
    Peer("jax-gqa", False, True, _heads_first, _gqa),
    Peer("jax-paged", True, True, _pools, _paged),
    _nn("nn-xla", "xla"),
    _nn("nn-cudnn", "cudnn"),
)
