"""What a conversion lost and saved, layer by layer."""

import dataclasses

from kvjax.dims import CacheDims


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerError:
    """What one layer lost.

    Attributes:
        keys: relative error of all keys that were rebuilt, |K - K'| / |K| (Frobenius).
        values: the same of values.
        unrotated: share of the keys' score energy in channels that lost their rotation; 0 if all
            kept it.
    """

    keys: float
    values: float
    unrotated: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConversionReport:
    """Errors of a conversion, and the bytes that a cached token takes.

    Attributes:
        layers: one a layer.
        weighted: errors are of keys and values on calibration text; else of the matrices.
        before: values that a token caches in all layers, before.
        after: the same, after.
        itemsize: bytes of a value in the model's dtype.
    """

    layers: tuple[LayerError, ...]
    weighted: bool
    before: int
    after: int
    itemsize: int

    @property
    def bytes_before(self) -> int:
        """Bytes of a cached token, stored as it is, before."""
        return self.before * self.itemsize

    @property
    def bytes_after(self) -> int:
        """The same, after."""
        return self.after * self.itemsize


def values_per_token(dims: CacheDims) -> int:
    """Values that a token caches in all layers that have a store.

    >>> values_per_token(CacheDims(num_layers=3, num_heads=2, latent_dim=8, rope_dim=4))
    36
    """
    own = sum(dims.owner(layer) == layer for layer in range(dims.num_layers))
    return own * dims.num_kv_heads * sum(dims.fields.values())
