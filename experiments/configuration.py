"""What an ablation is: a frozen config, the Python file that holds it, its `--set` overrides."""

import dataclasses
import importlib.util
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import configs
from experiments.conversions import Conversion
from experiments.overrides import set_value
from kvjax.cache import CacheConfig, LayerPattern
from kvjax.errors import ConfigError, KvjaxError

VARIANT_NAME = re.compile(r"[A-Za-z0-9_+-]+")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AblationConfig:
    """One model, one text, and the caches to compare on them.

    Attributes:
        variants: the caches by label; each is one row.
        conversions: variants whose model is converted first, with how.
        baseline: label of the exact cache that the others are held against.
        model: a name or path that `kvjax.load` knows.
        dtype: of weights and activations, "float32" or "bfloat16".
        text: a name or path that `kvjax.data.load_text` knows.
        text_start: first token of the text that is used.
        num_tokens: tokens that quality is measured on; the context of `bytes_per_token`.
        score_from: first position that counts for perplexity, KL and agreement, at least 1.
        chunk: tokens that go through the cache at once; 1 is the decode path.
        prompt_tokens: length of the prompt that speed is measured with.
        new_tokens: tokens generated after it, greedily.
        batch: sequences whose speed is measured together.
        repetitions: steady runs whose median is the speed; 0 leaves speed and greedy text out.
        seed: draws where in the text the prompts of a batch start; the first is at `text_start`.

    >>> AblationConfig(variants={"contiguous": CacheConfig()}, num_tokens=64).chunk
    256
    """

    variants: Mapping[str, CacheConfig | LayerPattern]
    conversions: Mapping[str, Conversion] = dataclasses.field(default_factory=dict)
    baseline: str = "contiguous"
    model: str = "smollm2-135m"
    dtype: str = "float32"
    text: str = "python-reference"
    text_start: int = 0
    num_tokens: int = 1024
    score_from: int = 1
    chunk: int = 256
    prompt_tokens: int = 512
    new_tokens: int = 64
    batch: int = 1
    repetitions: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        least = {
            "text_start": 0,
            "num_tokens": 2,
            "score_from": 1,
            "chunk": 1,
            "prompt_tokens": 1,
            "new_tokens": 1,
            "batch": 1,
            "repetitions": 0,
            "seed": 0,
        }
        for name, limit in least.items():
            value = getattr(self, name)
            if type(value) is not int or value < limit:
                raise ConfigError(f"{name}={value!r} must be a whole number of at least {limit}")
        if self.score_from >= self.num_tokens:
            raise ConfigError(
                f"score_from={self.score_from} leaves nothing of num_tokens={self.num_tokens}; "
                "make it smaller"
            )
        if self.baseline not in self.variants:
            raise ConfigError(
                f"baseline={self.baseline!r} is no variant; known: {', '.join(self.variants)}"
            )
        for label, conversion in self.conversions.items():
            if label not in self.variants or label == self.baseline:
                known = ", ".join(name for name in self.variants if name != self.baseline)
                raise ConfigError(
                    f"conversion of {label!r}, expected a variant that is not the baseline: {known}"
                )
            if not isinstance(conversion, Conversion):
                raise ConfigError(
                    f"conversion of {label!r} is {conversion!r}, expected ToLatent or ToGrouped"
                )
        for label, cache in self.variants.items():
            if not VARIANT_NAME.fullmatch(label):
                raise ConfigError(
                    f"variant label {label!r} may hold letters, digits, '_', '+' and '-' only"
                )
            if not isinstance(cache, CacheConfig | LayerPattern):
                raise ConfigError(
                    f"variant {label!r} is {cache!r}, expected a CacheConfig or a LayerPattern"
                )

    @property
    def speed_capacity(self) -> int:
        """Capacity of the caches whose speed is measured, in tokens.

        That of the quality run where it is enough, so that one compilation serves both.
        """
        return max(self.num_tokens, self.prompt_tokens + self.new_tokens)

    def replace(self, **changes: Any) -> "AblationConfig":
        """Return a copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def with_implementation(self, name: str) -> "AblationConfig":
        """Let every variant run one attention implementation."""
        variants = {k: c.replace(implementation=name) for k, c in self.variants.items()}
        return self.replace(variants=variants)


def configs_folder() -> Path:
    """Folder of the configs that come with kvjax."""
    return Path(str(configs.__file__)).parent


def known_configs() -> list[tuple[str, Path]]:
    """Name and file of each config that comes with kvjax."""
    folder = configs_folder()
    files = sorted(folder.rglob("[!_]*.py"))
    return [(file.relative_to(folder).with_suffix("").as_posix(), file) for file in files]


def find_config(path: str | Path) -> Path:
    """Find a config file: the path itself, or the name of one that comes with kvjax.

    >>> find_config("quickstart").name
    'quickstart.py'
    """
    path = Path(path)
    candidates = [
        path,
        configs_folder().parent / path,
        configs_folder() / path.with_suffix(".py"),
    ]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    known = [name for name, _ in known_configs()]
    raise ConfigError(
        f"no config file {str(path)!r}; give the path of one, or a name that comes with kvjax: "
        f"{', '.join(known)}"
    )


def load_config(path: str | Path) -> AblationConfig:
    """Run a config file and return what its `get_config()` gives.

    Raises:
        ConfigError: no such file, an error in it (with its line), or something else in it.
    """
    file = find_config(path)
    spec = importlib.util.spec_from_file_location(f"kvjax_config_{file.stem}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        if not callable(getattr(module, "get_config", None)):
            raise ConfigError(f"{file}: a config file defines get_config() -> AblationConfig")
        config = module.get_config()
    except KvjaxError:
        raise
    except Exception as error:  # whatever a user's file may raise
        raise ConfigError(
            f"{file}{_line_of(error, file)}: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(config, AblationConfig):
        raise ConfigError(
            f"{file}: get_config() gave {type(config).__name__}, expected AblationConfig"
        )
    return config


def _line_of(error: Exception, file: Path) -> str:
    """Where in the config file the error arose, as ":line"."""
    lines = []
    traceback = error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == str(file):
            lines.append(traceback.tb_lineno)
        traceback = traceback.tb_next
    line = getattr(error, "lineno", None) or (lines[-1] if lines else None)
    return f":{line}" if line else ""


def apply_overrides(config: AblationConfig, assignments: Iterable[str]) -> AblationConfig:
    """Apply `--set key=value` overrides in order; keys may reach into variants.

    >>> base = AblationConfig(variants={"contiguous": CacheConfig(), "int4": CacheConfig()})
    >>> changed = apply_overrides(base, ["num_tokens=512", "variants.int4.codec=int(bits=4)"])
    >>> changed.num_tokens, changed.variants["int4"].codec.bits
    (512, 4)
    """
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"--set {assignment!r} must look like key=value")
        config = set_value(config, key.strip(), text.strip())
    return config


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Flatten a config to dotted keys and JSON values, for fingerprints and messages.

    >>> flatten(CacheConfig())["layout"]
    'Contiguous'
    """
    dot = f"{prefix}." if prefix else ""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        own = {prefix: type(value).__name__} if prefix else {}
        parts = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    elif isinstance(value, Mapping):
        own, parts = {}, value
    elif isinstance(value, tuple | list):
        own, parts = {}, dict(enumerate(value))
    else:
        plain = value is None or isinstance(value, bool | int | float | str)
        return {prefix: value if plain else repr(value)}
    return own | {k: v for name, x in parts.items() for k, v in flatten(x, f"{dot}{name}").items()}


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Say which flat keys differ, as `key: old -> new`.

    >>> differences({"a": 1, "b": 2}, {"a": 3, "c": 4})
    ['a: 1 -> 3', 'b: 2 -> nothing', 'c: nothing -> 4']
    """

    def shown(flat: Mapping[str, Any], key: str) -> str:
        return repr(flat[key]) if key in flat else "nothing"

    keys = dict.fromkeys([*old, *new])
    return [
        f"{key}: {shown(old, key)} -> {shown(new, key)}"
        for key in keys
        if key not in old or key not in new or old[key] != new[key]
    ]
