"""Why a cache loses quality: where its error enters, by layer and head.

The exact model runs over a text. What the attention of each layer is given is then attended with
what the cache would hold of it (codes) and with what it would let each query see (eviction), one
at a time and together. Errors do not pass on from layer to layer here: this is where loss
arises, the perplexity is what it adds up to.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache.config import CacheConfig, LayerPattern
from kvjax.cache.spec import LayerSpec, make_spec
from kvjax.errors import ConfigError
from kvjax.language_model import LanguageModel
from kvjax.nn.config import AttentionConfig
from kvjax.nn.layers import outputs_first
from kvjax.nn.rotary import Rotary

QUERIES = 128  # query positions that are looked at together


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attribution:
    """Errors by layer and query head, f64[L, N], over the query positions that count.

    Attributes:
      keys: Relative error of the stored keys, |k' - k| / |k|.
      values: The same of values.
      scores: Root mean square of the change of scaled scores by the error of keys.
      total_variation: Half the sum of |w' - w| over the softmax, by the error of keys.
      lost_mass: Weight of the exact softmax on tokens that the policy does not show.
      mix_keys: Relative error of the head's output by the error of keys alone.
      mix_values: By that of values alone.
      mix_codec: By both: the codec's share.
      mix_eviction: By eviction alone, with exact keys and values.
      mix: By all together.
      output: f64[L], relative error of the layer's attention output, by all together.
    """

    keys: np.ndarray
    values: np.ndarray
    scores: np.ndarray
    total_variation: np.ndarray
    lost_mass: np.ndarray
    mix_keys: np.ndarray
    mix_values: np.ndarray
    mix_codec: np.ndarray
    mix_eviction: np.ndarray
    mix: np.ndarray
    output: np.ndarray

    def by_layer(self) -> dict[str, np.ndarray]:
        """Mean over heads of every figure, f64[L]."""
        return {name: x.reshape(len(x), -1).mean(1) for name, x in vars(self).items()}


def attribute(
    lm: LanguageModel, tokens: Any, cache: CacheConfig | LayerPattern, *, start: int = 1
) -> Attribution:
    """Attribute the loss of a cache on a text.

    Args:
      lm: A model that caches keys and values.
      tokens: One text of token ids, [T] or [1, T].
      cache: Which cache; keys and values are seen in the precision that it would show them in when
        the text is decoded.
      start: First query position that counts.

    Raises:
      ConfigError: The model caches latents, or positions are relative to the cache (their effect
        is neither the codec's nor the policy's).

    >>> from kvjax.testing.tiny import tiny_lm
    >>> found = attribute(tiny_lm(), list(range(40)), CacheConfig(codec="int(bits=4)"))
    >>> found.mix.shape, float(found.lost_mass.max()), bool((found.mix == found.mix_codec).all())
    ((2, 4), 0.0, True)
    """
    heads = lm.config.attention
    if not isinstance(heads, AttentionConfig):
        raise ConfigError("attribution needs keys and values; this model caches latents")
    ids = jnp.asarray(np.atleast_2d(tokens), jnp.int32)
    _, T = ids.shape
    if len(ids) != 1 or not 0 <= start < T:
        raise ConfigError(f"tokens [{len(ids)}, {T}] and start={start}: one text, start within it")
    spec = make_spec(cache, lm.dims, 1, T)
    if any(store.config.positions.slot for store in spec.stores):
        raise ConfigError("attribution does not know positions that are relative to the cache")
    captured = _capture(lm, ids)
    rows = []
    for i, layer in enumerate(lm.config.layers):
        q, k, v = captured[i]
        rotary = None if layer.rotary is None else Rotary.of(layer.rotary)
        store = spec.stores[spec.store_of[i]]
        kernel = lm.params["params"][f"layers_{i}"]["attention"]["out"]["kernel"]
        out = kernel.T if outputs_first(kernel.dtype) else kernel
        sinks = lm.params["params"][f"layers_{i}"]["attention"].get("sink_logits")
        rows.append(_layer(store, heads, rotary, q, k, v, out, sinks, start))
    figures = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    return Attribution(**figures)


def _capture(lm: LanguageModel, ids: jax.Array) -> list[tuple[jax.Array, ...]]:
    """Unrotated queries [T, N, H], keys and values [T, K, H] of each layer."""
    positions = jnp.arange(ids.shape[1], dtype=jnp.int32)[None]

    @jax.jit
    def run(params):
        _, state = lm.model.apply(params, ids, positions, mutable=["intermediates"])
        return state["intermediates"]

    found = run(lm.params)
    return [
        tuple(x[0] for x in found[f"layers_{i}"]["attention"]["attended"][0])
        for i in range(lm.config.num_layers)
    ]


def _layer(
    spec: LayerSpec, heads: AttentionConfig, rotary, q, k, v, out, sinks, start: int
) -> dict[str, np.ndarray]:
    T = len(q)
    stored = _stored(spec, rotary, q, k, v)
    sums: dict[str, Any] = {}
    for first in range(start, T, QUERIES):
        # The last block reaches back; what it repeats does not count.
        at = min(first, max(T - QUERIES, 0))
        counted = np.arange(at, min(at + QUERIES, T)) >= first
        block = _block(spec, heads, stored, out, sinks, jnp.int32(at), jnp.asarray(counted))
        sums = {name: sums.get(name, 0) + np.asarray(x, np.float64) for name, x in block.items()}
    N, K = heads.num_heads, heads.num_kv_heads
    queries = T - start
    found = {
        "keys": np.repeat(_ratio(*stored["key_norms"]), N // K),
        "values": np.repeat(_ratio(*stored["value_norms"]), N // K),
        "scores": np.sqrt(sums["score"] / sums["pairs"]),
        "total_variation": sums["variation"] / queries,
        "lost_mass": sums["lost"] / queries,
        "output": _ratio(sums["out"], sums["out_norm"]),
    }
    for name in ("mix_keys", "mix_values", "mix_codec", "mix_eviction", "mix"):
        found[name] = _ratio(sums[name], sums["norm"])
    return found


def _ratio(error: Any, norm: Any) -> np.ndarray:
    """Relative error of squared sums; 0 where all is 0."""
    return np.sqrt(np.asarray(error, np.float64) / np.maximum(np.asarray(norm, np.float64), 1e-300))


@functools.partial(jax.jit, static_argnames=("spec",))
def _stored(spec: LayerSpec, rotary, q, k, v) -> dict[str, Any]:
    """Queries and keys at their positions, and what the cache would hold; [heads, T, W], f32."""
    positions = jnp.arange(len(q), dtype=jnp.int32)[None]
    rotated = spec.config.positions.rotated

    def turned(x: jax.Array, query: bool = False) -> jax.Array:
        if rotary is None:
            return x
        turn = rotary.apply_to_query if query else rotary.apply
        return turn(x[None], positions)[0]

    def coded(name: str, x: jax.Array) -> jax.Array:
        whole = len(x) // spec.group * spec.group
        codec, rows = spec.codecs[name], x[:whole].swapaxes(0, 1)
        back = spec.decode(name, codec.encode(rows)).swapaxes(0, 1)
        return jnp.concatenate([back.astype(jnp.float32), x[whole:].astype(jnp.float32)])

    exact_k = turned(k)
    held_k = coded("k", exact_k) if rotated else turned(coded("k", k))
    held_v = coded("v", v)
    wide = {"q": turned(q, query=True), "k": exact_k, "v": v, "held_k": held_k, "held_v": held_v}
    wide = {name: x.astype(jnp.float32).swapaxes(0, 1) for name, x in wide.items()}

    def norms(held: jax.Array, exact: jax.Array):
        return jnp.square(held - exact).sum((1, 2)), jnp.square(exact).sum((1, 2))

    return wide | {
        "key_norms": norms(wide["held_k"], wide["k"]),
        "value_norms": norms(wide["held_v"], wide["v"]),
    }


@functools.partial(jax.jit, static_argnames=("spec", "heads"))
def _block(spec: LayerSpec, heads: AttentionConfig, stored, out, sinks, at, counted):
    """Sums over a block of queries, f32[N] each."""
    N, K, H = heads.num_heads, heads.num_kv_heads, heads.head_dim
    T = stored["k"].shape[1]
    rows = len(counted)
    q = jax.lax.dynamic_slice_in_dim(stored["q"], at, rows, axis=1).reshape(K, N // K, rows, H)
    p = (at + jnp.arange(rows, dtype=jnp.int32))[:, None]
    j = jnp.arange(T, dtype=jnp.int32)[None]
    window = T if spec.window is None else spec.window
    model = (j <= p) & (j > p - window)
    shown = model & ((j >= spec.policy.window_start(p)) | (j < spec.policy.sinks))
    as_codes = j < spec.encoded(p + 1)
    scale = H**-0.5 if heads.scale is None else heads.scale

    def scores(keys: jax.Array) -> jax.Array:
        s = scale * jnp.einsum("kgth,ksh->kgts", q, keys, precision="highest")
        s = s if heads.softcap is None else heads.softcap * jnp.tanh(s / heads.softcap)
        return s.reshape(N, rows, T)

    def weights(s: jax.Array, visible: jax.Array) -> jax.Array:
        s = jnp.where(visible[None], s, -jnp.inf)
        if sinks is None:
            return jax.nn.softmax(s, axis=-1)
        own = jnp.broadcast_to(sinks.astype(jnp.float32)[:, None, None], (N, rows, 1))
        return jax.nn.softmax(jnp.concatenate([s, own], axis=-1), axis=-1)[..., :-1]

    def mix(w: jax.Array, held: bool) -> jax.Array:
        grouped = w.reshape(K, N // K, rows, T)

        def of(part: jax.Array, values: jax.Array) -> jax.Array:
            return jnp.einsum("kgts,ksh->kgth", part, values, precision="highest")

        if not held:
            return of(grouped, stored["v"]).reshape(N, rows, -1)
        codes = jnp.where(as_codes[None, None], grouped, 0.0)
        both = of(codes, stored["held_v"]) + of(grouped - codes, stored["v"])
        return both.reshape(N, rows, -1)

    exact = scores(stored["k"])
    held = jnp.where(as_codes[None], scores(stored["held_k"]), exact)
    w, w_keys = weights(exact, model), weights(held, model)
    o = mix(w, False)
    outputs = {
        "mix_keys": mix(w_keys, False),
        "mix_values": mix(w, True),
        "mix_codec": mix(w_keys, True),
        "mix_eviction": mix(weights(exact, shown), False),
        "mix": mix(weights(held, shown), True),
    }
    count = counted.astype(jnp.float32)

    def total(x: jax.Array) -> jax.Array:
        """Sum over counted queries of [N, rows, ...]."""
        flat = x.reshape(N, rows, -1).sum(-1)
        return (flat * count[None]).sum(-1)

    def projected(x: jax.Array) -> jax.Array:
        merged = x.transpose(1, 0, 2).reshape(rows, -1)
        return jnp.matmul(merged, out.astype(jnp.float32), precision="highest")

    pairs = jnp.broadcast_to(model[None], exact.shape).astype(jnp.float32)
    sums = {name: total(jnp.square(x - o)) for name, x in outputs.items()}
    return sums | {
        "norm": total(jnp.square(o)),
        "score": total(jnp.square(held - exact) * pairs),
        "pairs": total(pairs),
        "variation": total(jnp.abs(w_keys - w)) / 2,
        "lost": total(jnp.where(shown[None], 0.0, w)),
        "out": (jnp.square(projected(outputs["mix"] - o)).sum(-1) * count).sum(),
        "out_norm": (jnp.square(projected(o)).sum(-1) * count).sum(),
    }
