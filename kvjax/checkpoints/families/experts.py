"""Mixtures of experts with tensors for each expert, as Qwen, Mixtral and DeepSeek save them."""

import dataclasses
from collections.abc import Iterator

import numpy as np

from kvjax.checkpoints.families.base import linear
from kvjax.checkpoints.tensors import Parameter, Part
from kvjax.nn.config import MoEConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class SeparateExperts:
    """Tensors of a mixture of experts; `{e}` is the expert.

    Attributes:
      router: The router's matrix, less ".weight".
      gate: Of an expert.
      up: Of an expert.
      down: Of an expert.
      shared: Where the shared expert is.
      choice_bias: Bias that joins the scores for the choice alone.
    """

    router: str = "mlp.gate"
    gate: str = "mlp.experts.{e}.gate_proj"
    up: str = "mlp.experts.{e}.up_proj"
    down: str = "mlp.experts.{e}.down_proj"
    shared: str = "mlp.shared_experts."
    choice_bias: str = "mlp.gate.e_score_correction_bias"

    def __call__(self, config: MoEConfig, D: int, at: str, stem: str) -> Iterator[Parameter]:
        """Yield the parameters of the layer whose tensors start with `stem`."""
        E, F = config.num_experts, config.d_ff
        yield from linear(at, "mlp", "router", names={stem + self.router: E}, width=D)
        if config.router.choice_bias:
            yield Parameter.whole(
                at, "mlp", "choice_bias", name=stem + self.choice_bias, shape=(E,)
            )

        def of(name: str, e: int) -> str:
            return f"{stem}{name.format(e=e)}.weight"

        columns = {self.gate: slice(F), self.up: slice(F, 2 * F)}
        yield Parameter(
            path=(at, "mlp", "gate_up"),
            shape=(E, D, 2 * F),
            parts=tuple(
                Part(
                    name=of(name, e), shape=(F, D), place=(e, slice(None), place), view=np.transpose
                )
                for e in range(E)
                for name, place in columns.items()
            ),
        )
        yield Parameter(
            path=(at, "mlp", "down"),
            shape=(E, F, D),
            parts=tuple(
                Part(name=of(self.down, e), shape=(D, F), place=e, view=np.transpose)
                for e in range(E)
            ),
        )
        if config.shared_d_ff is not None:
            S, shared = config.shared_d_ff, stem + self.shared
            rows = {f"{shared}gate_proj": S, f"{shared}up_proj": S}
            yield from linear(at, "mlp", "shared", "gate_up", names=rows, width=D)
            down = {f"{shared}down_proj": D}
            yield from linear(at, "mlp", "shared", "down", names=down, width=S)
