"""Run an ablation: every variant of a config on one model and one text, one row each.

The order of things is what a user waits for: the folder is tried first, then the model is loaded,
then every variant is checked, and only then is anything computed. A row is on the disk before the
next variant starts. A variant that fails is a row with its error and the others go on; the next run
of the same config tries it again. A run that is finished only writes its report again.
"""

import dataclasses
import hashlib
import shlex
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import jax
from rich.console import Console

import kvjax
from experiments import measure
from experiments.configuration import AblationConfig, flatten
from experiments.conversions import Conversion, describe
from experiments.environment import code_fingerprint, count_cache_hits, environment
from experiments.progress import RunProgress
from experiments.report import result_table, write_report
from experiments.rows import Row, RunFolder, fresh_name, open_run
from kvjax.data import load_text
from kvjax.errors import ConfigError, KvjaxError
from kvjax.language_model import LanguageModel

MAX_ERROR_CHARACTERS = 300
# Of the run's config; a row has one variant, and the model's own name.
ROW_HAS_ITS_OWN = ("variants", "conversions", "model")


def run_ablation(
    config: AblationConfig,
    out: Path,
    *,
    console: Console | None = None,
    command: str = "",
    load: Callable[..., LanguageModel] | None = None,
) -> int:
    """Run what is missing of an ablation, then write its report into `out`.

    Args:
        config: what to compare.
        out: folder of the rows and the report; the same config continues there.
        console: where progress and the table go; None is standard output.
        command: the command line, for the report.
        load: loads the model; None is `kvjax.load`.

    Returns:
        0 if every variant has a good row, else 1.

    Raises:
        KvjaxError: something is wrong with the config, a variant, the folder, the model or the
            text; nothing has been computed then.
    """
    console = console or Console()
    text = load_text(config.text)
    identity = {
        **flatten(config),
        "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "code": code_fingerprint(),  # rows of another codec of the same name are not finished
    }
    with open_run(out, identity) as folder:
        pending = [label for label in config.variants if not folder.finished(label)]
        if pending:
            _run_pending(config, folder, pending, text, console, load or kvjax.load)
        else:
            console.print(f"all {len(config.variants)} variants are there already: {out}")
        latest = folder.latest()
        rows = [latest[label] for label in config.variants if label in latest]
        files = write_report(out, config, rows, command=command)
        console.print(result_table(rows))
        console.print("written: " + ", ".join(shlex.quote(str(f)) for f in files), soft_wrap=True)
        failed = [row["variant"] for row in rows if row["status"] != "ok"]
        if failed:
            console.print(
                f"{len(failed)} of {len(rows)} variants failed: {', '.join(failed)}; "
                "run the same command to try them again",
                style="red",
                soft_wrap=True,
            )
        return 1 if failed else 0


def _run_pending(
    config: AblationConfig,
    folder: RunFolder,
    pending: list[str],
    text: str,
    console: Console,
    load: Callable[..., LanguageModel],
) -> None:
    """Load, check, and run the variants that have no good row, the baseline first."""
    console.print(f"loading {config.model} ({config.dtype})", highlight=False)
    lm = load(config.model, dtype=config.dtype)
    models = _models(config, lm, pending, console)
    measure.validate(config, {**dict.fromkeys(config.variants, lm), **models})
    material = measure.prepare(config, lm, text)
    facts = {
        "model": lm.name,
        "model_fingerprint": lm.fingerprint,
        **{name: value for name, value in vars(config).items() if name not in ROW_HAS_ITS_OWN},
        **environment(),
    }
    _check_same_model(folder, facts["model_fingerprint"])
    order = sorted(pending, key=lambda label: label != config.baseline)
    with RunProgress(console, total=len(order)) as progress:
        exact = measure.Exact(config, material, progress.stage)
        for label in order:
            progress.start(label)
            reference = None if label == config.baseline else folder.latest()[config.baseline]
            own = dataclasses.replace(material, lm=models.get(label, lm))
            row = run_variant(config, own, label, exact, reference, progress.stage)
            row |= facts | {"model": own.lm.name}
            folder.append(row)
            progress.finish(row)
            # No later variant runs its programs, and each holds on to 100 MB and more.
            jax.clear_caches()


def _models(
    config: AblationConfig, lm: LanguageModel, pending: list[str], console: Console
) -> dict[str, LanguageModel]:
    """Convert the model for the variants that ask for it; what they share is shared."""
    made: dict[Conversion, LanguageModel] = {}
    wanted = {label: c for label, c in config.conversions.items() if label in pending}
    for label, conversion in wanted.items():
        if conversion in made:
            continue
        console.print(f"converting for {label}: {describe(conversion)}", highlight=False)
        try:
            made[conversion], _ = conversion.apply(lm)
        except KvjaxError as error:
            raise type(error)(f"variant {label}: {error}") from None
    return {label: made[conversion] for label, conversion in wanted.items()}


def run_variant(
    config: AblationConfig,
    material: measure.Material,
    label: str,
    exact: measure.Exact,
    reference: Row | None,
    stage: measure.Stage,
) -> Row:
    """Measure one variant; an error of any kind ends in a row with status "failed"."""
    cache = config.variants[label]
    layers, conversion = material.lm.config.num_layers, config.conversions.get(label)
    row: Row = {
        "variant": label,
        "status": "ok",
        "error": None,
        "cache": cache.label,
        "conversion": describe(conversion) if conversion else None,
        "changes": measure.changes(
            cache, config.variants[config.baseline], layers, converted=conversion is not None
        ),
        "implementation": measure.implementations(cache, material.lm),
        "config": flatten(cache),
    }
    started = time.perf_counter()
    with count_cache_hits() as hits:
        try:
            if reference is not None and reference["status"] != "ok":
                raise RuntimeError(f"nothing to compare with: {config.baseline} failed")
            stage("bytes")
            row |= measure.measure_bytes(config, material, cache)
            # Speed first: its first run is where the programs that quality uses too are compiled.
            if config.repetitions:
                stage("speed")
                row |= measure.measure_generation(config, material, cache, reference)
            stage("quality")
            row |= measure.measure_quality(config, material, cache, exact, reference, stage)
        except Exception as error:  # one bad variant must not take the others with it
            row |= {
                "status": "failed",
                "error": one_line(error),
                "traceback": traceback.format_exc(),
            }
    # Programs that were read from disk: their compile time is the time of reading.
    return row | {"compiled_before": hits[0], "seconds": time.perf_counter() - started}


def one_line(error: BaseException) -> str:
    """Say what went wrong in one line.

    >>> one_line(MemoryError("no room  for it"))
    'MemoryError: no room for it'
    """
    text = " ".join(str(error).split())
    if not isinstance(error, KvjaxError):
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    short = text[:MAX_ERROR_CHARACTERS]
    return short if short == text else short + "..."


def _check_same_model(folder: RunFolder, fingerprint: str) -> None:
    """Refuse to add rows of other weights to those that are there."""
    for row in folder.latest().values():
        if row["status"] == "ok" and row["model_fingerprint"] != fingerprint:
            raise ConfigError(
                f"{folder.path} has rows of other weights (fingerprint "
                f"{row['model_fingerprint']}, now {fingerprint}); "
                f"use --out {fresh_name(folder.path)}"
            )
