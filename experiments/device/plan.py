"""How large everything is, and in which order: what matters most comes first."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence

from experiments.device.peers import PEERS
from experiments.device.stores import Layout, codecs_of
from experiments.device.works import (
    Check,
    Work,
    append_check,
    append_work,
    attention_check,
    attention_work,
    latent_check,
    latent_work,
    peer_work,
)

CODECS = ("bf16", "int8", "int4", "float8_e4m3fn", "kivi4")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of all that runs; (B, S) are sequences and tokens of each.

    Attributes:
        bar: (B, S) at which the bars are held: 4 GB of bf16.
        main: (B, S) that every codec, layout and peer runs at.
        rest: more (B, S), for our own kernels alone, if time is left.
        most_bytes: no cache is larger.
        prefill: (B, T, S).
        heads: N and K.
        latent_heads: N of latent decode; `latent_widths` are C and R.
        checked: codecs of the small checks; `codecs` are those that are timed.
        timed_paged, checked_paged: which layouts are timed, and checked.
        checked_queries: T of the small checks.
        calls: steps of a program.
        seconds: spent on repetitions of one work.
        least: seconds that one repetition lasts at least.
    """

    bar: tuple[int, int]
    main: tuple[tuple[int, int], ...]
    rest: tuple[tuple[int, int], ...]
    most_bytes: int
    prefill: tuple[int, int, int]
    append: tuple[int, int]
    latent: tuple[tuple[int, int], ...]
    check: tuple[int, int]
    checked: tuple[str, ...] = CODECS
    checked_paged: tuple[bool, ...] = (False, True)
    checked_queries: tuple[int, ...] = (1, 16)
    timed_paged: tuple[bool, ...] = (False, True)
    codecs: tuple[str, ...] = CODECS
    page: int = 64
    heads: tuple[int, int] = (32, 8)
    width: int = 128
    latent_heads: int = 128
    latent_widths: tuple[int, int] = (512, 64)
    l2_bytes: int = 60_000_000
    copies: int = 32
    calls: int = 4
    copied_bytes: int = 4 * 10**9
    repetitions: int = 20
    seconds: float = 0.25
    least: float = 2e-3


_GRID = tuple((B, S) for S in (2048, 8192, 32768, 131072) for B in (1, 8, 64))
_MAIN = ((8, 131072), (64, 8192), (8, 32768), (8, 8192), (1, 32768))
FULL = Sizes(
    bar=(8, 131072),
    main=_MAIN,
    rest=tuple(shape for shape in _GRID if shape not in _MAIN),
    most_bytes=6 * 10**9,
    prefill=(1, 2048, 8192),
    append=(8, 32768),
    latent=((8, 32768), (64, 8192)),
    check=(3, 512),
)
TINY = Sizes(
    bar=(2, 256),
    main=((2, 256),),
    rest=(),
    most_bytes=10**8,
    prefill=(1, 32, 64),
    append=(2, 64),
    latent=((1, 64),),
    check=(2, 256),
    checked=("int4",),
    checked_paged=(True,),
    checked_queries=(1,),
    timed_paged=(False,),
    codecs=("bf16", "int4"),
    page=16,
    heads=(4, 2),
    width=32,
    latent_heads=4,
    latent_widths=(32, 16),
    l2_bytes=20_000,
    copies=3,
    calls=2,
    copied_bytes=10**6,
    repetitions=3,
    seconds=0.0,
    least=0.0,
)


def layout_of(sizes: Sizes, codec: str, B: int, S: int, paged: bool) -> Layout:
    """A cache of keys and values."""
    _, K = sizes.heads
    page = sizes.page if paged else 0
    return Layout(codec=codec, B=B, S=S, page=page, heads=K, width=sizes.width)


def pages(sizes: Sizes, paged: Sequence[bool]) -> list[int]:
    """Z of each layout; 0 is contiguous."""
    return [sizes.page if each else 0 for each in paged]


def usable(sizes: Sizes) -> tuple[Sizes, list[str]]:
    """The sizes without codecs that cannot be imported, and why those cannot."""
    missing = {}
    for codec in sizes.codecs:
        try:
            codecs_of(codec)
        except ImportError as error:
            missing[codec] = f"codec {codec}: {error}"

    def kept(codecs: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(codec for codec in codecs if codec not in missing)

    changed = dataclasses.replace(sizes, codecs=kept(sizes.codecs), checked=kept(sizes.checked))
    return changed, list(missing.values())


def works(sizes: Sizes, implementation: str) -> Iterator[Work]:
    """Everything to time, the most important first, each once."""
    seen = set()
    for work in _works(sizes, implementation):
        if work.label not in seen and work.layout.bytes <= sizes.most_bytes:
            seen.add(work.label)
            yield work


def _works(sizes: Sizes, own: str) -> Iterator[Work]:
    N, _ = sizes.heads
    layout = functools.partial(layout_of, sizes)
    both = sizes.timed_paged
    for paged in both:
        for codec in sizes.codecs[:3]:
            yield attention_work(layout(codec, *sizes.bar, paged), N, own)
    for paged in both:
        for codec in sizes.codecs[:3]:
            for appends in (False, True):
                at = layout(codec, *sizes.append, paged)
                yield append_work(at, N, own, appends=appends)
    yield from _with_peers(sizes, own, *sizes.bar)
    B, T, S = sizes.prefill
    for paged in both:
        for codec in sizes.codecs[:3]:
            yield attention_work(layout(codec, B, S, paged), N, own, T=T, op="prefill")
    yield from _with_peers(sizes, own, B, S, T=T, op="prefill")
    C, R = sizes.latent_widths
    for B, S in sizes.latent:
        for page in pages(sizes, both):
            wide = Layout(codec="bf16", B=B, S=S, page=page, heads=1, width=C, value_width=R)
            for name in (own, "xla"):
                yield latent_work(wide, sizes.latent_heads, name)
    for B, S in sizes.main:
        for paged in both:
            for codec in sizes.codecs:
                yield attention_work(layout(codec, B, S, paged), N, own)
        yield from _with_peers(sizes, own, B, S)
    for B, S in sizes.main[:3]:
        for codec in sizes.codecs[1:3]:
            yield attention_work(layout(codec, B, S, False), N, "xla")
    for B, S in sizes.rest:
        for paged in both:
            for codec in sizes.codecs:
                yield attention_work(layout(codec, B, S, paged), N, own)


def _with_peers(
    sizes: Sizes, own: str, B: int, S: int, *, T: int = 1, op: str = "decode"
) -> Iterator[Work]:
    """The same tokens in bf16 by "xla" and by peers."""
    N, _ = sizes.heads
    for paged in sizes.timed_paged:
        at = layout_of(sizes, "bf16", B, S, paged)
        yield attention_work(at, N, "xla", T=T, op=op)
        work = attention_work(at, N, own, T=T, op=op)
        for peer in PEERS:
            if peer.paged == paged and (T == 1 or not peer.decodes_only):
                yield peer_work(at, N, peer, own != "gpu", work)


def checks(sizes: Sizes, implementation: str) -> Iterator[Check]:
    """Small calls that must come out right before anything is timed."""
    N, _ = sizes.heads
    B, S = sizes.check
    for codec in sizes.checked:
        for paged in sizes.checked_paged:
            at = layout_of(sizes, codec, B, S, paged)
            for T in sizes.checked_queries:
                yield attention_check(at, N, T, implementation)
            if codec != "kivi4":  # its keys are written by groups of tokens
                yield append_check(at, implementation)
    C, R = sizes.latent_widths
    for page in pages(sizes, sizes.checked_paged):
        wide = Layout(codec="bf16", B=B, S=S, page=page, heads=1, width=C, value_width=R)
        yield latent_check(wide, sizes.latent_heads, implementation)
    for peer in PEERS:
        at = layout_of(sizes, "bf16", B, max(S, 16 * sizes.page), peer.paged)
        yield attention_check(at, N, 1, implementation, peer)
