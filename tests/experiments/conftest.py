"""A tiny model, a text, and a config file, so that a whole ablation runs in seconds."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import jax
import pytest

import kvjax
from experiments.configuration import AblationConfig
from kvjax import CacheConfig, Int, Window
from kvjax.language_model import LanguageModel
from kvjax.testing.tiny import tiny_lm

CONFIG_FILE = '''"""A tiny ablation."""

from experiments.configuration import AblationConfig
from kvjax import CacheConfig, Int, Window


def get_config() -> AblationConfig:
    return AblationConfig(
        model="tiny",
        text={text!r},
        num_tokens=40,
        chunk=16,
        prompt_tokens=16,
        new_tokens=4,
        repetitions=1,
        variants={{
            "contiguous": CacheConfig(),
            "int4": CacheConfig(codec=Int(bits=4)),
            "window": CacheConfig(policy=Window(window=8)),
        }},
    )
'''


@pytest.fixture(autouse=True)
def one_set_of_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither keep programs on disk nor forget them between tests, which run the same ones."""
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "")
    monkeypatch.setattr(jax, "clear_caches", lambda: None)


@pytest.fixture(scope="session")
def tiny() -> LanguageModel:
    return tiny_lm(num_layers=1)  # half the time to compile


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("It was a bright cold day in spring, and the clocks were striking. " * 4)
    return path


@pytest.fixture
def config(text_file: Path) -> AblationConfig:
    return AblationConfig(
        model="tiny",
        text=str(text_file),
        num_tokens=40,
        chunk=16,
        prompt_tokens=16,
        new_tokens=4,
        repetitions=1,
        variants={
            "contiguous": CacheConfig(),
            "int4": CacheConfig(codec=Int(bits=4)),
            "window": CacheConfig(policy=Window(window=8)),
        },
    )


@pytest.fixture
def config_file(tmp_path: Path, text_file: Path) -> Path:
    path = tmp_path / "tiny.py"
    path.write_text(CONFIG_FILE.format(text=str(text_file)))
    return path


@dataclasses.dataclass
class Loader:
    """Stands in for `kvjax.load` and counts its calls."""

    lm: LanguageModel
    calls: int = 0

    def __call__(self, source: object, dtype: str = "float32") -> LanguageModel:
        self.calls += 1
        return self.lm


@pytest.fixture
def loader(tiny: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> Loader:
    loader = Loader(tiny)
    monkeypatch.setattr(kvjax, "load", loader)
    return loader


@pytest.fixture
def break_variant(monkeypatch: pytest.MonkeyPatch) -> Callable[[CacheConfig, str], None]:
    """Make one variant fail in the middle of its measurements."""
    from experiments import measure

    right = measure.measure_quality

    def breaks(broken: CacheConfig, message: str) -> None:
        def measure_quality(config, material, cache, *rest):
            if cache == broken:
                raise MemoryError(message)
            return right(config, material, cache, *rest)

        monkeypatch.setattr(measure, "measure_quality", measure_quality)

    return breaks
