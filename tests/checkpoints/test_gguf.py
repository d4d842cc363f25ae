import re
from collections.abc import Callable
from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.checkpoints import Checkpoint, load_checkpoint
from kvjax.checkpoints.gguf import rotate_half_rows
from kvjax.errors import CheckpointError, ConfigError


def fails(path: Path, *words: str) -> None:
    """The error names the file and every word, on one line."""
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(path)
    message = str(caught.value)
    assert message.startswith(str(path))
    assert all(word in message for word in words), message
    assert "\n" not in message


@pytest.mark.parametrize("tied", [True, False])
def test_equals_the_hugging_face_folder_of_the_same_weights(
    make_weights: Callable, gguf_file: Callable, folder: Callable, tied: bool
) -> None:
    weights = make_weights(tied=tied)
    ours = load_checkpoint(gguf_file(weights))
    theirs = load_checkpoint(folder(weights, tie_word_embeddings=tied))
    assert ours.config == theirs.config
    assert ours.config.tie_embeddings == tied
    jax.tree.map(np.testing.assert_array_equal, ours.params, theirs.params)
    leaves = jax.tree.leaves(ours.params)
    assert sum(leaf.size for leaf in leaves) == ours.config.parameter_count
    assert all(isinstance(leaf, jax.Array) and leaf.dtype == jnp.float32 for leaf in leaves)
    assert ours.name == "tiny"
    assert ours.eos_ids == (2,)


def test_quantized_tensors_are_dequantized(make_weights: Callable, gguf_file: Callable) -> None:
    weights = make_weights()
    kind = gguf.GGMLQuantizationType.Q8_0
    params = load_checkpoint(gguf_file(weights, quantize=kind)).params["params"]
    down = weights["model.layers.1.mlp.down_proj.weight"]
    stored = gguf.quants.dequantize(gguf.quants.quantize(down, kind), kind)
    np.testing.assert_array_equal(params["layers_1"]["mlp"]["down"]["kernel"], stored.T)
    assert 0 < np.abs(stored - down).max() < 0.05


def test_bfloat16_rounds_the_float32_weights(make_weights: Callable, gguf_file: Callable) -> None:
    path = gguf_file(make_weights())
    exact, rounded = load_checkpoint(path, "float32"), load_checkpoint(path, "bfloat16")
    # Matrices of 16 bits lie the other way round (kvjax/nn/layers.py).
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(a.astype(jnp.bfloat16).T, b),
        exact.params,
        rounded.params,
    )


def test_a_rewritten_file_leaves_loaded_weights_alone(
    make_weights: Callable, gguf_file: Callable
) -> None:
    path = gguf_file(make_weights())
    params = load_checkpoint(path).params
    before = jax.tree.map(np.array, params)
    with path.open("r+b") as file:
        file.write(b"\xff" * path.stat().st_size)
    jax.tree.map(np.testing.assert_array_equal, params, before)


def test_unpermuting_inverts_the_converter() -> None:
    heads, H, D = 3, 8, 5
    weight = np.arange(heads * H * D, dtype=np.float32).reshape(heads * H, D)
    # convert_hf_to_gguf.py, LlamaModel.permute
    stored = weight.reshape(heads, 2, H // 2, D).swapaxes(1, 2).reshape(weight.shape)
    np.testing.assert_array_equal(rotate_half_rows(stored, heads), weight)


def test_reads_the_tokenizer(make_weights: Callable, gguf_file: Callable) -> None:
    tokenizer = load_checkpoint(gguf_file(make_weights())).tokenizer
    assert tokenizer is not None
    assert tokenizer.encode("ab<end>") == [0, 1, 2]
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.add_bos) == (0, 2, True)


def test_unknown_dtype_lists_the_known(make_weights: Callable, gguf_file: Callable) -> None:
    for dtype in ("int8", "float99"):
        with pytest.raises(ConfigError, match=rf"{dtype}.*float32, bfloat16"):
            load_checkpoint(gguf_file(make_weights()), dtype)


def test_missing_and_foreign_files(tmp_path: Path) -> None:
    fails(tmp_path / "absent.gguf", "no such file")
    for content in (
        b"",
        b"GG",
        b"GGUF",
        b"PK\x03\x04" + b"\0" * 100,
        b"GGUF\x63\0\0\0" + b"\0" * 40,
    ):
        path = tmp_path / "foreign.gguf"
        path.write_bytes(content)
        fails(path)


def test_every_cut_is_refused_by_name(make_weights: Callable, gguf_file: Callable) -> None:
    path = gguf_file(make_weights())
    content = path.read_bytes()
    for size in np.linspace(1, len(content) - 1, 40).astype(int):
        path.write_bytes(content[:size])
        fails(path)
    fails(path, "tensor output_norm.weight", "ends at byte", str(len(content) - 1))


def test_flipped_header_bytes_are_refused_or_harmless(
    make_weights: Callable, gguf_file: Callable
) -> None:
    path = gguf_file(make_weights())
    content = path.read_bytes()
    for place in range(0, 3000, 7):
        broken = bytearray(content)
        broken[place] ^= 0x41
        path.write_bytes(broken)
        try:
            load_checkpoint(path)
        except CheckpointError as error:
            assert str(path) in str(error)


def test_missing_misshapen_and_unknown_tensors(make_weights: Callable, gguf_file: Callable) -> None:
    for name, ours in {
        "model.layers.1.mlp.up_proj.weight": "blk.1.ffn_up.weight",
        "model.embed_tokens.weight": "token_embd.weight",
    }.items():
        weights = make_weights()
        del weights[name]
        fails(gguf_file(weights), ours, "missing")
    weights = make_weights()
    weights["model.layers.0.self_attn.v_proj.weight"] = np.zeros((48, 64), np.float32)
    fails(gguf_file(weights), "blk.0.attn_v.weight", "(48, 64)", "(32, 64)")
    weights = make_weights() | {"model.layers.0.self_attn.q_proj.bias": np.zeros(64, np.float32)}
    with pytest.raises(ValueError):
        gguf_file(weights)  # the writer of the tests reorders matrices only
    weights = make_weights() | {"blk.0.attn_v.bias": np.zeros(32, np.float32)}
    fails(gguf_file(weights), "blk.0.attn_v.bias", "not part of a Llama model")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"architecture": "qwen2"}, ["qwen2", "known: llama"]),
        ({"pre": "llama-bpe"}, ["llama-bpe", "known", "smollm"]),
        ({"tokens": ["<start>", "ab", "<end>", "a", "b"]}, ["5 tokens", "97 rows"]),
        ({"extra": lambda w: w.add_key_length(24)}, ["rope.dimension_count", "24"]),
        (
            {"extra": lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)},
            ["rotary scaling", "linear"],
        ),
        ({"extra": lambda w: w.add_expert_count(8)}, ["expert_count"]),
    ],
    ids=["architecture", "splitting", "vocabulary", "head-dim", "rope-scaling", "experts"],
)
def test_what_is_not_built_is_refused_by_name(
    make_weights: Callable, gguf_file: Callable, options: dict, words: list[str]
) -> None:
    fails(gguf_file(make_weights(), **options), *words)


def test_unknown_names_list_the_known(tmp_path: Path) -> None:
    for name in ("smollm3", str(tmp_path / "nowhere")):
        with pytest.raises(CheckpointError, match=re.escape(name) + ".*smollm2-135m.*folder"):
            load_checkpoint(name)


@pytest.mark.real_model
def test_the_real_model(smollm2: Checkpoint) -> None:
    config = smollm2.config
    assert (config.num_layers, config.d_model, config.d_ff) == (30, 576, 1536)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (9, 3, 64)
    assert (config.vocab_size, config.rope_theta, config.norm_eps) == (49_152, 1e5, 1e-5)
    assert (config.max_len, config.tie_embeddings) == (8192, True)
    assert config.parameter_count == 134_515_008
    leaves = jax.tree.leaves(smollm2.params)
    assert sum(leaf.size for leaf in leaves) == config.parameter_count
    assert smollm2.eos_ids == (2,)
    assert smollm2.name == "smollm2-135m"
