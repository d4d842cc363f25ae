"""Static facts of a cache: what is worked out once from config and sizes, and is hashable."""

import dataclasses
import math

import jax
import jax.numpy as jnp

from kvjax.cache.base import Codec, PartSpec, Place, Policy, decode_to_model
from kvjax.cache.config import CacheConfig
from kvjax.cache.entries import ENTRIES, EntryKind
from kvjax.cache.legality import token_group
from kvjax.dims import CacheDims, round_up
from kvjax.errors import CapacityError, ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """One store: of a layer, and of those that read it.

    Attributes:
        config: the layer's four choices.
        dims: the model's sizes.
        batch: B.
        max_len: tokens asked for.
        window: keys that a query of the layer sees under the model; None is all.
        table: index into the cache's shared tables.
    """

    config: CacheConfig
    dims: CacheDims
    batch: int
    max_len: int
    window: int | None = None
    table: int = 0

    @property
    def policy(self) -> Policy:
        """The config's policy, within what the model lets the layer see."""
        policy = self.config.policy
        return policy if self.window is None else policy.within(self.window)

    @property
    def kind(self) -> EntryKind:
        """How queries meet what is stored."""
        return ENTRIES[self.dims.entry]

    @property
    def codecs(self) -> dict[str, Codec]:
        """Codec of each field."""
        return self.config.codecs_of(self.dims.fields)

    @property
    def group(self) -> int:
        """Tokens that are encoded together."""
        return token_group(self.config)

    @property
    def policy_slots(self) -> int:
        """S as the policy counts it."""
        return self.policy.num_slots(self.max_len, self.config.slack, self.group)

    @property
    def wanted_slots(self) -> int:
        """Slots that would do without any rounding; what is more counts as padding."""
        return self.policy.num_slots(self.max_len, self.config.slack, 1)

    @property
    def num_slots(self) -> int:
        """S, slots that are allocated for each sequence."""
        return round_up(self.policy_slots, self.config.layout.slot_multiple)

    @property
    def capacity(self) -> int | None:
        """Tokens that a sequence may hold; None if it may stream for ever."""
        return self.policy.capacity(self.max_len)

    @property
    def lossless(self) -> bool:
        """Whether every field is stored as it is."""
        return all(codec.lossless for codec in self.codecs.values())

    @property
    def residual(self) -> int:
        """Newest tokens that a codec wants to keep in full precision."""
        return max(codec.residual for codec in self.codecs.values())

    @property
    def has_tail(self) -> bool:
        """Whether new tokens wait in full precision before they are encoded."""
        delayed = self.group > 1 or self.residual > 0 or self.config.slack > 0
        return not self.lossless and delayed

    @property
    def tail_slots(self) -> int:
        """Slots of the full-precision ring: an open group, the residual, and what may roll back."""
        if not self.has_tail:
            return 0
        return round_up(self.group + self.residual + 2 * self.config.slack, self.group)

    @property
    def max_rollback(self) -> int | None:
        """Newest tokens that `rollback` may forget; None is any number."""
        free = self.policy.linear and not self.has_tail
        return None if free else self.config.slack

    def coded_width(self, field: str) -> int:
        """Channels of a field as its codec decodes it."""
        width, basis = self.dims.fields[field], self.codecs[field].basis
        return width if basis is None else basis.width(width)

    def decode(self, field: str, parts: tuple[jax.Array, ...]) -> jax.Array:
        """Decode a field to the basis of the model."""
        return decode_to_model(self.codecs[field], parts, self.dims.fields[field])

    def encoded(self, lengths: jax.Array) -> jax.Array:
        """Number of tokens that are codes (or stored as they are) when `lengths` have been seen.

        encoded(n) = floor(max(n - slack - residual, 0) / group) * group; positions below it are
        codes, the rest are in the tail. A pure function of the length: a token is seen in the same
        precision however the text was cut into chunks.
        """
        if not self.has_tail:
            return lengths
        settled = jnp.maximum(lengths - (self.config.slack + self.residual), 0)
        return settled // self.group * self.group

    def places(self, field: str) -> tuple[Place, ...]:
        """Where the parts of a field are stored."""
        width = self.dims.fields[field]
        codec, layout = self.codecs[field], self.config.layout
        parts = codec.parts(width, self.dims.dtype)
        # Only keys: a score contracts over the width, the mix of values over the slots.
        # Keys that are rotated on read are best where their width is innermost.
        transposed = (
            field == "k"
            and self.config.positions.rotated
            and layout.can_transpose()
            and len(parts) == 1
            and parts[0].dtype == "float32"
        )
        return tuple(
            Place(
                batch=self.batch,
                heads=self.dims.num_kv_heads,
                num_slots=self.num_slots,
                part=part,
                transposed=transposed,
                implementation=self.config.implementation,
            )
            for part in parts
        )

    def slot_positions(self, lengths: jax.Array) -> jax.Array:
        """Position in each allocated slot, i32[B, S], once `lengths` tokens are stored."""
        positions = self.policy.slot_positions(lengths, self.policy_slots)
        padding = self.num_slots - self.policy_slots
        return jnp.pad(positions, ((0, 0), (0, padding)), constant_values=-1)

    def tail_place(self, field: str) -> Place:
        """Where the tail of a field is stored: a contiguous ring whatever the layout."""
        return Place(
            batch=self.batch,
            heads=self.dims.num_kv_heads,
            num_slots=self.tail_slots,
            part=PartSpec(
                name="tail", kind="tail", width=self.dims.fields[field], dtype=self.dims.dtype
            ),
            implementation=self.config.implementation,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheSpec:
    """All stores, which layer reads which, and what they share.

    Attributes:
        dims: the model's sizes.
        batch: B.
        max_len: tokens asked for.
        stores: a spec for each store.
        store_of: index of the store that each layer reads.
        table_keys: (layout, slots) of each shared table.
    """

    dims: CacheDims
    batch: int
    max_len: int
    stores: tuple[LayerSpec, ...]
    store_of: tuple[int, ...]
    table_keys: tuple

    def reads_first(self, layer: int) -> bool:
        """Whether a layer is the first of those that read its store."""
        return self.store_of.index(self.store_of[layer]) == layer

    def reads_last(self, layer: int) -> bool:
        """Whether a layer is the last of those that read its store."""
        return self.store_of[layer] not in self.store_of[layer + 1 :]

    @property
    def capacity(self) -> int | None:
        """Tokens that a sequence may hold in every layer; None if it may stream for ever."""
        limits = [store.capacity for store in self.stores if store.capacity is not None]
        return min(limits) if limits else None

    @property
    def max_rollback(self) -> int | None:
        """Newest tokens that every layer can forget; None is any number."""
        limits = [s.max_rollback for s in self.stores if s.max_rollback is not None]
        return min(limits) if limits else None


def make_spec(config, dims: CacheDims, batch: int, max_len: int) -> CacheSpec:
    """Work out the static facts; raises before anything is allocated."""
    for name, value in (("batch", batch), ("max_len", max_len)):
        if value < 1:
            raise ConfigError(f"{name}={value} must be at least 1")
    keys: dict = {}
    stores: list[LayerSpec] = []
    store_of: list[int] = []
    configs = config.for_layers(dims.num_layers)
    for layer, choice in enumerate(configs):
        owner = dims.owner(layer)
        if owner != layer:
            if choice != configs[owner]:
                raise ConfigError(
                    f"layer {layer} reads the store of layer {owner}, so its cache cannot be "
                    f"another: {choice.label} against {configs[owner].label}"
                )
            store_of.append(store_of[owner])
            continue
        window = dims.window(layer)
        draft = LayerSpec(config=choice, dims=dims, batch=batch, max_len=max_len, window=window)
        _check_index_range(draft)
        table = keys.setdefault((choice.layout, draft.num_slots), len(keys))
        store_of.append(len(stores))
        stores.append(dataclasses.replace(draft, table=table))
    return CacheSpec(
        dims=dims,
        batch=batch,
        max_len=max_len,
        stores=tuple(stores),
        store_of=tuple(store_of),
        table_keys=tuple(keys),
    )


def _check_index_range(layer: LayerSpec) -> None:
    """Refuse buffers whose flat indices leave int32: XLA would wrap them without a word."""
    for field in layer.dims.fields:
        for place in layer.places(field):
            elements = math.prod((place.batch, place.heads, place.num_rows, place.part.width))
            if elements >= 2**31:
                raise CapacityError(
                    f"batch={layer.batch} x {place.num_rows} rows of {field} make {elements} "
                    f"elements in one buffer; int32 indices reach 2^31: lower batch or max_len"
                )
