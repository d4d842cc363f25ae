"""The compiled decode step moves no cache buffer: it holds no copy op of a buffer's shape.

One model has a layer for each config, so that one compilation covers them all: XLA inserts copies
buffer by buffer. The shapes are large enough not to occur anywhere else in the program.
"""

import re

import jax
import jax.numpy as jnp
import pytest

from kvjax import (
    CacheConfig,
    Codecs,
    Contiguous,
    Int,
    KeepAll,
    LayerPattern,
    Paged,
    Raw,
    SinkWindow,
    Window,
)
from kvjax.cache.cache import Cache
from kvjax.decode.generate import LoopState, generate_loop
from kvjax.decode.sampling import Sampler, Sampling
from kvjax.decode.step import decode_step
from kvjax.dims import CacheDims
from kvjax.nn.transformer import Transformer
from tests.models import tiny

COPY = re.compile(r"= \(?(\w+)\[([\d,]+)\]\S* copy(?:-start|_fusion)?\(")
CHANNEL = Codecs(k=Int(bits=2, axis="channel", group_size=16), v=Int(bits=4))
SHORT = SinkWindow(sinks=16, window=140)


def configs(window: int) -> list[CacheConfig]:
    """Layouts x codecs x policies of interest; `window` is the reach of a longer one."""
    sinks = SinkWindow(sinks=16, window=window)
    members = [
        *((codec, KeepAll(), "rotated_absolute") for codec in (Raw(), Raw(dtype="bfloat16"))),
        *((codec, KeepAll(), "rotated_absolute") for codec in (Int(bits=8), Int(bits=4), CHANNEL)),
        (Raw(), KeepAll(), "unrotated_absolute"),
        (Int(bits=8), KeepAll(), "unrotated_absolute"),
        *((codec, Window(window=window), "rotated_absolute") for codec in (Raw(), Int(bits=8))),
        (CHANNEL, Window(window=window), "rotated_absolute"),
        (Raw(), sinks, "rotated_absolute"),
        (Int(bits=4), sinks, "rotated_absolute"),
        *((codec, SHORT, "unrotated_slot") for codec in (Raw(), Int(bits=8), CHANNEL)),
    ]
    found = []
    for layout in (Contiguous(), Paged(page_size=16)):
        for codec, policy, rule in members:
            found.append(CacheConfig(layout=layout, codec=codec, policy=policy, positions=rule))
        found.append(CacheConfig(layout=layout, codec=Int(bits=8), slack=3))  # has a tail
    return found


def buffers(cache: Cache) -> dict[str, list[str]]:
    """Dimensions of every buffer, as HLO writes them, and what has such a one."""
    found: dict[str, list[str]] = {}
    for spec, store in zip(cache.spec.stores, cache.stores, strict=True):
        for name, field in store.items():
            tails = [("tail", array) for array in field.tail]
            for part, array in [*enumerate(field.parts), *tails]:
                dims = ",".join(map(str, array.shape))
                found.setdefault(dims, []).append(f"{name} {part} of {spec.config.label}")
    return found


def copies(hlo: str, shapes: dict[str, list[str]]) -> list[str]:
    """Copy ops of one of these shapes, in whatever dtype."""
    return [
        f"{dtype}[{dims}], as in {shapes[dims][0]} ({len(shapes[dims])} such)"
        for dtype, dims in COPY.findall(hlo)
        if dims in shapes
    ]


def model(dtype: str, layers: int) -> tuple[Transformer, dict, CacheDims]:
    """A model, the shapes of its parameters, and what a cache must know of it."""
    config = tiny(num_layers=layers, d_model=32, d_ff=48, head_dim=64).config
    transformer = Transformer(config, dtype=dtype)
    token = jnp.zeros((1, 1), jnp.int32)
    params = jax.eval_shape(transformer.init, jax.random.key(0), token, token)
    return transformer, params, config.cache_dims(dtype)


@pytest.mark.parametrize(
    ("dtype", "batch", "max_len", "some"),
    [
        ("float32", 1, 1152, slice(None)),
        ("bfloat16", 1, 257, slice(0, None, 2)),
        ("float32", 3, 257, slice(0, None, 3)),
        ("bfloat16", 3, 1152, slice(1, None, 2)),
    ],
    ids=["f32-B1-1152", "bf16-B1-257", "f32-B3-257", "bf16-B3-1152"],
)
def test_decode_step_copies_no_buffer(dtype: str, batch: int, max_len: int, some: slice):
    members = configs(window=max_len - 100)[some]
    transformer, params, sizes = model(dtype, len(members))
    pattern = LayerPattern(members[0], dict(enumerate(members)))
    cache = jax.eval_shape(lambda: pattern.init(sizes, batch, max_len))
    tokens, active = jnp.zeros(batch, jnp.int32), jnp.ones(batch, bool)
    compiled = decode_step.lower(transformer, params, tokens, active, cache).compile()
    found = copies(compiled.as_text(), buffers(cache))
    assert not found, "\n".join(dict.fromkeys(found))


@pytest.mark.parametrize(
    ("dtype", "batch", "max_len"), [("float32", 1, 1152), ("bfloat16", 3, 257)]
)
def test_generation_copies_no_buffer(dtype: str, batch: int, max_len: int):
    """... and neither does the loop around the step."""
    members = configs(window=max_len - 100)[::4]
    transformer, params, sizes = model(dtype, len(members))
    pattern = LayerPattern(members[0], dict(enumerate(members)))
    V = transformer.config.vocab_size

    def state() -> LoopState:
        return LoopState(
            cache=pattern.init(sizes, batch, max_len),
            logits=jnp.zeros((batch, V)),
            tokens=jnp.zeros((batch, 64), jnp.int32),
            logprobs=jnp.zeros((batch, 64)),
            seen=jnp.zeros((batch, V), bool),
            counts=jnp.zeros(batch, jnp.int32),
            reason=jnp.zeros(batch, jnp.int32),
            step=jnp.int32(0),
        )

    sampler = Sampler.of([Sampling(temperature=1.0, top_k=5, repetition_penalty=1.1)] * batch)
    stops, limit = jnp.full((batch, 4), -1, jnp.int32), jnp.full(batch, 8, jnp.int32)
    shapes = jax.eval_shape(state)
    lowered = generate_loop.lower(transformer, params, shapes, sampler, stops, limit, jnp.int32(8))
    hlo = lowered.compile().as_text()
    assert " while(" in hlo
    found = copies(hlo, buffers(shapes.cache))
    assert not found, "\n".join(dict.fromkeys(found))


@pytest.mark.parametrize("donate", [False, True])
def test_a_copy_would_be_found(donate: bool):
    """A buffer that is updated without being donated must be copied."""
    cache = CacheConfig().init(tiny(num_layers=1).dims, 1, 1152)
    shapes = buffers(cache)
    assert set(shapes) == {"2,16,1152", "2,1152,16"}
    update = jax.jit(
        lambda x, i: x.at[:, i].set(1.0, mode="drop"), donate_argnums=0 if donate else ()
    )
    hlo = update.lower(cache.stores[0]["v"].parts[0], jnp.int32(3)).compile().as_text()
    assert bool(copies(hlo, shapes)) != donate
