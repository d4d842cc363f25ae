"""Calls of `latent_attention` that `kvjax kernels` compiles."""

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from experiments.kernels.case import (
    Case,
    Stored,
    codec_name,
    operand_of,
    ragged_lengths,
    shape_of,
)
from kvjax import Int, Raw
from pallas_kernels._common.operand import Operand
from pallas_kernels._common.traffic import Traffic, attention_traffic
from pallas_kernels._common.visibility import Visibility
from pallas_kernels.latent_attention.tuning import gpu_tiles, tpu_tiles


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentCase:
    """A call of `latent_attention`: C and R are those of DeepSeek V2 and V3.

    Attributes:
        latents: codec of the latents; rotary keys stay as they are.
        page_size: Z; 0 is contiguous.
    """

    name: str
    reason: str
    latents: Stored = Raw()
    page_size: int = 0
    dtype: str = "bfloat16"
    B: int = 64
    T: int = 1
    N: int = 16
    C: int = 512
    R: int = 64
    S: int = 8192
    limits: dict[str, str] = dataclasses.field(default_factory=dict)

    op = "latent_attention"
    donated = ()

    @property
    def layout(self) -> str:
        """The layout."""
        return f"page {self.page_size}" if self.page_size else "contiguous"

    @property
    def codec(self) -> str:
        """The codec of the latents."""
        return codec_name(self.latents, self.dtype)

    @property
    def decode(self) -> bool:
        """One tile of rows; more heads fetch the latents once for each tile."""
        return self.N <= 16

    def build(self, implementation: str) -> tuple[Callable, tuple]:
        """The implementation as a function of arrays alone."""
        module = importlib.import_module(f"pallas_kernels.latent_attention.{implementation}")
        vector = shape_of((self.B, self.T), jnp.int32)
        table = None
        if self.page_size:
            table = shape_of((self.B, self.S // self.page_size), jnp.int32)
        arguments = (
            *self._queries(),
            *self._operands(),
            Visibility(vector, vector, vector),
            shape_of((self.B, self.S), jnp.int32),
            table,
            shape_of((), jnp.float32),
        )

        def function(latent_query, rope_query, latent, rope_key, visibility, held, table, scale):
            return module.latent_attention(
                latent_query,
                rope_query,
                latent,
                rope_key,
                visibility,
                held,
                page_table=table,
                scale=scale,
                softcap=None,
                key_rotation=None,
            )

        return function, arguments

    def traffic(self, implementation: str) -> Traffic:
        """Count over the blocks of this implementation; the latent is key and value at once."""
        latent, rope_key = self._operands()
        rows = self.T * self.N
        if implementation == "gpu":
            tiles = gpu_tiles(latent, rope_key, self.B, rows, self.S)
            sizes: dict[str, Any] = dict(splits=tiles.splits, padded=False)
        else:
            tiles = tpu_tiles(latent, rope_key, rows, self.S)
            sizes = dict(heads=tiles.heads)
        lengths = ragged_lengths(self.B, self.S)
        slots = np.arange(self.S, dtype=np.int32)
        positions = np.where(slots < lengths[:, None], slots, -1).astype(np.int32)
        last = (lengths[:, None] - self.T + np.arange(self.T)).astype(np.int32)
        zero = np.zeros_like(last)
        first, start, last = map(jnp.asarray, (zero, zero, last))
        visibility = Visibility(first, start, last)
        query = shape_of((self.B, self.T, self.N, self.C + self.R), self.dtype)
        return attention_traffic(
            query,
            rope_key,
            latent,
            visibility,
            jnp.asarray(positions),
            rows=tiles.rows,
            block=tiles.block,
            **sizes,
        )

    def _queries(self) -> tuple[Any, Any]:
        lead = (self.B, self.T, self.N)
        return shape_of((*lead, self.C), self.dtype), shape_of((*lead, self.R), self.dtype)

    def _operands(self) -> tuple[Operand, Operand]:
        sizes = dict(B=self.B, K=1, S=self.S, page_size=self.page_size)
        return (
            operand_of(self.latents, self.C, self.dtype, **sizes),
            operand_of(Raw(), self.R, self.dtype, **sizes),
        )


def latent_cases() -> list[Case]:
    """Layouts, codecs and numbers of heads."""
    case = LatentCase
    return [
        case(name="bf16", reason="heads of one of eight devices"),
        case(name="bf16-page64", page_size=64, reason="the page of FlashMLA"),
        case(name="bf16-n128", N=128, reason="all heads of DeepSeek V3 on one device"),
        case(name="int8", latents=Int(bits=8), reason="half the bytes"),
        case(name="int4-page64", latents=Int(bits=4), page_size=64, reason="packed, in pages"),
        case(name="f32", dtype="float32", reason="products in full precision"),
    ]
