"""GQA to MLA: a joint low-rank factor of keys and values, beside decoupled rotary channels.

Of each KV head some rotary pairs keep their positions. They are stored as they are, side by side
for all heads, as the rotary key that all query heads share (a query is zero where other heads'
channels lie). The other key channels lose their rotation, and with the values they are
factorised together: [W_k; W_v] = U V with V of C rows, V x is the latent and U the up-projections.

Two errors, reported apart: the rank, which is nil once C reaches the rank of what is factorised,
and the rotation that was dropped, which is nil if every pair is kept. After MHA2MLA (arXiv
2502.14837) and TransMLA (arXiv 2502.07864), without their training.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np

from kvjax.conversion.report import ConversionReport, LayerError, values_per_token
from kvjax.conversion.weights import (
    attention_inputs,
    kernel,
    plain_attention,
    projections,
    relative_error,
    replace_attention,
    rounded,
)
from kvjax.errors import ConfigError
from kvjax.language_model import LanguageModel
from kvjax.nn.config import AttentionConfig, LatentAttentionConfig, TransformerConfig
from kvjax.nn.rotary import Frequencies, RotaryConfig

# Distances between query and key over which the effect of a rotation is averaged.
_DISTANCES = 1024


def to_latent(
    lm: LanguageModel,
    latent_dim: int,
    rope_dim: int | None = None,
    calibration: np.ndarray | None = None,
) -> tuple[LanguageModel, ConversionReport]:
    """Convert a model with grouped attention to one with latent attention.

    Args:
        lm: the model: rotary positions, no biases, no QK-norm, no soft cap, no sink logits.
        latent_dim: C, width of the latent.
        rope_dim: rotary channels of each KV head that keep their positions, an even number; None
            keeps all. The rotary key has num_kv_heads * rope_dim channels.
        calibration: token ids of a text. The factors are then the best for the keys and values of
            this text, else for the matrices alone.

    Returns:
        the model, and its errors by layer.

    Raises:
        ConfigError: sizes out of range, or attention of a form that latents cannot express.

    >>> from kvjax.testing.tiny import tiny_lm
    >>> latent, report = to_latent(tiny_lm(), latent_dim=32)
    >>> latent.dims.fields, max(layer.values for layer in report.layers) < 1e-6
    ({'c': 32, 'k_rope': 32}, True)
    """
    attention = plain_attention(lm.config, "the latent conversion")
    pairs = _check(lm.config, attention, latent_dim, rope_dim)
    inputs = None if calibration is None else attention_inputs(lm, calibration)
    layers, rotaries, errors = [], [], []
    for i, layer in enumerate(lm.config.layers):
        assert layer.rotary is not None  # checked
        q, k, v = projections(lm, i)
        x = None if inputs is None else inputs[i]
        kept, lost = _split_channels(q, k, layer.rotary, pairs)
        factors = _factorise(k, v, lost, latent_dim, x)
        factors = tuple(rounded(factor, lm.model.dtype) for factor in factors)
        old = lm.params["params"][f"layers_{i}"]["attention"]
        layers.append(
            _parameters(q, k, kept, lost, layer.rotary, factors, old["out"], lm.model.dtype)
        )
        rotaries.append(_rotary(layer.rotary, kept, attention.num_kv_heads))
        errors.append(_errors(q, k, v, lost, factors, layer.rotary, x))
    config = _config(lm.config, attention, latent_dim, 2 * pairs, rotaries)
    new = replace_attention(lm, config, layers, f"{lm.name}-mla{latent_dim}r{2 * pairs}")
    report = ConversionReport(
        layers=tuple(errors),
        weighted=calibration is not None,
        before=values_per_token(lm.dims),
        after=values_per_token(new.dims),
        itemsize=jnp.dtype(lm.model.dtype).itemsize,
    )
    return new, report


def _check(
    config: TransformerConfig, attention: AttentionConfig, latent_dim: int, rope_dim: int | None
) -> int:
    """Return the rotary pairs that each head keeps."""
    if attention.softcap is not None or attention.sink_logits or attention.out_bias:
        raise ConfigError(
            "soft caps, sink logits and output biases are not known to the latent conversion"
        )
    rotary = [layer.rotary for layer in config.layers]
    if any(r is None for r in rotary):
        raise ConfigError("the latent conversion needs rotary positions in every layer")
    widest = min(r.dims for r in rotary if r is not None)
    rope_dim = widest if rope_dim is None else rope_dim
    if type(rope_dim) is not int or rope_dim % 2 or not 2 <= rope_dim <= widest:
        raise ConfigError(f"rope_dim={rope_dim!r}, expected an even number from 2 to {widest}")
    K, H = attention.num_kv_heads, attention.head_dim
    full = min(K * (2 * H - rope_dim), config.d_model)
    if type(latent_dim) is not int or not 1 <= latent_dim <= full:
        raise ConfigError(
            f"latent_dim={latent_dim!r}, expected 1 to {full}, where nothing is lost by rank"
        )
    return rope_dim // 2


def _energies(q: np.ndarray, k: np.ndarray, rotary: RotaryConfig) -> np.ndarray:
    """How much each rotary pair adds to scores: f64[R/2], mean over heads of |W_q| |W_k|."""
    half = rotary.dims // 2
    N, K = len(q), len(k)

    def norms(x: np.ndarray) -> np.ndarray:  # [heads, R/2]
        squares = np.square(x).sum(-1)
        return np.sqrt(squares[:, :half] + squares[:, half : 2 * half])

    return (norms(q) * np.repeat(norms(k), N // K, axis=0)).mean(0)


def _split_channels(
    q: np.ndarray, k: np.ndarray, rotary: RotaryConfig, pairs: int
) -> tuple[np.ndarray, np.ndarray]:
    """Pairs [pairs] that keep their rotation, and all channels of a head that do not.

    Kept are those that would change scores most without it: by their energy, times how far
    their rotation takes a key from where it was, 1 - cos(angle), over `_DISTANCES`.
    """
    angles = np.arange(_DISTANCES)[:, None] * rotary.frequencies
    damage = _energies(q, k, rotary) * (1 - np.cos(angles)).mean(0)
    kept = np.sort(np.argsort(-damage, kind="stable")[:pairs])
    half, H = rotary.dims // 2, k.shape[1]
    lost = np.setdiff1d(np.arange(H), np.concatenate([kept, kept + half]))
    return kept, lost


def _factorise(
    k: np.ndarray, v: np.ndarray, lost: np.ndarray, C: int, x: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Down-projection [C, D] and up-projections of keys [K, lost, C] and values [K, H, C].

    With text the factors minimise the error of keys and values on it: the matrix is factorised
    behind the square root of the inputs' second moments.
    """
    K, H, D = v.shape
    stacked = np.concatenate([k[:, lost].reshape(-1, D), v.reshape(-1, D)])
    if x is None:
        root, inverse = np.eye(D), np.eye(D)
    else:
        moments, vectors = np.linalg.eigh(x.T @ x / len(x))
        # Directions that the text hardly uses keep a little weight, so that all is invertible.
        moments = np.maximum(moments, 1e-6 * moments.max())
        root = (vectors * np.sqrt(moments)) @ vectors.T
        inverse = (vectors / np.sqrt(moments)) @ vectors.T
    left, singular, right = np.linalg.svd(stacked @ root, full_matrices=False)
    C = min(C, len(singular))
    # Latents of one size in all channels are what codecs like: the weight is split evenly.
    share = np.sqrt(singular[:C])
    down = (share[:, None] * right[:C]) @ inverse
    up = left[:, :C] * share
    keys = K * len(lost)
    return down, up[:keys].reshape(K, -1, C), up[keys:].reshape(K, H, C)


def _parameters(q, k, kept, lost, rotary: RotaryConfig, factors, out, dtype: str) -> dict:
    """Parameters of the latent attention of one layer."""
    N, _, D = q.shape
    K, P = len(k), len(kept)
    half = rotary.dims // 2
    down, key_up, value_up = factors
    # Channels that are no longer turned keep the gain that turned ones have.
    nope = np.where(lost < rotary.dims, rotary.magnitude**2, 1.0)[:, None] * q[:, lost]
    # Rotary channels of all heads: first members of their pairs, then second members.
    k_rope = np.stack([k[:, kept], k[:, kept + half]]).reshape(-1, D)
    rope = np.zeros((N, 2, K, P, D))
    head = np.arange(N) // (N // K)
    rope[np.arange(N), 0, head] = q[:, kept]
    rope[np.arange(N), 1, head] = q[:, kept + half]
    query = np.concatenate([nope, rope.reshape(N, -1, D)], axis=1).reshape(-1, D)
    return {
        "query": {"kernel": kernel(query, dtype)},
        "latent": {"kernel": kernel(np.concatenate([down, k_rope]), dtype)},
        **({"key_up": jnp.asarray(key_up[head], dtype)} if len(lost) else {}),
        "value_up": jnp.asarray(value_up[head], dtype),
        "out": out,
    }


def _rotary(old: RotaryConfig, kept: np.ndarray, K: int) -> RotaryConfig:
    """Positions of the shared rotary key: the kept frequencies, once for each head."""
    values = tuple(np.tile(old.frequencies[kept], K).tolist())
    return RotaryConfig(
        dims=2 * len(values),
        theta=old.theta,
        scaling=Frequencies(values=values),
        magnitude=old.magnitude,
    )


def _config(
    old: TransformerConfig,
    attention: AttentionConfig,
    latent_dim: int,
    rope_dim: int,
    rotaries: list[RotaryConfig],
) -> TransformerConfig:
    latent = LatentAttentionConfig(
        num_heads=attention.num_heads,
        latent_dim=latent_dim,
        rope_dim=attention.num_kv_heads * rope_dim,
        nope_dim=attention.head_dim - rope_dim,
        value_dim=attention.head_dim,
        norm_epsilon=None,
        scale=attention.scale or attention.head_dim**-0.5,
    )
    layers = tuple(
        dataclasses.replace(layer, rotary=rotary)
        for layer, rotary in zip(old.layers, rotaries, strict=True)
    )
    return dataclasses.replace(old, attention=latent, layers=layers)


def _errors(q, k, v, lost, factors, rotary: RotaryConfig, x: np.ndarray | None) -> LayerError:
    down, key_up, value_up = factors
    D = down.shape[1]
    seen = np.eye(D) if x is None else x.T  # the columns on which errors are measured

    def of(heads: np.ndarray) -> np.ndarray:
        return heads.reshape(-1, D) @ seen

    rebuilt = k.copy()
    rebuilt[:, lost] = key_up @ down
    energies = _energies(q, k, rotary)
    turned = lost[lost < rotary.dims // 2]
    return LayerError(
        keys=relative_error(of(rebuilt), of(k)),
        values=relative_error(of(value_up @ down), of(v)),
        unrotated=float(energies[turned].sum() / max(energies.sum(), 1e-300)),
    )
