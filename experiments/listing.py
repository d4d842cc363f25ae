"""`kvjax list`: members, their knobs, what goes together; where models, texts and configs are."""

import ast
import dataclasses
import inspect
from collections.abc import Iterator
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from experiments.configuration import known_configs
from kvjax.cache import CODECS, LAYOUTS, POLICIES, RULES, CacheConfig, PositionRule
from kvjax.cache.config import member_label
from kvjax.checkpoints import known_models
from kvjax.data import known_texts
from kvjax.errors import ConfigError
from kvjax.registry import Registry
from pallas_kernels.attention.op import IMPLEMENTATIONS

# Field of a CacheConfig, and the registry of its members.
KINDS: dict[str, Registry] = {"layout": LAYOUTS, "codec": CODECS, "policy": POLICIES}


def print_listing(console: Console) -> None:
    """Print everything that can be chosen."""
    console.print("[bold]A cache is layout x codec x policy x position rule[/bold]\n")
    console.print(member_table())
    console.print(legality_table())
    console.print(
        "Tried pair by pair with the settings of the conformance suite. Refused are: "
        f"{'; '.join(rule.name for rule in RULES)}. An illegal cache says why when it is built.\n",
        highlight=False,
    )
    console.print(f"[bold]Attention implementations[/bold]: auto, {', '.join(IMPLEMENTATIONS)}")
    for title, names in (("Models", known_models()), ("Texts", known_texts())):
        console.print(f"[bold]{title}[/bold]")
        for name, line in names.items():
            console.print(f"  {escape(name)}: {escape(line)}", highlight=False)
    console.print("[bold]Configs[/bold]")
    for _, path in known_configs():
        console.print(f"  {path}: {escape(first_docstring_line(path.read_text()))}", soft_wrap=True)


def member_table() -> Table:
    """Every registered member with its knobs, their defaults, and the first line of its doc."""
    table = _table("Members")
    for title in ("choice", "member", "knobs and defaults", "what it is"):
        table.add_column(title, overflow="fold")
    for kind, registry in KINDS.items():
        for name, cls in registry.items():
            table.add_row(kind, name, escape("\n".join(knobs(cls)) or "-"), first_line(cls))
    for name in PositionRule.NAMES:
        table.add_row("positions", name, "-", POSITION_RULES.get(name, ""))
    return table


POSITION_RULES = {
    "rotated_absolute": "keys are rotated, then stored; positions are those of the text",
    "unrotated_absolute": "keys are rotated when they are read, at positions of the text",
    "unrotated_slot": "keys are rotated when they are read, at their rank in the cache",
    "rotated_slot": "refused: a stored rotation cannot follow a rank that changes",
}


def knobs(cls: type) -> list[str]:
    """Fields of a member as `name: type = default`; a knob without default has to be given.

    >>> from kvjax import Paged
    >>> knobs(Paged)
    ['page_size: int = 16']
    """
    lines = []
    for field in dataclasses.fields(cls):
        kind = getattr(field.type, "__name__", str(field.type))
        given = field.default is not dataclasses.MISSING
        lines.append(f"{field.name}: {kind}" + (f" = {field.default!r}" if given else ""))
    return lines


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)


def legality_table() -> Table:
    """What each member goes with: its settings paired with every setting of the other choices."""
    notes: dict[str, int] = {}
    table = _table("What goes together")
    columns = [*KINDS, "positions"]
    for title in ("choice", "setting", *columns):
        table.add_column(title, overflow="fold")
    settings = {kind: list(_settings(kind)) for kind in columns}
    for kind in columns:
        for label, member in settings[kind]:
            cells = [
                "" if kind == other else _verdict(kind, member, other, settings[other], notes)
                for other in columns
            ]
            table.add_row(kind, escape(label), *(escape(cell) for cell in cells))
    table.caption = escape("\n".join(f"[{number}] {note}" for note, number in notes.items()))
    table.caption_justify = "left"
    return table


def _settings(kind: str) -> Iterator[tuple[str, Any]]:
    """Settings of a choice that are tried: the examples of every member, or the rules."""
    if kind == "positions":
        for name in PositionRule.NAMES:
            yield name, PositionRule.parse(name)
        return
    registry = KINDS[kind]
    for cls in registry.values():
        for member in cls.examples():
            yield member_label(registry, member), member


def _verdict(
    kind: str, member: Any, other: str, candidates: list[tuple[str, Any]], notes: dict[str, int]
) -> str:
    """Say "all", "none [note]" or "not these [note]"; notes are numbered as they come up."""
    refused, reasons = [], []
    for label, candidate in candidates:
        try:
            CacheConfig(**{kind: member, other: candidate})
        except ConfigError as error:
            # The part after the cache's own description is the reason.
            reason = str(error).partition(": ")[2]
            refused.append(label)
            reasons.append(notes.setdefault(reason, len(notes) + 1))
    if not refused:
        return "all"
    marks = "".join(f" [{number}]" for number in dict.fromkeys(reasons))
    return f"none{marks}" if len(refused) == len(candidates) else f"not {', '.join(refused)}{marks}"


def first_line(cls: type) -> str:
    """First line of a class's docstring."""
    return escape((inspect.getdoc(cls) or "").partition("\n")[0])


def first_docstring_line(source: str) -> str:
    """First line of a module's docstring, without running it.

    >>> first_docstring_line('"One. "')
    'One. '
    """
    return (ast.get_docstring(ast.parse(source), clean=False) or "").partition("\n")[0]
