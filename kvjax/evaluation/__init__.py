"""What a cache costs and loses: perplexity, divergence from the exact cache, bytes, speed."""

from kvjax.evaluation.accounting import (
    bytes_per_token,
    check_prediction,
    effective_bits,
    measured_nbytes,
)
from kvjax.evaluation.attribution import Attribution, attribute
from kvjax.evaluation.divergence import (
    Divergence,
    divergence,
    divergence_of_logits,
    greedy_divergence,
)
from kvjax.evaluation.perplexity import nll_from_chunks, perplexity, token_nll
from kvjax.evaluation.speed import Speed, Timing, measure_speed, timed

__all__ = [
    "Attribution",
    "Divergence",
    "Speed",
    "Timing",
    "attribute",
    "bytes_per_token",
    "check_prediction",
    "divergence",
    "divergence_of_logits",
    "effective_bits",
    "greedy_divergence",
    "measure_speed",
    "measured_nbytes",
    "nll_from_chunks",
    "perplexity",
    "timed",
    "token_nll",
]
