"""What every attention op asks of its arguments: each mistake is named with its value."""

import jax
import jax.numpy as jnp

from pallas_kernels._common.visibility import Visibility


def check_query(name: str, query: jax.Array, axes: str) -> None:
    """Check the rank, four axes, and the dtype."""
    if query.ndim != 4:
        raise ValueError(f"{name} must be {axes}, got {query.shape=}")
    if query.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise ValueError(f"{name} must be float32, bfloat16 or float16, got {query.dtype}")


def check_visibility(visibility: Visibility, B: int, T: int) -> None:
    """Check that there are i32 positions of every query."""
    for name in ("first", "window_start", "last"):
        array = getattr(visibility, name)
        if array.shape != (B, T) or array.dtype != jnp.int32:
            raise ValueError(f"visibility.{name} must be int32[{B}, {T}], got {array.aval}")


def check_slots(key_positions: jax.Array, page_table: jax.Array | None, B: int) -> None:
    """Check the positions of the slots and the page table, if there is one."""
    for name, array in (("key_positions", key_positions), ("page_table", page_table)):
        if array is None:
            continue
        if array.dtype != jnp.int32:
            raise ValueError(f"{name} must be int32, got {array.dtype}")
        if array.ndim != 2 or array.shape[0] != B:
            raise ValueError(f"{name} must be [B={B}, ...], got {array.shape}")


def check_softcap(softcap: float | None) -> None:
    """Check that it caps something."""
    if softcap is not None and not softcap > 0:
        raise ValueError(f"{softcap=} must be above 0; None is off")
