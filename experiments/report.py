"""Turn rows into `results.csv`, `report.md` and a table for the terminal."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich import box
from rich.table import Table

from experiments.configuration import AblationConfig
from experiments.plots import write_plots
from experiments.rows import Row, write_atomically


class Column(NamedTuple):
    """A figure of a row as people read it."""

    title: str
    key: str
    form: str  # a format specification; "" is text
    meaning: str


COLUMNS = (
    Column("variant", "variant", "", "label in the config"),
    Column("model", "conversion", "", "how the model was converted; - is not"),
    Column(
        "bytes/token",
        "bytes_per_token",
        ",.0f",
        "all buffers of a cache for the whole text, over its tokens",
    ),
    Column("bits", "effective_bits", ".2f", "a stored value, with its share of scales"),
    Column("perplexity", "perplexity", ".3f", "of the text, teacher-forced through the cache"),
    Column("x exact", "perplexity_ratio", ".3f", "perplexity over that of the baseline"),
    Column("KL", "kl", ".2g", "KL(baseline || variant), nats a token"),
    Column("top-1", "top1_agreement", ".1%", "tokens where both put the same one first"),
    Column(
        "same text",
        "greedy_divergence",
        "d",
        "greedy tokens before the first that differs from the baseline's",
    ),
    Column("prefill/s", "prefill_tokens_per_s", ",.0f", "prompt tokens a second, steady"),
    Column("decode/s", "decode_tokens_per_s", ",.1f", "generated tokens a second, steady"),
    Column(
        "compile s",
        "compile_s",
        ".1f",
        "first prefill and generation less steady ones; short if read from the compilation cache",
    ),
    Column("runs", "implementation", "", "attention implementation that ran"),
    Column("status", "status", "", "ok, or failed"),
)

# results.csv: these first, then whatever else the rows hold that is a single value.
CSV_FIRST = (
    "variant",
    "status",
    "error",
    "cache",
    "conversion",
    "changes",
    "bytes_per_token",
    "cache_bytes",
    "payload_bytes",
    "scales_bytes",
    "tail_bytes",
    "metadata_bytes",
    "tables_bytes",
    "padding_bytes",
    "effective_bits",
    "perplexity",
    "perplexity_ratio",
    "kl",
    "top1_agreement",
    "greedy_divergence",
    "prefill_tokens_per_s",
    "decode_tokens_per_s",
    "compile_s",
    "implementation",
)
CSV_LEFT_OUT = ("config", "traceback", "greedy_tokens")


def write_report(
    out: Path, config: AblationConfig, rows: Sequence[Row], command: str = ""
) -> list[Path]:
    """Write the table, the page and the plots of a run.

    Returns:
        The files, the page first.
    """
    plots = write_plots(out, rows, config)
    write_atomically(out / "results.csv", csv_text(rows))
    page = markdown(out.name, config, rows, [p for p in plots if p.suffix == ".png"], command)
    write_atomically(out / "report.md", page)
    return [out / "report.md", out / "results.csv", *plots]


def shown(row: Mapping[str, Any], column: Column) -> str:
    """A figure of a row as text; "-" where it was not measured.

    >>> shown({"kl": 0.01234}, COLUMNS[6])
    '0.012'
    """
    value = row.get(column.key)
    return "-" if value is None else format(value, column.form)


def used_columns(rows: Sequence[Row]) -> list[Column]:
    """Columns that some row has a figure for: a run without speed shows none."""
    return [c for c in COLUMNS if any(row.get(c.key) is not None for row in rows)]


def result_table(rows: Sequence[Row]) -> Table:
    """The rows as a table for the terminal."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    columns = used_columns(rows)
    for column in columns:
        table.add_column(column.title, justify="right" if column.form else "left", no_wrap=True)
    for row in rows:
        style = None if row["status"] == "ok" else "red"
        table.add_row(*(shown(row, column) for column in columns), style=style)
    return table


def csv_text(rows: Sequence[Row]) -> str:
    """All rows with every single-valued figure; nested facts become dotted columns."""
    flat = [{k: v for k, v in _flat(row) if k.split(".")[0] not in CSV_LEFT_OUT} for row in rows]
    columns = dict.fromkeys([*CSV_FIRST, *(key for row in flat for key in row)])
    text = io.StringIO()
    writer = csv.DictWriter(text, list(columns), restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return text.getvalue()


def _flat(row: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in row.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def markdown(
    name: str, config: AblationConfig, rows: Sequence[Row], plots: Sequence[Path], command: str = ""
) -> str:
    """The page of a run: how it was made, the table, the plots, what the columns mean."""
    lines = [f"# {name}", ""]
    if command:
        lines += ["```", command, "```", ""]
    lines += [_setting(config), ""]
    if rows:
        lines += [*_where(rows), ""]
    lines += [*markdown_table(rows), ""]
    failed = [row for row in rows if row["status"] != "ok"]
    if failed:
        lines += ["Failed:", "", *(f"- {row['variant']}: {row['error']}" for row in failed), ""]
    lines += [line for plot in plots for line in (f"![{plot.stem}]({plot.name})", "")]
    lines += ["| variant | cache |", "| --- | --- |"]
    lines += [f"| {row['variant']} | {row['cache']} |" for row in rows]
    lines += ["", *(f"- **{c.title}**: {c.meaning}" for c in used_columns(rows))]
    return "\n".join(lines) + "\n"


def markdown_table(rows: Sequence[Row]) -> list[str]:
    """The rows as lines of a Markdown table."""
    columns = used_columns(rows)
    lines = [
        "| " + " | ".join(column.title for column in columns) + " |",
        "| " + " | ".join("---:" if column.form else "---" for column in columns) + " |",
    ]
    return lines + ["| " + " | ".join(shown(row, c) for c in columns) + " |" for row in rows]


def _setting(config: AblationConfig) -> str:
    text = (
        f"Model {config.model} ({config.dtype}); quality on {config.num_tokens:,} tokens of "
        f"{config.text} from token {config.text_start}, scored from position {config.score_from}, "
        f"{config.chunk} at a time, against {config.baseline}"
    )
    if config.repetitions:
        text += (
            f"; speed at a prompt of {config.prompt_tokens:,} and {config.new_tokens} new tokens, "
            f"batch {config.batch}, median of {config.repetitions}"
        )
    return text + "."


def _where(rows: Sequence[Row]) -> list[str]:
    """One line for each environment that rows come from: normally one."""
    places: dict[str, list[str]] = {}
    for row in rows:
        versions = ", ".join(f"{name} {version}" for name, version in row["versions"].items())
        place = f"{row['device']}, {row['threads']} threads; {versions}"
        places.setdefault(place, []).append(row["variant"])
    if len(places) == 1:
        return [f"Ran on {next(iter(places))}."]
    return [f"- {', '.join(names)} ran on {place}" for place, names in places.items()]
