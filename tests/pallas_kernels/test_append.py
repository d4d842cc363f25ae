"""The append op: every implementation against plain numpy, bit by bit.

One suite body: `CASES` holds what differs. Buffers and rows hold random bytes. The Pallas kernels
run interpreted, and a few calls in the TPU simulator, which checks bounds, copies and races.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.testing.conformance import COMPILER_OPTIONS
from pallas_kernels._common.implementations import ImplementationUnavailable, resolve
from pallas_kernels.append import IMPLEMENTATIONS, append, tpu
from pallas_kernels.append.tuning import tpu_tiles
from tests.pallas_kernels import simulator
from tests.pallas_kernels.implementations import runnable

PORTABLE = runnable(IMPLEMENTATIONS)
LARGEST = 2**31 - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One compiled call; each of `rounds` gives it the starts of its windows.

    Attributes:
        n: rows of a window.
        S: rows of a sequence, a multiple of the page.
        page: Z', rows of a page; 0 is contiguous.
    """

    n: int = 1
    W: int = 40
    S: int = 96
    B: int = 3
    K: int = 2
    page: int = 0
    transposed: bool = False
    dtype: str = "float32"

    def __str__(self) -> str:
        """Readable in a log, and after `-k`."""
        words = [f"B{self.B}", f"n{self.n}", f"W{self.W}", f"S{self.S}"]
        words += [f"page{self.page}" if self.page else "rows"]
        words += ["transposed"] if self.transposed else []
        return "-".join([*words, self.dtype])

    @property
    def rounds(self) -> list[list[int]]:
        """Starts around every border, and far outside; all are dropped in the last round."""
        last, Z = self.S - self.n, self.page or 32
        inside = [0, 1, 7, 15, 16, 31, Z - 1, Z, Z + 1, 2 * Z - 1, last - 1, last]
        inside = sorted({min(max(start, 0), last) for start in inside})
        outside = [-1, last + 1, self.S, -self.n, LARGEST, -LARGEST - 1]
        starts = [x for pair in zip(inside, outside * 3, strict=False) for x in pair]
        starts += [0] * (-len(starts) % self.B)
        found = [starts[i : i + self.B] for i in range(0, len(starts), self.B)]
        return [*found, [last] * self.B, (outside * 2)[: self.B]]


CASES = [
    *(Case(W=W, dtype=d) for W, d in ((1, "float32"), (80, "bfloat16"))),
    *(Case(n=3, W=W, dtype=d) for W, d in ((64, "uint16"), (128, "bfloat16"))),
    Case(n=40, W=40, dtype="uint8"),
    # Sequences that are no whole number of blocks, or shorter than one.
    *(Case(n=n, S=S, W=6, dtype="uint8") for n, S in ((1, 5), (5, 5), (3, 33), (40, 101))),
    Case(n=40, W=6, S=300, dtype="float16"),
    # Rows as lanes.
    *(Case(n=n, W=W, S=300, transposed=True) for n, W in ((1, 64), (40, 80))),
    Case(n=3, W=6, S=40, transposed=True, dtype="uint8"),
    # Pages.
    *(Case(W=W, page=16, dtype=d) for W, d in ((128, "bfloat16"), (4, "float16"))),
    *(Case(n=3, page=page, dtype="uint16") for page in (1, 3)),
    *(Case(n=40, W=W, page=p, dtype="uint8") for W, p in ((6, 4), (64, 32), (1, 24))),
    Case(n=40, W=128, page=16, dtype="bfloat16"),
    # A lone sequence, which XLA would rewrite.
    *(Case(B=1, n=n, K=k, W=6) for n, k in ((1, 1), (3, 2))),
    Case(B=1, W=6, page=16),
    Case(B=1, transposed=True, K=1, W=6),
]


def random_bytes(rng, shape, dtype: str) -> np.ndarray:
    """Any bytes, but one NaN of bf16: XLA:CPU widens it on the way. Caches hold words there."""
    size = jnp.dtype(dtype).itemsize
    words = rng.integers(0, 256, (*shape, size), dtype=np.uint8).view(f"u{size}")[..., 0]
    if dtype == "bfloat16":
        words = np.where(words & 0x7F80 == 0x7F80, words & 0x8000 | 0x7FC0, words)
    return words.view(jnp.dtype(dtype))


def build(case: Case, starts: list[int], seed: int = 0):
    """Buffer, rows, starts and page table; entries that no window needs point outside the pool."""
    rng = np.random.default_rng(seed)
    rows = random_bytes(rng, (case.B, case.K, case.n, case.W), case.dtype)
    start = np.array(starts, np.int32)
    if not case.page:
        shape = (case.B * case.K, case.S, case.W)
        shape = (shape[0], case.W, case.S) if case.transposed else shape
        return random_bytes(rng, shape, case.dtype), rows, start, None
    M = case.S // case.page
    P = case.B * M + 3
    table = rng.permutation(P)[: case.B * M].reshape(case.B, M).astype(np.int32)
    pool = random_bytes(rng, (P, case.K, case.page, case.W), case.dtype)
    first, last = start[:, None] // case.page, (start[:, None] + case.n - 1) // case.page
    page = np.arange(M, dtype=np.int32)[None]
    outside = rng.choice(np.array([-1, P, P + 7, LARGEST, -LARGEST - 1], np.int32), table.shape)
    used = (page >= first) & (page <= last)
    used[-1] &= rng.random(M) < 0.7  # and a few that a window does need
    return pool, rows, start, np.where(used, table, outside)


def expected(case: Case, buffer, rows, start, table) -> np.ndarray:
    """Row by row, in numpy."""
    out = buffer.copy()
    for b in range(case.B):
        if not 0 <= start[b] <= case.S - case.n:
            continue
        for k in range(case.K):
            for i in range(case.n):
                row, bk = start[b] + i, b * case.K + k
                if case.page:
                    page = table[b, row // case.page]
                    if 0 <= page < len(out):
                        out[page, k, row % case.page] = rows[b, k, i]
                elif case.transposed:
                    out[bk, :, row] = rows[b, k, i]
                else:
                    out[bk, row] = rows[b, k, i]
    return out


@functools.cache
def compiled(case: Case, implementation: str):
    def call(buffer, rows, start, table):
        return append(
            buffer,
            rows,
            start,
            page_table=table,
            transposed=case.transposed,
            implementation=implementation,
        )

    return jax.jit(call, compiler_options=COMPILER_OPTIONS)


def same_bits(got: jax.Array, want: np.ndarray, what: str) -> None:
    got = np.asarray(got)
    assert got.dtype == want.dtype and got.shape == want.shape
    words = f"u{want.dtype.itemsize}"
    np.testing.assert_array_equal(got.view(words), want.view(words), err_msg=what)


@pytest.mark.parametrize("implementation", PORTABLE)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_go_where_they_belong_and_nothing_else_moves(case: Case, implementation: str):
    run = compiled(case, implementation)
    for seed, starts in enumerate(case.rounds):
        inputs = build(case, starts, seed)
        same_bits(run(*inputs), expected(case, *inputs), f"{starts=}")


def test_rounds_write_and_drop():
    """The numpy body itself: some round writes, the last writes nothing."""
    for case in CASES:
        changed = []
        for starts in case.rounds:
            inputs = build(case, starts)
            changed.append(expected(case, *inputs).tobytes() != inputs[0].tobytes())
        assert any(changed) and not changed[-1], case
    assert len(set(map(str, CASES))) == len(CASES)


@pytest.mark.parametrize("implementation", PORTABLE)
def test_windows_that_never_fit_write_nothing(implementation: str):
    """More rows than a sequence has; no rows; no sequences."""
    for case, n in ((Case(S=2), 3), (Case(S=32, page=16), 33), (Case(S=4, transposed=True), 5)):
        buffer, _, start, table = build(case, [0, 1, -1])
        rows = np.zeros((3, 2, n, case.W), np.float32)
        for some in (rows, rows[:, :, :0]):
            same_bits(compiled(case, implementation)(buffer, some, start, table), buffer, "")
    empty = append(
        jnp.zeros((0, 4, 3)), jnp.zeros((0, 2, 1, 3)), jnp.zeros(0, jnp.int32), implementation="xla"
    )
    assert empty.shape == (0, 4, 3)


def test_a_loop_fills_a_buffer_row_by_row():
    """Traced starts under `lax.fori_loop`, as in a decode loop."""
    case = Case(S=8, W=6)
    rows = build(case, [0] * 3)[1]

    for implementation in PORTABLE:

        def body(i, buffer, implementation=implementation):
            start = jnp.full(3, i, jnp.int32)
            return append(buffer, jnp.asarray(rows), start, implementation=implementation)

        got = jax.jit(lambda b, body=body: jax.lax.fori_loop(0, 8, body, b))(jnp.zeros((6, 8, 6)))
        same_bits(got, np.repeat(rows.reshape(6, 1, 6), 8, axis=1), implementation)


@pytest.mark.parametrize(
    "case",
    [
        *(Case(B=B, n=n, dtype="uint16", S=1152) for B, n in ((1, 1), (3, 3))),
        *(Case(B=B, n=n, transposed=True, S=1152) for B, n in ((1, 1), (3, 3))),
        *(Case(B=B, n=n, page=16, dtype="uint8", S=1152) for B, n in ((1, 1), (3, 3))),
    ],
    ids=str,
)
def test_xla_updates_in_place(case: Case):
    inputs = build(case, [0] * case.B)
    run = jax.jit(compiled(case, "xla").__wrapped__, donate_argnums=0)
    hlo = run.lower(*inputs).compile().as_text()
    dims = ",".join(map(str, inputs[0].shape))
    assert f"[{dims}]" in hlo and "input_output_alias" in hlo
    assert not re.search(rf"\[{dims}\]\S* copy(?:-start|_fusion)?\(", hlo)


def test_tpu_kernel_in_the_simulator():
    simulator.in_child("tests.pallas_kernels.test_append:simulate", seconds=120)


def simulate() -> None:
    """Run the TPU kernel with simulated memory; any race, stray access or leftover signal fails."""
    calls = [  # of whole blocks: the simulator returns a last one that is cut with its padding
        (Case(n=40, W=6, S=96, dtype="uint16"), [30, 97, 7]),
        (Case(n=3, W=6, S=32, page=16, dtype="uint8"), [14, -1, 29]),
    ]

    def call(buffer, rows, start, table, interpret):
        return tpu.append(buffer, rows, start, page_table=table, interpret=interpret)

    for case, starts in calls:
        inputs = build(case, starts)
        for mode, got in simulator.simulate(call, *inputs):
            same_bits(got, expected(case, *inputs), f"{case}, {mode}")
    print("simulated")


@pytest.mark.parametrize("itemsize", [1, 2, 4])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("page", [0, 1, 16, 24, 64, 128, 512])
def test_tpu_tiles_are_whole_tiles_within_a_page(page: int, transposed: bool, itemsize: int):
    num_rows = page or 8190
    aligned = 128 if transposed else 32 // itemsize
    for n in (1, 3, 40, 512, 8190):
        for K, W in ((1, 576), (8, 128), (96, 256), (8, 4)):
            paged = bool(page)
            tiles = tpu_tiles(n, K, W, num_rows, itemsize, paged=paged, transposed=transposed)
            assert tiles.rows % aligned == 0 or tiles.rows == num_rows
            assert tiles.rows <= num_rows and K % tiles.heads == 0
            assert not paged or num_rows % tiles.rows == 0
            assert tiles.rows <= aligned or tiles.rows <= n or tiles.rows == num_rows


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(rows=jnp.zeros((3, 2, 4))), r"rows must be \[B, K, n, W\].*\(3, 2, 4\)"),
        (dict(rows=jnp.zeros((3, 2, 1, 4), jnp.bfloat16)), "bfloat16.*float32.*encode"),
        (dict(rows=jnp.zeros((3, 2, 1, 5))), r"\(6, 8, 4\), expected \(6, 8, 5\)"),
        (dict(start=jnp.zeros(2, jnp.int32)), r"int32\[3\], got int32\[2\]"),
        (dict(start=jnp.zeros(3, jnp.uint8)), r"int32\[3\], got uint8\[3\]"),
        (dict(transposed=True), r"expected \(6, 4, 4\)"),
        (dict(buffer=jnp.zeros((6, 2, 8, 4))), "page_table is missing"),
        (dict(page_table=jnp.zeros((3, 2), jnp.int32)), "contiguous, yet there is a page_table"),
        (
            dict(buffer=jnp.zeros((6, 2, 8, 4)), page_table=jnp.zeros((2, 2), jnp.int32)),
            r"page_table must be int32\[3, M\], got int32\[2, 2\]",
        ),
        (
            dict(
                buffer=jnp.zeros((6, 2, 8, 4)),
                page_table=jnp.zeros((3, 2), jnp.int32),
                transposed=True,
            ),
            "transposed=True",
        ),
        (dict(buffer=jnp.zeros((6, 8))), r"3 axes, or 4.*\(6, 8\)"),
        (dict(implementation="cuda"), "unknown append implementation 'cuda'; known: auto, ref.*"),
    ],
)
def test_mistakes_are_named(changes: dict, message: str):
    good = dict(
        buffer=jnp.zeros((6, 8, 4)), rows=jnp.zeros((3, 2, 1, 4)), start=jnp.zeros(3, jnp.int32)
    )
    with pytest.raises(ValueError, match=message):
        append(**{**good, **changes})


class TestResolve:
    def test_auto_is_xla(self):
        assert resolve("append", "auto", IMPLEMENTATIONS) == "xla"

    @pytest.mark.parametrize("name", PORTABLE)
    def test_portable_names_run_here(self, name: str):
        assert resolve("append", name, IMPLEMENTATIONS) == name

    @pytest.mark.parametrize("name", ["tpu", "gpu"])
    def test_a_kernel_needs_its_device(self, name: str, monkeypatch):
        monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
        message = f"'{name}' needs a {name.upper()}; this process runs on cpu .*{name}_interpreted"
        with pytest.raises(ImplementationUnavailable, match=message):
            resolve("append", name, IMPLEMENTATIONS)
        monkeypatch.setattr(jax, "default_backend", lambda: name)
        assert resolve("append", name, IMPLEMENTATIONS) == name
