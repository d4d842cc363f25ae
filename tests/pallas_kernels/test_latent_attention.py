"""The latent attention op: its reference against a dense f64 oracle, the others against it.

One suite body: `CASES` holds what differs. What must not be read is poisoned, slots lie in any
order, pages anywhere in a pool with foreign pages between them, and table entries of dead pages
point outside the pool.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache.codecs import Int, Raw
from kvjax.testing.conformance import COMPILER_OPTIONS
from pallas_kernels._common import online
from pallas_kernels._common.operand import Operand
from pallas_kernels._common.visibility import Visibility, causal
from pallas_kernels._common.words import to_words
from pallas_kernels.attention import KeyRotation, attention
from pallas_kernels.latent_attention import (
    IMPLEMENTATIONS,
    latent_attention,
    resolve_implementation,
)
from tests.pallas_kernels.implementations import runnable
from tests.tolerances import ATTENTION, LOGSUMEXP

SCALE = 0.125  # of the heads before absorption: no shape of a call tells it
LONG = 1088
assert LONG > 2 * online.BLOCK and LONG % online.BLOCK

INT8, INT4, CHANNEL = Int(bits=8), Int(bits=4), Int(bits=2, axis="channel", group_size=8)
FINE = Int(bits=8, group_size=8)  # more groups than the kernels multiply one by one


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One compiled call.

    Attributes:
        page: Z; 0 is contiguous.
        latent, rope: codecs; the rotary keys are encoded as the latents if None.
        rotated: rotary keys are rotated when they are read, from a random base.
        logits: attention sinks of each head.
    """

    T: int = 1
    N: int = 3
    C: int = 80
    R: int = 16
    S: int = 48
    page: int = 0
    latent: Any = Raw()
    rope: Any = None
    dtype: str = "float32"
    window: int | None = None
    sinks: int = 0
    softcap: float | None = None
    rotated: bool = False
    logits: bool = False

    def __str__(self) -> str:
        """Readable in a log, and after `-k`."""
        codecs = [self.latent, *([self.rope] if self.rope else [])]
        words = [f"T{self.T}", f"N{self.N}", f"C{self.C}", f"R{self.R}", f"S{self.S}"]
        words += [f"page{self.page}" if self.page else "rows"]
        for name in ("window", "sinks", "softcap"):
            words += [f"{name}{getattr(self, name):g}"] if getattr(self, name) else []
        words += [name for name in ("rotated", "logits") if getattr(self, name)]
        for c in codecs:
            bits = getattr(c, "bits", None)
            words += [f"int{bits}-{c.axis}{c.group_size}" if bits else "raw"]
        return "-".join([*words, self.dtype])

    @property
    def rounds(self) -> list[list[int]]:
        """Lengths around every border; then short ones only."""
        Z = self.page or 16
        borders = [min(n, self.S) for n in (0, 1, Z - 1, Z, Z + 1, 40, self.S)]
        return [borders, [min(n, 9) for n in borders]]


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Arguments of one call, and the decoded values behind them."""

    latents: np.ndarray  # [B, S, C]
    keys: np.ndarray  # [B, S, R]
    positions: np.ndarray  # i32[B, T]
    held: np.ndarray  # i32[B, S]
    arguments: tuple[Any, ...]  # of `latent_attention`
    options: dict[str, Any]


def build(case: Case, lengths: Sequence[int], poison: float = np.nan) -> Inputs:
    """Random inputs of unit variance for sequences of `lengths`, the slots of each shuffled."""
    rng = np.random.default_rng(0)
    B, T, S = len(lengths), case.T, case.S
    held = np.where(np.arange(S) < np.array(lengths)[:, None], np.arange(S), -1).astype(np.int32)
    held = rng.permuted(held, axis=1) if not case.page else _permuted_pages(rng, held, case.page)
    positions = np.maximum(np.array(lengths)[:, None] - T + np.arange(T), -1).astype(np.int32)
    queries = [
        jnp.asarray(rng.standard_normal((B, T, case.N, width)), case.dtype)
        for width in (case.C, case.R)
    ]
    latents, latent = _operand(case.latent, rng, held, case.C, case.dtype, poison)
    keys, rope_key = _operand(case.rope or case.latent, rng, held, case.R, case.dtype, poison)
    table = None
    if case.page:
        table, latent, rope_key = _paged(rng, held, (latent, rope_key), case.page, poison)
    start = np.zeros_like(positions) if case.window is None else positions - case.window + 1
    first, start, last = map(jnp.asarray, (np.zeros_like(positions), start, positions))
    visible = Visibility(first, start, last, case.sinks)
    rotation = None
    if case.rotated:
        frequencies = 100.0 ** -(np.arange(case.R // 2) / (case.R // 2))
        base = rng.integers(0, 40, B).astype(np.int32)
        rotation = KeyRotation(jnp.asarray(frequencies, jnp.float32), jnp.asarray(base))
    logits = jnp.asarray(rng.standard_normal(case.N), jnp.float32) if case.logits else None
    return Inputs(
        latents,
        keys,
        positions,
        held,
        (*queries, latent, rope_key, visible, jnp.asarray(held)),
        dict(page_table=table, key_rotation=rotation, sink_logits=logits),
    )


def _permuted_pages(rng, held: np.ndarray, page: int) -> np.ndarray:
    """Shuffle the slots within their pages, so that whole pages stay dead."""
    pages = held.reshape(len(held), -1, page)
    return rng.permuted(pages, axis=2).reshape(held.shape)


def _operand(codec, rng, held: np.ndarray, width: int, dtype: str, poison: float):
    """Decoded values [B, S, width], and the contiguous operand with all dead slots poisoned."""
    x = jnp.asarray(rng.standard_normal((*held.shape, width)), dtype)
    rows, decoded = _coder(codec)(x)
    specs = codec.parts(width, dtype)
    parts = []
    for spec, part in zip(specs, rows, strict=True):
        empty = held.reshape(len(held), -1, spec.tokens_per_row) < 0
        dead = empty.all(axis=-1, keepdims=True)
        parts.append(jnp.asarray(np.where(dead, _poison(part.dtype, poison), np.asarray(part))))
    operand = Operand(
        parts=tuple(parts),
        tokens_per_row=tuple(spec.tokens_per_row for spec in specs),
        dtypes=tuple(part.dtype.name for part in parts),
        width=width,
        format=codec,
    )
    return np.asarray(decoded), operand


@functools.cache
def _coder(codec):
    def encode(x: jax.Array):
        rows = codec.encode(x)
        return rows, codec.decode(rows, x.shape[-1])

    return jax.jit(encode, compiler_options=COMPILER_OPTIONS)


def _poison(dtype, value: float):
    """`value` in a float part; the largest code in a part of codes."""
    if jnp.issubdtype(dtype, jnp.floating):
        return np.asarray(value).astype(dtype)
    return np.asarray(0 if value == 0 else jnp.iinfo(dtype).max).astype(dtype)


def _paged(rng, held: np.ndarray, operands: Sequence[Operand], page: int, poison: float):
    """Move contiguous operands into pools; returns the page table and the operands."""
    B, S = held.shape
    M = S // page
    P = B * M + 3
    table = rng.permutation(P)[: B * M].reshape(B, M).astype(np.int32)
    moved = []
    for operand in operands:
        pools = []
        for part, r in zip(operand.parts, operand.tokens_per_row, strict=True):
            W, rows = part.shape[-1], page // r
            pool = np.full((P, 1, rows, W), _poison(part.dtype, poison), part.dtype)
            pool[table] = np.asarray(part).reshape(B, M, 1, rows, W)
            pools.append(jnp.asarray(pool))
        moved.append(dataclasses.replace(operand, parts=tuple(pools), paged=True))
    dead = (held.reshape(B, M, page) < 0).all(-1)
    outside = rng.choice(np.array([-1, P, P + 7, 2**31 - 1], np.int32), (B, M))
    return jnp.asarray(np.where(dead, outside, table)), *moved


@functools.cache
def _compiled(case: Case, implementation: str):
    call = functools.partial(
        latent_attention, scale=SCALE, softcap=case.softcap, implementation=implementation
    )
    return jax.jit(call, compiler_options=COMPILER_OPTIONS)


def run(case: Case, implementation: str, inputs: Inputs) -> tuple[np.ndarray, np.ndarray]:
    """Output [B, T, N, C] and logsumexp [B, T, N]."""
    output, lse = _compiled(case, implementation)(*inputs.arguments, **inputs.options)
    assert output.dtype == lse.dtype == jnp.float32
    return np.asarray(output), np.asarray(lse)


def expected(case: Case, inputs: Inputs) -> tuple[np.ndarray, np.ndarray]:
    """A dense f64 oracle of its own, over lists of visible tokens."""
    q_latent, q_rope = (np.asarray(q, np.float64) for q in inputs.arguments[:2])
    logits, rotation = inputs.options["sink_logits"], inputs.options["key_rotation"]
    B, T, N, C = q_latent.shape
    output, lse = np.zeros((B, T, N, C)), np.full((B, T, N), -np.inf)
    for b in range(B):
        held, keys = inputs.held[b], inputs.keys[b].astype(np.float64)
        if rotation is not None:
            frequencies = np.asarray(rotation.inverse_frequencies, np.float64)
            angles = (held - int(rotation.base[b]))[:, None] * frequencies
            low, high = np.split(keys, 2, axis=-1)
            turned = (low + 1j * high) * np.exp(1j * angles)
            keys = np.concatenate([turned.real, turned.imag], axis=-1)
        for t in range(T):
            p = inputs.positions[b, t]
            reach = case.window or case.S
            seen = [
                s for s, j in enumerate(held) if 0 <= j <= p and (j > p - reach or j < case.sinks)
            ]
            latents = inputs.latents[b, seen].astype(np.float64)
            scores = SCALE * (q_latent[b, t] @ latents.T + q_rope[b, t] @ keys[seen].T)
            if case.softcap is not None:
                scores = case.softcap * np.tanh(scores / case.softcap)
            if logits is not None:
                scores = np.concatenate([scores, np.asarray(logits, np.float64)[:, None]], axis=1)
                latents = np.concatenate([latents, np.zeros((1, C))])
            if scores.size:
                top = scores.max(axis=1, keepdims=True)
                weights = np.exp(scores - top)
                total = weights.sum(axis=1, keepdims=True)
                output[b, t] = weights @ latents / total
                lse[b, t] = (top + np.log(total))[:, 0]
    return output, lse


def check(case: Case, got, want, what: str) -> None:
    for a, b, tolerance in zip(got, want, (ATTENTION[case.dtype], LOGSUMEXP), strict=True):
        np.testing.assert_allclose(a, b, atol=tolerance, rtol=0, err_msg=what)
    empty = np.isneginf(want[1])
    assert (got[0][empty] == 0).all(), f"{what}: a query that sees nothing must give 0"
    assert np.array_equal(np.isneginf(got[1]), empty), what


WIDE: dict[str, Any] = dict(C=512, R=64, S=32)  # the widths of DeepSeek V2 and V3
ODD: dict[str, Any] = dict(C=10, R=6)
CASES = [
    Case(T=5),
    Case(**ODD, T=17, page=16, window=4, sinks=4),
    Case(**WIDE),
    Case(N=40, page=8, logits=True),  # heads of one token in several tiles of rows
    # Several blocks, one that ends early.
    Case(**ODD, S=LONG, T=5, window=70, sinks=3),
    Case(**ODD, S=LONG, page=16, latent=INT8),
    # Codes: at f32 tolerance, since the oracle sees what they decode to.
    Case(T=5, page=8, softcap=2.0, rotated=True, rope=INT8),
    Case(**WIDE, page=8, latent=INT4),
    Case(**ODD, T=5, page=8, latent=INT4, rope=Raw()),
    Case(T=5, page=16, latent=CHANNEL, rotated=True),
    Case(latent=FINE, rope=INT4, window=7, sinks=3),
    # Narrow dtypes.
    Case(dtype="bfloat16", T=5, page=16, window=4, logits=True),
    Case(dtype="bfloat16", T=17, page=8, latent=INT8, rope=Raw()),
]
OTHERS = [name for name in runnable(IMPLEMENTATIONS) if name != "reference"]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_reference_equals_the_oracle(case: Case):
    for lengths in case.rounds:
        inputs = build(case, lengths)
        check(case, run(case, "reference", inputs), expected(case, inputs), f"{lengths=}")


@pytest.mark.parametrize("implementation", OTHERS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_implementation_equals_the_reference(case: Case, implementation: str):
    for lengths in case.rounds if implementation == "xla" else case.rounds[:1]:
        inputs = build(case, lengths)
        want = run(case, "reference", inputs)
        check(case, run(case, implementation, inputs), want, f"{lengths=}")


@pytest.mark.parametrize("implementation", runnable(IMPLEMENTATIONS))
@pytest.mark.parametrize(
    "case",
    [
        Case(T=5),
        Case(N=40, page=8, logits=True),
        Case(**ODD, T=5, page=8, latent=INT4, rope=Raw()),
        Case(T=5, page=16, latent=CHANNEL, rotated=True),
    ],
    ids=str,
)
def test_poison_in_dead_slots_changes_no_bit(case: Case, implementation: str):
    lengths = case.rounds[0]
    wanted = run(case, implementation, build(case, lengths, 0.0))
    for poison in (np.nan, 1e3, -np.inf):
        got = run(case, implementation, build(case, lengths, poison))
        for a, b in zip(got, wanted, strict=True):
            np.testing.assert_array_equal(a, b, err_msg=f"{poison=}")


@pytest.mark.parametrize("implementation", runnable(IMPLEMENTATIONS))
def test_equals_attention_over_keys_of_both_parts(implementation: str):
    """Keys of width C + R whose first C channels are the values, one head for all."""
    case = Case(T=5)
    inputs = build(case, case.rounds[0], 0.0)
    q_latent, q_rope, latent, rope_key, *rest = inputs.arguments
    key = Operand.raw(jnp.concatenate([latent.parts[0], rope_key.parts[0]], axis=-1))
    query = jnp.concatenate([q_latent, q_rope], axis=-1)
    call = jax.jit(
        functools.partial(attention, scale=SCALE, implementation=implementation),
        compiler_options=COMPILER_OPTIONS,
    )
    want = call(query, key, latent, *rest)
    check(case, run(case, implementation, inputs), jax.device_get(want), "both parts")


@pytest.mark.parametrize("case", [Case(latent=INT8, page=16), Case(dtype="bfloat16")], ids=str)
def test_xla_forms_no_decoded_cache(case: Case):
    case = dataclasses.replace(case, S=16 * online.BLOCK, N=16)
    inputs = build(case, [case.S])
    q_latent, q_rope, *operands = inputs.arguments[:4]
    stored = [  # as a cache on a CPU holds them
        dataclasses.replace(x, parts=tuple(map(to_words, x.parts))) for x in operands
    ]
    arguments = (q_latent, q_rope, *stored, *inputs.arguments[4:])
    compiled = _compiled(case, "xla").lower(*arguments, **inputs.options).compile()
    memory, decoded = compiled.memory_analysis(), 4 * case.S * case.C
    assert memory is not None and memory.temp_size_in_bytes < decoded / 2


def test_case_ids_are_unique():
    ids = list(map(str, CASES))
    assert len(set(ids)) == len(ids), sorted({i for i in ids if ids.count(i) > 1})


class TestRefusals:
    """Mistakes raise ValueError before any implementation is asked, and name the value."""

    S = 16

    def call(self, **changes):
        """A call that works, but for the changes."""
        paged = changes.pop("paged", False)
        raw = self.pool if paged else self.rows
        arguments: dict[str, Any] = dict(
            query_latent=jnp.zeros((2, 1, 3, 10)),
            query_rope=jnp.zeros((2, 1, 3, 6)),
            latent=raw(10),
            rope_key=raw(6),
            visibility=causal(jnp.full((2, 1), 3, jnp.int32)),
            key_positions=jnp.zeros((2, self.S), jnp.int32),
            page_table=jnp.zeros((2, 2), jnp.int32) if paged else None,
            scale=SCALE,
            implementation="xla",
        )
        return latent_attention(**{**arguments, **changes})

    def rows(self, width: int, heads: int = 2, slots: int = S) -> Operand:
        return Operand.raw(jnp.zeros((heads, slots, width)))

    def pool(self, width: int, heads: int = 1, page: int = 8, pages: int = 5) -> Operand:
        return dataclasses.replace(Operand.raw(jnp.zeros((pages, heads, page, width))), paged=True)

    @pytest.mark.parametrize("paged", [False, True])
    def test_nothing_is_wrong_with_the_base(self, paged: bool):
        output, lse = jax.eval_shape(lambda: self.call(paged=paged))
        assert output.shape == (2, 1, 3, 10) and lse.shape == (2, 1, 3)

    def test_scale_has_no_default(self):
        arguments = (jnp.zeros((2, 1, 3, 10)), jnp.zeros((2, 1, 3, 6)), self.rows(10), self.rows(6))
        with pytest.raises(TypeError, match="scale"):
            latent_attention(*arguments, causal(jnp.zeros((2, 1), jnp.int32)), jnp.zeros((2, 16)))  # pyright: ignore[reportCallIssue]

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            (dict(query_latent=jnp.zeros((2, 1, 10))), r"query_latent must be \[B, T, N, C\]"),
            (dict(query_rope=jnp.zeros((2, 1, 4, 6))), "query_latent and query_rope.*1,4,6"),
            (dict(query_rope=jnp.zeros((2, 1, 3, 6), jnp.bfloat16)), "same.*dtype.*bfloat16"),
            (dict(query_rope=jnp.zeros((2, 1, 3, 6), jnp.int32)), "query_rope.*int32"),
            (dict(query_rope=jnp.zeros((2, 1, 3, 4))), "rope_key.width=6.*4"),
            (dict(query_latent=jnp.zeros((2, 1, 3, 11))), "latent.width=10.*11"),
            (dict(key_positions=jnp.zeros((2, 16))), "key_positions must be int32, got float32"),
            (dict(key_positions=jnp.zeros((2, 17), jnp.int32)), "slots differ.*16.*16.*17"),
            (dict(page_table=jnp.zeros((2, 2), jnp.int32)), "latent.paged=False.*page table"),
            (dict(paged=True, page_table=None), "latent.paged=True.*page table"),
            (dict(paged=True, page_table=jnp.zeros((2, 2), jnp.uint8)), "page_table.*uint8"),
            (dict(visibility=causal(jnp.zeros((2, 2), jnp.int32))), "visibility.first.*2,2"),
            (dict(softcap=0.0), "softcap=0.0"),
            (dict(implementation="xlas"), "unknown latent_attention implementation 'xlas'; known"),
        ],
        ids=lambda x: x if isinstance(x, str) else "",
    )
    def test_arguments(self, changes: dict, message: str):
        with pytest.raises(ValueError, match=message):
            self.call(**changes)

    def test_operands(self):
        transposed = dataclasses.replace(self.rows(10), transposed=True)
        for changes, message in (
            (dict(latent=self.rows(10, heads=4)), r"latent must be stored once.*\(4, 16, 10\)"),
            (dict(rope_key=self.rows(6, heads=1)), r"rope_key must be stored once.*\(1, 16, 6\)"),
            (dict(latent=transposed), "latent.transposed"),
            (dict(rope_key=self.rows(6, slots=17)), "slots differ: latents 16, rotary keys 17"),
            (dict(paged=True, latent=self.pool(10, heads=2)), r"latent must.*\(5, 2, 8, 10\)"),
            (dict(paged=True, rope_key=self.pool(6, page=4)), "page_size=8.*page_size=4"),
            (dict(paged=True, rope_key=self.pool(6, pages=4)), "pools differ: 5 and 4 pages"),
            (dict(paged=True, rope_key=self.rows(6)), "rope_key.paged=False"),
        ):
            with pytest.raises(ValueError, match=message):
                self.call(**changes)

    def test_what_a_kernel_cannot_do(self):
        narrow, page4 = self.rows(6), self.pool(10, page=4)
        with pytest.raises(NotImplementedError, match=r"gpu_interpreted.*512.*got 600"):
            resolve_implementation("gpu_interpreted", self.rows(600), narrow)
        with pytest.raises(NotImplementedError, match=r"tpu_interpreted.*8 tokens.*got 4"):
            resolve_implementation("tpu_interpreted", page4, self.pool(6, page=4))
