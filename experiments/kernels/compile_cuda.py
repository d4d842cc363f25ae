"""Compile a function for NVIDIA GPUs that are not here, down to machine code.

XLA's own pipeline, as on a machine with the GPU; all that it needs of the chip is on a data sheet.
"""

import dataclasses
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from experiments.kernels.memory import MIB, temporary

IMPLEMENTATION = "gpu"
PACKAGES = (
    "jax-cuda13-plugin",
    "jax-cuda13-pjrt",
    "nvidia-cuda-nvcc",
    "nvidia-nvvm",
    "nvidia-cuda-nvdisasm",
)
KIB, GIB = 2**10, 2**30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpu:
    """Data-sheet figures of a chip, as XLA's GpuTargetConfigProto wants them."""

    name: str
    major: int
    minor: int
    multiprocessors: int
    shared: int  # KiB of a multiprocessor; a block gets one less
    bandwidth: int  # GB/s
    l2: int  # MiB
    memory: int  # GiB
    clock: float  # GHz
    fpus: int = 128
    threads: int = 2048

    @property
    def architecture(self) -> str:
        """The name that ptxas knows; from Hopper on with the instructions of this chip alone."""
        return f"sm_{self.major}{self.minor}{'a' if self.major >= 9 else ''}"

    def config(self) -> str:
        """Text of the proto."""
        extension = "feature_extension: ACCELERATED_FEATURES" if self.major >= 9 else ""
        return f"""
            gpu_device_info {{
              threads_per_block_limit: 1024  threads_per_warp: 32
              shared_memory_per_block: 49152
              shared_memory_per_core: {self.shared * KIB}
              shared_memory_per_block_optin: {(self.shared - 1) * KIB}
              threads_per_core_limit: {self.threads}
              core_count: {self.multiprocessors}  fpus_per_core: {self.fpus}
              block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
              thread_dim_limit_x: 1024  thread_dim_limit_y: 1024  thread_dim_limit_z: 64
              registers_per_core_limit: 65536  registers_per_block_limit: 65536
              memory_bandwidth: {self.bandwidth * 10**9}  l2_cache_size: {self.l2 * MIB}
              clock_rate_ghz: {self.clock}  device_memory_size: {self.memory * GIB}
              cuda_compute_capability {{ major: {self.major} minor: {self.minor} {extension} }}
              device_vendor: "NVIDIA Corporation"  device_address_bits: 64  name: "{self.name}"
              driver_version: "13.0.0"  runtime_version: "13.0.0"
              compile_time_toolkit_version: "13.0.0"  dnn_version: "9.12.0"
            }}
            platform_name: "CUDA"
            dnn_version_info {{ major: 9 minor: 12 patch: 0 }}
            device_description_str: "{self.name}"
        """


# fmt: off
TARGETS = {
    "sm_80": Gpu(name="NVIDIA A100-SXM4-80GB", major=8, minor=0, multiprocessors=108, shared=164,
                 bandwidth=2039, l2=40, memory=80, clock=1.41, fpus=64),
    "sm_90": Gpu(name="NVIDIA H100 80GB HBM3", major=9, minor=0, multiprocessors=132, shared=228,
                 bandwidth=3352, l2=50, memory=80, clock=1.98),
    "sm_100": Gpu(name="NVIDIA B200", major=10, minor=0, multiprocessors=148, shared=228,
                  bandwidth=7672, l2=126, memory=178, clock=1.965),
    "sm_120": Gpu(name="NVIDIA RTX PRO 6000", major=12, minor=0, multiprocessors=188, shared=100,
                  bandwidth=1792, l2=128, memory=94, clock=2.6, threads=1536),
}
# fmt: on
TITLES = {
    "sm_80": "sm_80 (A100)",
    "sm_90": "sm_90 (H100)",
    "sm_100": "sm_100 (B200)",
    "sm_120": "sm_120 (RTX PRO 6000)",
}


def plans(target: str) -> tuple[str, ...]:
    """There is one way to compile for a GPU."""
    return ("plain",)


def environment(plan: str, scratch: Path) -> dict[str, str]:
    """Variables that the process which compiles has to start with."""
    return {}


def tool(name: str) -> str | None:
    """Path of a program of the CUDA toolkit: of the wheels, or else of this machine."""
    for folder in sys.path:
        path = Path(folder) / "nvidia" / "cu13" / "bin" / name
        if path.is_file():
            return str(path)
    return shutil.which(name)


def compile_for(target: str, jitted: Any, arguments: Any, kernel: str, plan: str) -> dict[str, Any]:
    """Compile a jitted function; say what its kernels named `kernel`... need, the largest of each.

    Returns:
        registers and spilled bytes of a thread, shared bytes of a block, warps, the instructions of
        the machine code and of its longest loop, the kind of matrix instruction, and the bytes of
        temporary memory around the kernel and of its arguments.
    """
    gpu = TARGETS[target]
    device = topologies.get_topology_desc(
        platform="cuda", topology_name=target, topology="1x1x1", target_config=gpu.config()
    ).devices[0]
    sharding = SingleDeviceSharding(device)
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments
    )
    lowered = jitted.trace(*shapes).lower(lowering_platforms=("cuda",))
    with tempfile.TemporaryDirectory() as dump:
        compiled = lowered.compile(compiler_options={"xla_dump_to": dump})
        kernels = list(_resources(Path(dump), gpu.architecture, kernel).values())
    if not kernels:
        raise RuntimeError(f"no kernel {kernel!r} in the program")
    largest = {key: max(each.get(key, 0) for each in kernels) for key in NUMBERS}
    units = sorted({each["matrix_unit"] for each in kernels} - {"none"})
    memory = compiled.memory_analysis()
    assert memory is not None
    return {
        **largest,
        "kernels": len(kernels),
        "matrix_unit": ", ".join(units) or "none",
        "temp_bytes": int(memory.temp_size_in_bytes),
        "argument_bytes": sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(arguments)),
    }


NUMBERS = ("registers", "spill_bytes", "shared_bytes", "warps", "instructions", "loop_instructions")
LAUNCH = re.compile(r"(\S+) grid: \[[^\]]*\] threads: \[(\d+)[^\]]*\]\s+shared_memory: (\d+)")
USAGE = re.compile(
    r"entry function '(\S+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads"
    r".*?Used (\d+) registers",
    re.DOTALL,
)


def _resources(dump: Path, architecture: str, kernel: str) -> dict[str, dict[str, Any]]:
    """Figures of each kernel of the name, from XLA's dump of a compilation and from ptxas."""
    found: dict[str, dict[str, Any]] = {}
    for path in dump.glob("*thunk_sequence.txt"):
        for name, threads, shared in LAUNCH.findall(path.read_text()):
            found[name] = {"warps": int(threads) // 32, "shared_bytes": int(shared)}
    ptxas, nvdisasm = tool("ptxas"), tool("nvdisasm")
    assert ptxas is not None, "it comes with PACKAGES"
    for path in dump.glob("*.ptx"):
        ptx, cubin = path.read_text(), path.with_suffix(".cubin")
        if not re.search(rf"\.entry {re.escape(kernel)}", ptx):  # XLA's own, or none
            continue
        command = [ptxas, "-v", "--gpu-name", architecture, str(path), "-o", str(cubin)]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        code = _machine_code(nvdisasm, cubin) if nvdisasm else {}
        for name, stores, loads, registers in USAGE.findall(report):
            found.setdefault(name, {}).update(
                registers=int(registers),
                spill_bytes=int(stores) + int(loads),
                matrix_unit=_matrix_unit(ptx),
                **code.get(name, {}),
            )
    return {name: figures for name, figures in found.items() if "registers" in figures}


def _matrix_unit(ptx: str) -> str:
    for instruction in ("tcgen05.mma", "wgmma", "mma.sync"):
        if instruction in ptx:
            return instruction
    return "none"


SECTION = re.compile(r"^\s*\.section\s+\.text\.(\w+)")
LABEL = re.compile(r"^\s*(\.L_x_\d+):")
INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)(.*);")


def _machine_code(nvdisasm: str, cubin: Path) -> dict[str, dict[str, int]]:
    """Instructions of each kernel, and of its longest loop that holds no other."""
    command = [nvdisasm, "-c", str(cubin)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    counts: dict[str, dict[str, int]] = {}
    name, number, labels = "", 0, {}
    loops: list[tuple[int, int]] = []

    def close() -> None:
        if name:
            inner = [
                end - start + 1
                for start, end in loops
                if not any((start <= s and e < end) or (start < s and e <= end) for s, e in loops)
            ]
            counts[name] = {"instructions": number, "loop_instructions": max(inner, default=0)}

    for line in text.splitlines():
        if match := SECTION.match(line):
            close()
            name, number, labels, loops = match[1], 0, {}, []
        elif match := LABEL.match(line):
            labels[match[1]] = number
        elif match := INSTRUCTION.match(line):
            target = re.search(r"\.L_x_\d+", match[2])
            if match[1].startswith("BRA") and target and labels.get(target[0], number) < number:
                loops.append((labels[target[0]], number))
            number += 1
    close()
    return counts


def cell(figures: dict[str, Any]) -> str:
    """What a table shows of a compiled kernel.

    >>> size = {"temp_bytes": 1, "argument_bytes": 90}
    >>> cell({"registers": 96, "shared_bytes": 20480, "spill_bytes": 8, **size})
    '96 r / 20 KiB, spills 8 B'
    """
    text = f"{figures['registers']} r / {figures['shared_bytes'] / KIB:.0f} KiB"
    if figures["spill_bytes"]:
        text += f", spills {figures['spill_bytes']} B"
    return text + temporary(figures)
