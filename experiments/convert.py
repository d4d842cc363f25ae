"""`kvjax convert`: a model that caches less, saved for `kvjax.load`, with what it lost."""

import dataclasses
import json
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

import kvjax
from experiments.conversions import Conversion, describe
from kvjax.checkpoints.native import make_new_folder
from kvjax.conversion import ConversionReport

REPORT = "conversion.json"


def convert(
    source: str, conversion: Conversion, out: Path, *, dtype: str | None, console: Console
) -> None:
    """Convert a model, print the error of each layer, and save it into a new folder.

    Raises:
        KvjaxError: the folder exists, the model cannot be read, or it cannot be converted.
    """
    # Made and removed again: what cannot be written is said before the work.
    make_new_folder(out)
    out.rmdir()
    lm = kvjax.load(source, dtype=dtype)
    new, report = conversion.apply(lm)
    console.print(error_table(report))
    console.print(
        f"{lm.name} -> {new.name} ({describe(conversion)}): {report.bytes_before:,} -> "
        f"{report.bytes_after:,} bytes a cached token in {new.model.dtype}",
        highlight=False,
    )
    new.save(out)
    facts = {"conversion": dataclasses.asdict(conversion), **dataclasses.asdict(report)}
    (out / REPORT).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    console.print(
        f'written: {out}; try: kvjax generate "The sea is" --model {out}', highlight=False
    )


def error_table(report: ConversionReport) -> Table:
    """Errors by layer, as relative Frobenius norms."""
    on = "on the calibration text" if report.weighted else "of the matrices"
    table = Table(box=box.SIMPLE_HEAD, title=f"relative error {on}", pad_edge=False)
    for title in ("layer", "keys", "values", "rotation dropped"):
        table.add_column(title, justify="right")
    for i, layer in enumerate(report.layers):
        figures = (layer.keys, layer.values, layer.unrotated)
        table.add_row(str(i), f"{figures[0]:.2e}", f"{figures[1]:.2e}", f"{figures[2]:.1%}")
    return table
