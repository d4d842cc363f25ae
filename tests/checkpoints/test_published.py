"""Configs of published models come to the published numbers of parameters."""

import math
from pathlib import Path
from typing import Any

import pytest

from kvjax.checkpoints.hugging_face import read_config
from kvjax.checkpoints.raw_config import RawConfig


def sizes(vocab: int, hidden: int, mlp: int, layers: int, heads: int, kv: int) -> dict[str, int]:
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
    }


def yarn(factor: float, original: int, **more: Any) -> dict[str, Any]:
    return {"factor": factor, "original_max_position_embeddings": original, **more}


PUBLISHED: dict[str, tuple[int, int, dict[str, Any]]] = {
    "Llama-2-7b": (
        6_738_415_616,
        4096,
        {
            "model_type": "llama",
            **sizes(32_000, 4096, 11_008, 32, 32, 32),
            "max_position_embeddings": 4096,
            "rope_scaling": None,
            "rms_norm_eps": 1e-5,
            "pretraining_tp": 1,
        },
    ),
    "Llama-3.2-1B": (
        1_235_814_400,
        131_072,
        {
            "model_type": "llama",
            **sizes(128_256, 2048, 8192, 16, 32, 8),
            "head_dim": 64,
            "max_position_embeddings": 131_072,
            "tie_word_embeddings": True,
            "rope_theta": 500_000.0,
            "rope_scaling": {
                "rope_type": "llama3",
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                **yarn(32.0, 8192),
            },
        },
    ),
    "Mistral-7B-v0.1": (
        7_241_732_096,
        32_768,
        {
            "model_type": "mistral",
            **sizes(32_000, 4096, 14_336, 32, 32, 8),
            "max_position_embeddings": 32_768,
            "sliding_window": 4096,
        },
    ),
    "Mixtral-8x7B-v0.1": (
        46_702_792_704,
        32_768,
        {
            "model_type": "mixtral",
            **sizes(32_000, 4096, 14_336, 32, 32, 8),
            "max_position_embeddings": 32_768,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "sliding_window": None,
        },
    ),
    "Qwen2.5-0.5B": (
        494_032_768,
        32_768,
        {
            "model_type": "qwen2",
            **sizes(151_936, 896, 4864, 24, 14, 2),
            "max_position_embeddings": 32_768,
            "tie_word_embeddings": True,
            "sliding_window": 32_768,
            "max_window_layers": 24,
            "use_sliding_window": False,
        },
    ),
    "Qwen3-0.6B": (
        596_049_920,
        40_960,
        {
            "model_type": "qwen3",
            **sizes(151_936, 1024, 3072, 28, 16, 8),
            "head_dim": 128,
            "max_position_embeddings": 40_960,
            "tie_word_embeddings": True,
            "sliding_window": None,
            "max_window_layers": 28,
        },
    ),
    "Qwen3-30B-A3B": (
        30_532_122_624,
        40_960,
        {
            "model_type": "qwen3_moe",
            **sizes(151_936, 2048, 6144, 48, 32, 4),
            "head_dim": 128,
            "max_position_embeddings": 40_960,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
    ),
    "gemma-2-2b": (
        2_614_341_888,
        8192,
        {
            "model_type": "gemma2",
            **sizes(256_000, 2304, 9216, 26, 8, 4),
            "head_dim": 256,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_activation": "gelu_pytorch_tanh",
            "max_position_embeddings": 8192,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
        },
    ),
    "gemma-3-1b": (
        999_885_952,
        32_768,
        {
            "model_type": "gemma3_text",
            **sizes(262_144, 1152, 6912, 26, 4, 1),
            "head_dim": 256,
            "max_position_embeddings": 32_768,
            "rope_local_base_freq": 10_000,
            "rope_theta": 1_000_000,
            "rope_scaling": None,
            "sliding_window": 512,
            "sliding_window_pattern": 6,
        },
    ),
    "Phi-3-mini-4k": (
        3_821_079_552,
        4096,
        {
            "model_type": "phi3",
            **sizes(32_064, 3072, 8192, 32, 32, 32),
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "rope_scaling": None,
            "sliding_window": 2047,
            "attention_bias": False,
        },
    ),
    "SmolLM3-3B": (
        3_075_098_624,
        65_536,
        {
            "model_type": "smollm3",
            **sizes(128_256, 2048, 11_008, 36, 16, 4),
            "max_position_embeddings": 65_536,
            "rope_theta": 5_000_000.0,
            "no_rope_layer_interval": 4,
            "use_sliding_window": False,
        },
    ),
    "OLMo-2-1B": (
        1_484_916_736,
        4096,
        {
            "model_type": "olmo2",
            **sizes(100_352, 2048, 8192, 16, 16, 16),
            "max_position_embeddings": 4096,
            "rope_theta": 500_000,
        },
    ),
    "gpt-oss-20b": (
        20_914_757_184,
        131_072,
        {
            "model_type": "gpt_oss",
            **sizes(201_088, 2880, 2880, 24, 64, 8),
            "head_dim": 64,
            "max_position_embeddings": 131_072,
            "num_local_experts": 32,
            "experts_per_token": 4,
            "rope_theta": 150_000,
            "rope_scaling": {
                "rope_type": "yarn",
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                **yarn(32.0, 4096),
            },
            "swiglu_limit": 7.0,
            "sliding_window": 128,
        },
    ),
    "DeepSeek-V2-Lite": (
        15_706_484_224,
        163_840,
        {
            "model_type": "deepseek_v2",
            **sizes(102_400, 2048, 10_944, 27, 16, 16),
            "max_position_embeddings": 163_840,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 512,
            "q_lora_rank": None,
            "moe_intermediate_size": 1408,
            "moe_layer_freq": 1,
            "n_group": 1,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "norm_topk_prob": False,
            "num_experts_per_tok": 6,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "scoring_func": "softmax",
            "topk_group": 1,
            "topk_method": "greedy",
            "v_head_dim": 128,
            "rope_scaling": {
                "type": "yarn",
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 0.707,
                "mscale_all_dim": 0.707,
                **yarn(40, 4096),
            },
        },
    ),
    "DeepSeek-V3": (
        671_026_419_200,
        163_840,
        {
            "model_type": "deepseek_v3",
            **sizes(129_280, 7168, 18_432, 61, 128, 128),
            "max_position_embeddings": 163_840,
            "first_k_dense_replace": 3,
            "kv_lora_rank": 512,
            "q_lora_rank": 1536,
            "moe_intermediate_size": 2048,
            "moe_layer_freq": 1,
            "n_group": 8,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "num_experts_per_tok": 8,
            "num_nextn_predict_layers": 1,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "routed_scaling_factor": 2.5,
            "scoring_func": "sigmoid",
            "topk_group": 4,
            "topk_method": "noaux_tc",
            "v_head_dim": 128,
            "rope_scaling": {
                "type": "yarn",
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                **yarn(40, 4096),
            },
        },
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models(name: str) -> None:
    count, max_len, values = PUBLISHED[name]
    family, config = read_config(RawConfig(values, Path("config.json")))
    stored = {
        part.name: math.prod(part.shape)
        for parameter in family.parameters(config)
        for part in parameter.parts
    }
    assert sum(stored.values()) == config.parameter_count == count
    assert config.max_len == max_len
