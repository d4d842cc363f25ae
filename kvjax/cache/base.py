"""The contract of the cache algebra: what a layout, a codec, a policy and a position rule are.

    cache = layout x codec x policy x position rule

The four do not know each other. `cache.py` threads them; `legality.py` says which go together.
"""

import dataclasses
from typing import ClassVar, Protocol, runtime_checkable

import jax

from kvjax.errors import ConfigError
from pallas_kernels._common.operand import Operand


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartSpec:
    """One array of an encoded field: what one head stores for one row.

    Attributes:
        name: for reports and reprs, such as "codes" or "scale".
        kind: "payload" or "scales": the line of the byte report that it counts under.
        width: W, elements of a row.
        dtype: numpy name of the element type.
        tokens_per_row: r, consecutive tokens that share one row.
        padding_bits: bits of a row that hold nothing: 8 * itemsize * width less those of all codes.
    """

    name: str
    kind: str
    width: int
    dtype: str
    tokens_per_row: int = 1
    padding_bits: int = 0


@runtime_checkable
class Basis(Protocol):
    """Another basis that a codec stores vectors in: orthogonal, so that scores are the same.

    Keys stay in it: queries are brought to it instead, and the mix of values is brought back.
    """

    def width(self, width: int) -> int:
        """Channels that `width` channels become."""
        ...

    def forward(self, x: jax.Array) -> jax.Array:
        """Bring [..., W] to it, f32[..., width(W)]."""
        ...

    def inverse(self, y: jax.Array, width: int) -> jax.Array:
        """Bring f32[..., width(W)] back to [..., W]."""
        ...


@runtime_checkable
class Codec(Protocol):
    """How one field (keys, or values) of a token is encoded. A frozen dataclass, hence hashable."""

    @property
    def group(self) -> int:
        """Consecutive tokens that are encoded together; 1 for per-token codecs."""
        ...

    @property
    def residual(self) -> int:
        """Newest tokens that stay in full precision beyond those of an open group."""
        ...

    @property
    def lossless(self) -> bool:
        """Whether decode(encode(x)) is x, bit for bit, in the model's dtype."""
        ...

    @property
    def basis(self) -> Basis | None:
        """Basis that decoded values are in; None is that of the model."""
        ...

    def parts(self, width: int, dtype: str) -> tuple[PartSpec, ...]:
        """Arrays that hold a field of `width` channels of a model that computes in `dtype`."""
        ...

    def encode(self, x: jax.Array) -> tuple[jax.Array, ...]:
        """Encode [..., S, width] to rows [..., S // r, W] of each part; `group` divides S.

        x has the model's dtype (f32 or bf16); rows have the dtypes and widths that `parts` says.
        Values that are not finite must not reach other tokens or heads.
        """
        ...

    def decode(self, parts: tuple[jax.Array, ...], width: int) -> jax.Array:
        """Decode rows [..., S // r, W] of each part to [..., S, width], f32 or narrower.

        With a basis, `width` and the result are those of the basis.

        Slots that were never written hold any bytes: decode them to anything, but do not fail.
        """
        ...

    def bound(self, x: jax.Array) -> jax.Array:
        """Largest |decode(encode(x)) - x| that the method allows, by element, in x's own basis."""
        ...

    @classmethod
    def examples(cls) -> tuple["Codec", ...]:
        """Settings that the conformance suite runs."""
        ...


@runtime_checkable
class Policy(Protocol):
    """Which slot a token gets, who leaves, who is visible. A frozen dataclass.

    A query at position p sees the positions from `window_start(p)` to p, and those below `sinks`.
    """

    @property
    def sinks(self) -> int:
        """First tokens that are always visible."""
        ...

    @property
    def linear(self) -> bool:
        """Whether slot == position, so that nothing is ever overwritten."""
        ...

    def within(self, window: int) -> "Policy":
        """The policy of a layer whose queries see no more than `window` keys anyway.

        It may keep less; what it lets a query see is cut to the window by the cache.
        """
        ...

    def num_slots(self, max_len: int, slack: int, group: int) -> int:
        """Slots S that a sequence needs, a multiple of `group`."""
        ...

    def capacity(self, max_len: int) -> int | None:
        """Tokens that a sequence may hold; None if it may stream for ever."""
        ...

    def window_start(self, positions: jax.Array) -> jax.Array:
        """First position of the window of queries at i32[...] `positions`."""
        ...

    def slots(self, positions: jax.Array, num_slots: int) -> jax.Array:
        """Slot of each position."""
        ...

    def slot_positions(self, lengths: jax.Array, num_slots: int) -> jax.Array:
        """Positions i32[B, S] that the slots hold once positions < lengths i32[B] are stored."""
        ...

    def shift(self, positions: jax.Array) -> jax.Array:
        """How far cache-relative positions lag behind absolute ones, for queries at `positions`."""
        ...

    @classmethod
    def examples(cls) -> tuple["Policy", ...]:
        """Settings that the conformance suite runs, small enough for texts of 40 tokens."""
        ...


class Layout(Protocol):
    """Where the bytes of slot s live. Owns the physical shape of every buffer. A frozen dataclass.

    A *row window* is the rows [start, start + size) of every sequence, [B, K, size, W] logically.
    """

    @property
    def slot_multiple(self) -> int:
        """Slots are allocated in multiples of this."""
        ...

    def allocate(self, place: "Place") -> jax.Array:
        """Zeros in the physical shape."""
        ...

    def tables(self, batch: int, num_slots: int) -> tuple[jax.Array, ...]:
        """Shared state of this layout: nothing, or a page table i32[B, M]."""
        ...

    def read(self, buffer, place: "Place", table, start: jax.Array, size: int) -> jax.Array:
        """Rows [start[b], start[b] + size) of each sequence, [B, K, size, W]."""
        ...

    def write(self, buffer, place: "Place", table, start: jax.Array, rows: jax.Array) -> jax.Array:
        """Overwrite rows from start[b] on with `rows` [B, K, size, W]; both in range."""
        ...

    def scatter(self, buffer, place: "Place", table, row: jax.Array, rows: jax.Array) -> jax.Array:
        """Put `rows` [B, K, size, W] at row[b]; a row index out of range writes nothing."""
        ...

    def reorder(self, buffer, place: "Place", table, index: jax.Array) -> jax.Array:
        """Give sequence b the content of sequence index[b]."""
        ...

    def operand(self, buffers, places: "tuple[Place, ...]", width: int, codec) -> Operand:
        """The buffers of a field as attention kernels see them."""
        ...

    def can_transpose(self) -> bool:
        """Whether raw f32 keys may be stored [W, S]."""
        ...

    def window_unit(self, tokens_per_row: int) -> int:
        """Row windows start at multiples of this and span multiples of it."""
        ...

    @classmethod
    def examples(cls) -> tuple["Layout", ...]:
        """Settings that the conformance suite runs."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """Where one part of one field is stored: sizes that a layout turns into a physical shape."""

    batch: int  # B
    heads: int  # K
    num_slots: int  # S, allocated slots of a sequence
    part: PartSpec
    transposed: bool = False  # the layout may store [W, S]: the part is raw f32 keys
    implementation: str = "auto"  # which kernel appends

    @property
    def num_rows(self) -> int:
        """Rows of one head of one sequence."""
        return self.num_slots // self.part.tokens_per_row


@dataclasses.dataclass(frozen=True)
class PositionRule:
    """What position a slot's key stands for.

    Attributes:
        rotated: keys are rotated before they are stored; else when they are read.
        slot: positions are relative to the cache (StreamingLLM, arXiv 2309.17453), not absolute.
    """

    rotated: bool = True
    slot: bool = False

    NAMES: ClassVar[dict[str, tuple[bool, bool]]] = {
        "rotated_absolute": (True, False),
        "unrotated_absolute": (False, False),
        "unrotated_slot": (False, True),
        "rotated_slot": (True, True),
    }

    @property
    def name(self) -> str:
        """The rule's name in configs.

        >>> PositionRule(rotated=False).name
        'unrotated_absolute'
        """
        return next(n for n, v in self.NAMES.items() if v == (self.rotated, self.slot))

    @classmethod
    def parse(cls, name: str) -> "PositionRule":
        """Build a rule from its name."""
        if name not in cls.NAMES:
            raise ConfigError(f"unknown position rule {name!r}; known: {', '.join(cls.NAMES)}")
        return cls(*cls.NAMES[name])


def decode_to_model(codec: Codec, parts: tuple[jax.Array, ...], width: int) -> jax.Array:
    """Decode to [..., S, width] in the basis of the model."""
    if codec.basis is None:
        return codec.decode(parts, width)
    return codec.basis.inverse(codec.decode(parts, codec.basis.width(width)), width)


ROTATED_ABSOLUTE = PositionRule(rotated=True, slot=False)
UNROTATED_ABSOLUTE = PositionRule(rotated=False, slot=False)
UNROTATED_SLOT = PositionRule(rotated=False, slot=True)


def check_at_least(owner: object, **limits: int) -> None:
    """Refuse knobs of `owner` that are no int or below their limit."""
    for name, least in limits.items():
        value = getattr(owner, name)
        if type(value) is not int or value < least:
            raise ConfigError(
                f"{type(owner).__name__}.{name}={value!r} must be an integer of at least {least}"
            )
