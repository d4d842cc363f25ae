"""Bytes of a cache by what they are for: predicted without allocating, equal to the buffers."""

import dataclasses

import jax

from kvjax.dims import CacheDims


@dataclasses.dataclass(frozen=True, kw_only=True)
class ByteReport:
    """Bytes on the device; the lines add up to `total`, which is the sum of all buffers.

    Attributes:
        payload: codes or raw values of real slots.
        scales: scales and zero points of real slots.
        tail: full-precision rings of tokens that are not encoded yet.
        metadata: lengths and status.
        tables: page tables.
        padding: slots beyond those asked for (page, group and ring rounding), unused bits of codes.
    """

    payload: int
    scales: int
    tail: int
    metadata: int
    tables: int
    padding: int

    @property
    def total(self) -> int:
        """Sum of all lines."""
        return sum(dataclasses.astuple(self))

    def as_dict(self) -> dict[str, int]:
        """All lines and the total, by name."""
        return {**dataclasses.asdict(self), "total": self.total}


def predict_nbytes(config, dims: CacheDims, batch: int, max_len: int) -> ByteReport:
    """`ByteReport` of the cache that `config.init(dims, batch, max_len)` would allocate.

    >>> from kvjax import CacheConfig
    >>> dims = CacheDims(num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16)
    >>> CacheConfig().predict_nbytes(dims, batch=1, max_len=10).payload == 2 * 10 * 2 * (16+16) * 4
    True
    """
    from kvjax.cache.cache import init_cache

    return count_nbytes(jax.eval_shape(lambda: init_cache(config, dims, batch, max_len)))


def count_nbytes(cache) -> ByteReport:
    """Count the buffers (or their shapes) of a cache."""
    lines = {"payload": 0, "scales": 0, "tail": 0, "padding": 0}
    for spec, store in zip(cache.spec.stores, cache.stores, strict=True):
        for name, field in store.items():
            for buffer, place in zip(field.parts, spec.places(name), strict=True):
                total, part = _nbytes(buffer), place.part
                rows = spec.wanted_slots * place.num_rows // spec.num_slots
                real = total * rows // place.num_rows
                bits = 8 * part.width * jax.numpy.dtype(part.dtype).itemsize
                real = real * (bits - part.padding_bits) // bits
                lines[part.kind] += real
                lines["padding"] += total - real
            lines["tail"] += sum(_nbytes(x) for x in jax.tree.leaves(field.tail))
    return ByteReport(
        **lines,
        metadata=sum(map(_nbytes, (cache.lengths, cache.peaks, cache.status))),
        tables=sum(_nbytes(table) for tables in cache.tables for table in tables),
    )


def _nbytes(array) -> int:
    return array.size * array.dtype.itemsize
