"""The op: validate, resolve the implementation, call it."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels._common.implementations import resolve
from pallas_kernels.append import gpu, reference, tpu, xla

IMPLEMENTATIONS = {
    "reference": reference.append,
    "xla": xla.append,
    "tpu": tpu.append,
    "gpu": gpu.append,
    "tpu_interpreted": functools.partial(tpu.append, interpret=True),
    "gpu_interpreted": functools.partial(gpu.append, interpret=True),
}


def append(
    buffer: jax.Array,  # [B*K, S', W], [B*K, W, S'] or [P, K, Z', W]
    rows: jax.Array,  # [B, K, n, W]
    start: jax.Array,  # i32[B]
    *,
    page_table: jax.Array | None = None,  # i32[B, M]
    transposed: bool = False,
    implementation: str = "auto",
) -> jax.Array:
    """Put rows[b, :, i] at row start[b] + i of sequence b; nothing else changes.

    A window of rows that is not wholly inside its sequence (start < 0 or start + n beyond the last
    row) writes nothing: so a cache drops padding and overflow. A page outside the pool takes
    nothing either. Pages that take rows must differ: no page may be shared by two sequences that
    both write to it.

    Rows are encoded before, by the codec and in XLA: that is elementwise work on a few tokens. This
    op only moves data, so it never looks at what a word means: narrow floats may come as integer
    words (`words.py`). The buffer is updated in place if it is donated or dead afterwards.

    Args:
        buffer: contiguous [B*K, S', W], or [B*K, W, S'] if `transposed`; paged [P, K, Z', W].
            S' and Z' count rows, each of which may describe several tokens.
        rows: [B, K, n, W] of the buffer's dtype.
        start: i32[B], row of the sequence at which its window starts.
        page_table: i32[B, M], the page of the pool that holds rows m * Z' to (m + 1) * Z'; given
            iff the buffer is paged.
        transposed: the rows are the last axis of the buffer.
        implementation: "auto" or one of `IMPLEMENTATIONS`.

    Returns:
        The buffer with the rows in it.

    Raises:
        ValueError: shapes, dtypes or the implementation do not fit.

    >>> append(jnp.zeros((1, 3, 1)), jnp.ones((1, 1, 1, 1)), jnp.array([1]))[0, :, 0].tolist()
    [0.0, 1.0, 0.0]
    """
    num_rows = _validate(buffer, rows, start, page_table, transposed)
    run = IMPLEMENTATIONS[resolve("append", implementation, IMPLEMENTATIONS)]
    n = rows.shape[2]
    if 0 in (*rows.shape, *buffer.shape) or n > num_rows:  # no window fits
        return buffer
    with jax.named_scope("append"):
        return run(buffer, rows, start, page_table=page_table, transposed=transposed)


def _validate(buffer, rows, start, page_table, transposed: bool) -> int:
    """Rows of one sequence."""
    if rows.ndim != 4:
        raise ValueError(f"rows must be [B, K, n, W], got {rows.shape=}")
    B, K, _, W = rows.shape
    if rows.dtype != buffer.dtype:
        raise ValueError(f"{rows.dtype=} differs from {buffer.dtype=}: encode the rows before")
    if start.shape != (B,) or start.dtype != jnp.int32:
        raise ValueError(f"start must be int32[{B}], got {start.dtype}{list(start.shape)}")
    if buffer.ndim == 4:
        if page_table is None:
            raise ValueError(f"page_table is missing: {buffer.shape=} is paged")
        if transposed:
            raise ValueError(f"pages keep rows outermost: {transposed=} with {buffer.shape=}")
        if page_table.dtype != jnp.int32 or page_table.ndim != 2 or page_table.shape[0] != B:
            found = f"{page_table.dtype}{list(page_table.shape)}"
            raise ValueError(f"page_table must be int32[{B}, M], got {found}")
        P, _, Z, _ = buffer.shape
        expected, num_rows = (P, K, Z, W), page_table.shape[1] * Z
    elif buffer.ndim == 3:
        if page_table is not None:
            raise ValueError(f"{buffer.shape=} is contiguous, yet there is a page_table")
        num_rows = buffer.shape[2 if transposed else 1]
        expected = (B * K, W, num_rows) if transposed else (B * K, num_rows, W)
    else:
        raise ValueError(f"buffer must have 3 axes, or 4 if paged, got {buffer.shape=}")
    if buffer.shape != expected:
        raise ValueError(f"{buffer.shape=}, expected {expected} for {rows.shape=}, {transposed=}")
    return num_rows
