from pathlib import Path

import pytest

from experiments.configuration import (
    AblationConfig,
    apply_overrides,
    configs_folder,
    differences,
    find_config,
    flatten,
    load_config,
)
from kvjax import CacheConfig, Codecs, Int, LayerPattern, Paged, SinkWindow, Window
from kvjax.errors import ConfigError, KvjaxError

INT4 = CacheConfig(codec=Int(bits=4))
VARIANTS = {
    "contiguous": CacheConfig(),
    "int4": INT4,
    "window": CacheConfig(policy=Window(window=64)),
    "mixed": CacheConfig(codec=Codecs(k=Int(bits=4, axis="channel"), v=Int(bits=4))),
    "layers": LayerPattern(INT4, {0: CacheConfig()}),
}
BASE = AblationConfig(variants=VARIANTS)


@pytest.mark.parametrize("path", sorted(configs_folder().glob("[!_]*.py")), ids=lambda p: p.stem)
def test_configs_that_come_with_kvjax_are_sound(path: Path) -> None:
    config = load_config(path)
    assert len(config.variants) >= 4
    docstring = path.read_text().split('"""')[1]
    assert f"kvjax ablate configs/{path.name}" in docstring


def test_the_quickstart_has_the_variants_that_it_should() -> None:
    assert len(load_config("quickstart").variants) >= 10


@pytest.mark.parametrize(
    ("assignment", "field", "value"),
    [
        ("num_tokens=512", "num_tokens", 512),
        ("model=other", "model", "other"),
        ("text = a=b.txt", "text", "a=b.txt"),
        ("dtype=bfloat16", "dtype", "bfloat16"),
    ],
)
def test_fields_are_set_by_their_type(assignment: str, field: str, value: object) -> None:
    assert getattr(apply_overrides(BASE, [assignment]), field) == value


@pytest.mark.parametrize(
    ("assignment", "label", "cache"),
    [
        ("variants.int4.codec=int(bits=2)", "int4", CacheConfig(codec=Int(bits=2))),
        ("variants.int4.codec.bits=2", "int4", CacheConfig(codec=Int(bits=2))),
        (
            "variants.int4.layout=paged(page_size=32)",
            "int4",
            INT4.replace(layout=Paged(page_size=32)),
        ),
        ("variants.int4.slack=3", "int4", INT4.replace(slack=3)),
        (
            "variants.int4.positions=unrotated_absolute",
            "int4",
            INT4.replace(positions="unrotated_absolute"),
        ),
        (
            "variants.int4.codec.symmetric=true",
            "int4",
            CacheConfig(codec=Int(bits=4, symmetric=True)),
        ),
        (
            "variants.int4.codec=codecs(k=int(bits=8), v=int(bits=2))",
            "int4",
            CacheConfig(codec=Codecs(k=Int(bits=8), v=Int(bits=2))),
        ),
        ("variants.window.policy.window=32", "window", CacheConfig(policy=Window(window=32))),
        (
            "variants.window.policy=sink_window(sinks=4, window=28)",
            "window",
            CacheConfig(policy=SinkWindow(sinks=4, window=28)),
        ),
        (
            "variants.mixed.codec.v=int(bits=8)",
            "mixed",
            CacheConfig(codec=Codecs(k=Int(bits=4, axis="channel"), v=Int(bits=8))),
        ),
        (
            "variants.layers.default.codec=int(bits=2)",
            "layers",
            LayerPattern(CacheConfig(codec=Int(bits=2)), {0: CacheConfig()}),
        ),
        (
            "variants.contiguous.codec.dtype=bfloat16",
            "contiguous",
            CacheConfig(codec="raw(dtype='bfloat16')"),
        ),
        ("variants.contiguous.codec.dtype=none", "contiguous", CacheConfig()),
    ],
    ids=lambda value: value if isinstance(value, str) and "=" in value else "",
)
def test_overrides_reach_into_variants(assignment: str, label: str, cache: object) -> None:
    changed = apply_overrides(BASE, [assignment])
    assert changed.variants[label] == cache
    assert all(changed.variants[k] == v for k, v in VARIANTS.items() if k != label)


@pytest.mark.parametrize(
    ("assignment", "parts"),
    [
        ("numtokens=3", ["'numtokens'", "num_tokens", "variants"]),
        ("variants.int5.slack=3", ["'int5'", "contiguous", "int4"]),
        ("variants.int4.codek=raw", ["'codek'", "layout", "codec"]),
        ("variants.int4.codec.bit=3", ["'bit'", "bits", "group_size"]),
        ("variants.int4.codec=float3(bits=4)", ["float3", "int", "raw"]),
        ("variants.int4.codec=int(bit=4)", ["'bit'", "bits"]),
        ("variants.int4.codec=int(bits=3)", ["bits=3", "8, 4, 2"]),
        ("variants.int4.codec=codecs(q=raw)", ["codecs(", "k=", "v="]),
        ("variants.int4=raw", ["whole entry", "codec"]),
        ("variants=raw", ["cannot be set"]),
        ("num_tokens=many", ["num_tokens='many'", "int"]),
        ("num_tokens=1", ["num_tokens=1", "at least 2"]),
        ("num_tokens.x=1", ["'x'"]),
        ("num_tokens", ["key=value"]),
        ("=3", ["key=value"]),
        ("variants.int4.positions=rotated_slot", ["rotated keys with slot positions"]),
        ("variants.int4.codec.symmetric=maybe", ["symmetric='maybe'", "bool"]),
        ("baseline=nothing", ["'nothing'", "contiguous"]),
        ("score_from=5000", ["score_from=5000"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_overrides_say_what_is_known(assignment: str, parts: list[str]) -> None:
    with pytest.raises(KvjaxError) as caught:
        apply_overrides(BASE, [assignment])
    message = str(caught.value)
    assert all(part in message for part in parts), message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"variants": {"a.b": CacheConfig()}, "baseline": "a.b"}, "label 'a.b'"),
        ({"variants": {"contiguous": "raw"}}, "expected a CacheConfig"),
        ({"variants": {}}, "is no variant"),
        ({"chunk": 0}, "chunk=0"),
        ({"num_tokens": 8.0}, "num_tokens=8.0"),
    ],
)
def test_a_bad_config_is_refused_when_it_is_built(changes: dict, part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        AblationConfig(**{"variants": VARIANTS, **changes})


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        ("def get_config(:", [":1", "SyntaxError"]),
        ("import nothing_like_it", [":1", "nothing_like_it"]),
        ("x = 1", ["get_config()"]),
        ("def get_config():\n    return 3", ["int", "AblationConfig"]),
        ("def get_config():\n\n    return y", [":3", "NameError"]),
        ("from kvjax import Int\ndef get_config():\n    return Int(bits=5)", ["bits=5"]),
    ],
    ids=["syntax", "import", "no-function", "wrong-type", "name", "illegal"],
)
def test_a_broken_config_file_says_where(tmp_path: Path, source: str, parts: list[str]) -> None:
    path = tmp_path / "broken.py"
    path.write_text(source)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert all(part in str(caught.value) for part in parts), str(caught.value)


def test_an_unknown_config_lists_the_known() -> None:
    with pytest.raises(ConfigError, match=r"'nothing'.*quickstart"):
        find_config("nothing")


def test_implementation_reaches_every_layer() -> None:
    config = BASE.with_implementation("reference")
    layers = [layer for cache in config.variants.values() for layer in cache.for_layers(2)]
    assert {layer.implementation for layer in layers} == {"reference"}


def test_flat_configs_tell_every_knob_apart() -> None:
    flat = flatten(BASE)
    assert flat["variants.int4.codec"] == "Int"
    assert flat["variants.int4.codec.bits"] == 4
    for assignment in (
        "variants.int4.codec.group_size=16",
        "variants.layers.default.slack=1",
        "seed=1",
    ):
        assert len(differences(flat, flatten(apply_overrides(BASE, [assignment])))) == 1
    assert not differences(flat, flatten(BASE))
