"""Where rows come from: versions, device and threads; and the compilation cache on disk."""

import contextlib
import hashlib
import importlib.metadata
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.monitoring

import kvjax
import pallas_kernels

PACKAGES = ("jax", "jaxlib", "numpy", "flax", "kvjax")
_CACHE_HIT = "/jax/compilation_cache/cache_hits"


def environment() -> dict[str, Any]:
    """Versions, device and CPU threads, as they go into every row.

    >>> environment()["versions"]["jax"] == jax.__version__
    True
    """
    device = jax.devices()[0]
    return {
        "versions": {"python": platform.python_version(), **{p: _version(p) for p in PACKAGES}},
        "device": f"{device.platform}: {_device_name(device)}",
        "devices": jax.device_count(),
        "cpus": os.cpu_count(),
        "threads": available_threads(),
    }


def code_fingerprint() -> str:
    """SHA-256 of the source of kvjax and its kernels, 16 hex digits: what gave a row its data."""
    digest = hashlib.sha256()
    for package in (kvjax, pallas_kernels):
        root = Path(str(package.__file__)).parent
        for file in sorted(root.rglob("*.py")):
            digest.update(f"{package.__name__}/{file.relative_to(root).as_posix()}\0".encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def available_threads() -> int:
    """CPU threads that this process may run on; XLA's pool has as many."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def enable_compilation_cache() -> str | None:
    """Keep compiled programs on disk, all of them, so that a second run starts at once.

    The folder is JAX_COMPILATION_CACHE_DIR if that is set (empty turns the cache off), else
    `kvjax/xla` in XDG_CACHE_HOME or in ~/.cache.

    Returns:
        A warning if the folder cannot be written to: then nothing is kept.
    """
    chosen = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    if chosen == "":
        return None
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = Path(chosen) if chosen else base / "kvjax" / "xla"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe-{os.getpid()}"
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        return (
            f"compiled programs are not kept: {folder}: {error.strerror or error} "
            "(set JAX_COMPILATION_CACHE_DIR)"
        )
    jax.config.update("jax_compilation_cache_dir", str(folder))
    # The defaults leave out what compiles within a second: most of what an ablation runs.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    return None


@contextlib.contextmanager
def count_cache_hits() -> Iterator[list[int]]:
    """Count the programs that are read from the compilation cache within the block.

    Yields:
        A list whose only element grows.
    """
    hits = [0]

    def listen(event: str, **_: Any) -> None:
        if event == _CACHE_HIT:
            hits[0] += 1

    jax.monitoring.register_event_listener(listen)
    try:
        yield hits
    finally:
        jax.monitoring.unregister_event_listener(listen)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # run from a checkout
        return getattr(sys.modules.get(package), "__version__", None)


def _device_name(device: Any) -> str:
    if device.platform != "cpu":
        return device.device_kind
    with contextlib.suppress(OSError, StopIteration, IndexError):
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            line = next(line for line in file if line.startswith("model name"))
        return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
