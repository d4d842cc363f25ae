"""The TPU simulator: kernels with simulated memories, copies and semaphores, on a CPU.

It sees what the plain interpreter hides: races, reads before a copy has ended, reads out of bounds,
signals left over. A wait that nobody signals hangs, so whoever simulates does it in a process with
a time limit: `in_child`.
"""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jax
from jax.experimental.pallas import tpu as pltpu

ROOT = Path(__file__).resolve().parents[2]
MODES = ("on_wait", "eager")  # copies happen when they are waited for, or at once


def in_child(function: str, seconds: float) -> None:
    """Call "module:function" in a process of its own; it must print "simulated" last."""
    module, name = function.split(":")
    command = [sys.executable, "-c", f"from {module} import {name}; {name}()"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    # Leftover signals and races are printed.
    assert done.stdout.splitlines() == ["simulated"], done.stdout[-2000:]


def simulate(call: Callable, *arguments):
    """Run call(*arguments, interpret=...) in each mode; yields (mode, result)."""
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    chip = jax.sharding.AbstractDevice("TPU v5e", 1, "tpu")
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=chip)
    for mode in MODES:
        params = pltpu.InterpretParams(detect_races=True, dma_execution_mode=mode)

        def run(*arguments, params=params):
            return call(*arguments, interpret=params)

        with jax.sharding.use_abstract_mesh(mesh):
            result = jax.block_until_ready(jax.jit(run)(*arguments))
        races = interpret_pallas_call.races
        assert races is not None and not races.races_found
        yield mode, result
