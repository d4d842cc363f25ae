"""Bytes of a cache: the prediction held against the buffers, bytes a token, bits a value."""

import jax
import jax.numpy as jnp

from kvjax.cache.accounting import ByteReport
from kvjax.cache.config import CacheConfig, LayerPattern
from kvjax.dims import CacheDims


def measured_nbytes(cache) -> int:
    """Sum the sizes of all device buffers of a cache.

    >>> from kvjax.cache import CacheConfig
    >>> dims = CacheDims(num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8)
    >>> measured_nbytes(CacheConfig().init(dims, batch=1, max_len=4)) > 4 * (8 + 8) * 4
    True
    """
    return sum(leaf.nbytes for leaf in jax.tree.leaves(cache))


def check_prediction(
    config: CacheConfig | LayerPattern, dims: CacheDims, batch: int, max_len: int
) -> ByteReport:
    """Allocate a cache and demand that its buffers sum to the prediction.

    Returns:
        The report, predicted and measured alike.

    Raises:
        RuntimeError: they differ: an error in kvjax or in a new member, not of the user.

    >>> from kvjax.cache import CacheConfig
    >>> dims = CacheDims(num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8)
    >>> check_prediction(CacheConfig(), dims, batch=1, max_len=4).payload
    256
    """
    predicted = config.predict_nbytes(dims, batch=batch, max_len=max_len)
    cache = config.init(dims, batch=batch, max_len=max_len)
    reported, measured = cache.nbytes(), measured_nbytes(cache)
    if not predicted == reported or predicted.total != measured:
        raise RuntimeError(
            f"bytes of {config.label} do not add up: predicted {predicted.total}, "
            f"reported {reported.total}, in buffers {measured}"
        )
    return predicted


def bytes_per_token(report: ByteReport, tokens: int) -> float:
    """Divide the whole cache by the tokens of context that it serves.

    The total of *all* buffers (payload, scales, tail, metadata, tables, padding), of one cache that
    was allocated for `tokens` tokens, over these `tokens`, times sequences if there are several. So
    it is a figure at one length: what grows with the text stays, what does not (a tail, a table, a
    window's ring) is spread over the context, and a window's bytes per token fall as the text
    grows.

    >>> report = ByteReport(payload=90, scales=6, tail=0, metadata=4, tables=0, padding=0)
    >>> bytes_per_token(report, tokens=10)
    10.0
    """
    return report.total / tokens


def effective_bits(config: CacheConfig | LayerPattern, dims: CacheDims) -> float:
    """Average the bits of one stored value, with its share of scales and zero points.

    Codes and scales of settled tokens only, over the fields and layers of the model: what the codec
    costs, whatever the policy keeps. Tails, tables and rounding are in the byte report.

    >>> from kvjax.cache import CacheConfig
    >>> dims = CacheDims(num_layers=1, num_heads=2, num_kv_heads=1, head_dim=64)
    >>> effective_bits(CacheConfig(codec="int(bits=4, group_size=32)"), dims)
    5.0
    """
    bits, values = 0.0, 0
    for layer, choice in enumerate(config.for_layers(dims.num_layers)):
        if dims.owner(layer) != layer:
            continue
        for field, codec in choice.codecs_of(dims.fields).items():
            values += dims.fields[field]
            bits += sum(
                (8 * part.width * jnp.dtype(part.dtype).itemsize - part.padding_bits)
                / part.tokens_per_row
                for part in codec.parts(dims.fields[field], dims.dtype)
            )
    return bits / values
