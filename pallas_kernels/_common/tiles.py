"""Tile sizes of the two bodies: frozen and checked."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuTiles:
    """Sizes of the Triton body.

    Attributes:
        rows: query rows (t, g) of a program; a power of two, at least 16 (one MMA tile).
        block: slots of a step; a power of two, at least 16.
        splits: programs that share the slots of one sequence and head.
        num_warps: warps of a program.
        num_stages: depth of the software pipeline.
    """

    rows: int
    block: int
    splits: int
    num_warps: int = 4
    num_stages: int = 2

    def __post_init__(self) -> None:
        for name in ("rows", "block"):
            value = getattr(self, name)
            if value < 16 or value & (value - 1):
                raise ValueError(f"{name}={value} must be a power of two of at least 16")


MULTIPROCESSORS = 132  # of an H100
LEAST_SLOTS = 256  # of a split


def count_splits(programs: int, S: int, bytes_per_slot: float, bytes_per_split: float) -> int:
    """Programs that share the S slots of one sequence, head and tile (flash-decoding).

    They fill the device once where `programs` alone do not. Twice would be better, but each split
    loads the queries and stores an output of its own, `bytes_per_split`: so only where that is at
    most 2 % of what it reads of the cache.

    >>> count_splits(32, 8192, 512, 3072), count_splits(32, 8192, 96, 3072)
    (8, 5)
    """
    cheap = S // max(LEAST_SLOTS, round(50 * bytes_per_split / bytes_per_slot))
    wanted = min(2 * MULTIPROCESSORS // programs, max(cheap, MULTIPROCESSORS // programs))
    return max(1, min(wanted, S // LEAST_SLOTS))


@dataclasses.dataclass(frozen=True, kw_only=True)
class TpuTiles:
    """Sizes of the Mosaic body.

    Attributes:
        rows: query rows (t, g) of a step; a multiple of 8 (sublanes).
        block: slots of a step: a multiple of 128 (lanes), or all; of a paged store whole pages.
        heads: stored heads of a step; a divisor of K.
    """

    rows: int
    block: int
    heads: int

    def __post_init__(self) -> None:
        if self.rows < 8 or self.rows % 8:
            raise ValueError(f"rows={self.rows} must be a multiple of 8")
