"""Rows of results, the bars they are held against, and the table that shows both."""

import dataclasses
from collections.abc import Sequence
from typing import Any

READ_SHARE = 0.85  # of the copy bandwidth, by bf16 decode
SPEEDUPS = {"int8": 1.7, "int4": 3.0}  # over bf16 for the same tokens
APPEND_SHARE = 0.05  # of a step
PEERS = ("xla", "jax-gqa", "jax-paged", "nn-xla", "nn-cudnn", "torch")
STEPS = ("step with append", "step without append")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One timed thing, or why it was not.

    Attributes:
        implementation: one of the op's own, or a peer.
        layout: a word; B and S are sequences and tokens of each.
        live_bytes: keys and values that have to be read.
        copies: caches that were rotated.
        seconds: of one call in each repetition.
        compile_s: of the program, beside others on other threads.
    """

    op: str
    implementation: str
    codec: str
    layout: str
    B: int
    S: int
    live_bytes: int
    flops: int = 0
    copies: int = 1
    ms: float | None = None
    seconds: tuple[float, ...] = ()
    compile_s: float | None = None
    error: str | None = None

    @property
    def bytes_per_s(self) -> float | None:
        """Live bytes over the median time."""
        return self.live_bytes / self.ms * 1e3 if self.ms else None


@dataclasses.dataclass(frozen=True)
class Bar:
    """A number that the kernels are held against.

    >>> Bar("int8 over bf16", 1.75, 1.7).verdict, Bar("append", None, 0.05, below=True).verdict
    ('met', 'not measured')
    """

    name: str
    value: float | None
    wanted: float
    below: bool = False

    @property
    def verdict(self) -> str:
        """Met, missed or not measured."""
        if self.value is None:
            return "not measured"
        good = self.value < self.wanted if self.below else self.value >= self.wanted
        return "met" if good else "missed"

    @property
    def line(self) -> str:
        """One line."""
        value = "" if self.value is None else f"{self.value:.3f}"
        sign = "<" if self.below else ">="
        return f"{self.verdict:12s} {self.name}: {value} (wanted {sign} {self.wanted:g})"


class Results:
    """All rows, found by what they measured."""

    def __init__(self, rows: Sequence[Row], own: str, copy_bytes_per_s: float | None):
        self.rows, self.own, self.copy = rows, own, copy_bytes_per_s
        self.found = {
            (r.op, r.implementation, r.codec, r.layout, r.B, r.S): r for r in rows if r.ms
        }

    def milliseconds(self, row: Row, **changes: Any) -> float | None:
        """Of the row that differs from `row` in some fields, if it was measured."""
        other = dataclasses.replace(row, **changes)
        key = (other.op, other.implementation, other.codec, other.layout, other.B, other.S)
        return self.found[key].ms if key in self.found else None

    def share(self, row: Row) -> float | None:
        """Live bytes per second over those that a copy moves."""
        rate = row.bytes_per_s
        return rate / self.copy if rate and self.copy else None

    def over_bf16(self, row: Row) -> float | None:
        """How many times as fast as the same kernel over the same tokens in bf16."""
        return _ratio(self.milliseconds(row, codec="bf16"), row.ms)

    def over_peer(self, row: Row, peer: str) -> float | None:
        """How many times as fast as a peer over the same tokens.

        "xla" holds the same codec in the same layout; the others hold bf16 as they like it.
        """
        if peer == "xla":
            return _ratio(self.milliseconds(row, implementation="xla"), row.ms)
        for layout in (row.layout, *{r.layout for r in self.rows}):
            theirs = self.milliseconds(row, implementation=peer, codec="bf16", layout=layout)
            if theirs:
                return _ratio(theirs, row.ms)
        return None

    def append_share(self, row: Row) -> float | None:
        """Part of a step with an append that the append takes."""
        with_it, without = (self.milliseconds(row, op=op) for op in STEPS)
        return (with_it - without) / with_it if with_it and without else None

    def bars(self, bar: tuple[int, int], layouts: Sequence[str]) -> list[Bar]:
        """The bars, at sequences and tokens of `bar`."""
        found = []
        at = {(r.codec, r.layout): r for r in self.rows if self._is_decode(r, bar)}
        for layout in layouts:
            row = at.get(("bf16", layout))
            value = self.share(row) if row else None
            found.append(Bar(f"bf16 {layout}, share of copy bandwidth", value, READ_SHARE))
        for codec, wanted in SPEEDUPS.items():
            for layout in layouts:
                row = at.get((codec, layout))
                value = self.over_bf16(row) if row else None
                found.append(Bar(f"{codec} {layout}, times as fast as bf16", value, wanted))
        steps = [r for r in self.rows if r.op == STEPS[0]]
        for row in steps:
            name = f"append, {row.codec} {row.layout}, share of a step"
            found.append(Bar(name, self.append_share(row), APPEND_SHARE, below=True))
        return found

    def _is_decode(self, row: Row, bar: tuple[int, int]) -> bool:
        at = (row.op, row.implementation, row.B, row.S)
        return at == ("decode", self.own, *bar)

    def table(self, shapes: Sequence[tuple[int, int]] | None = None) -> list[list[str]]:
        """Header and lines: our own rows, all of them or those of some (B, S)."""
        header = ["op", "codec", "layout", "B", "S", "ms", "GB/s", "of copy", "over bf16"]
        lines = [[*header, *(f"over {peer}" for peer in PEERS)]]
        for row in self.rows:
            if row.implementation != self.own or row.error or not row.ms:
                continue
            if shapes is not None and row.op == "decode" and (row.B, row.S) not in shapes:
                continue
            rate, share = row.bytes_per_s or 0.0, self.share(row)
            bound = row.flops == 0
            line = [row.op, row.codec, row.layout, str(row.B), str(row.S), f"{row.ms:.4g}"]
            line += [f"{rate / 1e9:.0f}" if bound else f"{row.flops / row.ms / 1e9:.0f} TFLOP/s"]
            line += [_text(share if bound else None), _text(self.over_bf16(row))]
            lines.append([*line, *(_text(self.over_peer(row, peer)) for peer in PEERS)])
        return lines


def _ratio(theirs: float | None, ours: float | None) -> float | None:
    return theirs / ours if theirs and ours else None


def _text(x: float | None) -> str:
    return "" if x is None else f"{x:.2f}"


def plain(lines: Sequence[Sequence[str]]) -> str:
    """Aligned columns, without those that are empty."""
    kept = [i for i in range(len(lines[0])) if any(line[i] for line in lines[1:])]
    widths = [max(len(line[i]) for line in lines) for i in kept]
    return "\n".join(
        "  ".join(line[i].ljust(w) for i, w in zip(kept, widths, strict=True)).rstrip()
        for line in lines
    )


def markdown(report: dict[str, Any], results: Results, bars: Sequence[Bar]) -> str:
    """The whole report but for single repetitions."""
    head, *body = ["| " + " | ".join(line) + " |" for line in results.table()]
    text = ["# Kernels on a device", "", *(f"- {k}: {v}" for k, v in report["device"].items())]
    text += ["", *report["notes"], "", "## Bars", "", *(f"- {bar.line}" for bar in bars)]
    text += ["", "## Checks", "", *(f"- {line}" for line in check_lines(report))]
    text += ["", "## Speed", "", head, "|" + " --- |" * len(results.table()[0]), *body]
    errors = [f"- {row.op} {row.implementation} {row.codec} {row.layout} {row.B}x{row.S}: "
              f"{row.error}" for row in results.rows if row.error]  # fmt: skip
    text += ["", "## What did not run", "", *(errors or ["- nothing"])]
    text += ["", "## Skipped, for time", "", *(f"- {x}" for x in report["skipped"] or ["nothing"])]
    return "\n".join([*text, ""])


def check_lines(report: dict[str, Any]) -> list[str]:
    """Tests and small checks, a line each."""
    tests = report["tests"]
    counts = ", ".join(f"{n} {word}" for word, n in tests.get("counts", {}).items())
    last = tests.get("last_line", "")
    lines = [f"kernel tests: {tests.get('status', 'not run')}; {counts}; {last}"]
    lines += [f"failed: {name}" for name in tests.get("failures", [])]
    for check in report["checks"]:
        said = check.get("error") or f"differs by {check['difference']:.3g} of {check['most']:g}"
        lines.append(f"{'good' if check['good'] else 'BAD '}: {check['label']}: {said}")
    return lines
