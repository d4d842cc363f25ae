"""A tiny Llama as a Hugging Face folder or a GGUF file, and the real one where it is installed."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file

from kvjax.checkpoints import Checkpoint, load_checkpoint
from kvjax.errors import MissingPackageError

V, L, D, N, K, H, F = 97, 2, 64, 4, 2, 16, 96
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": V,
    "num_hidden_layers": L,
    "hidden_size": D,
    "num_attention_heads": N,
    "num_key_value_heads": K,
    "intermediate_size": F,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "rope_scaling": None,
    "sliding_window": None,
    "eos_token_id": 2,
}
# GGUF's names, for what a Hugging Face folder calls otherwise.
GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers.": "blk.",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}

Weights = dict[str, np.ndarray]


def make_weights(*, head_dim: int = H, d_model: int = D, tied: bool = True) -> Weights:
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (V, d_model)}
    for i in range(L):
        layer = {
            "input_layernorm": (d_model,),
            "self_attn.q_proj": (N * head_dim, d_model),
            "self_attn.k_proj": (K * head_dim, d_model),
            "self_attn.v_proj": (K * head_dim, d_model),
            "self_attn.o_proj": (d_model, N * head_dim),
            "post_attention_layernorm": (d_model,),
            "mlp.gate_proj": (F, d_model),
            "mlp.up_proj": (F, d_model),
            "mlp.down_proj": (d_model, F),
        }
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (d_model,)
    if not tied:
        shapes["lm_head.weight"] = (V, d_model)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def write_folder(folder: Path, weights: Weights, *, shards: int = 1, **config: Any) -> Path:
    """Write a folder; `config` overrides keys of CONFIG, and `...` leaves a key out."""
    folder.mkdir(parents=True, exist_ok=True)
    merged = {key: value for key, value in (CONFIG | config).items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(merged))
    if shards == 1:
        save_file(weights, folder / "model.safetensors")
        return folder
    weight_map = {}
    names = list(weights)
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: weights[name] for name in names[i::shards]}
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def write_gguf(
    path: Path,
    weights: Weights,
    *,
    architecture: str = "llama",
    config: dict[str, Any] | None = None,
    tokens: list[str] | None = None,
    pre: str = "smollm",
    quantize: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    quantizer: Callable[..., np.ndarray] = gguf.quants.quantize,
    extra: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
) -> Path:
    """Write a GGUF file as llama.cpp's converter does, Llama's q and k rows interleaved."""
    sizes = CONFIG | (config or {})
    heads, kv_heads = sizes["num_attention_heads"], sizes["num_key_value_heads"]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(sizes["num_hidden_layers"])
    writer.add_context_length(sizes["max_position_embeddings"])
    writer.add_embedding_length(sizes["hidden_size"])
    writer.add_feed_forward_length(sizes["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_freq_base(sizes["rope_theta"])
    writer.add_rope_dimension_count(
        sizes.get("head_dim", sizes["hidden_size"] // sizes["num_attention_heads"])
    )
    if "head_dim" in sizes:
        writer.add_key_length(sizes["head_dim"])
        writer.add_value_length(sizes["head_dim"])
    writer.add_layer_norm_rms_eps(sizes["rms_norm_eps"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    vocab_size = sizes["vocab_size"]
    tokens = tokens or ["<start>", "ab", "<end>", *(chr(33 + i) for i in range(vocab_size - 3))]
    writer.add_token_list(tokens)
    writer.add_token_types([3, 1, 3] + [1] * (len(tokens) - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(True)
    extra(writer)
    for name, weight in weights.items():
        turned = heads if "q_proj" in name else kv_heads if "k_proj" in name else 0
        if turned and architecture == "llama":
            rows, width = weight.shape
            pairs = weight.reshape(turned, 2, rows // turned // 2, width)
            weight = pairs.swapaxes(1, 2).reshape(rows, width)
        for theirs, ours in GGUF_NAMES.items():
            name = name.replace(theirs, ours)
        block, _ = gguf.GGML_QUANT_SIZES[quantize]
        narrow = weight.ndim == 2 and weight.shape[1] % block == 0
        kind = quantize if narrow else gguf.GGMLQuantizationType.F32
        data = (quantizer if narrow else gguf.quants.quantize)(np.ascontiguousarray(weight), kind)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Path]:
    """Return a writer of folders: `folder(weights, shards=, **config)`."""
    return lambda weights, **options: write_folder(tmp_path / "tiny", weights, **options)


@pytest.fixture
def gguf_file(tmp_path: Path) -> Callable[..., Path]:
    """Return a writer of GGUF files: `gguf_file(weights, **options)`."""
    return lambda weights, **options: write_gguf(tmp_path / "tiny.gguf", weights, **options)


@pytest.fixture(name="make_weights")
def make_weights_fixture() -> Callable[..., Weights]:
    """Return `make_weights`; test files cannot import this one."""
    return make_weights


@pytest.fixture(scope="session")
def smollm2() -> Iterator[Checkpoint]:
    """The real model, float32."""
    try:
        yield load_checkpoint("smollm2-135m", "float32")
    except MissingPackageError as error:
        pytest.skip(str(error))
