"""The attention op: the reference against a dense f64 oracle, each implementation against it.

One suite body: `CASES` holds what differs. An implementation that cannot run a case must raise.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache.codecs import Int
from pallas_kernels.attention import IMPLEMENTATIONS, tpu, xla
from tests.pallas_kernels import simulator
from tests.pallas_kernels.attention_cases import Case, build, expected, run, skip_unsupported
from tests.pallas_kernels.implementations import runnable
from tests.tolerances import ATTENTION, LOGSUMEXP

# Longer than a block and than several buckets, and a multiple of neither.
LONG = 1090
assert LONG > 2 * xla.BLOCK and LONG > 4 * xla.BUCKET and LONG % xla.BLOCK

INT8, INT4 = Int(bits=8), Int(bits=4, group_size=32)
SYMMETRIC = Int(bits=4, symmetric=True, scale_dtype="float32")
CHANNEL = Int(bits=2, axis="channel", group_size=8)

CASES = [
    *(Case(T=T, G=G) for T, G in ((1, 1), (1, 3), (1, 8), (5, 3), (17, 1), (17, 8))),
    *(Case(T=T, H=H, transposed=True) for T, H in ((1, 64), (5, 80), (1, 96), (17, 128))),
    *(Case(T=T, page=page) for T, page in ((1, 1), (1, 4), (1, 16), (5, 1), (5, 16))),
    *(Case(H=H, page=4, S=72) for H in (80, 128)),
    # (keys, values) widths of case B90 beyond the square ones above.
    *(Case(H=H, Hv=Hv, G=1) for H, Hv in ((192, 128), (576, 512), (128, 64), (6, 6))),
    *(Case(H=H, Hv=Hv, page=16, T=5) for H, Hv in ((128, 64), (6, 6))),
    # Several buckets, several blocks, one that ends early.
    Case(S=LONG, G=1, H=80),
    Case(S=LONG, transposed=True, T=5, G=1),
    Case(S=LONG, G=1, T=17),
    Case(S=1088, page=16),
    Case(S=1092, page=4, T=17, G=1),
    Case(S=LONG, G=1, codec=INT8),
    Case(S=1088, page=16, codec=INT4, T=5, G=1),
    Case(S=LONG, window=70, sinks=3, shuffled=True, T=5, G=1),
    Case(S=1088, page=16, window=300, sinks=2, T=5, G=1),
    Case(S=LONG, rotated=True, shuffled=True, G=1),
    # What the queries see.
    *(Case(window=w, T=T, shuffled=True) for w, T in ((1, 1), (4, 5), (8, 17), (90, 5))),
    *(Case(window=4, sinks=n, T=T, page=p) for n, T, p in ((1, 5, 0), (4, 1, 16), (4, 17, 4))),
    Case(sinks=4, window=8, first_slots=4, page=1),
    Case(sinks=5, window=8, first_slots=5, page=4, T=5, rotated=True),
    Case(sinks=4, window=8, first_slots=4, T=5, codec=INT8, rotated=True),
    *(Case(softcap=c, T=T, page=p) for c, T, p in ((2.0, 1, 0), (50.0, 5, 16), (2.0, 17, 0))),
    # Keys that are rotated on read.
    *(Case(rotated=True, T=T, page=p) for T, p in ((1, 0), (5, 4))),
    Case(rotated=True, transposed=True, T=17, shuffled=True),
    Case(rotated=True, codec=CHANNEL, T=5),
    # Codes: at f32 tolerance, since the oracle sees what they decode to.
    *(Case(codec=c, T=T) for c, T in ((INT8, 1), (INT4, 5), (SYMMETRIC, 1), (CHANNEL, 5))),
    *(Case(codec=codec, page=16, H=80) for codec in (INT4, SYMMETRIC, CHANNEL)),
    *(Case(codec=codec, H=6, Hv=5, page=8, T=17) for codec in (INT4, CHANNEL)),
    # Narrow dtypes.
    *(Case(dtype="bfloat16", T=T, page=p) for T, p in ((1, 0), (5, 16), (17, 0))),
    Case(dtype="bfloat16", S=LONG, G=1, H=128),
    Case(dtype="bfloat16", codec=INT8, T=5),
    Case(dtype="bfloat16", rotated=True, window=9, sinks=2, T=5),
    Case(dtype="float16", T=5, page=4),
]
OTHERS = [name for name in runnable(IMPLEMENTATIONS) if name != "reference"]


def check(case: Case, got, want, what: str) -> None:
    for (a, b), tolerance in zip(
        zip(got, want, strict=True), (ATTENTION[case.dtype], LOGSUMEXP), strict=True
    ):
        np.testing.assert_allclose(a, b, atol=tolerance, rtol=0, err_msg=what)
    empty = np.isneginf(want[1])
    assert (got[0][empty] == 0).all(), f"{what}: a query that sees nothing must give 0"
    assert np.array_equal(np.isneginf(got[1]), empty), what


@pytest.mark.parametrize("case", CASES, ids=str)
def test_reference_equals_the_oracle(case: Case):
    for lengths in case.rounds[:2]:
        inputs = build(case, lengths)
        check(case, run(case, "reference", inputs), expected(case, inputs), f"{lengths=}")


@pytest.mark.parametrize("implementation", OTHERS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_implementation_equals_the_reference(case: Case, implementation: str):
    # The interpreter is slow: one round has every border, the others stop in other blocks.
    rounds = case.rounds if implementation == "xla" else case.rounds[:1]
    for lengths in rounds:
        inputs = build(case, lengths)
        skip_unsupported(implementation, inputs)
        want = run(case, "reference", inputs)
        check(case, run(case, implementation, inputs), want, f"{lengths=}")


@pytest.mark.parametrize("implementation", runnable(IMPLEMENTATIONS))
@pytest.mark.parametrize(
    "case",
    [
        Case(transposed=True),
        Case(T=5, shuffled=True, window=9),
        Case(T=5, page=4),
        Case(page=16, S=1088),
        Case(S=LONG, G=1, codec=INT8),
        Case(page=16, H=80, codec=INT4),
    ],
    ids=str,
)
def test_poison_in_dead_slots_changes_no_bit(case: Case, implementation: str):
    rounds = case.rounds[:2] if implementation in ("reference", "xla") else case.rounds[:1]
    for lengths in rounds:
        skip_unsupported(implementation, build(case, lengths))
        wanted = run(case, implementation, build(case, lengths, 0.0))
        for poison in (np.nan, 1e3, -np.inf):
            got = run(case, implementation, build(case, lengths, poison))
            for a, b in zip(got, wanted, strict=True):
                np.testing.assert_array_equal(a, b, err_msg=f"{poison=}, {lengths=}")


@pytest.mark.parametrize("implementation", runnable(IMPLEMENTATIONS))
def test_a_call_repeats_bit_for_bit(implementation: str):
    case = Case(S=1088, page=16)
    inputs = build(case, case.rounds[0])
    first, second = (run(case, implementation, inputs) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)


def test_tpu_kernel_in_the_simulator():
    simulator.in_child("tests.pallas_kernels.test_attention:simulate", seconds=200)


def simulate() -> None:
    """Run the TPU kernel with simulated memory; any race, stray access or leftover signal fails."""
    cases = [
        Case(S=300, G=1, T=2, window=70, sinks=3),
        Case(S=64, page=8, codec=INT4, T=5),
        Case(S=64, codec=CHANNEL, page=16, rotated=True),
    ]
    for case in cases:
        inputs = build(case, case.rounds[0][-2:])

        def call(query, key, value, visible, held, table, rotation, interpret):
            return tpu.attention(
                query,
                key,
                value,
                visible,
                held,
                page_table=table,
                scale=jnp.float32(query.shape[-1] ** -0.5),
                softcap=None,
                key_rotation=rotation,
                interpret=interpret,
            )

        for mode, got in simulator.simulate(call, *inputs.arguments):
            check(case, got, run(case, "reference", inputs), f"{case}, {mode}")
    print("simulated")


def test_case_ids_are_unique():
    ids = list(map(str, CASES))
    assert len(set(ids)) == len(ids), sorted({i for i in ids if ids.count(i) > 1})
