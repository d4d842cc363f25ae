"""Compile a function for TPUs that are not here, down to the schedule of instruction bundles.

libtpu holds the compiler and a description of each chip. It reads its flags once, when it is
loaded, so `environment` has to be in place before the process starts.
"""

import collections
import os
import re
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding

from experiments.kernels.memory import MIB, temporary

IMPLEMENTATION = "tpu"
PACKAGES = ("libtpu",)
TARGETS = {
    "v4": "v4:2x2x1",
    "v5e": "v5e:2x2",
    "v5p": "v5p:2x2x1",
    "v6e": "v6e:2x2",
    "7x": "tpu7x:2x2x1",
}
TITLES = {name: f"TPU {name}" for name in TARGETS}
# The estimate of cycles aborts the process for the others; for v5e on a gather beside the kernel.
# It takes up to a minute a kernel, and follows no length that is known at run time only.
ESTIMATED = ("v5p", "v6e")
DUMP = "KVJAX_KERNELS_DUMP"


def plans(target: str) -> tuple[str, ...]:
    """Ways to compile, the next if one dies: some kernels have no estimate of cycles either."""
    return ("cycles", "plain") if target in ESTIMATED else ("plain",)


def environment(plan: str, scratch: Path) -> dict[str, str]:
    """Variables that the process which compiles has to start with."""
    dump = scratch / "tpu"
    (dump / "profile").mkdir(parents=True, exist_ok=True)
    flags = [
        f"--xla_jf_dump_to={dump}",
        "--xla_jf_dump_llo_text=true",
        "--xla_jf_dump_llo_pass_label_regex=.*final_bundles.*",
    ]
    if plan == "cycles":
        flags.append(f"--xla_jf_dump_static_llo_profile_to={dump / 'profile'}")
    return {
        DUMP: str(dump),
        "LIBTPU_INIT_ARGS": " ".join(flags),
        # No chip is used, so none has to be locked.
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        # No query to the network, no lines about missing metadata.
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-4",
        "TPU_WORKER_HOSTNAMES": "localhost",
    }


def compile_for(target: str, jitted: Any, arguments: Any, kernel: str, plan: str) -> dict[str, Any]:
    """Compile a jitted function; say what its kernels named `kernel`... need.

    Returns:
        VMEM that the kernel is given, bytes of temporary memory around it, bundles of its schedule
        by depth of loop (0 runs once, 1 is the grid, 2 a loop within), matrix instructions, DMAs,
        estimated cycles (None where the compiler gives none), bytes of the arguments and how much
        their layout in memory pads them.
    """
    dump = Path(os.environ[DUMP])
    for path in [*dump.glob("*.*"), *dump.glob("profile/*")]:
        path.unlink()
    device = topologies.get_topology_desc(platform="tpu", topology_name=TARGETS[target]).devices[0]
    sharding = SingleDeviceSharding(device)
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments
    )
    # Kernels ask which chip they are for; without the mesh they are told a CPU.
    chip = AbstractDevice(device.device_kind, device.num_cores, "tpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=chip)):
        lowered = jitted.trace(*shapes).lower(lowering_platforms=("tpu",))
    compiled = lowered.compile()
    schedules = _schedules(dump, kernel)
    if not schedules:
        raise RuntimeError(f"no kernel {kernel!r} in the program")
    bundles = sum((each["bundles"] for each in schedules), collections.Counter())
    cycles = sum(each.get("cycles", 0) for each in schedules)
    memory = compiled.memory_analysis()
    assert memory is not None
    held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(arguments))
    return {
        "kernels": len(schedules),
        "vmem_bytes": _vmem_bytes(compiled.as_text() or "", kernel),
        "temp_bytes": int(memory.temp_size_in_bytes),
        "bundles": {str(depth): count for depth, count in sorted(bundles.items())},
        "matmuls": sum(each["matmuls"] for each in schedules),
        "dmas": sum(each["dmas"] for each in schedules),
        "cycles": cycles or None,  # 0 says that it lost its way
        "argument_bytes": held,
        "padding": round(memory.argument_size_in_bytes / held, 3),
    }


BUNDLE = re.compile(r"\s*(?:0x)?[0-9a-f]+\s[A-Z ]*:([ >]*)\{")


def _schedules(dump: Path, kernel: str) -> list[dict[str, Any]]:
    """The schedule of each kernel in libtpu's dump."""
    found: dict[str, dict[str, Any]] = {}
    for path in dump.glob("*-final_bundles.txt"):
        match = re.fullmatch(r"\d+-(.*)-\d+-final_bundles\.txt", path.name)
        if match is None or not match[1].startswith(kernel):
            continue
        text = path.read_text()
        depths = (m[1].count(">") for m in map(BUNDLE.match, text.splitlines()) if m)
        found[match[1]] = {
            "bundles": collections.Counter(depths),
            "matmuls": len(re.findall(r"= vmat\w+", text)),
            "dmas": len(re.findall(r"= dma\.\w+", text)),
        }
    for path in dump.glob("profile/*.textproto"):
        estimates = re.findall(
            r'hlo_op_name: "([^"]+)"\s+estimated_cycles: (\d+)', path.read_text()
        )
        for name, cycles in estimates:
            if name in found:
                found[name]["cycles"] = int(cycles)
    return list(found.values())


def _vmem_bytes(program: str, kernel: str) -> int:
    """The most VMEM (memory space 1) that a custom call of this name is given."""
    sizes = [0]
    for line in program.splitlines():
        if "tpu_custom_call" in line and re.match(rf"\s*(ROOT )?%?{re.escape(kernel)}", line):
            used = re.search(r'"used_scoped_memory_configs":\[([^\]]*)\]', line)
            spaces = re.findall(
                r'"memory_space":"1","offset":"\d+","size":"(\d+)"', used[1] if used else ""
            )
            sizes += map(int, spaces)
    return max(sizes)


def cell(figures: dict[str, Any]) -> str:
    """What a table shows of a compiled kernel.

    >>> size = {"temp_bytes": 20 << 20, "argument_bytes": 90 << 20}
    >>> cell({"vmem_bytes": 3 << 20, "bundles": {"0": 40, "1": 250}, "cycles": 11400, **size})
    '3.0 MiB / 40+250 b / 11 kc, temp 20 MiB'
    """
    bundles = "+".join(str(count) for count in figures["bundles"].values())
    text = f"{figures['vmem_bytes'] / MIB:.1f} MiB / {bundles} b"
    if figures["cycles"] is not None:
        text += f" / {figures['cycles'] / 1000:.0f} kc"
    return text + temporary(figures)
