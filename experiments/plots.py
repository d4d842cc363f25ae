"""Plots of a run: what quality costs in bytes, and what speed goes with it; PNG and SVG."""

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.rows import Row, write_atomically

if TYPE_CHECKING:
    from experiments.configuration import AblationConfig

FORMATS = ("png", "svg")
# Okabe and Ito's colours can be told apart by everybody.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "osD^vP*X"
# Where a label may stand, in points from its mark: near first, then further out.
PLACES = [
    (x * r, y * r)
    for r in (1.0, 1.8, 2.8, 4.0)
    for x, y in ((7, 5), (7, -11), (-7, 5), (-7, -11), (0, 9), (0, -15))
]


def write_plots(out: Path, rows: Sequence[Row], config: "AblationConfig") -> list[Path]:
    """Draw the good rows into `quality.*` and, if speed was measured, `speed.*`.

    Returns:
        The files; none if no row is good.
    """
    good = [row for row in rows if row["status"] == "ok"]
    files = []
    if good:
        files += _save(out, "quality", _quality(good, config))
    timed = [row for row in good if row.get("decode_tokens_per_s") is not None]
    if timed:
        files += _save(out, "speed", _speed(timed, config))
    return files


def _quality(rows: Sequence[Row], config: "AblationConfig") -> Any:
    figure, (left, right) = _figure(2)
    looks = _looks(rows)
    _scatter(left, rows, "bytes_per_token", "perplexity_ratio", looks)
    left.axhline(1.0, color="grey", linewidth=0.8, linestyle="--", zorder=0)
    left.set_ylabel(f"perplexity / that of {config.baseline}")
    diverging = [row for row in rows if row["kl"] > 0]
    if diverging:
        right.set_yscale("log")
    _scatter(right, diverging, "bytes_per_token", "kl", looks)
    right.set_ylabel(f"KL({config.baseline} || variant), nats a token")
    exact = [row["variant"] for row in rows if not row["kl"] > 0]
    if exact:
        right.set_title(f"KL is 0: {', '.join(exact)}", fontsize=8, loc="left")
    for axes in (left, right):
        axes.set_xlabel(f"cache bytes a token, at {config.num_tokens:,} tokens")
    _finish(figure, left)
    return figure


def _speed(rows: Sequence[Row], config: "AblationConfig") -> Any:
    figure, (axes,) = _figure(1)
    _scatter(axes, rows, "speed_cache_bytes", "decode_tokens_per_s", _looks(rows))
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1e6:,g} MB")
    axes.set_xlabel(f"size of the cache, {config.speed_capacity:,} tokens, batch {config.batch}")
    axes.set_ylabel("decode, tokens/s")
    _finish(figure, axes)
    return figure


def _figure(panels: int) -> tuple[Any, list[Any]]:
    # Not pyplot: no global state, no display; and imported late, for it takes a second.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1.5 + 5.5 * panels, 5.0), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, panels, squeeze=False)[0]
    for each in axes:
        each.grid(True, color="0.92", zorder=0)
        each.spines[["top", "right"]].set_visible(False)
    return figure, list(axes)


def _looks(rows: Sequence[Row]) -> dict[str, dict[str, str]]:
    """Colour and marker of each kind of change, the same in every panel."""
    kinds = dict.fromkeys(row["changes"] for row in rows)
    return {
        kind: {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)]}
        for i, kind in enumerate(kinds)
    }


def _scatter(axes: Any, rows: Sequence[Row], x: str, y: str, looks: dict) -> None:
    """Draw one mark a row, coloured by what the row changes, and a label without overlaps."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set_xscale("log")
    for kind, look in looks.items():
        chosen = [row for row in rows if row["changes"] == kind]
        points = [row[x] for row in chosen], [row[y] for row in chosen]
        axes.scatter(*points, s=36, label=kind, zorder=3, **look)
    axes.margins(x=0.2, y=0.15)
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    for row in rows:
        label = axes.annotate(
            row["variant"], (row[x], row[y]), (0, 0), textcoords="offset points", fontsize=8
        )
        label.set_in_layout(False)  # it moves later, and must not move the axes


def _finish(figure: Any, axes: Any) -> None:
    """Add the legend and move the labels to where they cover the least."""
    handles, names = axes.get_legend_handles_labels()
    figure.legend(
        handles,
        names,
        title="changes",
        loc="outside lower center",
        ncols=min(4, len(names)),
        fontsize=8,
        title_fontsize=8,
        frameon=False,
    )
    figure.draw_without_rendering()  # settles sizes and limits
    for each in figure.axes:
        _place_labels(figure, each)


def _place_labels(figure: Any, axes: Any) -> None:
    from matplotlib.text import Annotation
    from matplotlib.transforms import Bbox

    renderer = figure.canvas.get_renderer()
    labels = [child for child in axes.get_children() if isinstance(child, Annotation)]
    marks = [axes.transData.transform(label.xy) for label in labels]
    taken = [Bbox.from_extents(x - 5, y - 5, x + 5, y + 5) for x, y in marks]
    frame = axes.get_window_extent(renderer)
    for label in labels:
        costs = []
        for x, y in PLACES:
            label.set_position((x, y))
            label.set_horizontalalignment("left" if x > 0 else "right" if x < 0 else "center")
            box = label.get_window_extent(renderer)
            covered = sum(_area(Bbox.intersection(box, other)) for other in taken)
            inside = _area(Bbox.intersection(box, frame))
            own = _distance(box, axes.transData.transform(label.xy))
            confusing = any(_distance(box, mark) < 0.9 * own for mark in marks)
            cost = covered + 2 * (_area(box) - inside) + 150 * confusing
            costs.append((cost, len(costs), x, y, box))
        *_, x, y, box = min(costs, key=lambda cost: cost[:2])
        label.set_position((x, y))
        label.set_horizontalalignment("left" if x > 0 else "right" if x < 0 else "center")
        if abs(x) + abs(y) > 25:  # far from its mark: show where it belongs
            axes.annotate(
                "",
                label.xy,
                (x, y + 3 if y > 0 else y + 8),
                textcoords="offset points",
                arrowprops={"arrowstyle": "-", "color": "0.6", "linewidth": 0.6},
            )
        taken.append(box)


def _distance(box: Any, point: Sequence[float]) -> float:
    """Distance of a point from a box in pixels, 0 inside."""
    x, y = point
    return math.hypot(max(box.x0 - x, 0, x - box.x1), max(box.y0 - y, 0, y - box.y1))


def _area(box: Any) -> float:
    return 0.0 if box is None else float(box.width * box.height)


def _save(out: Path, name: str, figure: Any) -> list[Path]:
    files = []
    for suffix in FORMATS:
        buffer = io.BytesIO()
        # Without the date the same rows give the same file.
        figure.savefig(buffer, format=suffix, metadata={"Date": None} if suffix == "svg" else None)
        files.append(out / f"{name}.{suffix}")
        write_atomically(files[-1], buffer.getvalue())
    return files
