"""The cache: one frozen pytree for the whole model, and its whole interface."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.cache import store as stores
from kvjax.cache.accounting import ByteReport, count_nbytes
from kvjax.cache.entries import KV, Latent
from kvjax.cache.spec import CacheSpec, make_spec
from kvjax.cache.store import FieldStore
from kvjax.dims import CacheDims
from kvjax.errors import CapacityError, ConfigError

FULL, BAD_POSITIONS, BAD_ROLLBACK = 1, 2, 4
FAILURES = {
    FULL: "the cache was full and new tokens were not stored",
    BAD_POSITIONS: "positions did not continue the sequence (lengths, lengths + 1, ...)",
    BAD_ROLLBACK: "a rollback went further than the cache allows, or forwards",
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class Cache:
    """Stored entries of all layers of a model, for B sequences.

    A pure value: every method returns a new cache. Under `jit` with the cache donated the buffers
    are updated in place. Build one with `CacheConfig.init`.

    Attributes:
        stores: one store a layer that has its own: a `FieldStore` for each field of an entry.
        lengths: tokens seen by each sequence, i32[B].
        peaks: longest length that each sequence has had: what `rollback` is measured from.
        status: bits of `FAILURES` for each sequence, i32[B]; see `check`.
        tables: shared tables, one tuple for each distinct (layout, slots).
        spec: static facts.
    """

    stores: tuple[dict[str, FieldStore], ...]
    lengths: jax.Array  # i32[B]
    peaks: jax.Array  # i32[B]
    status: jax.Array  # i32[B]
    tables: tuple[tuple[jax.Array, ...], ...]
    spec: CacheSpec = dataclasses.field(metadata=dict(static=True))

    def attend(
        self,
        layer: int,
        query: Any,
        entry: KV | Latent,
        positions: jax.Array,  # i32[B, T]
        *,
        rotary: Any = None,
        scale: float | jax.Array | None = None,
        softcap: float | None = None,
        window: int | None = None,
        sink_logits: jax.Array | None = None,  # f32[N]
    ) -> tuple[jax.Array, "Cache"]:
        """Attend over what is stored and the new tokens, and store the new ones.

        The cache rotates queries and keys itself, as its position rule says, so nothing is rotated
        twice. `lengths` move only with `advance`, once after the last layer.

        Args:
            layer: which layer attends. Layers that share a store are called in order, each with
                the same entry.
            query: unrotated queries [B, T, N, H]; for latents a `LatentQuery`.
            entry: the new tokens' unrotated keys and values, or latents.
            positions: i32[B, T]: each sequence goes on at its length; -1 is padding, anywhere,
                and is neither stored nor seen.
            rotary: `kvjax.nn.rotary.Rotary`, or None for a layer without.
            scale: factor on scores; None is H ** -0.5.
            softcap: cap on scaled scores.
            window: keys that a query sees under the model, as the cache was built for.
            sink_logits: f32[N], logits that take part in the softmax without a value.

        Returns:
            output [B, T, N, Hv] in the query's dtype (0 at padding), and the new cache.

        Raises:
            ConfigError: the layer's entry or window is not what the cache was built for.
        """
        self._check_layer(layer, entry, window)
        index = self.spec.store_of[layer]
        spec = self.spec.stores[index]
        with jax.named_scope(f"cache_{layer}"):
            output, store = stores.attend(
                spec,
                stores.Turn(self.spec.reads_first(layer), self.spec.reads_last(layer)),
                self.stores[index],
                self.tables[spec.table],
                self.lengths,
                query,
                entry._asdict(),
                positions,
                rotary=rotary,
                scale=scale,
                softcap=softcap,
                sink_logits=sink_logits,
            )
        status = self.status
        if layer == 0:  # the layers see the same positions: one check a step
            status = status | _flag(~self._positions_fit(positions), BAD_POSITIONS)
        new_stores = (*self.stores[:index], store, *self.stores[index + 1 :])
        return output, dataclasses.replace(self, stores=new_stores, status=status)

    def advance(self, counts: jax.Array) -> "Cache":
        """Count `counts` i32[B] new tokens as seen; once after the last layer.

        A sequence that is full keeps its length and gets the `FULL` status.
        """
        lengths = self.lengths + counts.astype(jnp.int32)
        status = self.status
        capacity = self.spec.capacity
        if capacity is not None:
            status = status | _flag(lengths > capacity, FULL)
            lengths = jnp.minimum(lengths, capacity)
        peaks = jnp.maximum(self.peaks, lengths)
        return dataclasses.replace(self, lengths=lengths, peaks=peaks, status=status)

    def rollback(self, lengths: jax.Array) -> "Cache":
        """Forget the newest tokens, down to `lengths` i32[B] of each sequence.

        Exact in every layout and codec, past a wrap and past a flush, down to `spec.max_rollback`
        tokens below the longest length reached; beyond it (or forwards) the sequence is left as it
        is with the `BAD_ROLLBACK` status.
        """
        lengths = jnp.asarray(lengths).astype(jnp.int32)
        bad = (lengths > self.lengths) | (lengths < 0)
        if self.spec.max_rollback is not None:
            bad = bad | (lengths < self.peaks - self.spec.max_rollback) & (lengths < self.lengths)
        return dataclasses.replace(
            self,
            lengths=jnp.where(bad, self.lengths, lengths),
            status=self.status | _flag(bad, BAD_ROLLBACK),
        )

    def reorder(self, index: jax.Array) -> "Cache":
        """Give sequence b the content of sequence `index[b]`, i32[B] (beam search)."""
        index = jnp.asarray(index).astype(jnp.int32)
        if index.shape != (self.spec.batch,):
            raise ConfigError(
                f"reorder needs one index a sequence, [{self.spec.batch}], got "
                f"{index.shape}; fork changes the number of sequences"
            )
        moved = tuple(
            stores.reorder(spec, store, self.tables[spec.table], index)
            for spec, store in zip(self.spec.stores, self.stores, strict=True)
        )
        return dataclasses.replace(
            self,
            stores=moved,
            lengths=self.lengths[index],
            peaks=self.peaks[index],
            status=self.status[index],
        )

    def fork(self, index) -> "Cache":
        """Make a cache whose sequence b starts as a copy of `index[b]`; any number of them.

        The original is left as it is (parallel sampling, trying suffixes of one prefix).
        """
        index = jnp.asarray(index).astype(jnp.int32)
        (batch,) = index.shape
        spec = _resize(self.spec, batch)
        tables = _tables(spec)
        copied = tuple(
            stores.fork(old, new, store, self.tables[old.table], tables[new.table], index)
            for old, new, store in zip(self.spec.stores, spec.stores, self.stores, strict=True)
        )
        return Cache(
            stores=copied,
            lengths=self.lengths[index],
            peaks=self.peaks[index],
            status=self.status[index],
            tables=tables,
            spec=spec,
        )

    def nbytes(self) -> ByteReport:
        """Bytes by purpose; the total is the sum of the device buffers."""
        return count_nbytes(self)

    @property
    def implementations(self) -> tuple[str, ...]:
        """Names of the attention implementations that run over the stores, "auto" resolved.

        Raises:
            ConfigError: the one that was asked for is not known, needs a device that is not here,
                or cannot run over these stores; with the reason.
        """
        try:
            names = {
                spec.kind.resolve(spec.config.implementation, *stores.operands(spec, store))
                for spec, store in zip(self.spec.stores, self.stores, strict=True)
            }
        except (ValueError, NotImplementedError) as error:
            raise ConfigError(str(error)) from None
        return tuple(sorted(names))

    def check(self) -> "Cache":
        """Raise on the host if any sequence has failed; returns the cache."""
        for b, status in enumerate(jax.device_get(self.status).tolist()):
            failures = [text for bit, text in FAILURES.items() if status & bit]
            if failures:
                raise CapacityError(f"sequence {b}: {'; '.join(failures)}")
        return self

    def _check_layer(self, layer: int, entry: KV | Latent, window: int | None) -> None:
        dims = self.spec.dims
        widths = {name: x.shape[-1] for name, x in entry._asdict().items()}
        if widths != dims.fields:
            raise ConfigError(f"layer {layer} gives {widths}, the cache holds {dims.fields}")
        if window != dims.window(layer):
            raise ConfigError(
                f"layer {layer} has window {window}, the cache was built for "
                f"{dims.window(layer)}; build it with the model's dims (`lm.dims`)"
            )

    def _positions_fit(self, positions: jax.Array) -> jax.Array:
        valid = positions >= 0
        rank = jnp.cumsum(valid, axis=1, dtype=jnp.int32) - 1
        return (~valid | (positions == self.lengths[:, None] + rank)).all(1)

    def __repr__(self) -> str:
        groups: dict[str, int] = {}
        for spec, store in zip(self.spec.stores, self.stores, strict=True):
            arrays = ", ".join(
                f"{name}={'+'.join(_short(part) for part in field.parts)}"
                for name, field in store.items()
            )
            text = f"{type(spec.config.layout).__name__}[{arrays}]"
            groups[text] = groups.get(text, 0) + 1
        layers = " + ".join(f"{count} x {text}" for text, count in groups.items())
        return f"Cache(layers={layers}, lengths={_short(self.lengths)})"


def init_cache(config, dims: CacheDims, batch: int, max_len: int) -> Cache:
    """Allocate an empty cache; see `CacheConfig.init`.

    >>> from kvjax import CacheConfig
    >>> dims = CacheDims(num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16)
    >>> CacheConfig(layout="paged(page_size=4)").init(dims, batch=1, max_len=6)
    Cache(layers=2 x Paged[k=f32[2,2,4,16], v=f32[2,2,4,16]], lengths=i32[1])
    """
    spec = make_spec(config, dims, batch, max_len)
    return Cache(
        stores=tuple(stores.init(store) for store in spec.stores),
        lengths=jnp.zeros(batch, jnp.int32),
        peaks=jnp.zeros(batch, jnp.int32),
        status=jnp.zeros(batch, jnp.int32),
        tables=_tables(spec),
        spec=spec,
    )


def _tables(spec: CacheSpec) -> tuple[tuple[jax.Array, ...], ...]:
    return tuple(layout.tables(spec.batch, slots) for layout, slots in spec.table_keys)


def _resize(spec: CacheSpec, batch: int) -> CacheSpec:
    stores = tuple(dataclasses.replace(store, batch=batch) for store in spec.stores)
    return dataclasses.replace(spec, batch=batch, stores=stores)


def _flag(failed: jax.Array, bit: int) -> jax.Array:
    """`bit` where bool[B] `failed`; i32 whatever 64-bit types would make of a literal."""
    return jnp.where(failed, jnp.int32(bit), jnp.int32(0))


def _short(array) -> str:
    name = jnp.dtype(array.dtype).name
    for long, letter in (("bfloat", "bf"), ("float", "f"), ("uint", "u"), ("int", "i")):
        if name.startswith(long):
            name = letter + name[len(long) :]
            break
    return f"{name}[{','.join(map(str, array.shape))}]"
