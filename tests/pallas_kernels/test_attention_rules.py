"""Rules of the attention op, one by one: who is seen, soft cap, traced scale, what is refused."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.testing import oracle
from kvjax.testing.conformance import COMPILER_OPTIONS
from pallas_kernels._common.implementations import ACCELERATORS
from pallas_kernels._common.operand import Operand
from pallas_kernels._common.visibility import Visibility, causal
from pallas_kernels.attention import IMPLEMENTATIONS, attention, resolve_implementation
from tests.pallas_kernels.implementations import runnable
from tests.tolerances import ATTENTION, ELEMENTWISE, LOGSUMEXP

pytestmark = pytest.mark.parametrize("implementation", runnable(IMPLEMENTATIONS))


def rows(x) -> Operand:
    """[B, S, K, W] as a contiguous operand."""
    B, S, K, W = x.shape
    return Operand.raw(jnp.asarray(x, jnp.float32).swapaxes(1, 2).reshape(B * K, S, W))


def pages(x, page: int, seed: int = 0) -> tuple[jax.Array, Operand]:
    """[B, S, K, W] as pages in random order, and their table."""
    B, S, K, W = x.shape
    M = S // page
    table = np.random.default_rng(seed).permutation(B * M).reshape(B, M).astype(np.int32)
    pool = np.zeros((B * M, K, page, W), np.float32)
    pool[table] = np.asarray(x).reshape(B, M, page, K, W).swapaxes(2, 3)
    return jnp.asarray(table), dataclasses.replace(Operand.raw(jnp.asarray(pool)), paged=True)


@functools.cache
def _compiled(implementation: str, softcap: float | None):
    call = functools.partial(attention, implementation=implementation, softcap=softcap)
    return jax.jit(call, compiler_options=COMPILER_OPTIONS)


def attend(implementation: str, *arguments, softcap: float | None = None, **options):
    """One jitted call; returns NumPy arrays."""
    return jax.device_get(_compiled(implementation, softcap)(*arguments, **options))


def up_to(lengths, S: int) -> jax.Array:
    """Positions i32[B, S] of sequences of `lengths`, stored in order."""
    at = np.arange(S)
    return jnp.asarray(np.where(at < np.asarray(lengths)[:, None], at, -1), jnp.int32)


def probe_values(B: int, S: int) -> np.ndarray:
    """V row t is one-hot(t): with q = 0 the output is 1/n on exactly the n visible tokens."""
    return np.broadcast_to(np.eye(S, dtype=np.float32)[None, :, None], (B, S, 1, S))


@pytest.mark.parametrize("page", [0, 1, 8])
def test_probe_sees_real_tokens_only(implementation: str, page: int):
    """Lengths 1 to 33 around tiles of 8; padding lanes never join the softmax (B86, B96)."""
    if page == 1 and implementation.startswith("tpu"):
        pytest.skip("the TPU kernel takes pages of multiples of 8")
    B, S = 33, 40
    lengths = np.arange(1, B + 1)
    k, v = np.ones((B, S, 1, 4), np.float32), probe_values(B, S)
    if page:
        table, key = pages(k, page)
        _, value = pages(v, page)
    else:
        table, key, value = None, rows(k), rows(v)
    # Not causal: every query sees all that is stored, whatever its position.
    last = jnp.full((B, 1), 100, jnp.int32)
    zero = jnp.zeros_like(last)
    visible = Visibility(first=zero, window_start=zero, last=last)
    query = jnp.zeros((B, 1, 2, 4))
    output, lse = attend(
        implementation, query, key, value, visible, up_to(lengths, S), page_table=table
    )
    seen = np.arange(S) < lengths[:, None]
    want = np.where(seen, 1 / lengths[:, None], 0)
    np.testing.assert_allclose(output[:, 0, 0], want, atol=ELEMENTWISE)
    np.testing.assert_array_equal(output[:, 0, 0] == 0, ~seen)
    np.testing.assert_allclose(lse[:, 0, 0], np.log(lengths), atol=LOGSUMEXP)


@pytest.mark.parametrize(("T", "S"), [(4, 12), (1, 9), (12, 12)])
def test_row_i_sees_keys_up_to_its_own(implementation: str, T: int, S: int):
    """Queries are the newest tokens: row i sees key S - T + i and all before (B92)."""
    positions = jnp.arange(S - T, S, dtype=jnp.int32)[None]
    operands = rows(np.ones((1, S, 1, 4))), rows(probe_values(1, S))
    query = jnp.zeros((1, T, 1, 4))
    output, _ = attend(implementation, query, *operands, causal(positions), up_to([S], S))
    for t, p in enumerate(range(S - T, S)):
        want = np.where(np.arange(S) <= p, 1 / (p + 1), 0)
        np.testing.assert_allclose(output[0, t, 0], want, atol=ELEMENTWISE)


@pytest.mark.parametrize("window", [1, 4, 6, 9])
def test_window_counts_the_own_token(implementation: str, window: int):
    """W = 4, T = 6: row 5 sees 2..5; W = 1 is the own value exactly (B4)."""
    T = 6
    positions = jnp.arange(T, dtype=jnp.int32)[None]
    visible = Visibility(jnp.zeros_like(positions), positions - window + 1, positions)
    v = np.random.default_rng(0).standard_normal((1, T, 1, 5)).astype(np.float32)
    query, key = jnp.zeros((1, T, 1, 4)), rows(np.ones((1, T, 1, 4)))
    output, _ = attend(implementation, query, key, rows(v), visible, positions)
    for t in range(T):
        seen = v[0, max(0, t - window + 1) : t + 1, 0]
        np.testing.assert_allclose(output[0, t, 0], seen.mean(0), atol=ELEMENTWISE)
    if window == 1:
        np.testing.assert_array_equal(output[0, :, 0], v[0, :, 0])


def test_empty_rows_give_0_and_minus_infinity(implementation: str):
    """Length 0 beside 7; six queries over three keys: the first three see nothing (B84)."""
    rng = np.random.default_rng(1)
    S, T = 7, 6
    q, k, v = (rng.standard_normal((2, n, 1, 4)).astype(np.float32) for n in (T, S, S))
    positions = jnp.array([[-1] * T, [-1, -1, -1, 0, 1, 2]], jnp.int32)
    output, lse = attend(
        implementation, jnp.asarray(q), rows(k), rows(v), causal(positions), up_to([0, 3], S)
    )
    assert (output[0] == 0).all() and np.isneginf(lse[0]).all()
    assert (output[1, :3] == 0).all() and np.isneginf(lse[1, :3]).all()
    for t in range(3):
        want, want_lse = oracle.attend(q[1, t + 3], k[1], v[1], np.arange(S) <= t)
        np.testing.assert_allclose(output[1, t + 3], want, atol=ATTENTION["float32"])
        np.testing.assert_allclose(lse[1, t + 3], want_lse, atol=LOGSUMEXP)


@pytest.mark.parametrize("T", [1, 17])
@pytest.mark.parametrize("page", [0, 8])
def test_softcap_is_applied_to_scaled_scores_before_the_mask(
    implementation: str, T: int, page: int
):
    """Cap 50: scores 30, 60 and 200 become 26.852, 41.683 and 49.966 (B88)."""
    scores, capped = np.array([30.0, 60.0, 200.0]), np.array([26.852, 41.683, 49.966])
    np.testing.assert_allclose(50 * np.tanh(scores / 50), capped, atol=5e-4)
    S = 24
    k = np.zeros((3, S, 1, 4), np.float32)
    # The key is q = (1, 0, 0, 0) times twice the score: the scale is 1/2. A key past the length
    # would win if masked scores were pulled up to -50 or if the mask came too early.
    k[:, 0, 0, 0] = 2 * scores
    k[:, 1:, 0, 0] = 1e4
    v = np.random.default_rng(2).standard_normal((3, S, 1, 4)).astype(np.float32)
    table, key, value = None, rows(k), rows(v)
    if page:
        (table, key), (_, value) = pages(k, page), pages(v, page)
    query = jnp.zeros((3, T, 1, 4)).at[..., 0].set(1.0)
    positions = jnp.zeros((3, T), jnp.int32)
    arguments = (query, key, value, causal(positions), up_to([1, 1, 1], S))
    output, lse = attend(implementation, *arguments, softcap=50.0, page_table=table)
    np.testing.assert_allclose(lse[:, :, 0], np.tile(capped[:, None], (1, T)), atol=5e-4)
    np.testing.assert_array_equal(output[:, :, 0], np.repeat(v[:, :1, 0], T, axis=1))
    _, lse = attend(implementation, *arguments, page_table=table)
    np.testing.assert_allclose(lse[:, :, 0], np.tile(scores[:, None], (1, T)), rtol=ELEMENTWISE)


@pytest.mark.parametrize("softcap", [0.0, -1.0, float("nan")])
def test_softcap_that_caps_nothing_is_refused(implementation: str, softcap: float):
    """None is off; a cap of 0 would divide by zero (B88)."""
    arguments = _one_token()
    with pytest.raises(ValueError, match="softcap"):
        attention(*arguments, softcap=softcap, implementation=implementation)


def test_default_scale_comes_from_the_width_of_the_query(implementation: str):
    """Scores 10 and 0 over width 192: weights softmax([0.721688, 0]), V = +-1 (B22)."""
    H = 192
    k = np.zeros((1, 2, 1, H), np.float32)
    k[0, 0, 0, 0] = 10
    v = np.array([1.0, -1.0], np.float32).reshape(1, 2, 1, 1)
    query = jnp.zeros((1, 1, 1, H)).at[..., 0].set(1.0)
    position = jnp.array([[1]], jnp.int32)
    output, _ = attend(implementation, query, rows(k), rows(v), causal(position), up_to([2], 2))
    np.testing.assert_allclose(output.item(), 0.3460, atol=5e-5)


def _one_token(S: int = 3, seed: int = 3) -> list:
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal((1, n, 1, 4)).astype(np.float32) for n in (1, S, S))
    positions = jnp.array([[S - 1]], jnp.int32)
    return [jnp.asarray(q), rows(k), rows(v), causal(positions), up_to([S], S)]


@pytest.mark.parametrize("S", [3, 600])
def test_scale_may_be_traced(implementation: str, S: int):
    """Under an outer jit, vmap and forward derivatives; the reverse one over one block (B106)."""
    if implementation.removesuffix("_interpreted") in ACCELERATORS:
        pytest.skip("kernels are forward only; that they take a traced scale is tested below")
    arguments = _one_token(S)

    def total(scale):
        return attention(*arguments, scale=scale, implementation=implementation)[0].sum()

    @functools.partial(jax.jit, compiler_options=COMPILER_OPTIONS)
    def outputs_and_slopes(scales):
        def one(scale):
            slope = jax.jvp(total, (scale,), (jnp.ones_like(scale),))[1]
            # XLA cannot turn a loop of unknown length round; one block has none.
            return total(scale), slope, jax.grad(total)(scale) if S <= 256 else slope

        return jax.vmap(one)(scales)

    step = 1e-2
    scales = np.array([0.1, 0.5, 2.0, 0.5 - step, 0.5 + step], np.float32)
    want = [
        oracle.attend(
            np.asarray(arguments[0])[0, 0],
            *(np.asarray(x.parts[0]).swapaxes(0, 1) for x in arguments[1:3]),
            np.full(S, True),
            scale=float(scale),
        )[0].sum()
        for scale in scales
    ]
    got, forward, reverse = outputs_and_slopes(scales)
    np.testing.assert_allclose(got, want, atol=4 * ATTENTION["float32"])
    np.testing.assert_allclose(forward[1], (want[4] - want[3]) / (2 * step), atol=1e-3)
    np.testing.assert_allclose(reverse, forward, atol=4 * ATTENTION["float32"])


def test_sink_logits_take_weight_and_have_no_value(implementation: str):
    """One head of two has a strong sink; NumPy's softmax has one more logit, of value 0."""
    rng = np.random.default_rng(7)
    q, k, v = (
        rng.standard_normal((1, n, h, 4)).astype(np.float32) for n, h in ((1, 2), (5, 1), (5, 1))
    )
    sinks = np.array([2.5, -1.0], np.float32)
    output, lse = attend(
        implementation,
        jnp.asarray(q),
        rows(k),
        rows(v),
        causal(jnp.array([[4]], jnp.int32)),
        up_to([5], 5),
        sink_logits=jnp.asarray(sinks),
    )
    for n, sink in enumerate(sinks):
        logits = np.append(q[0, 0, n] @ k[0, :, 0].T / 2, sink).astype(np.float64)
        weights = np.exp(logits) / np.exp(logits).sum()
        want = weights[:-1] @ v[0, :, 0]
        np.testing.assert_allclose(output[0, 0, n], want, atol=ATTENTION["float32"])
        np.testing.assert_allclose(lse[0, 0, n], np.log(np.exp(logits).sum()), atol=LOGSUMEXP)


def test_one_traced_program_serves_every_scale(implementation: str):
    traces = []

    @jax.jit
    def call(scale, *arguments):
        traces.append(scale)
        return attention(*arguments, scale=scale, implementation=implementation)

    for scale in (0.1, 0.5):
        call(jnp.float32(scale), *_one_token())
    assert len(traces) == 1


class TestRefusals:
    """Wrong dtypes and shapes raise ValueError and name the value (B40)."""

    @pytest.mark.parametrize("dtype", ["int16", "uint8", "uint32", "float32"])
    def test_dtype_of_key_positions(self, implementation: str, dtype: str):
        query, key, value, visible, held = _one_token()
        with pytest.raises(ValueError, match=f"key_positions.*int32.*{dtype}"):
            attention(query, key, value, visible, held.astype(dtype), implementation=implementation)

    @pytest.mark.parametrize("dtype", ["int16", "uint8", "uint32", "float32"])
    def test_dtype_of_the_page_table(self, implementation: str, dtype: str):
        query, _, _, visible, held = _one_token(4)
        table, pool = pages(np.zeros((1, 4, 1, 4), np.float32), 2)
        with pytest.raises(ValueError, match=f"page_table.*int32.*{dtype}"):
            attention(
                query,
                pool,
                pool,
                visible,
                held,
                page_table=table.astype(dtype),
                implementation=implementation,
            )

    def test_int64_under_x64(self, implementation: str):
        query, key, value, visible, held = _one_token()
        with jax.enable_x64(True):
            wide = jnp.asarray(np.asarray(held), jnp.int64)
            with pytest.raises(ValueError, match=r"key_positions.*int32.*int64"):
                attention(query, key, value, visible, wide, implementation=implementation)

    @pytest.mark.parametrize(
        ("field", "wrong"),
        [("first", "shape"), ("window_start", "float32"), ("last", "uint8"), ("last", "shape")],
    )
    def test_visibility(self, implementation: str, field: str, wrong: str):
        query, key, value, visible, held = _one_token()
        array = getattr(visible, field)
        array = jnp.zeros((1, 2), jnp.int32) if wrong == "shape" else array.astype(wrong)
        visible = dataclasses.replace(visible, **{field: array})
        with pytest.raises(ValueError, match=field):
            attention(query, key, value, visible, held, implementation=implementation)

    def test_query_of_rank_3(self, implementation: str):
        query, *rest = _one_token()
        with pytest.raises(ValueError, match=r"query.*\(1, 1, 4\)"):
            attention(query[0], *rest, implementation=implementation)

    def test_width_of_keys(self, implementation: str):
        query, _, value, visible, held = _one_token()
        key = rows(np.zeros((1, 3, 1, 6)))
        with pytest.raises(ValueError, match=r"key\.width=6.*H=4"):
            attention(query, key, value, visible, held, implementation=implementation)

    def test_query_heads_that_do_not_divide(self, implementation: str):
        _, _, _, visible, held = _one_token()
        pair = rows(np.zeros((1, 3, 2, 4)))
        with pytest.raises(ValueError, match="N=3"):
            attention(
                jnp.zeros((1, 1, 3, 4)), pair, pair, visible, held, implementation=implementation
            )

    def test_heads_of_keys_and_values_differ(self, implementation: str):
        _, _, _, visible, held = _one_token()
        key, value = rows(np.zeros((1, 3, 2, 4))), rows(np.zeros((1, 3, 1, 4)))
        with pytest.raises(ValueError, match="2 and 1"):
            attention(
                jnp.zeros((1, 1, 2, 4)), key, value, visible, held, implementation=implementation
            )

    @pytest.mark.parametrize("name", ["value", "held"])
    def test_slots_that_differ(self, implementation: str, name: str):
        query, key, value, visible, held = _one_token()
        value = rows(np.zeros((1, 5, 1, 4))) if name == "value" else value
        held = up_to([3], 5) if name == "held" else held
        with pytest.raises(ValueError, match=r"slots differ.*3.*5"):
            attention(query, key, value, visible, held, implementation=implementation)

    def test_batches_that_differ(self, implementation: str):
        query, key, value, visible, held = _one_token()
        held = jnp.tile(held, (2, 1))
        with pytest.raises(ValueError, match=r"key_positions.*B=1.*\(2, 3\)"):
            attention(query, key, value, visible, held, implementation=implementation)

    @pytest.mark.parametrize("table", [True, False])
    def test_page_table_without_pages_and_pages_without_table(
        self, implementation: str, table: bool
    ):
        query, key, value, visible, held = _one_token(4)
        page_table, pool = pages(np.zeros((1, 4, 1, 4), np.float32), 2)
        if table:
            options = {"page_table": page_table}
        else:
            options, key, value = {}, pool, pool
        with pytest.raises(ValueError, match="page table"):
            attention(query, key, value, visible, held, implementation=implementation, **options)

    def test_unknown_implementation_lists_the_known(self, implementation: str):
        assert resolve_implementation(implementation) == implementation
        with pytest.raises(ValueError, match=f"{implementation}s.*known: auto.*{implementation}"):
            attention(*_one_token(), implementation=f"{implementation}s")
