"""`python -m experiments.device_check`: are the kernels right and fast on the GPU of this machine?

One command, under 6 minutes: runs the kernel tests, compares each op with its portable
implementation, measures what a copy moves, then times each op over bf16, int8, int4, float8 and
KIVI caches of up to a few GB beside what else could run. Caches are rotated past the L2, and each
timed program is a chain of calls of which each waits for the last. Needs no network.

Results go to device_check.json and device_check.md under $OUT, or runs/device.
"""

import argparse
import dataclasses
import functools
import gc
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from experiments.device.kernel_tests import NATIVE, KernelTests
from experiments.device.plan import FULL, TINY, Sizes, checks, usable, works
from experiments.device.report import Results, Row, check_lines, markdown, plain
from experiments.device.stores import num_copies
from experiments.device.timing import (
    Clock,
    Pool,
    calls_and_groups,
    chain,
    copy_bandwidth,
    measure,
)
from experiments.device.works import Check, Work

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "nvidia-cudnn-cu13", "numpy", "flax", "torch")
TEST_SECONDS = 150.0
TORCH_SECONDS = 40.0
# Of the time: what is not compiled by then is not timed. First our own, then the others.
OWN_SHARE, COMPILE_SHARE = 0.5, 0.6
GRACE = 10.0  # seconds for what still compiles then: it would disturb the timing
MARGIN = 8.0  # seconds kept for the end
TINY_TESTS = ("tests/pallas_kernels/test_common.py", "-k", "pack")
INTERPRETED = "interpreted: no timing is meaningful"
# A program of a test: compiled as fast as can be.
FAST = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
NOTES = (
    "ms: median of one call, its list of visible blocks and the merge of splits included.",
    "GB/s and of copy: bytes of live keys and values, over those that a copy reads and writes.",
    "over X: how many times as fast as X; peers but for xla hold the same tokens in bf16.",
)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.device_check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--tiny", action="store_true", help="run all of it on a CPU, interpreted")
    parser.add_argument("--seconds", type=float, default=330.0, help="end after about this long")
    parser.add_argument("--no-tests", action="store_true", help="do not run the kernel tests")
    parser.add_argument(
        "--out", type=Path, default=Path(os.environ.get("OUT") or "runs/device"), help="folder"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the check; 0: all is right, 1: a test, check or own kernel failed, 2: there is no GPU."""
    options = parse(sys.argv[1:] if argv is None else argv)
    clock = Clock(options.seconds)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # others share the device
    warnings.filterwarnings("ignore", category=DeprecationWarning)  # of the Triton backend
    if jax.default_backend() != "gpu" and not options.tiny:
        print(f"no GPU: JAX runs on {jax.default_backend()} (--tiny checks the logic there)")
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    run = Run(options, clock)
    watchdog = threading.Timer(options.seconds + 15, run.give_up)
    watchdog.daemon = True
    watchdog.start()
    try:
        run.everything()
    except Exception:
        run.report["skipped"].append(f"the rest: {traceback.format_exc()}")
        print(traceback.format_exc())
    watchdog.cancel()
    code = run.finish()
    if run.pool.busy:  # a compiling thread would keep the process, or bring it down at its end
        sys.stdout.flush()
        os._exit(code)
    return code


@dataclasses.dataclass
class Compiled:
    """Programs of one work on their way."""

    work: Work
    copies: int
    calls: int
    groups: list[list[int]]
    inputs: Future
    carry: Future
    program: Future


class Run:
    """One run: what it found so far, always ready to be written."""

    def __init__(self, options: argparse.Namespace, clock: Clock):
        self.options, self.clock = options, clock
        self.sizes: Sizes
        self.sizes, missing = usable(TINY if options.tiny else FULL)
        self.own, self.kernel = ("xla", "gpu_interpreted") if options.tiny else ("gpu", "gpu")
        cpus = os.cpu_count() or 1
        self.pool = Pool(1 if options.tiny else max(1, min(12, cpus - 4)))
        self.rows: list[Row] = []
        self.doing = "starting"
        self.builders: dict[Any, Future] = {}
        self.report: dict[str, Any] = {
            "label": INTERPRETED if options.tiny else "native",
            "device": device_report(),
            "notes": [INTERPRETED, *NOTES] if options.tiny else list(NOTES),
            "bandwidth": {},
            "tests": {},
            "checks": [],
            "torch": {},
            "skipped": missing,
        }

    def everything(self) -> None:
        """Compile beside the tests, then time while nothing else runs."""
        for name, value in self.report["device"].items():
            print(f"{name}: {value}")
        tests = self._start_tests()
        seconds = max(0.0, self.clock.left())
        until_own, until = (Clock(x * seconds).left for x in (OWN_SHARE, COMPILE_SHARE))
        checked = [(check, self._compile_check(check)) for check in checks(self.sizes, self.kernel)]
        planned = list(works(self.sizes, self.own))
        ours = [self._compile(work) for work in planned if work.implementation == self.own]
        self.doing = "kernel tests"
        if tests is not None:
            limit = 20.0 if self.options.tiny else TEST_SECONDS
            enough = Clock(min(limit, until_own())).left
            self.report["tests"] = tests.result(enough)
        self.pool.wait(until_own)  # tests and autotuning of others would disturb each other
        theirs = [self._compile(work) for work in planned if work.implementation != self.own]
        self.doing = "compiling"
        self.pool.wait(until, grace=GRACE)
        self._guarded("bandwidth", self._bandwidth)
        for check, future in checked:
            self._check(check, future)
        self._guarded("torch", self._torch)
        order = {id(item.work): item for item in (*ours, *theirs)}
        for work in planned:
            self._time(order[id(work)])

    def finish(self) -> int:
        """Write everything, print the short table last; returns the exit code."""
        results, bars = self._write()
        print()
        print("\n".join(check_lines(self.report)))
        print(f"PyTorch: {self.report['torch']}")
        for row in self.rows:
            if row.error:
                where = f"{row.op} {row.codec} {row.layout} {row.B}x{row.S}"
                print(f"did not run: {row.implementation} {where}: {row.error[:160]}")
        if self.report["skipped"]:
            print(f"skipped for time: {len(self.report['skipped'])}, listed in device_check.md")
        print()
        print("\n".join(self.report["notes"]))
        print(plain(results.table(self.sizes.main)))
        rates = ", ".join(f"{k} {v / 1e9:.0f}" for k, v in self.report["bandwidth"].items())
        print(f"GB/s: {rates}; written to {self.options.out}/device_check.json and .md")
        print("\n".join(bar.line for bar in bars))
        if self.options.tiny:
            print(INTERPRETED)
        tests = self.report["tests"]
        unfinished = any(x.startswith("the rest:") for x in self.report["skipped"])
        failed = (
            unfinished
            or tests.get("failures")
            or any(row.error and row.implementation == self.own for row in self.rows)
        )
        return 1 if failed or not all(check["good"] for check in self.report["checks"]) else 0

    def give_up(self) -> None:
        """End a run that hangs, with what it has."""
        self.report["skipped"].append(f"the rest: stopped while {self.doing}")
        self._write()
        print(f"stopped while {self.doing}", flush=True)
        os._exit(3)

    def _write(self):
        bandwidth = self.report["bandwidth"]
        copied = max((bandwidth[k] for k in ("copy", "kernel") if k in bandwidth), default=None)
        results = Results(self.rows, self.own, copied)
        bars = results.bars(self.sizes.bar, ("contiguous", f"page {self.sizes.page}"))
        data = {
            **self.report,
            "bars": [{**dataclasses.asdict(bar), "verdict": bar.verdict} for bar in bars],
            "rows": [
                {
                    **dataclasses.asdict(row),
                    "bytes_per_s": row.bytes_per_s,
                    "share_of_copy": results.share(row),
                    "over_bf16": results.over_bf16(row),
                }
                for row in self.rows
            ],
        }
        (self.options.out / "device_check.json").write_text(json.dumps(data, indent=1) + "\n")
        (self.options.out / "device_check.md").write_text(markdown(self.report, results, bars))
        return results, bars

    def _start_tests(self) -> KernelTests | None:
        if self.options.no_tests:
            self.report["tests"] = {"status": "not asked for"}
            return None
        selection = TINY_TESTS if self.options.tiny else NATIVE
        processes = 1 if self.options.tiny else 4
        selection = [str(ROOT / selection[0]), *selection[1:], f"--rootdir={ROOT}"]
        return KernelTests(self.options.out / "kernel_tests.txt", selection, processes)

    def _compiler_options(self) -> Any:
        return FAST if self.options.tiny else None

    def _compile_check(self, check: Check) -> Future:
        def build():
            call = jax.jit(check.difference, compiler_options=self._compiler_options())
            return call.lower(jnp.uint32(0)).compile()

        return self.pool.submit(build)

    def _builder(self, key: Any, function: Callable) -> Future:
        """A compiled function of a seed, shared by works whose `key` is the same."""
        if key not in self.builders:

            def build():
                call = jax.jit(function, compiler_options=self._compiler_options())
                return call.lower(jnp.uint32(0)).compile()

            self.builders[key] = self.pool.submit(build)
        return self.builders[key]

    def _compile(self, work: Work) -> Compiled:
        sizes, copies = self.sizes, 1
        if work.rotate:
            copies = num_copies(work.layout.bytes, sizes.l2_bytes, sizes.copies)
        calls, groups = calls_and_groups(copies, sizes.calls)

        def build():
            seed = jax.ShapeDtypeStruct((), jnp.uint32)
            carry, inputs = jax.eval_shape(work.carry, seed), jax.eval_shape(work.inputs, seed)
            program = jax.jit(
                chain(work.step, calls),
                donate_argnums=0,
                compiler_options=self._compiler_options(),
            )
            return program.lower(carry, (inputs,) * len(groups[0])).compile()

        at = (work.layout, work.queries)
        shared = work.implementation if work.implementation not in (self.own, "xla") else ""
        kind = work.op if work.op.startswith(("step", "latent")) else ""
        return Compiled(
            work=work,
            copies=copies,
            calls=calls,
            groups=groups,
            inputs=self._builder(("inputs", *at, kind, shared), work.inputs),
            carry=self._builder(("carry", *at, kind), work.carry),
            program=self.pool.submit(build),
        )

    def _bandwidth(self) -> None:
        self.report["bandwidth"] = copy_bandwidth(self.sizes.copied_bytes)

    def _check(self, check: Check, future: Future) -> None:
        entry: dict[str, Any] = {"label": check.label, "most": check.most, "good": False}
        self.doing = check.label
        try:
            if self.clock.left() < MARGIN:
                raise TimeoutError("no time left")
            call, entry["compile_s"] = future.result(timeout=0)
            entry["difference"] = float(call(jnp.uint32(7)))
            entry["good"] = entry["difference"] <= check.most
        except BaseException as error:
            entry["error"] = _reason(error)
            entry["good"] = not check.label.startswith(self.kernel)  # a peer may refuse
        self.report["checks"].append(entry)

    def _time(self, compiled: Compiled) -> None:
        work = compiled.work
        if self.clock.left() < MARGIN:
            self.report["skipped"].append(work.label)
            return
        self.doing = work.label
        row = Row(
            op=work.op,
            implementation=work.implementation,
            codec=work.layout.codec,
            layout=work.layout.word,
            B=work.layout.B,
            S=work.layout.S,
            live_bytes=work.layout.bytes,
            flops=work.flops,
            copies=compiled.copies,
        )
        try:
            row = dataclasses.replace(row, **self._measured(compiled))
        except BaseException as error:
            row = dataclasses.replace(row, error=_reason(error))
        self.rows.append(row)
        shown = f"{row.ms:.4g} ms" if row.ms else row.error
        print(f"[{self.clock.left():4.0f} s left] {work.label}: {shown}", flush=True)
        self._write()  # whoever ends this early finds what there is
        gc.collect()

    def _measured(self, compiled: Compiled) -> dict[str, Any]:
        inputs, _ = compiled.inputs.result(timeout=0)
        carry, _ = compiled.carry.result(timeout=0)
        program, compile_s = compiled.program.result(timeout=0)
        copies = [inputs(jnp.uint32(i)) for i in range(compiled.copies)]
        groups = [tuple(copies[i] for i in group) for group in compiled.groups]
        sizes = self.sizes
        found = measure(
            program,
            carry(jnp.uint32(99)),
            jax.block_until_ready(groups),
            compiled.calls,
            repetitions=sizes.repetitions,
            seconds=sizes.seconds,
            least=sizes.least,
        )
        finite = jnp.isfinite(jax.tree.leaves(found.carry)[0].astype(jnp.float32)).all()
        if not bool(finite):
            raise FloatingPointError("the output is not finite")
        return {"ms": found.median * 1e3, "seconds": found.seconds, "compile_s": compile_s}

    def _torch(self) -> None:
        sizes = self.sizes
        B, T, S = sizes.prefill
        N, K = sizes.heads
        at = {("decode", b, s): 1 for b, s in sizes.main} | {("prefill", B, S): T}
        per_token = 4 * K * sizes.width
        shapes = [
            {"B": b, "T": t, "S": s,
             "copies": num_copies(per_token * b * s, sizes.l2_bytes, sizes.copies)}
            for (_, b, s), t in at.items()
        ]  # fmt: skip
        seconds = min(TORCH_SECONDS, max(0.0, self.clock.left() - MARGIN))
        job = {"N": N, "K": K, "H": sizes.width, "shapes": shapes, "seconds": seconds / 2,
               "least": sizes.least}  # fmt: skip
        done = subprocess.run(
            [sys.executable, str(ROOT / "experiments/device/torch_peer.py")],
            input=json.dumps(job),
            capture_output=True,
            text=True,
            timeout=seconds,
        )
        lines = [json.loads(x) for x in done.stdout.splitlines() if x.startswith("{")]
        self.report["torch"] = lines[0] if lines else {"refused": done.stderr[-300:]}
        for (op, b, s), line in zip(at, lines[1:], strict=False):
            taken = tuple(line.get("seconds", ()))
            self.rows.append(
                Row(
                    op=op,
                    implementation="torch",
                    codec="bf16",
                    layout="contiguous",
                    B=b,
                    S=s,
                    live_bytes=per_token * b * s,
                    copies=line["copies"],
                    seconds=taken,
                    ms=sorted(taken)[len(taken) // 2] * 1e3 if taken else None,
                    error=line.get("error"),
                )
            )

    def _guarded(self, name: str, part: Callable[[], None]) -> None:
        self.doing = name
        try:
            part()
        except Exception as error:
            self.report["skipped"].append(f"{name}: {_reason(error)}")


def _reason(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        raise error
    if isinstance(error, CancelledError | TimeoutError) and not str(error):
        return "not compiled in time"
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


@functools.cache
def device_report() -> dict[str, str]:
    """Device, driver and versions."""
    device = jax.devices()[0]
    found = {"device": f"{device.platform}: {device.device_kind}", "cpus": str(os.cpu_count())}
    found["python"] = platform.python_version()
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    fields = "name,driver_version,memory.total,clocks.max.memory"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
        found["nvidia-smi"] = (done.stdout or done.stderr).strip() or "says nothing"
    except (OSError, subprocess.TimeoutExpired) as error:
        found["nvidia-smi"] = f"does not run: {type(error).__name__}"
    return found


if __name__ == "__main__":
    sys.exit(main())
