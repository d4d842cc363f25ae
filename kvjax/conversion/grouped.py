"""Fewer KV heads by mean pooling (Ainslie et al., arXiv 2305.13245), or more by repeating them."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from kvjax.conversion.report import ConversionReport, LayerError, values_per_token
from kvjax.conversion.weights import (
    kernel,
    plain_attention,
    projections,
    relative_error,
    replace_attention,
    rounded,
)
from kvjax.errors import ConfigError
from kvjax.language_model import LanguageModel


def to_grouped(lm: LanguageModel, num_kv_heads: int) -> tuple[LanguageModel, ConversionReport]:
    """Average neighbouring KV heads, down to `num_kv_heads` (1 is MQA), or repeat each.

    Pooling is a starting point for training, as in the paper: without it the loss is large.
    Repeating is exact: the same model with the cache of one that has more heads (MHA, if
    as many as queries).

    Returns:
        the model, and the error of its keys' and values' matrices by layer.

    Raises:
        ConfigError: `num_kv_heads` neither divides the model's nor is a multiple of them that
            divides its query heads, or its attention has a form that cannot be averaged.

    >>> from kvjax.testing.tiny import tiny_lm
    >>> grouped, report = to_grouped(tiny_lm(), num_kv_heads=1)
    >>> grouped.dims.num_kv_heads, report.bytes_before // report.bytes_after
    (1, 2)
    """
    attention = plain_attention(lm.config, "mean pooling")
    N, K = attention.num_heads, attention.num_kv_heads
    if type(num_kv_heads) is not int or num_kv_heads < 1:
        raise ConfigError(f"num_kv_heads={num_kv_heads!r}, expected a whole number of at least 1")
    pools = K % num_kv_heads == 0
    if not pools and (num_kv_heads % K or N % num_kv_heads):
        raise ConfigError(
            f"num_kv_heads={num_kv_heads} neither divides the model's {K} KV heads nor is a "
            f"multiple of them that divides its {N} query heads"
        )
    config = dataclasses.replace(
        lm.config, attention=dataclasses.replace(attention, num_kv_heads=num_kv_heads)
    )
    layers, errors = [], []
    for i in range(config.num_layers):
        q, k, v = projections(lm, i)
        if pools:
            means = [x.reshape(num_kv_heads, -1, *x.shape[1:]).mean(1) for x in (k, v)]
            new_kv = [rounded(x, lm.model.dtype) for x in means]
            back = [np.repeat(x, K // num_kv_heads, axis=0) for x in new_kv]
        else:
            new_kv = [np.repeat(x, num_kv_heads // K, axis=0) for x in (k, v)]
            back = [k, v]
        errors.append(
            LayerError(keys=relative_error(back[0], k), values=relative_error(back[1], v))
        )
        rows = np.concatenate([q, *new_kv]).reshape(-1, q.shape[-1])
        old = lm.params["params"][f"layers_{i}"]["attention"]
        layers.append({**old, "qkv": {"kernel": kernel(rows, lm.model.dtype)}})
    new = replace_attention(lm, config, layers, f"{lm.name}-kv{num_kv_heads}")
    report = ConversionReport(
        layers=tuple(errors),
        weighted=False,
        before=values_per_token(lm.dims),
        after=values_per_token(new.dims),
        itemsize=jnp.dtype(lm.model.dtype).itemsize,
    )
    return new, report
