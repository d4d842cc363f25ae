"""What stands between the attentions of a decoder: a dense MLP or a mixture of experts."""

import dataclasses
from typing import ClassVar

from kvjax.errors import ConfigError
from kvjax.nn.checks import check_choice, check_flags, check_positive, check_sizes


@dataclasses.dataclass(frozen=True, kw_only=True)
class MLPConfig:
    """A gated MLP: down(activation(gate(x)) * up(x)).

    Attributes:
      d_ff: F, inner width.
      activation: "silu" or "gelu_tanh".
      bias: All three matrices have biases.
    """

    ACTIVATIONS: ClassVar[tuple[str, ...]] = ("silu", "gelu_tanh")

    d_ff: int
    activation: str = "silu"
    bias: bool = False

    def __post_init__(self) -> None:
        check_sizes(self, "d_ff")
        check_choice(self, "activation", self.ACTIVATIONS)
        check_flags(self, "bias")

    def parameter_count(self, width: int) -> int:
        """Trained values of one layer of `width` D."""
        return 3 * width * self.d_ff + self.bias * (2 * self.d_ff + width)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """How a token chooses its experts.

    Scores of all experts come from the router's logits. The experts with the best scores are
    taken; they are weighted with their scores.

    Attributes:
      score: "softmax" over all experts, "softmax_chosen" over the chosen ones only, or "sigmoid".
      bias: The router's logits have a trained bias.
      choice_bias: A trained bias joins the scores for the choice alone, not for the weights
        (DeepSeek-V3, arXiv 2412.19437).
      renormalize: Weights of the chosen experts are divided by their sum.
      scale: Factor on the weights.
      num_groups: Experts are chosen from the best groups only, of so many; 1 is off.
      groups_per_token: Groups that are open to a token.
      group_score: What a group is worth: its best expert ("max") or its best two ("top2").
    """

    score: str = "softmax"
    bias: bool = False
    choice_bias: bool = False
    renormalize: bool = True
    scale: float = 1.0
    num_groups: int = 1
    groups_per_token: int = 1
    group_score: str = "max"

    def __post_init__(self) -> None:
        check_choice(self, "score", ("softmax", "softmax_chosen", "sigmoid"))
        check_choice(self, "group_score", ("max", "top2"))
        check_flags(self, "bias", "choice_bias", "renormalize")
        check_positive(self, "scale")
        check_sizes(self, "num_groups", "groups_per_token")
        if self.groups_per_token > self.num_groups:
            raise ConfigError(
                f"groups_per_token={self.groups_per_token} exceeds num_groups={self.num_groups}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """A mixture of experts, each a gated MLP, with an expert that all tokens use beside it.

    Attributes:
      num_experts: E.
      experts_per_token: Experts that each token uses.
      d_ff: Inner width of an expert.
      shared_d_ff: Inner width of the shared expert; None has none.
      activation: One of `MLPConfig`, or "clamped_swiglu" (GPT-OSS).
      bias: The experts' matrices have biases.
      router: How experts are chosen and weighted.
    """

    ACTIVATIONS: ClassVar[tuple[str, ...]] = (*MLPConfig.ACTIVATIONS, "clamped_swiglu")

    num_experts: int
    experts_per_token: int
    d_ff: int
    shared_d_ff: int | None = None
    activation: str = "silu"
    bias: bool = False
    router: RouterConfig = RouterConfig()

    def __post_init__(self) -> None:
        check_sizes(self, "num_experts", "experts_per_token", "d_ff")
        if self.shared_d_ff is not None:
            check_sizes(self, "shared_d_ff")
        check_choice(self, "activation", self.ACTIVATIONS)
        check_flags(self, "bias")
        E, groups = self.num_experts, self.router.num_groups
        if E % groups:
            raise ConfigError(f"num_experts={E} is not a multiple of num_groups={groups}")
        if groups > 1 and self.router.group_score == "top2" and E // groups < 2:
            raise ConfigError(
                f"num_experts={E} in num_groups={groups}: a group has no two experts for "
                "group_score='top2'"
            )
        open_experts = E // groups * self.router.groups_per_token
        if self.experts_per_token > open_experts:
            raise ConfigError(
                f"experts_per_token={self.experts_per_token} exceeds the {open_experts} experts "
                "that are open to a token"
            )

    def parameter_count(self, width: int) -> int:
        """Trained values of one layer of `width` D."""
        E, F, shared = self.num_experts, self.d_ff, self.shared_d_ff or 0
        experts = E * (3 * width * F + self.bias * (2 * F + width))
        router = E * (width + self.router.bias + self.router.choice_bias)
        return experts + 3 * width * shared + router
