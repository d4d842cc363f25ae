import dataclasses
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from kvjax.checkpoints import Checkpoint, load_checkpoint
from kvjax.checkpoints.tensors import half_split
from kvjax.errors import CheckpointError, ConfigError
from kvjax.nn.config import AttentionConfig
from kvjax.nn.rotary import Linear, Yarn
from tests.fixtures.families import MODELS


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


# Largest error of a value, in the largest of its block: half a step of the type.
QUANTIZED = {
    "F32": 0.0,
    "F16": 2**-11,
    "BF16": 2**-8,
    "Q8_0": 0.5 / 127,
    "Q4_0": 1 / 8,
    "Q4_1": 1 / 15,
}


@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_tensors_are_dequantized(
    make_weights: Callable, gguf_file: Callable, name: str
) -> None:
    weights = make_weights()
    path = gguf_file(weights, quantize=gguf.GGMLQuantizationType[name])
    params = load_checkpoint(path).params["params"]
    down = weights["model.layers.1.mlp.down_proj.weight"]
    loss = np.abs(np.asarray(params["layers_1"]["mlp"]["down"]["kernel"]).T - down)
    most = np.abs(down.reshape(len(down), -1, 32)).max(-1, keepdims=True) * (QUANTIZED[name] + 1e-3)
    assert (loss.reshape(len(down), -1, 32) <= most * (name != "F32")).all()


def random_blocks(weight: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """Blocks of random codes and scales: the package cannot quantize to these types."""
    rng = np.random.default_rng(weight.size)
    width, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (len(weight), weight.shape[1] // width, size), np.uint8)
    scales = rng.normal(size=(*blocks.shape[:2], 2)).astype(np.float16).view(np.uint8)
    if kind == gguf.GGMLQuantizationType.Q4_K:
        blocks[..., :4] = scales
    else:
        blocks[..., -2:] = scales[..., :2]
    return blocks.reshape(len(weight), -1)


def q4_k(block: np.ndarray) -> np.ndarray:
    """256 values of 144 bytes: scale, least, 12 bytes of 6-bit scales and leasts, codes."""
    scale, least = block[:4].view(np.float16).astype(np.float32)
    packed, codes = block[4:16].astype(int), block[16:].astype(int).reshape(4, 32)
    out = []
    for i in range(8):
        if i < 4:
            s, m = packed[i] & 63, packed[i + 4] & 63
        else:
            s = (packed[i + 4] & 15) | (packed[i - 4] >> 6 << 4)
            m = (packed[i + 4] >> 4) | (packed[i] >> 6 << 4)
        out.append(scale * s * (codes[i // 2] >> 4 * (i % 2) & 15) - least * m)
    return np.concatenate(out)


def q6_k(block: np.ndarray) -> np.ndarray:
    """256 values of 210 bytes: low 4 bits, high 2 bits, 16 scales of a byte, one scale of all."""
    low, high = block[:128].astype(int).reshape(2, 64), block[128:192].astype(int).reshape(2, 32)
    scales, scale = block[192:208].view(np.int8), block[208:].view(np.float16)[0]
    out = np.empty((2, 4, 32), np.float32)
    for half in range(2):
        for i in range(4):
            bits = low[half, 32 * (i % 2) :][:32] >> 4 * (i // 2) & 15
            code = bits | (high[half] >> 2 * i & 3) << 4
            own = np.repeat(scales[8 * half + 2 * i :][:2].astype(np.float32), 16)
            out[half, i] = np.float32(scale) * own * (code - 32)
    return out.reshape(-1)


@pytest.mark.parametrize("decode", [q4_k, q6_k], ids=lambda decode: decode.__name__)
def test_superblocks_are_dequantized(
    make_weights: Callable, gguf_file: Callable, decode: Callable
) -> None:
    kind = gguf.GGMLQuantizationType[decode.__name__.upper()]
    weights = make_weights(d_model=256)
    path = gguf_file(
        weights, config={"hidden_size": 256, "head_dim": 16}, quantize=kind, quantizer=random_blocks
    )
    params = load_checkpoint(path).params["params"]
    gate = random_blocks(weights["model.layers.1.mlp.gate_proj.weight"], kind)
    got = np.asarray(params["layers_1"]["mlp"]["gate_up"]["kernel"]).T
    for row in (0, 7):
        np.testing.assert_allclose(got[row], decode(gate[row]), rtol=1e-6)


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_qwen_equals_its_folder(gguf_file: Callable, tmp_path: Path, name: str) -> None:
    folder = Path(shutil.copytree(MODELS / name, tmp_path / "folder"))
    raw = json.loads((folder / "config.json").read_text())
    raw |= {"rope_parameters": None, "use_sliding_window": False, "layer_types": None}
    (folder / "config.json").write_text(json.dumps(raw))
    weights = load_file(folder / "model.safetensors")
    weights = {key: weight.astype(np.float32) for key, weight in weights.items()}
    path = gguf_file(weights, architecture=name, config=raw | {"rope_theta": 1e4})
    ours, theirs = load_checkpoint(path), load_checkpoint(folder)
    assert ours.config == theirs.config
    jax.tree.map(np.testing.assert_array_equal, ours.params, theirs.params)


def test_llama3_frequencies_come_as_factors(gguf_file: Callable) -> None:
    folder = MODELS / "llama_llama3"
    expected = load_checkpoint(folder)
    rotary = expected.config.layers[0].rotary
    assert rotary is not None
    plain = dataclasses.replace(rotary, scaling=None)
    raw = json.loads((folder / "config.json").read_text()) | {"rope_theta": rotary.theta}
    weights = load_file(folder / "model.safetensors")
    weights = {key: weight.astype(np.float32) for key, weight in weights.items()}
    factors = plain.frequencies / rotary.frequencies
    weights["rope_freqs.weight"] = factors.astype(np.float32)
    loaded = load_checkpoint(gguf_file(weights, config=raw))
    got = loaded.config.layers[3].rotary
    assert got is not None
    np.testing.assert_allclose(got.frequencies, rotary.frequencies, rtol=1e-6)
    assert np.abs(factors - 1).max() > 1
    jax.tree.map(np.testing.assert_array_equal, loaded.params, expected.params)


def test_scaled_positions(make_weights: Callable, gguf_file: Callable) -> None:
    def scaled(kind: gguf.RopeScalingType) -> Callable:
        def extra(writer: gguf.GGUFWriter) -> None:
            writer.add_rope_scaling_type(kind)
            writer.add_rope_scaling_factor(4.0)
            writer.add_rope_scaling_orig_ctx_len(64)

        return extra

    for kind, scaling in {
        gguf.RopeScalingType.LINEAR: Linear(factor=4.0),
        gguf.RopeScalingType.YARN: Yarn(factor=4.0, original_len=64),
    }.items():
        config = load_checkpoint(gguf_file(make_weights(), extra=scaled(kind))).config
        assert config.layers[0].rotary is not None
        assert config.layers[0].rotary.scaling == scaling
    with pytest.raises(ConfigError, match="context_len=300 exceeds the 256"):
        load_checkpoint(gguf_file(make_weights()), context_len=300)


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
    np.testing.assert_array_equal(half_split(heads, 0, H)(stored), weight)


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
    fails(gguf_file(weights), "blk.0.attn_v.bias", "not part of a llama model")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"architecture": "gemma2"}, ["gemma2", "known: llama, qwen2, qwen3"]),
        ({"pre": "tekken"}, ["tekken", "known", "smollm"]),
        ({"tokens": ["<start>", "ab", "<end>", "a", "b"]}, ["5 tokens", "97 rows"]),
        ({"extra": lambda w: w.add_key_length(24)}, ["rope.dimension_count", "24"]),
        (
            {"extra": lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)},
            ["rotary scaling", "longrope"],
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
    attention, layer = config.attention, config.layers[0]
    assert isinstance(attention, AttentionConfig) and layer.rotary is not None
    assert (config.num_layers, config.d_model, layer.mlp.d_ff) == (30, 576, 1536)
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (9, 3, 64)
    assert (config.vocab_size, layer.rotary.theta, config.norm.epsilon) == (49_152, 1e5, 1e-5)
    assert (config.max_len, config.tie_embeddings) == (8192, True)
    assert config.parameter_count == 134_515_008
    leaves = jax.tree.leaves(smollm2.params)
    assert sum(leaf.size for leaf in leaves) == config.parameter_count
    assert smollm2.eos_ids == (2,)
    assert smollm2.name == "smollm2-135m"
