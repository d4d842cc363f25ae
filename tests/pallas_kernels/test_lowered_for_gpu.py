"""The attention kernel as it is lowered for a GPU, executed: right, in bounds, all written once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache.codecs import Int
from pallas_kernels._common import triton
from pallas_kernels.attention import gpu
from tests.pallas_kernels import triton_ir
from tests.pallas_kernels.attention_cases import Case, build
from tests.tolerances import ELEMENTWISE

CASES = [
    Case(T=5, H=80, page=16, window=20, sinks=2, dtype="bfloat16"),
    Case(codec=Int(bits=4), page=16, H=80, T=2),
    Case(codec=Int(bits=2, axis="channel", group_size=8), dtype="bfloat16"),
    Case(rotated=True, T=5, S=90, shuffled=True, softcap=2.0),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention(case: Case, monkeypatch):
    calls = []
    call = triton.call

    def watched(body, arguments, out_shape, **options):
        outputs = call(body, arguments, out_shape, **options)
        calls.append((jax.tree.leaves(arguments), out_shape, outputs))
        return outputs

    monkeypatch.setattr(triton, "call", watched)
    inputs = build(case, case.rounds[0][-2:])

    def attention(query, key, value, visible, held, table, rotation, *, interpret: bool):
        return gpu.attention(
            query,
            key,
            value,
            visible,
            held,
            page_table=table,
            scale=jnp.float32(query.shape[-1] ** -0.5),
            softcap=case.softcap,
            key_rotation=rotation,
            interpret=interpret,
        )

    attention(*inputs.arguments, interpret=True)
    arguments, out_shape, wanted = calls[0]
    native = jax.jit(functools.partial(attention, interpret=False))
    lowered = native.trace(*inputs.arguments).lower(lowering_platforms=("cuda",))
    (kernel,) = triton_ir.kernels(lowered)
    got = triton_ir.run(kernel, [np.asarray(x) for x in arguments], out_shape)
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(a, np.asarray(b), atol=20 * ELEMENTWISE, rtol=0)
