"""Tiny random models: real architecture, no download, seconds to compile."""

from typing import Any

import jax
import jax.numpy as jnp

from kvjax.language_model import LanguageModel
from kvjax.nn.config import TransformerConfig
from kvjax.nn.transformer import Transformer


class ByteTokenizer:
    """Bytes folded into a small vocabulary; it decodes to printable characters.

    >>> ByteTokenizer(97).encode("a")
    [65]
    """

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size
        self.eos_id = vocab_size - 1

    def encode(self, text: str) -> list[int]:
        """Text to ids."""
        return [byte - 32 if 32 <= byte < 32 + self.vocab_size else 0 for byte in text.encode()]

    def decode(self, ids, *, skip_special_tokens: bool = False) -> str:
        """Ids to text."""
        return "".join(chr(32 + i) for i in ids)


def tiny_lm(
    config: TransformerConfig | None = None,
    *,
    seed: int = 0,
    dtype: str = "float32",
    scale: float = 3.0,
    **sizes: Any,
) -> LanguageModel:
    """Build a random model: by default a Llama of 2 layers, D 64, N 4, K 2, H 16, V 97.

    Args:
        config: another model than a Llama.
        seed: of the weights.
        dtype: of weights and activations.
        scale: factor on the initial matrices, so that attention is far from uniform.
        **sizes: arguments of `TransformerConfig.llama` to change.
    """
    fields = {
        "vocab_size": 97,
        "num_layers": 2,
        "d_model": 64,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "d_ff": 96,
        "max_len": 4096,
        "tie_embeddings": True,
    }
    config = config or TransformerConfig.llama(**{**fields, **sizes})
    model = Transformer(config, dtype=dtype)
    tokens = jnp.zeros((1, 1), jnp.int32)
    params = jax.jit(model.init)(jax.random.key(seed), tokens, tokens)
    params = jax.tree.map(lambda x: x * jnp.asarray(scale, x.dtype) if x.ndim > 1 else x, params)
    tokenizer = ByteTokenizer(config.vocab_size)
    return LanguageModel(
        model=model,
        params=params,
        config=config,
        tokenizer=tokenizer,  # type: ignore[arg-type]
        name=f"tiny-{seed}",
        eos_ids=(tokenizer.eos_id,),
    )
