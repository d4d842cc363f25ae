"""The command line: `kvjax list`, `ablate`, `generate`, `convert`, `bench` and `kernels`."""

import dataclasses
import importlib
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Literal

import tyro

# Nothing here imports jax: --help and typing errors must answer at once.
INTERRUPTED = 130


@dataclasses.dataclass(frozen=True, kw_only=True)
class List:
    """Show what can be chosen: layouts, codecs, policies and position rules with their knobs.

    Also what goes together, and which models, texts and configs there are.

    Try this:

        kvjax list
    """

    def run(self) -> int:
        """Print the listing."""
        from experiments.listing import print_listing

        print_listing(_console())
        return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ablate:
    """Compare caches on one model and one text: what each costs, and what it loses.

    Every variant of the config becomes a row (bytes, perplexity, KL and agreement with the exact
    cache, prefill and decode speed, compile time), written as it finishes; then results.csv,
    report.md and plots. The same command goes on where it was stopped and tries failed variants
    again. Exit code 1: a variant failed; 2: something in the command or the config is wrong.

    Try these:

        kvjax ablate configs/quickstart.py

        kvjax ablate quickstart --set num_tokens=512 --set chunk=1 --out runs/a

        kvjax ablate quickstart --set "variants.int4.codec=int(bits=4, group_size=64)" --out runs/b
    """

    config: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="CONFIG")]
    """A Python file with get_config(), or the name of one that comes with kvjax."""
    set: Annotated[
        tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="KEY=VALUE")
    ] = ()
    """Change a value of the config; dots reach into it. May be given several times."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """Folder of the results; runs/NAME-OF-THE-CONFIG if not given."""
    implementation: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """Attention implementation of all variants: auto, reference, xla, tpu or gpu."""

    def run(self) -> int:
        """Run the ablation."""
        _keep_compiled_programs()
        from experiments.ablate import run_ablation
        from experiments.configuration import apply_overrides, find_config, load_config

        config = apply_overrides(load_config(self.config), self.set)
        if self.implementation is not None:
            config = config.with_implementation(self.implementation)
        out = self.out or Path("runs") / find_config(self.config).stem
        try:
            return run_ablation(config, out, console=_console(), command=self._command())
        except KeyboardInterrupt:
            note = "finished rows are kept, the same command goes on from them"
            print(f"kvjax: interrupted; {note}", file=sys.stderr)
            return INTERRUPTED

    def _command(self) -> str:
        """The command as a user would type it."""
        words = ["kvjax", "ablate", self.config]
        words += [word for each in self.set for word in ("--set", each)]
        words += ["--out", str(self.out)] if self.out else []
        words += ["--implementation", self.implementation] if self.implementation else []
        return shlex.join(words)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generate:
    """Continue a prompt with any cache; the text appears token by token.

    Try these:

        kvjax generate "The sea is" --max-new-tokens 40

        kvjax generate "The sea is" --cache "codec=int(bits=4)" --cache "layout=paged(page_size=32)"

        kvjax generate "The sea is" --cache "policy=window(window=64)" --temperature 0.8 --seed 1
    """

    prompt: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="PROMPT")]
    """The text to continue."""
    cache: Annotated[
        tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="CHOICE=MEMBER")
    ] = ()
    """A choice of the cache, as `kvjax list` shows them. May be given several times."""
    model: str = "smollm2-135m"
    """A name that `kvjax list` shows, a folder, or a .gguf file."""
    dtype: str | None = None
    """Of weights and activations: float32 or bfloat16; what was saved, or float32."""
    max_new_tokens: int = 64
    """Most new tokens; an end-of-text token ends earlier."""
    temperature: float = 0.0
    """0 takes the likeliest token, higher is more random."""
    top_p: float = 1.0
    """Draw from the fewest likeliest tokens that reach this probability."""
    seed: int = 0
    """Of the random draws."""

    def run(self) -> int:
        """Generate."""
        _keep_compiled_programs()
        from experiments.generate import generate, parse_cache
        from kvjax import Sampling

        generate(
            self.prompt,
            cache=parse_cache(self.cache),
            model=self.model,
            dtype=self.dtype,
            max_new_tokens=self.max_new_tokens,
            sampling=Sampling(temperature=self.temperature, top_p=self.top_p, seed=self.seed),
            out=sys.stdout,
            notes=sys.stderr,
        )
        return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Convert:
    """Turn a model with grouped attention into one that caches latents, or fewer KV heads.

    `latent` factorises keys and values of each layer together (a joint SVD) beside the rotary
    channels that keep their positions: exact with all of these and a full latent, else lossy.
    `grouped` averages neighbouring KV heads, or repeats them. Nothing is trained. The error of
    every layer is printed and saved with the model.

    Try these:

        kvjax convert smollm2-135m --to latent --latent-dim 160 --calibrate bible-web --out runs/mla

        kvjax convert smollm2-135m --to grouped --kv-heads 1 --out runs/mqa

        kvjax generate "The sea is" --model runs/mla
    """

    source: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]
    """A name that `kvjax list` shows, a folder, or a .gguf file."""
    to: Literal["latent", "grouped"]
    """What the model shall cache."""
    out: Annotated[Path, tyro.conf.arg(metavar="FOLDER")]
    """New folder for the model."""
    latent_dim: int | None = None
    """Width of the latent (with --to latent)."""
    rope_dim: int | None = None
    """Rotary channels of each KV head that keep their positions; all if not given."""
    calibrate: str | None = None
    """Text that the factors shall be best for: a name that `kvjax list` shows, or a file."""
    calibration_tokens: int = 4096
    """Tokens of that text."""
    kv_heads: int | None = None
    """Number of KV heads (with --to grouped)."""
    dtype: str | None = None
    """Of the weights: float32 or bfloat16; what was saved, or float32."""

    def run(self) -> int:
        """Convert and save."""
        from experiments.convert import convert

        convert(self.source, self._conversion(), self.out, dtype=self.dtype, console=_console())
        return 0

    def _conversion(self):
        from experiments.conversions import ToGrouped, ToLatent
        from kvjax.errors import ConfigError

        latent = {
            "latent_dim": self.latent_dim,
            "rope_dim": self.rope_dim,
            "calibrate": self.calibrate,
        }
        foreign = {"kv_heads": self.kv_heads} if self.to == "latent" else latent
        for name, value in foreign.items():
            if value is not None:
                option = "--" + name.replace("_", "-")
                raise ConfigError(f"{option} has no meaning with --to {self.to}")
        if self.to == "grouped":
            if self.kv_heads is None:
                raise ConfigError("--to grouped needs --kv-heads")
            return ToGrouped(num_kv_heads=self.kv_heads)
        if self.latent_dim is None:
            raise ConfigError("--to latent needs --latent-dim")
        return ToLatent(
            latent_dim=self.latent_dim,
            rope_dim=self.rope_dim,
            calibration=self.calibrate,
            calibration_tokens=self.calibration_tokens,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bench:
    """Measure prefill and decode speed on this machine; `kvjax bench --help` shows its options.

    Try this:

        kvjax bench --help
    """

    def run(self) -> int:
        """Never called: `main` hands everything after `bench` to the benchmarks."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernels:
    """Compile every Pallas kernel for GPUs and TPUs that are not here, and show what each needs.

    A matrix of op x codec x target: compiled or why not; registers, spills and shared memory of a
    GPU; VMEM and the static schedule of a TPU; and the bytes that a call moves over those
    that it needs. No accelerator is used: the compilers come with the extra `deviceless`, which
    `make kernels` installs. Nothing is run, so this says nothing of real speed.

    Each (kernel, target) compiles in a process of its own with a time limit, since a target that
    lacks something often aborts its compiler. Exit code 1: some kernel did not compile where the
    hardware could run it.

    Try these:

        kvjax kernels --targets sm_90 v6e --only int4

        kvjax kernels --targets tpu

        kvjax kernels --out docs/results
    """

    out: Annotated[Path, tyro.conf.arg(metavar="FOLDER")] = Path("runs/kernels")
    """Folder for kernels.json and kernels.md."""
    targets: Annotated[tuple[str, ...], tyro.conf.arg(metavar="TARGET")] = ("cuda", "tpu")
    """Of cuda: sm_80 sm_90 sm_100 sm_120; of tpu: v4 v5e v5p v6e 7x; cuda and tpu are all."""
    only: Annotated[str, tyro.conf.arg(metavar="TEXT")] = ""
    """Only cases whose op/name contains this, as attention/int4."""
    timeout: Annotated[float, tyro.conf.arg(metavar="SECONDS")] = 90.0
    """Limit of each compilation."""
    jobs: int = 1
    """Compilations at the same time; each takes a core and up to 1 GB."""
    cycles: bool = False
    """Ask for TPU v5p and v6e for an estimate of cycles, too: up to a minute each, and rough."""

    def run(self) -> int:
        """Compile the matrix."""
        from experiments.kernels.main import run

        return run(self, _console())


COMMANDS: dict[str, type] = {
    "list": List,
    "ablate": Ablate,
    "generate": Generate,
    "convert": Convert,
    "bench": Bench,
    "kernels": Kernels,
}

HELP = """usage: kvjax COMMAND [options]

A laboratory for the key-value cache of transformer decoders.

commands:
{commands}

`kvjax COMMAND --help` shows the options of a command, with examples. A good start:
  kvjax list
  kvjax ablate configs/quickstart.py
  kvjax generate "The sea is" --cache "codec=int(bits=4)"
"""


def help_text() -> str:
    """The overview: each command with the first line of its doc."""
    lines = [(name, (cls.__doc__ or "").partition("\n")[0]) for name, cls in COMMANDS.items()]
    return HELP.format(commands="\n".join(f"  {name:<10}{line}" for name, line in lines))


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code.

    0 is good, 1 says that a variant or a kernel failed, 2 that the user has something to mend (one
    line on standard error says what), 130 that it was interrupted.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(help_text(), end="")
        return 0
    if arguments[0] == "bench":
        return _guarded(lambda: _bench(arguments[1:]))
    try:
        command = tyro.extras.subcommand_cli_from_dict(
            COMMANDS,
            prog="kvjax",
            description="A laboratory for the key-value cache of transformer decoders.",
            args=arguments,
        )
    except SystemExit as stop:  # --help, or a typing error that tyro has explained
        return stop.code if isinstance(stop.code, int) else 2
    return _guarded(command.run)


def _guarded(run: Callable[[], int]) -> int:
    """Turn errors that a user can mend into one line and exit code 2."""
    from kvjax.errors import KvjaxError

    try:
        return run()
    except KvjaxError as error:
        print(f"kvjax: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("kvjax: interrupted", file=sys.stderr)
        return INTERRUPTED


def _bench(arguments: list[str]) -> int:
    _keep_compiled_programs()
    return importlib.import_module("experiments.bench.main").run(arguments)


def _keep_compiled_programs() -> None:
    from experiments.environment import enable_compilation_cache

    warning = enable_compilation_cache()
    if warning:
        print(f"kvjax: warning: {warning}", file=sys.stderr)


def _console():
    """A console that never cuts a table: files and pipes have no width."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=160)
