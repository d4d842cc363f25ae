import json
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kvjax.checkpoints import load_checkpoint
from kvjax.checkpoints.hugging_face import read_config
from kvjax.checkpoints.raw_config import RawConfig
from kvjax.errors import CheckpointError

TOP, PARAMETERS, SCALING = "rope_theta", "rope_parameters", "rope_scaling"


def fails(path: Path, *words: str) -> None:
    """The error names every word, on one line."""
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(path)
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert "\n" not in message


def test_kernels_are_fused_and_stand_in_by_out(make_weights: Callable, folder: Callable) -> None:
    weights = make_weights(tied=False)
    checkpoint = load_checkpoint(folder(weights, tie_word_embeddings=False))
    params = checkpoint.params["params"]
    layer = {key.partition("layers.1.")[2]: value for key, value in weights.items()}
    q, k, v = (layer[f"self_attn.{name}_proj.weight"] for name in "qkv")
    gate, up = (layer[f"mlp.{name}_proj.weight"] for name in ("gate", "up"))
    expected = {
        "attention_norm": {"scale": layer["input_layernorm.weight"]},
        "attention": {
            "qkv": {"kernel": np.concatenate([q, k, v]).T},
            "out": {"kernel": layer["self_attn.o_proj.weight"].T},
        },
        "mlp_norm": {"scale": layer["post_attention_layernorm.weight"]},
        "mlp": {
            "gate_up": {"kernel": np.concatenate([gate, up]).T},
            "down": {"kernel": layer["mlp.down_proj.weight"].T},
        },
    }
    jax.tree.map(np.testing.assert_array_equal, params["layers_1"], expected)
    np.testing.assert_array_equal(
        params["embed"]["embedding"], weights["model.embed_tokens.weight"].T
    )
    np.testing.assert_array_equal(params["norm"]["scale"], weights["model.norm.weight"])
    np.testing.assert_array_equal(params["head"]["kernel"], weights["lm_head.weight"].T)
    assert params.keys() == {"embed", "layers_0", "layers_1", "norm", "head"}
    assert checkpoint.tokenizer is None
    assert checkpoint.eos_ids == (2,)
    assert checkpoint.name == "tiny"


@pytest.mark.parametrize("indexed", [True, False])
def test_shards_equal_a_single_file(
    make_weights: Callable, folder: Callable, tmp_path: Path, indexed: bool
) -> None:
    weights = make_weights()
    single = load_checkpoint(folder(weights)).params
    (tmp_path / "tiny" / "model.safetensors").unlink()
    path = folder(weights, shards=3)
    if not indexed:
        (path / "model.safetensors.index.json").unlink()
    jax.tree.map(np.testing.assert_array_equal, load_checkpoint(path).params, single)


@pytest.mark.parametrize("stored", [np.float16, ml_dtypes.bfloat16, np.float64])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_stored_types_are_converted(
    make_weights: Callable, folder: Callable, stored: type, dtype: str
) -> None:
    weights = {name: weight.astype(stored) for name, weight in make_weights().items()}
    params = load_checkpoint(folder(weights), dtype).params["params"]
    expected = weights["model.norm.weight"].astype(jnp.dtype(dtype))
    np.testing.assert_array_equal(params["norm"]["scale"], expected)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {dtype}


@pytest.mark.parametrize(
    ("config", "theta"),
    [
        ({TOP: 5e5}, 5e5),
        ({TOP: ..., PARAMETERS: {"rope_theta": 5e5, "rope_type": "default"}}, 5e5),
        ({TOP: ..., SCALING: {"rope_theta": 5e5, "type": "default"}}, 5e5),
        ({TOP: 5e5, PARAMETERS: {"rope_theta": 5e5}}, 5e5),
        ({TOP: ...}, 1e4),
        ({TOP: None, PARAMETERS: None}, 1e4),
    ],
    ids=["top", "parameters", "scaling", "both", "absent", "null"],
)
def test_rope_theta_is_found_wherever_it_is(
    make_weights: Callable, folder: Callable, config: dict, theta: float
) -> None:
    rotary = load_checkpoint(folder(make_weights(), **config)).config.layers[0].rotary
    assert rotary is not None and rotary.theta == theta


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({SCALING: {"type": "mrope"}}, ["rotary type 'mrope'", "known: default, linear"]),
        ({SCALING: {"rope_type": "llama3", "factor": 8.0}}, ["low_freq_factor", "missing"]),
        ({SCALING: {"rope_type": "default", "type": "yarn"}}, ["two different rope_type"]),
        ({PARAMETERS: {"rope_type": "dynamic", "rope_theta": 1e4}}, ["factor is missing"]),
        ({PARAMETERS: {"rope_type": "default", "factor": 2.0}}, ["factor"]),
        ({PARAMETERS: {"full_attention": {"rope_theta": 1e6}}}, ["full_attention"]),
        ({SCALING: 2.0}, ["rope_scaling=2.0", "an object"]),
        ({TOP: 1e4, PARAMETERS: {"rope_theta": 5e5}}, ["two different rope_theta", "500000"]),
        ({TOP: -1.0}, ["rope_theta=-1.0"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor"]),
        ({"model_type": "gpt2"}, ["model_type 'gpt2'", "known: llama, mistral"]),
        ({"model_type": ...}, ["model_type None", "known: llama"]),
        ({"attention_bias": 1}, ["attention_bias=1", "true or false"]),
        ({"hidden_act": "gelu"}, ["hidden_act 'gelu'", "known: silu"]),
        ({"quantization_config": {"quant_method": "gptq"}}, ["quantization_config"]),
        ({"hidden_size": ...}, ["hidden_size", "missing"]),
        ({"num_attention_heads": 0}, ["config.json"]),
        ({"num_attention_heads": 3}, ["num_heads=3", "num_kv_heads=2"]),
        ({"num_hidden_layers": "2"}, ["num_hidden_layers='2'"]),
        ({"hidden_size": "64"}, ["config.json"]),
        ({"head_dim": 15}, ["dims=15", "even"]),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else "",
)
def test_configs_that_would_give_another_model_are_refused(
    make_weights: Callable, folder: Callable, config: dict, words: list[str]
) -> None:
    fails(folder(make_weights(), **config), "config.json", *words)


@pytest.mark.parametrize(("head_dim", "expected"), [(16, 16), (None, 10), (..., 10)])
def test_head_dim_is_read_and_derived_only_when_absent(
    make_weights: Callable, folder: Callable, head_dim: int | None, expected: int
) -> None:
    weights = make_weights(head_dim=expected, d_model=40)
    checkpoint = load_checkpoint(folder(weights, hidden_size=40, head_dim=head_dim))
    assert checkpoint.config.attention.head_dim == expected
    qkv = checkpoint.params["params"]["layers_0"]["attention"]["qkv"]["kernel"]
    assert qkv.shape == (40, (4 + 2 * 2) * expected)


def test_absent_keys_take_the_family_defaults() -> None:
    sizes = {
        "model_type": "llama",
        "vocab_size": 97,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
    }
    _, config = read_config(RawConfig(sizes, Path("config.json")))
    rotary = config.layers[0].rotary
    assert rotary is not None and rotary.theta == 10_000.0
    assert (config.attention.num_kv_heads, config.attention.head_dim) == (4, 16)
    assert (config.norm.epsilon, config.max_len, config.tie_embeddings) == (1e-6, 2048, False)


def test_tied_models(make_weights: Callable, folder: Callable) -> None:
    weights = make_weights()
    alone = load_checkpoint(folder(weights))
    assert "head" not in alone.params["params"]
    count = sum(leaf.size for leaf in jax.tree.leaves(alone.params))
    assert count == alone.config.parameter_count
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].copy()
    jax.tree.map(
        np.testing.assert_array_equal, load_checkpoint(folder(weights)).params, alone.params
    )
    weights["lm_head.weight"] += 1
    fails(folder(weights), "tie_word_embeddings", "lm_head.weight differs")
    del weights["lm_head.weight"]
    fails(folder(weights, tie_word_embeddings=False), "lm_head.weight", "missing")


def test_eos_ids_come_from_the_generation_config_first(
    make_weights: Callable, folder: Callable
) -> None:
    path = folder(make_weights())
    assert load_checkpoint(path).eos_ids == (2,)
    (path / "generation_config.json").write_text('{"eos_token_id": [5, 7]}')
    assert load_checkpoint(path).eos_ids == (5, 7)
    (path / "generation_config.json").write_text('{"eos_token_id": [5, 97]}')
    fails(path, "eos_token_id", "[5, 97]", "below 97")


def test_missing_misshapen_and_unknown_tensors(make_weights: Callable, folder: Callable) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    weights = make_weights()
    removed = weights.pop(name)
    fails(folder(weights), name, "missing")
    fails(folder(weights | {name: removed.T}), name, "(64, 96)", "(96, 64)")
    weights[name] = removed
    fails(folder(weights | {"model.layers.2.extra": removed}), "model.layers.2.extra", "not part")
    fails(folder(weights | {name: removed.astype(np.int8)}), name, "I8", "known: F32")
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}
    assert load_checkpoint(folder(weights | buffer)).config.num_layers == 2


def test_a_missing_shard_is_named(make_weights: Callable, folder: Callable) -> None:
    path = folder(make_weights(), shards=3)
    shard = "model-00002-of-00003.safetensors"
    (path / shard).unlink()
    fails(path, shard, "no such file")
    (path / "model.safetensors.index.json").unlink()
    fails(path, shard, "no such file")


@pytest.mark.parametrize("size", [0, 4, 8, 100, -1])
def test_a_truncated_shard_is_named(make_weights: Callable, folder: Callable, size: int) -> None:
    path = folder(make_weights(), shards=3)
    shard = path / "model-00003-of-00003.safetensors"
    content = shard.read_bytes()
    shard.write_bytes(content[:size])
    fails(path, shard.name, *(["tensor model.", "ends at byte"] if size == -1 else []))


def test_the_index_is_held_to_its_word(make_weights: Callable, folder: Callable) -> None:
    path = folder(make_weights(), shards=2)
    shard = path / "model-00001-of-00002.safetensors"
    weights = load_file(shard)
    name = next(iter(weights))
    moved = weights.pop(name)
    save_file(weights, shard)
    fails(path, shard.name, name, "missing")
    other = path / "model-00002-of-00002.safetensors"
    save_file(weights | {name: moved}, shard)
    save_file(load_file(other) | {name: moved}, other)
    fails(path, other.name, shard.name, name)
    (path / "model.safetensors.index.json").unlink()
    fails(path, other.name, shard.name, name)
    for content in ("{}", '{"weight_map": {}}', '{"weight_map": ["a"]}'):
        (path / "model.safetensors.index.json").write_text(content)
        fails(path, "model.safetensors.index.json", "weight_map")


def test_broken_folders(make_weights: Callable, folder: Callable, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    fails(tmp_path / "empty", "config.json", "no such file")
    path = folder(make_weights())
    (path / "config.json").write_text("{")
    fails(path, "config.json", "JSON")
    (path / "config.json").write_text("[]")
    fails(path, "config.json", "JSON object")
    path = folder(make_weights())
    (path / "model.safetensors").unlink()
    fails(path, str(path), "no safetensors file")


def test_shapes_are_compared_before_memory_is_spent(
    make_weights: Callable, folder: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "kvjax.checkpoints.hugging_face.assemble_params",
        lambda *_: pytest.fail("weights were read"),
    )
    # The config promises 4 billion parameters that the file does not hold.
    fails(folder(make_weights(), vocab_size=2**26), "model.embed_tokens.weight")


def test_a_tokenizer_beside_the_weights_is_read(make_weights: Callable, folder: Callable) -> None:
    path = folder(make_weights())
    tokenizer = {
        "version": "1.0",
        "added_tokens": [
            {
                "id": id,
                "content": content,
                "special": True,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
            }
            for id, content in enumerate(["<s>", "</s>"])
        ],
        "pre_tokenizer": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": True,
        },
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": True,
        },
        "model": {"type": "BPE", "vocab": {"<s>": 0, "</s>": 1, "a": 2, "b": 3}, "merges": []},
    }
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    loaded = load_checkpoint(path).tokenizer
    assert loaded is not None
    assert loaded.encode("ab</s>") == [2, 3, 1]
    assert loaded.eos_id == 1
    (path / "tokenizer.json").write_text("{}")
    fails(path, "tokenizer.json")


def test_weights_that_are_not_finite_are_refused_by_name(
    make_weights: Callable, folder: Callable
) -> None:
    weights = make_weights()
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] = np.nan
    fails(folder(weights), "model.layers.1.mlp.up_proj.weight", "NaN")


def test_a_name_that_promises_millions_of_shards_is_answered_at_once(make_weights, folder) -> None:
    path = folder(make_weights())
    (path / "model.safetensors").rename(path / "model-00001-of-99999999.safetensors")
    fails(path, "model-00002-of-99999999.safetensors")


def test_numbers_too_large_for_the_dtype_are_refused(make_weights, folder) -> None:
    weights = make_weights()
    weights["model.norm.weight"] = np.full_like(weights["model.norm.weight"], 3.4e38)
    path = folder(weights)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight.*too large for bfloat16"):
        load_checkpoint(path, "bfloat16")
