"""Every family against the original implementation, on the tiny models of `tests.fixtures.make`."""

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kvjax.checkpoints import load_checkpoint
from kvjax.checkpoints.families import FAMILIES
from kvjax.checkpoints.hugging_face import read_config
from kvjax.checkpoints.raw_config import RawConfig
from kvjax.errors import CheckpointError, ConfigError
from kvjax.language_model import LanguageModel
from kvjax.nn.transformer import Transformer
from tests.fixtures.families import (
    CASES,
    MODELS,
    Case,
    cached,
    load,
    one_shot,
    together,
)
from tests.tolerances import FAMILY_LOGITS

IDS = [case.id for case in CASES]
every_case = pytest.mark.parametrize("case", CASES, ids=IDS)
# Through the cache once a model: what a shorter context changes is in the frequencies.
every_model = pytest.mark.parametrize(
    "case", [case for case in CASES if case.file == "logits.npz"], ids=lambda case: case.id
)


@functools.cache
def loaded(id: str) -> LanguageModel:
    return load(CASES[IDS.index(id)])


def raw_of(name: str, **changes: Any) -> RawConfig:
    """The config.json of a fixture with keys replaced; `...` leaves a key out."""
    path = MODELS / name / "config.json"
    values = json.loads(path.read_text()) | changes
    return RawConfig({key: value for key, value in values.items() if value is not ...}, path)


def config_of(name: str, **changes: Any):
    return read_config(raw_of(name, **changes))[1]


def test_every_family_has_a_model() -> None:
    # The text model of Gemma 3 with images has a test of its own.
    assert {raw_of(case.folder.name).values["model_type"] for case in CASES} == (
        FAMILIES.keys() - {"gemma3"}
    )


def test_fixtures_are_small() -> None:
    for folder in MODELS.iterdir():
        assert sum(path.stat().st_size for path in folder.iterdir()) < 300_000, folder.name


@every_model
def test_the_tree_of_a_16_bit_model(case: Case) -> None:
    """In float32, whose matrices lie the other way, the logits show it."""
    checkpoint = load_checkpoint(case.folder, "bfloat16")
    model = Transformer(checkpoint.config, dtype="bfloat16")
    tokens = jax.ShapeDtypeStruct((1, 1), np.int32)
    expected = jax.eval_shape(model.init, jax.random.key(0), tokens, tokens)

    def kinds(tree: Any) -> Any:
        return jax.tree.map(lambda x: (x.shape, x.dtype), tree)

    assert kinds(checkpoint.params) == kinds(expected)
    count = sum(leaf.size for leaf in jax.tree.leaves(checkpoint.params))
    assert count == checkpoint.config.parameter_count


@every_case
def test_one_shot_logits(case: Case) -> None:
    assert case.difference(one_shot(loaded(case.id), case.texts)) < FAMILY_LOGITS


@every_model
def test_logits_through_the_cache(case: Case) -> None:
    """A ragged batch in chunks of 7, then 32 tokens of the longer text one by one."""
    rows = list(together(*cached(loaded(case.id), case.texts)))
    assert case.difference(rows) < FAMILY_LOGITS


def test_live_against_transformers() -> None:
    """The stored logits are what the installed transformers computes, from the stored weights."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    for case in CASES:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            case.folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        rows = []
        for text in case.texts:
            whole = text + [0] * max(0, (case.context_len or 0) - len(text))
            with torch.no_grad():
                out = model(input_ids=torch.tensor([whole]), use_cache=False).logits
            rows.append(out[0, : len(text)].numpy())
        assert case.difference(rows) < FAMILY_LOGITS, case.id


class TestGenerationsOfTheConfig:
    """`rope_theta` and `rope_scaling` beside the sizes mean what `rope_parameters` means."""

    @pytest.mark.parametrize(
        "name", ["llama_llama3", "llama_linear", "qwen2", "phi3", "gpt_oss", "deepseek_v3"]
    )
    @pytest.mark.parametrize("spelling", ["rope_type", "type"])
    def test_old_keys(self, name: str, spelling: str) -> None:
        scaling = dict(raw_of(name).values["rope_parameters"])
        theta = scaling.pop("rope_theta")
        scaling.pop("partial_rotary_factor", None)
        scaling[spelling] = scaling.pop("rope_type")
        old = config_of(name, rope_parameters=..., rope_theta=theta, rope_scaling=scaling)
        assert old == config_of(name)

    def test_gemma3(self) -> None:
        old = config_of(
            "gemma3_text",
            rope_parameters=...,
            rope_theta=100_000.0,
            rope_local_base_freq=10_000.0,
            rope_scaling={"rope_type": "linear", "factor": 8.0},
        )
        assert old == config_of("gemma3_text")

    def test_patterns_instead_of_layer_types(self) -> None:
        given = raw_of("gemma3_text").values["layer_types"]
        assert given == ["sliding_attention"] * 2 + ["full_attention"] + [
            "sliding_attention",
            given[4],
        ]
        old = config_of("gemma3_text", layer_types=..., sliding_window_pattern=3)
        assert [layer.window for layer in old.layers] == [9, 9, None, 9, 9]
        for name in ("gemma2", "gpt_oss", "qwen2", "smollm3"):
            assert config_of(name, layer_types=...) == config_of(name), name

    def test_names_of_families_defaults(self) -> None:
        """What a file leaves out is what the family's class has."""
        left_out = config_of("gpt_oss", rope_parameters=..., sliding_window=...)
        rotary = left_out.layers[0].rotary
        assert rotary is not None
        assert (rotary.theta, left_out.layers[0].window) == (150_000.0, 128)
        assert round(rotary.magnitude, 6) == 1.346574
        for name, theta in {"mixtral": 1e6, "smollm3": 2e6, "qwen2": 1e4}.items():
            rotary = config_of(name, rope_parameters=...).layers[0].rotary
            assert rotary is not None and rotary.theta == theta


class TestWindows:
    def test_a_window_that_is_not_in_use(self) -> None:
        """B142: sliding_window alone means nothing where use_sliding_window is false."""
        for name in ("qwen2", "qwen3", "qwen3_moe", "smollm3"):
            config = config_of(name, use_sliding_window=False, sliding_window=4)
            assert {layer.window for layer in config.layers} == {None}, name

    def test_null(self) -> None:
        """B144."""
        for name in ("mistral", "mixtral", "qwen2", "gemma2", "gemma3_text", "phi3", "gpt_oss"):
            config = config_of(name, sliding_window=None)
            assert {layer.window for layer in config.layers} == {None}, name

    def test_absence_is_the_default_of_the_family(self) -> None:
        assert config_of("mistral", sliding_window=...).layers[0].window == 4096
        assert config_of("mixtral", sliding_window=...).layers[0].window is None

    def test_other_kinds_of_layers(self) -> None:
        types = ["chunked_attention"] * 4
        with pytest.raises(CheckpointError, match=r"chunked_attention.*known: full_attention"):
            config_of("qwen2", layer_types=types)
        with pytest.raises(CheckpointError, match=r"layer_types.*a list of 4 str"):
            config_of("qwen2", layer_types=["full_attention"])


class TestContextLen:
    def test_positions(self) -> None:
        for name, own in {"llama_dynamic": 24, "phi3": 24, "mistral": 128}.items():
            assert load_checkpoint(MODELS / name).config.max_len == own
            assert load_checkpoint(MODELS / name, context_len=20).config.max_len == 20
        for name in ("llama_dynamic", "phi3"):
            assert load_checkpoint(MODELS / name, context_len=500).config.max_len == 500

    def test_only_two_kinds_extend(self) -> None:
        for name in ("mistral", "qwen2", "llama_linear"):
            with pytest.raises(
                ConfigError, match=r"context_len=129 exceeds the 128 .*config\.json"
            ):
                load_checkpoint(MODELS / name, context_len=129)

    @pytest.mark.parametrize("asked", [0, -1, 1.5, True])
    def test_no_length(self, asked: Any) -> None:
        with pytest.raises(ConfigError, match=f"context_len={asked!r}"):
            load_checkpoint(MODELS / "mistral", context_len=asked)


class TestGemma3WithImages:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        text = raw_of("gemma3_text").values
        config = {"model_type": "gemma3", "text_config": text, "vision_config": {"depth": 1}}
        (tmp_path / "config.json").write_text(json.dumps(config))
        weights = load_file(MODELS / "gemma3_text" / "model.safetensors")
        weights = {f"language_model.{name}": weight for name, weight in weights.items()}
        weights["vision_tower.vision_model.post_layernorm.weight"] = np.ones(3, np.float32)
        weights["multi_modal_projector.mm_soft_emb_norm.weight"] = np.ones(3, np.float32)
        save_file(weights, tmp_path / "model.safetensors")
        return tmp_path

    def test_the_text_model_is_read(self, folder: Path) -> None:
        got, want = load_checkpoint(folder), load_checkpoint(MODELS / "gemma3_text")
        assert got.config == want.config
        jax.tree.map(np.testing.assert_array_equal, got.params, want.params)

    def test_absent_sizes_are_those_of_the_class(self) -> None:
        sizes = {"hidden_size": 2560, "intermediate_size": 10_240, "num_hidden_layers": 34}
        scaling = {"rope_type": "linear", "factor": 8.0}
        text = sizes | {"rope_scaling": scaling, "sliding_window": 1024}
        raw = RawConfig({"model_type": "gemma3", "text_config": text}, Path("config.json"))
        _, config = read_config(raw)
        assert (config.vocab_size, config.max_len, config.tie_embeddings) == (
            262_208,
            131_072,
            True,
        )
        assert config.attention.num_heads == 8 and config.attention.num_kv_heads == 4
        assert [layer.window for layer in config.layers[:7]] == [1024] * 5 + [None, 1024]
        thetas = [layer.rotary.theta for layer in config.layers[4:6] if layer.rotary]
        assert thetas == [1e4, 1e6]


class TestPlacement:
    def test_one_sharding_for_all(self) -> None:
        mesh = jax.make_mesh((2,), ("x",))
        everywhere = jax.NamedSharding(mesh, jax.P())
        params = load_checkpoint(MODELS / "qwen3_moe", sharding=everywhere).params
        assert {leaf.sharding for leaf in jax.tree.leaves(params)} == {everywhere}
        alone = load_checkpoint(MODELS / "qwen3_moe").params
        jax.tree.map(np.testing.assert_array_equal, params, alone)

    def test_one_sharding_a_parameter(self) -> None:
        mesh = jax.make_mesh((2,), ("x",))
        seen = []

        def place(path: tuple[str, ...], shape: tuple[int, ...]) -> jax.sharding.Sharding:
            seen.append((path, shape))
            return jax.NamedSharding(mesh, jax.P(None, "x") if path[-1] == "down" else jax.P())

        params = load_checkpoint(MODELS / "gpt_oss", sharding=place).params["params"]
        down = params["layers_0"]["mlp"]["down"]
        assert down.sharding.spec == jax.P(None, "x")
        assert params["norm"]["scale"].sharding.spec == jax.P()
        assert (("layers_0", "mlp", "down"), (5, 12, 48)) in seen


class TestDeepSeek:
    def test_layers_that_predict_further_are_passed_over(self, tmp_path: Path) -> None:
        shutil.copytree(MODELS / "deepseek_v3", tmp_path, dirs_exist_ok=True)
        weights = load_file(tmp_path / "model.safetensors")
        more = {
            name.replace("layers.3.", "layers.4."): weight
            for name, weight in weights.items()
            if "layers.3." in name
        }
        save_file(weights | more, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match=r"model\.layers\.4\..*not part of a deepseek_v3"):
            load_checkpoint(tmp_path)
        raw = raw_of("deepseek_v3", num_nextn_predict_layers=1)
        (tmp_path / "config.json").write_text(json.dumps(raw.values))
        got, want = load_checkpoint(tmp_path), load_checkpoint(MODELS / "deepseek_v3")
        jax.tree.map(np.testing.assert_array_equal, got.params, want.params)

    def test_the_scale_of_the_scores(self) -> None:
        """B158: from the widths of the expanded key, and YaRN's share on top."""
        assert config_of("deepseek_v2").attention.scale == (10 + 6) ** -0.5
        share = 0.1 * 0.6 * np.log(4.0) + 1
        attention = config_of("deepseek_v3").attention
        np.testing.assert_allclose(attention.scale, (10 + 6) ** -0.5 * share**2, rtol=1e-12)
        assert (attention.latent_dim, attention.rope_dim) == (20, 6)


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("gpt_oss", {"quantization_config": {"quant_method": "mxfp4"}}, ["mxfp4", "unquantized"]),
        ("deepseek_v3", {"quantization_config": {"quant_method": "fp8"}}, ["fp8", "unquantized"]),
        ("llama_linear", {"compression_config": {"format": "x"}}, ["compression_config"]),
        ("gpt_oss", {"swiglu_limit": 5.0}, ["swiglu_limit=5.0"]),
        ("deepseek_v3", {"rope_interleave": False}, ["rope_interleave=False"]),
        ("deepseek_v3", {"n_group": 3}, ["num_experts=8", "num_groups=3"]),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, ["topk_method 'noaux_tc'", "greedy"]),
        ("deepseek_v2", {"kv_lora_rank": "20"}, ["kv_lora_rank='20'", "a whole number from 1"]),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, ["attn_logit_softcapping=50.0"]),
        (
            "gemma3_text",
            {"rope_parameters": {"rope_theta": 1e4}},
            ["rope_parameters", "rope_theta"],
        ),
        ("mistral", {"layer_types": ["sliding_attention"] * 4}, ["layer_types"]),
        ("qwen2", {"hidden_act": "relu"}, ["hidden_act 'relu'", "known: silu"]),
        ("smollm3", {"no_rope_layers": [1, 0]}, ["no_rope_layers", "5 int"]),
        ("qwen3", {"num_hidden_layers": 2**40 - 1}, ["num_hidden_layers", "to 4096"]),
        ("mixtral", {"num_local_experts": 2**39}, ["num_local_experts", "to 65536"]),
        ("gemma2", {"use_bidirectional_attention": True}, ["use_bidirectional_attention=True"]),
        ("phi3", {"original_max_position_embeddings": 25}, ["two different original", "25"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_is_not_built_is_refused_by_name(
    name: str, changes: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(CheckpointError) as caught:
        config_of(name, **changes)
    message = str(caught.value)
    assert all(word in message for word in ["config.json", *words]), message


class TestBadFiles:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        return Path(shutil.copytree(MODELS / "qwen3_moe", tmp_path / "model"))

    def fails(self, folder: Path, *words: str) -> None:
        with pytest.raises(CheckpointError) as caught:
            load_checkpoint(folder)
        assert all(word in str(caught.value) for word in words), str(caught.value)

    def change(self, folder: Path, name: str, weight: np.ndarray | None) -> None:
        index = folder / "model.safetensors.index.json"
        listed = json.loads(index.read_text())
        shard = folder / listed["weight_map"].get(name, "model-00001-of-00004.safetensors")
        weights = load_file(shard)
        weights.pop(name, None)
        listed["weight_map"].pop(name, None)
        if weight is not None:
            weights[name] = weight
            listed["weight_map"][name] = shard.name
        save_file(weights, shard)
        index.write_text(json.dumps(listed))

    def test_the_fixture_has_shards(self, folder: Path) -> None:
        assert len(list(folder.glob("*.safetensors"))) == 4

    def test_missing_and_cut_shards(self, folder: Path) -> None:
        shard = folder / "model-00003-of-00004.safetensors"
        content = shard.read_bytes()
        shard.write_bytes(content[:-1])
        self.fails(folder, shard.name, "tensor model.", "ends at byte", str(len(content) - 1))
        shard.unlink()
        self.fails(folder, shard.name, "no such file")

    def test_missing_misshapen_and_extra_tensors(self, folder: Path) -> None:
        name = "model.layers.2.mlp.experts.4.up_proj.weight"
        self.change(folder, name, None)
        self.fails(folder, str(folder), name, "missing")
        self.change(folder, name, np.zeros((48, 12), np.float32))
        self.fails(folder, str(folder), name, "(48, 12)", "(12, 48)")
        self.change(folder, name, np.zeros((12, 48), np.float32))
        extra = "model.layers.2.mlp.experts.5.up_proj.weight"
        self.change(folder, extra, np.zeros((12, 48), np.float32))
        self.fails(folder, str(folder), extra, "not part of a qwen3_moe model")

    def test_packed_tensors(self, folder: Path) -> None:
        name = "model.layers.2.mlp.experts.4.up_proj.weight"
        self.change(folder, name, np.zeros((12, 24), np.uint8))
        self.fails(folder, ".safetensors", name, "U8", "unquantized")

    def test_nan(self, folder: Path) -> None:
        name = "model.layers.2.mlp.experts.4.up_proj.weight"
        self.change(folder, name, np.full((12, 48), np.nan, np.float32))
        self.fails(folder, str(folder), name, "NaN")
