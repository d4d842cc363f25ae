"""Mixture of experts: a router, and gated MLPs of which each token uses a few."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from kvjax.nn.config import MLPConfig, MoEConfig, RouterConfig
from kvjax.nn.layers import GatedMLP, Linear, along_last, gated


def route(
    logits: jax.Array,  # f32[rows, E]
    config: RouterConfig,
    experts_per_token: int,
    choice_bias: jax.Array | None = None,  # f32[E]
) -> tuple[jax.Array, jax.Array]:
    """Choose each row's experts.

    Returns:
        their indices i32[rows, X] and weights f32[rows, X].

    >>> chosen, weights = route(jnp.array([[0.0, 2.0, 1.0]]), RouterConfig(), 2)
    >>> chosen.tolist(), [round(w, 2) for w in weights[0].tolist()]
    ([[1, 2]], [0.73, 0.27])
    """
    match config.score:
        case "softmax":
            scores = jax.nn.softmax(logits, axis=-1)
        case "sigmoid":
            scores = jax.nn.sigmoid(logits)
        case _:
            scores = logits
    ranked = scores if choice_bias is None else scores + along_last(choice_bias, scores)
    if config.num_groups > 1:
        rows, E = ranked.shape
        groups = ranked.reshape(rows, config.num_groups, -1)
        best, _ = jax.lax.top_k(groups, 2 if config.group_score == "top2" else 1)
        _, open_groups = jax.lax.top_k(best.sum(-1), config.groups_per_token)
        closed = ~jax.nn.one_hot(open_groups, config.num_groups, dtype=jnp.bool_).any(1)
        ranked = jnp.where(closed[..., None], -jnp.inf, groups).reshape(rows, E)
    _, chosen = jax.lax.top_k(ranked, experts_per_token)
    weights = jnp.take_along_axis(scores, chosen, axis=-1)
    if config.score == "softmax_chosen":
        weights = jax.nn.softmax(weights, axis=-1)
    elif config.renormalize:
        weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
    return chosen, weights * config.scale


class MixtureOfExperts(nn.Module):
    """The sum of the chosen experts' outputs by their weights, and of the shared expert's.

    Rows are sorted by expert, so that each expert multiplies a run of them (`lax.ragged_dot`).

    Attributes:
        config: sizes and routing.
    """

    config: MoEConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map [..., D] to [..., D]."""
        config = self.config
        *lead, D = x.shape
        E, F, X = config.num_experts, config.d_ff, config.experts_per_token
        rows = x.reshape(-1, D)
        logits = Linear(E, config.router.bias, name="router")(rows)
        choice_bias = None
        if config.router.choice_bias:
            stored = self.param("choice_bias", nn.initializers.zeros, (E,), x.dtype)
            choice_bias = stored.astype(jnp.float32)
        chosen, weights = route(logits.astype(jnp.float32), config.router, X, choice_bias)

        order = jnp.argsort(chosen.reshape(-1), stable=True)
        expert = chosen.reshape(-1)[order]
        counts = jnp.bincount(expert, length=E).astype(jnp.int32)
        inner = self._product(rows[order // X], "gate_up", 2 * F, expert, counts)
        outer = self._product(gated(inner, config.activation), "down", D, expert, counts)
        back = jnp.argsort(order).reshape(-1, X)
        mixed = (outer[back].astype(jnp.float32) * weights[..., None]).sum(1).astype(x.dtype)
        if config.shared_d_ff is not None:
            shared = MLPConfig(d_ff=config.shared_d_ff, activation=config.activation)
            mixed = mixed + GatedMLP(shared, name="shared")(rows)
        return mixed.reshape(*lead, D)

    def _product(self, x, name: str, features: int, expert, counts) -> jax.Array:
        """Rows sorted by expert times their expert's matrix, plus its bias."""
        E = self.config.num_experts
        init = nn.initializers.lecun_normal(-2, -1, batch_axis=(0,))
        kernel = self.param(name, init, (E, x.shape[-1], features), x.dtype)
        out = jax.lax.ragged_dot(x, kernel, counts, preferred_element_type=jnp.float32)
        if self.config.bias:
            bias = self.param(f"{name}_bias", nn.initializers.zeros, (E, features), x.dtype)
            out = out + bias[expert].astype(jnp.float32)
        return out.astype(x.dtype)
