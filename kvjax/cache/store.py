"""One layer's store: attend and append.

Two orders, chosen by shapes alone, give the same output:

* *write first* (one new token; or a policy that never overwrites): the new tokens are stored, then
  the queries attend over the store. One read of the store; XLA updates it in place.
* *attend first* (a chunk into a ring, which may overwrite what its first queries still see): the
  queries attend over the store as it was and over the chunk, then the chunk is stored.

Layers that read one store take their part in it: the first writes in the first order, the last in
the second, so that all of them see the store as it has to be.

With a codec that delays encoding (`LayerSpec.has_tail`) a query at p sees position j as codes iff
j < encoded(p + 1), else in full precision, from the tail and the chunk; the parts merge exactly.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kvjax.cache.base import Place
from kvjax.cache.entries import Sight
from kvjax.cache.layouts.contiguous import Contiguous
from kvjax.cache.policies.window import ring_positions
from kvjax.cache.spec import LayerSpec
from kvjax.dims import round_up
from pallas_kernels._common.merge import merge
from pallas_kernels._common.operand import AsItIs, Operand
from pallas_kernels._common.softmax import with_sinks
from pallas_kernels._common.visibility import Visibility
from pallas_kernels.attention import KeyRotation

TAIL_LAYOUT = Contiguous()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FieldStore:
    """Buffers of one field (keys or values) of one layer."""

    parts: tuple[jax.Array, ...]  # encoded, in the layout's physical shapes
    tail: tuple[jax.Array, ...]  # () or one full-precision ring [B*K, tail slots, W]


class Turn(NamedTuple):
    """A layer's place among those that read its store."""

    first: bool = True
    last: bool = True


class Chunk(NamedTuple):
    """The new tokens of a step, compacted: real tokens first, in order."""

    start: jax.Array  # i32[B], position of the first: the length so far
    end: jax.Array  # i32[B], the length after it
    fields: dict[str, jax.Array]  # [B, K, T, W] each


def init(spec: LayerSpec) -> dict[str, FieldStore]:
    """Allocate an empty store."""
    layout = spec.config.layout
    fields = {}
    for name in spec.dims.fields:
        parts = tuple(layout.allocate(place) for place in spec.places(name))
        tail = (TAIL_LAYOUT.allocate(spec.tail_place(name)),) if spec.has_tail else ()
        fields[name] = FieldStore(parts, tail)
    return fields


def operands(spec: LayerSpec, store) -> list[Operand]:
    """The stored fields as kernels see them."""
    return [
        spec.config.layout.operand(
            store[name].parts, spec.places(name), spec.coded_width(name), spec.codecs[name]
        )
        for name in spec.dims.fields
    ]


@functools.partial(jax.jit, static_argnames=("spec", "turn", "softcap"))
def attend(
    spec: LayerSpec,
    turn: Turn,
    store,
    tables,
    lengths,
    query,
    entry,
    positions,
    *,
    rotary,
    scale,
    softcap,
    sink_logits,
):
    """Attend over the store and the chunk, and append the chunk; see `Cache.attend`.

    Jitted only so that layers of one kind are traced once; inside a step XLA inlines it.
    """
    table = tables[0] if tables else None
    rule, kind = spec.config.positions, spec.kind
    _, T = positions.shape
    dtype = jax.tree.leaves(query)[0].dtype
    if rule.rotated and rotary is not None:
        query = kind.rotate(query, rotary, positions)
        entry = {**entry, kind.turned: rotary.apply(entry[kind.turned], positions)}
    reader = _Reader(
        spec, query, positions, table, None if rule.rotated else rotary, scale, softcap
    )
    chunk = _compact(entry, positions, lengths, spec.capacity)
    if T == 1:
        if turn.first:
            store = _append_token(spec, store, table, chunk)
        parts = reader.store(store, chunk.end)
        if spec.has_tail:
            tail = [
                TAIL_LAYOUT.operand(field.tail, (spec.tail_place(name),), width, AsItIs())
                for (name, field), width in zip(
                    store.items(), spec.dims.fields.values(), strict=True
                )
            ]
            parts += reader.in_full(tail, ring_positions(chunk.end, spec.tail_slots))
    else:
        recent, base = _recent(spec, store, chunk)
        codes = {name: codec.encode(recent[name]) for name, codec in spec.codecs.items()}
        positions_of_recent = _run(base, chunk.end, jax.tree.leaves(recent)[0].shape[2])
        write_first = _can_write_first(spec, turn)
        if write_first:
            if turn.first:
                store = _append_chunk(spec, store, table, chunk, codes, recent, base)
            parts = reader.store(store, chunk.end)
        else:
            parts = reader.store(store, chunk.start)
            parts += reader.recent_codes(codes, positions_of_recent, chunk.end)
        if spec.has_tail:
            full = [Operand.raw(_flat(x)) for x in recent.values()]
            parts += reader.in_full(full, positions_of_recent, fresh=True)
        if turn.last and not write_first:
            store = _append_chunk(spec, store, table, chunk, codes, recent, base)
    output, lse = merge(parts)
    if sink_logits is not None:
        output, _ = with_sinks(output, lse, sink_logits)
    return output.astype(dtype), store


def _can_write_first(spec: LayerSpec, turn: Turn) -> bool:
    """Whether a chunk may be stored before its queries attend."""
    if not spec.policy.linear or spec.kind.attend_fresh is not None:
        return False
    # What a tail held is needed by every layer that reads it.
    return not spec.has_tail or (turn.first and turn.last)


def reorder(spec: LayerSpec, store, tables, index):
    """Give sequence b the content of sequence index[b]."""
    table = tables[0] if tables else None
    layout = spec.config.layout
    return {
        name: FieldStore(
            tuple(
                layout.reorder(x, place, table, index)
                for x, place in zip(field.parts, spec.places(name), strict=True)
            ),
            tuple(TAIL_LAYOUT.reorder(x, spec.tail_place(name), None, index) for x in field.tail),
        )
        for name, field in store.items()
    }


def fork(old: LayerSpec, new: LayerSpec, store, old_tables, new_tables, index):
    """Copy sequences `index` of `store` into a new store of `new.batch` sequences."""
    layout = old.config.layout
    source = old_tables[0] if old_tables else None
    target = new_tables[0] if new_tables else None
    fields = {}
    for name, field in store.items():
        parts = []
        for buffer, place, fresh in zip(
            field.parts, old.places(name), new.places(name), strict=True
        ):
            start = jnp.zeros(old.batch, jnp.int32)
            rows = layout.read(buffer, place, source, start, place.num_rows)
            start = jnp.zeros(new.batch, jnp.int32)
            parts.append(layout.write(layout.allocate(fresh), fresh, target, start, rows[index]))
        tail = tuple(TAIL_LAYOUT.reorder(x, old.tail_place(name), None, index) for x in field.tail)
        fields[name] = FieldStore(tuple(parts), tail)
    return fields


class _Reader:
    """Attention of one step's queries over parts; each method returns a list of parts to merge."""

    def __init__(self, spec: LayerSpec, query, positions, table, rotary, scale, softcap):
        self.spec, self.query, self.positions = spec, query, positions
        self.table, self.rotary, self.scale, self.softcap = table, rotary, scale, softcap

    def store(self, store, length) -> list:
        """What is stored once `length` tokens have been appended."""
        held = self.spec.slot_positions(self.spec.encoded(length))
        return self._attend(operands(self.spec, store), held, self._coded(), self.table)

    def recent_codes(self, codes, held, length) -> list:
        """The chunk's own tokens as they are encoded, before they are in the store."""
        spec = self.spec
        fields = []
        for name in spec.dims.fields:
            places = spec.places(name)
            fields.append(
                Operand(
                    parts=tuple(_flat(rows) for rows in codes[name]),
                    tokens_per_row=tuple(place.part.tokens_per_row for place in places),
                    dtypes=tuple(place.part.dtype for place in places),
                    width=spec.coded_width(name),
                    format=spec.codecs[name],
                )
            )
        held = jnp.where(held < spec.encoded(length)[:, None], held, -1)
        return self._attend(fields, held, self._coded(), fresh=True)

    def in_full(self, fields, held, fresh: bool = False) -> list:
        """Tokens in full precision, at positions `held` i32[B, S]; `fresh` if of the chunk."""
        first = self.spec.encoded(self.positions + 1)
        visible = self._visibility(first, self.positions)
        return self._attend(fields, held, visible, coded=False, fresh=fresh)

    def _coded(self) -> Visibility:
        encoded = self.spec.encoded(self.positions + 1)
        last = jnp.minimum(self.positions, encoded - 1) if self.spec.has_tail else self.positions
        return self._visibility(jnp.zeros_like(self.positions), last)

    def _visibility(self, first, last) -> Visibility:
        policy, window = self.spec.policy, self.spec.window
        padding = self.positions < 0
        if window is not None:  # the model's own, whatever the policy would show
            first = jnp.maximum(first, self.positions - (window - 1))
        return Visibility(
            first=first,
            window_start=policy.window_start(self.positions),
            last=jnp.where(padding, -1, last),
            sinks=policy.sinks,
        )

    def _attend(
        self,
        fields,
        held,
        visible: Visibility,
        table=None,
        *,
        coded: bool = True,
        fresh: bool = False,
    ) -> list:
        kind = self.spec.kind
        bases = tuple(codec.basis if coded else None for codec in self.spec.codecs.values())
        run = kind.attend_fresh if fresh and kind.attend_fresh is not None else kind.attend

        def call(query, held, key_rotation=None, first_slots=None):
            sight = Sight(
                visibility=visible,
                key_positions=held,
                page_table=table,
                scale=self.scale,
                softcap=self.softcap,
                key_rotation=key_rotation,
                first_slots=first_slots,
                implementation=self.spec.config.implementation,
                bases=bases,
                widths=tuple(self.spec.dims.fields.values()),
            )
            return run(query, fields, sight)

        if self.rotary is None:
            return [call(self.query, held)]
        rotary, positions, policy = self.rotary, self.positions, self.spec.policy
        frequencies = rotary.inverse_frequencies
        start = jnp.zeros_like(positions[:, 0])
        if not self.spec.config.positions.slot:
            query = kind.rotate(self.query, rotary, positions)
            return [call(query, held, KeyRotation(frequencies, start))]
        # Slot positions: within the window distances are those of the text, so queries and keys
        # are turned from a common base, which stays small in a stream of any length. The sinks
        # are as far from the query as their ranks among the tokens it sees.
        base = jnp.min(jnp.where(positions < 0, jnp.iinfo(jnp.int32).max, positions), axis=1)
        base = jnp.maximum(policy.window_start(base), 0)
        in_window = jnp.where(held < policy.sinks, -1, held)
        query = kind.rotate(self.query, rotary, positions - base[:, None])
        parts = [call(query, in_window, KeyRotation(frequencies, base))]
        if policy.sinks:
            query = kind.rotate(self.query, rotary, positions - policy.shift(positions))
            sinks = jnp.where(held < policy.sinks, held, -1)
            rotation = KeyRotation(frequencies, start)
            parts.append(call(query, sinks, rotation, first_slots=policy.sinks))
        return parts


def _compact(entry, positions, lengths, capacity) -> Chunk:
    """Move real tokens to the front, head-major; tokens past the capacity do not count."""
    _, T = positions.shape
    valid = positions >= 0
    count = valid.sum(1, dtype=jnp.int32)
    end = lengths + count
    if capacity is not None:
        end = jnp.minimum(end, capacity)
    if T > 1:
        order = jnp.argsort(~valid, axis=1, stable=True)
        entry = {
            name: jnp.take_along_axis(x, order[:, :, None, None], axis=1)
            for name, x in entry.items()
        }
    return Chunk(lengths, end, {name: x.swapaxes(1, 2) for name, x in entry.items()})


def _append_token(spec: LayerSpec, store, table, chunk: Chunk) -> dict[str, FieldStore]:
    """Append one token a sequence: to the store, or to the tail and by groups to the store."""
    layout, policy, g = spec.config.layout, spec.policy, spec.group
    new = chunk.end > chunk.start
    done, todo = spec.encoded(chunk.start), spec.encoded(chunk.end)
    fields = {}
    for name, field in store.items():
        token, tail = chunk.fields[name], field.tail
        if spec.has_tail:
            place = spec.tail_place(name)
            at = jnp.where(new, chunk.start % spec.tail_slots, spec.tail_slots)
            tail = (TAIL_LAYOUT.scatter(tail[0], place, None, at, token),)
            token = TAIL_LAYOUT.read(tail[0], place, None, done % spec.tail_slots, g)
        rows = spec.codecs[name].encode(token)
        slot = policy.slots(done, spec.policy_slots)
        parts = []
        for buffer, place, part in zip(field.parts, spec.places(name), rows, strict=True):
            row = jnp.where(todo > done, slot // place.part.tokens_per_row, place.num_rows)
            parts.append(layout.scatter(buffer, place, table, row, part))
        fields[name] = FieldStore(tuple(parts), tail)
    return fields


def _recent(spec: LayerSpec, store, chunk: Chunk):
    """Raw tokens from the first that is not encoded yet to the chunk's end.

    Returns:
        [B, K, R, W] of each field, R a multiple of the group, and the first position i32[B].
    """
    if not spec.has_tail:
        return chunk.fields, chunk.start
    base = spec.encoded(chunk.start)
    T = jax.tree.leaves(chunk.fields)[0].shape[2]
    R = round_up(spec.tail_slots + T, spec.group)
    at = base[:, None] + jnp.arange(R, dtype=jnp.int32)[None]  # [B, R]
    zero = jnp.zeros_like(base)
    recent = {}
    for name, field in store.items():
        place = spec.tail_place(name)
        ring = TAIL_LAYOUT.read(field.tail[0], place, None, zero, spec.tail_slots)
        old = _take(ring, at % spec.tail_slots)
        new = _take(chunk.fields[name], jnp.clip(at - chunk.start[:, None], 0, T - 1))
        recent[name] = jnp.where((at < chunk.start[:, None])[:, None, :, None], old, new)
    return recent, base


def _append_chunk(spec: LayerSpec, store, table, chunk: Chunk, codes, recent, base):
    """Store the codes of all full groups, and put the rest into the tail."""
    layout = spec.config.layout
    done, todo = spec.encoded(chunk.start), spec.encoded(chunk.end)
    fields = {}
    for name, field in store.items():
        parts = tuple(
            _overwrite(spec, layout, buffer, place, table, rows, base, done, todo)
            for buffer, place, rows in zip(field.parts, spec.places(name), codes[name], strict=True)
        )
        tail = field.tail
        if spec.has_tail:
            place = spec.tail_place(name)
            held = ring_positions(chunk.end, spec.tail_slots)
            rows = _take(recent[name], jnp.clip(held - base[:, None], 0, None))
            # What is older than `recent` stays: a rollback may need it again.
            zero = jnp.zeros_like(base)
            old = TAIL_LAYOUT.read(tail[0], place, None, zero, spec.tail_slots)
            merged = jnp.where((held >= base[:, None])[:, None, :, None], rows, old)
            tail = (TAIL_LAYOUT.write(tail[0], place, None, zero, merged),)
        fields[name] = FieldStore(parts, tail)
    return fields


def _overwrite(spec: LayerSpec, layout, buffer, place: Place, table, rows, base, done, todo):
    """Write rows of positions [done, todo) where they belong; row i of `rows` is `base` + i * r.

    A window of rows is read, each row asks which position it holds now and takes it from the chunk
    if it is new, and the window is written back. Padding, wrap-around, a chunk longer than the
    ring and rows past the end need no case of their own.
    """
    r = place.part.tokens_per_row
    _, _, n, _ = rows.shape
    unit = layout.window_unit(r)
    size, start = place.num_rows, jnp.zeros_like(done)
    if spec.policy.linear:  # only the rows from `done` on are touched
        size = min(size, round_up(n + unit - 1, unit))
        start = jnp.clip(done // r // unit * unit, 0, place.num_rows - size)
    old = layout.read(buffer, place, table, start, size)
    held = spec.slot_positions(todo)[:, ::r]  # first position of each row, [B, rows]
    row = start[:, None] + jnp.arange(size, dtype=jnp.int32)[None]
    position = jnp.take_along_axis(held, row, axis=1, mode="clip")
    new = _take(rows, jnp.clip((position - base[:, None]) // r, 0, n - 1))
    fresh = (position >= done[:, None])[:, None, :, None]
    merged = jnp.where(fresh, new.astype(old.dtype), old)
    return layout.write(buffer, place, table, start, merged)


def _take(x: jax.Array, index: jax.Array) -> jax.Array:
    """Rows `index` i32[B, n] of x [B, K, S, W]; out of range reads the last."""
    return jnp.take_along_axis(x, index[:, None, :, None], axis=2, mode="clip")


def _run(base: jax.Array, end: jax.Array, size: int) -> jax.Array:
    """Positions base, base + 1, ... below `end`, then -1: i32[B, size]."""
    at = base[:, None] + jnp.arange(size, dtype=jnp.int32)[None]
    return jnp.where(at < end[:, None], at, -1)


def _flat(x: jax.Array) -> jax.Array:
    """[B, K, S, W] to [B*K, S, W]."""
    B, K, S, W = x.shape
    return x.reshape(B * K, S, W)
