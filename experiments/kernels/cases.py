"""The kernel calls that `kvjax kernels` compiles: each one is here for a reason.

To add an op: a class that meets `Case` and a function that lists its calls, named in `CASES`.
"""

import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from experiments.kernels.case import (
    Case,
    Plain,
    Stored,
    codec_name,
    operand_of,
    ragged_lengths,
    shape_of,
)
from experiments.kernels.latent_cases import latent_cases
from kvjax import Int, Raw
from kvjax.errors import ConfigError
from pallas_kernels._common.operand import Operand
from pallas_kernels._common.traffic import Traffic, attention_traffic
from pallas_kernels._common.visibility import Visibility
from pallas_kernels.append.tuning import tpu_tiles as append_tiles
from pallas_kernels.attention import KeyRotation
from pallas_kernels.attention.tuning import gpu_tiles, tpu_tiles


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionCase:
    """A call of `attention`; the letters are those of DESIGN.md.

    Attributes:
        keys, values: codec of each, or a dtype that is stored as it is; values are like keys if
            None.
        page_size: Z; 0 is contiguous.
        Hv: width of the values; H if 0.
        window: positions that a query sees, with `sinks` first ones beside; 0 is all.
        rotated: keys are rotated on read.
    """

    name: str
    reason: str
    keys: Stored = Raw()
    values: Stored | None = None
    page_size: int = 0
    dtype: str = "bfloat16"
    B: int = 4
    T: int = 1
    N: int = 32
    K: int = 8
    H: int = 128
    Hv: int = 0
    S: int = 8192
    window: int = 0
    sinks: int = 0
    softcap: float | None = None
    rotated: bool = False
    limits: dict[str, str] = dataclasses.field(default_factory=dict)

    op = "attention"
    donated = ()

    @property
    def layout(self) -> str:
        """The layout."""
        return f"page {self.page_size}" if self.page_size else "contiguous"

    @property
    def codec(self) -> str:
        """The codec of the keys, and of the values if it is another."""
        names = [codec_name(codec, self.dtype) for codec in (self.keys, self.values or self.keys)]
        return " / ".join(dict.fromkeys(names))

    @property
    def decode(self) -> bool:
        """Few queries over the whole context: bound by memory. The issue's bar is for S >= 8k."""
        return self.T <= 16 and not self.window

    def build(self, implementation: str) -> tuple[Callable, tuple]:
        """The implementation as a function of arrays alone."""
        module = importlib.import_module(f"pallas_kernels.attention.{implementation}")
        vector = shape_of((self.B, self.T), jnp.int32)
        rotation = None
        if self.rotated:
            frequencies = shape_of((self.H // 2,), jnp.float32)
            rotation = KeyRotation(frequencies, shape_of((self.B,), jnp.int32))
        table = None
        if self.page_size:
            table = shape_of((self.B, self.S // self.page_size), jnp.int32)
        key, value = self._operands()
        arguments = (
            self._query(),
            key,
            value,
            Visibility(vector, vector, vector, sinks=self.sinks),
            shape_of((self.B, self.S), jnp.int32),
            table,
            shape_of((), jnp.float32),
            rotation,
        )
        softcap = self.softcap

        def function(query, key, value, visibility, key_positions, table, scale, rotation):
            return module.attention(
                query,
                key,
                value,
                visibility,
                key_positions,
                page_table=table,
                scale=scale,
                softcap=softcap,
                key_rotation=rotation,
            )

        return function, arguments

    def traffic(self, implementation: str) -> Traffic:
        """Count over the blocks of this implementation."""
        key, value = self._operands()
        rows = self.T * self.N // self.K
        if implementation == "gpu":
            wide = self.dtype == "float32"
            tiles = gpu_tiles(
                key, value, self.B * self.K, rows, self.S, wide=wide, rotated=self.rotated
            )
            sizes: dict[str, Any] = dict(
                rows=tiles.rows, block=tiles.block, splits=tiles.splits, padded=False
            )
        else:
            tiles = tpu_tiles(key, value, self.K, rows, self.S, self.S)
            sizes = dict(rows=tiles.rows, block=tiles.block, heads=tiles.heads)
        lengths = ragged_lengths(self.B, self.S)
        slots = np.arange(self.S, dtype=np.int32)
        positions = np.where(slots < lengths[:, None], slots, -1).astype(np.int32)
        last = (lengths[:, None] - self.T + np.arange(self.T)).astype(np.int32)
        start = np.maximum(last - self.window + 1, 0) if self.window else np.zeros_like(last)
        zero = np.zeros_like(last)
        visibility = Visibility(*map(jnp.asarray, (zero, start, last)), sinks=self.sinks)
        return attention_traffic(
            self._query(), key, value, visibility, jnp.asarray(positions), **sizes
        )

    def _query(self) -> Any:
        return shape_of((self.B, self.T, self.N, self.H), self.dtype)

    def _operands(self) -> tuple[Operand, Operand]:
        values = self.values or self.keys
        sizes = dict(B=self.B, K=self.K, S=self.S, page_size=self.page_size)
        return (
            operand_of(self.keys, self.H, self.dtype, **sizes),
            operand_of(values, self.Hv or self.H, self.dtype, **sizes),
        )


def attention_cases() -> list[Case]:
    """Layouts, then codecs, then head shapes, then what changes the body of the kernel."""
    case = AttentionCase
    channel = functools.partial(Int, axis="channel", group_size=32)
    e4m3, e5m2 = Plain("float8_e4m3fn"), Plain("float8_e5m2")
    ampere = {"sm_80": "no conversion of float8_e4m3fn below sm_89"}
    llama = functools.partial(AttentionCase, N=64, K=8)
    smollm = functools.partial(AttentionCase, N=9, K=3, H=64)
    return [
        case(name="bf16", reason="the base: Llama 3 8B"),
        case(name="bf16-page16", page_size=16, reason="the page of most servers"),
        case(name="bf16-page64", page_size=64, reason="a page is a GPU block"),
        case(name="bf16-page128", page_size=128, reason="a page is a TPU tile of lanes"),
        case(name="f32", dtype="float32", reason="products in full precision"),
        case(name="f16", dtype="float16", reason="a dtype that Mosaic lacks"),
        case(name="int8", keys=Int(bits=8), reason="half the bytes"),
        case(name="int8-page16", keys=Int(bits=8), page_size=16, reason="half an int8 tile"),
        case(name="int4", keys=Int(bits=4), reason="two runs of channels in a byte"),
        case(name="int4-page64", keys=Int(bits=4), page_size=64, reason="packed codes in pages"),
        case(name="int2", keys=Int(bits=2), reason="four runs of channels in a byte"),
        case(name="kivi4-page64", keys=channel(bits=4), values=Int(bits=4), page_size=64,
             reason="scales that 32 tokens share, in pages"),
        case(name="kivi2", keys=channel(bits=2), values=Int(bits=2), reason="KIVI's own setting"),
        case(name="e4m3", keys=e4m3, limits=ampere, reason="float8 with more mantissa"),
        case(name="e5m2-page64", keys=e5m2, page_size=64, reason="float8 with more exponent"),
        smollm(name="h64-g3", reason="SmolLM2 135M; G = 3"),
        smollm(name="h64-g3-int4", keys=Int(bits=4), reason="rows of 32 bytes"),
        case(name="h80-g1", N=32, K=32, H=80, reason="Phi-2; padded to 128 columns"),
        case(name="h96-g1", N=32, K=32, H=96, reason="Phi-3 mini; G = 1"),
        case(name="h192-v128", N=16, K=16, H=192, Hv=128, reason="unabsorbed latent attention"),
        case(name="h256-softcap", N=16, K=8, H=256, softcap=50.0, reason="Gemma 2 9B"),
        case(name="h128-g7", N=28, K=4, reason="Qwen 2.5 7B; G = 7"),
        llama(name="h128-g8-page64", page_size=64, reason="Llama 3 70B; G = 8"),
        case(name="verify16-page64", B=16, T=16, page_size=64, reason="speculative verification"),
        case(name="verify16-int4", B=16, T=16, keys=Int(bits=4), reason="verification on codes"),
        case(name="prefill512", T=512, reason="a chunk of a prompt"),
        case(name="prefill512-int8", T=512, keys=Int(bits=8), reason="a chunk on codes"),
        case(name="window1k-sinks4", window=1024, sinks=4, reason="StreamingLLM: unseen blocks"),
        case(name="rotated", rotated=True, reason="keys are turned when read"),
        case(name="rotated-int4", rotated=True, keys=Int(bits=4), reason="pairs across two runs"),
    ]  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class AppendCase:
    """A call of `append`: one part of a store takes n new rows of each sequence.

    Attributes:
        dtype, W: of the part.
        n: new rows.
        page_size: Z; 0 is contiguous.
        transposed: rows are the last axis.
    """

    name: str
    reason: str
    dtype: str = "bfloat16"
    n: int = 1
    page_size: int = 0
    transposed: bool = False
    B: int = 4
    K: int = 8
    W: int = 128
    S: int = 8192
    limits: dict[str, str] = dataclasses.field(default_factory=dict)

    op = "append"
    decode = False
    donated = (0,)

    @property
    def layout(self) -> str:
        """The layout."""
        if self.page_size:
            return f"page {self.page_size}"
        return "contiguous, transposed" if self.transposed else "contiguous"

    @property
    def codec(self) -> str:
        """The dtype of the part."""
        return self.dtype

    def build(self, implementation: str) -> tuple[Callable, tuple]:
        """The implementation as a function of arrays alone."""
        module = importlib.import_module(f"pallas_kernels.append.{implementation}")
        B, K, W, S = self.B, self.K, self.W, self.S
        buffer, table = (B * K, W, S) if self.transposed else (B * K, S, W), None
        if self.page_size:
            buffer = (B * S // self.page_size, K, self.page_size, W)
            table = shape_of((B, S // self.page_size), jnp.int32)
        arguments = (
            shape_of(buffer, self.dtype),
            shape_of((B, K, self.n, W), self.dtype),
            shape_of((B,), jnp.int32),
            table,
        )
        transposed = self.transposed

        def function(buffer, rows, start, table):
            return module.append(buffer, rows, start, page_table=table, transposed=transposed)

        return function, arguments

    def traffic(self, implementation: str) -> Traffic:
        """New rows, read and written once: on a GPU as they are, on a TPU by whole blocks."""
        row = self.K * self.W * np.dtype(self.dtype).itemsize
        live = 2 * self.B * self.n * row
        if implementation == "gpu":
            return Traffic(parts={"rows": live}, live=live)
        held = self.page_size or self.S
        tiles = append_tiles(
            self.n,
            self.K,
            self.W,
            held,
            np.dtype(self.dtype).itemsize,
            paged=bool(self.page_size),
            transposed=self.transposed,
        )
        last = ragged_lengths(self.B, self.S) - 1
        blocks = int((last // tiles.rows - (last - self.n + 1) // tiles.rows + 1).sum())
        return Traffic(
            parts={"old, new and merged blocks": 3 * blocks * tiles.rows * row}, live=live
        )


def append_cases() -> list[Case]:
    """What layouts and parts differ in."""
    case = AppendCase
    return [
        case(name="bf16", reason="a decode step of the base"),
        case(name="bf16-page16", page_size=16, reason="a step into small pages"),
        case(name="f32-transposed", dtype="float32", transposed=True, reason="keys as columns"),
        case(name="codes8-page16", dtype="uint8", page_size=16, reason="int8 codes; half a tile"),
        case(name="codes4-h64", dtype="uint8", W=32, reason="int4 codes; rows of 32 bytes"),
        case(name="scales", dtype="float16", W=4, reason="scales of int codes; rows of 8 bytes"),
        case(name="e4m3-page64", dtype="float8_e4m3fn", page_size=64, reason="float8"),
        case(name="prefill512-page64", n=512, page_size=64, reason="a chunk of a prompt"),
    ]


CASES: dict[str, Case] = {
    f"{case.op}/{case.name}": case
    for case in (*attention_cases(), *latent_cases(), *append_cases())
}


def select_cases(only: str) -> dict[str, Case]:
    """Cases whose op/name contains `only`.

    >>> list(select_cases("attention/int2"))
    ['attention/int2']
    """
    found = {name: case for name, case in CASES.items() if only in name}
    if not found:
        raise ConfigError(f"no kernel case contains {only!r}; known: {', '.join(CASES)}")
    return found
