"""The loaded weights against transformers' logits, through a forward pass in plain NumPy.

It shares nothing with kvjax's model, so that a wrong weight and a wrong model can be told apart.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvjax.checkpoints import Checkpoint
from kvjax.nn.config import AttentionConfig, TransformerConfig

FIXTURE = Path(__file__).parents[1] / "fixtures" / "smollm2_logits.npz"
STRIDE = 192


def numpy_llama(
    params: dict[str, Any], config: TransformerConfig, rows: list[np.ndarray]
) -> list[np.ndarray]:
    """Return float64 logits [T, V] of each row of ids [T]."""
    heads, (layer, *_) = config.attention, config.layers
    assert isinstance(heads, AttentionConfig) and layer.rotary is not None
    N, K, H, F = heads.num_heads, heads.num_kv_heads, heads.head_dim, layer.mlp.d_ff
    theta = layer.rotary.theta
    params = params["params"]

    def norm(x: np.ndarray, scale: Any) -> np.ndarray:
        mean = np.square(x).mean(-1, keepdims=True)
        return x / np.sqrt(mean + config.norm.epsilon) * np.asarray(scale["scale"], np.float64)

    def linear(x: np.ndarray, layer: Any) -> np.ndarray:
        return x @ np.asarray(layer["kernel"], np.float64)

    def rotate(x: np.ndarray) -> np.ndarray:  # [T, heads, H]
        inverse = theta ** (-np.arange(0, H, 2) / H)
        angle = (np.arange(len(x))[:, None] * inverse)[:, None, :]
        a, b = x[..., : H // 2], x[..., H // 2 :]
        cos, sin = np.cos(angle), np.sin(angle)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def attend(qkv: np.ndarray) -> np.ndarray:  # [T, (N + 2K) H]
        T = len(qkv)
        heads = qkv.reshape(T, N + 2 * K, H)
        q, k, v = rotate(heads[:, :N]), rotate(heads[:, N : N + K]), heads[:, N + K :]
        scores = np.einsum("tkgh,skh->kgts", q.reshape(T, K, N // K, H), k) / np.sqrt(H)
        scores = np.where(np.tri(T, dtype=bool), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        return np.einsum("kgts,skh->tkgh", weights, v).reshape(T, N * H)

    table = np.asarray(params["embed"]["embedding"], np.float64).T
    hidden = [table[ids] for ids in rows]
    for i in range(config.num_layers):
        layer = params[f"layers_{i}"]
        for row, x in enumerate(hidden):
            attended = attend(linear(norm(x, layer["attention_norm"]), layer["attention"]["qkv"]))
            x = x + linear(attended, layer["attention"]["out"])
            both = linear(norm(x, layer["mlp_norm"]), layer["mlp"]["gate_up"])
            gate, up = both[:, :F], both[:, F:]
            hidden[row] = x + linear(gate / (1 + np.exp(-gate)) * up, layer["mlp"]["down"])
    return [norm(x, params["norm"]) @ table.T for x in hidden]


@pytest.mark.real_model
def test_weights_give_the_logits_of_transformers(smollm2: Checkpoint) -> None:
    with np.load(FIXTURE) as fixture:
        stored = dict(fixture)
    names = sorted({key.partition("/")[0] for key in stored if "/" in key})
    assert len(names) == 3
    ids = [stored[f"{name}/ids"] for name in names]
    for name, logits in zip(names, numpy_llama(smollm2.params, smollm2.config, ids), strict=True):
        chosen = logits[stored[f"{name}/positions"]][:, ::STRIDE]
        # transformers rounds to float32 through 30 layers: 4e-5 measured, logits reach 40.
        np.testing.assert_allclose(chosen, stored[f"{name}/logits"], atol=2e-4, rtol=0)
        top = logits[-1, stored[f"{name}/top_ids"]]
        np.testing.assert_allclose(top, stored[f"{name}/top_logits"], atol=2e-4, rtol=0)
        np.testing.assert_array_equal(logits.argmax(-1), stored[f"{name}/argmax"])
