"""Measure one variant: bytes, then quality on real text, then speed; what goes into its row."""

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from experiments.configuration import AblationConfig
from kvjax.cache import CacheConfig, LayerPattern
from kvjax.errors import CapacityError, ConfigError, KvjaxError
from kvjax.evaluation import (
    bytes_per_token,
    check_prediction,
    divergence,
    effective_bits,
    greedy_divergence,
    measure_speed,
    perplexity,
)
from kvjax.evaluation.perplexity import Chunks
from kvjax.language_model import LanguageModel

CacheChoice = CacheConfig | LayerPattern
Stage = Callable[[str], None]

# Exact logits up to this size stay in host memory; longer texts run the exact cache along.
MAX_KEPT_BYTES = 2 << 30
CHOICES = ("layout", "codec", "policy", "positions")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Material:
    """What every variant is measured on.

    Attributes:
        lm: the model.
        tokens: text for quality, i32[1, num_tokens].
        prompts: prompts for speed, one list of ids a sequence.
    """

    lm: LanguageModel
    tokens: np.ndarray
    prompts: list[list[int]]


def prepare(config: AblationConfig, lm: LanguageModel, text: str) -> Material:
    """Cut the text into what the config asks for; the text must be long enough."""
    if lm.tokenizer is None:
        raise ConfigError(f"{lm.name} has no tokenizer: an ablation needs one for its text")
    ids = lm.tokenizer.encode(text)
    needed = max(config.num_tokens, config.prompt_tokens if config.repetitions else 0)
    if config.text_start + needed > len(ids):
        raise ConfigError(
            f"text {config.text!r} has {len(ids)} tokens; {needed} from text_start="
            f"{config.text_start} on do not fit: take a longer text or fewer tokens"
        )
    last_start = len(ids) - config.prompt_tokens
    draw = np.random.default_rng(config.seed)
    others = draw.integers(0, last_start + 1, size=config.batch - 1) if last_start >= 0 else []
    starts = [config.text_start, *map(int, others)]
    scored = ids[config.text_start : config.text_start + config.num_tokens]
    return Material(
        lm=lm,
        tokens=np.asarray([scored], np.int32),
        prompts=[ids[start : start + config.prompt_tokens] for start in starts],
    )


def validate(config: AblationConfig, models: Mapping[str, LanguageModel]) -> None:
    """Refuse variants that cannot run, all of them before any work.

    Args:
        config: the variants.
        models: the model of each.

    Raises:
        KvjaxError: names the variant and the reason.
    """
    lengths = [(1, config.num_tokens)]
    if config.repetitions:
        if config.new_tokens < 2:
            raise ConfigError(
                f"new_tokens={config.new_tokens} must be at least 2 to measure decode speed"
            )
        lengths.append((config.batch, config.speed_capacity))
    for label, cache in config.variants.items():
        lm = models[label]
        try:
            implementations(cache, lm)
            for batch, length in lengths:
                _check_positions(cache, lm, length)
                cache.predict_nbytes(lm.dims, batch=batch, max_len=length)
        except KvjaxError as error:
            raise type(error)(f"variant {label}: {error}") from None


def _check_positions(cache: CacheChoice, lm: LanguageModel, length: int) -> None:
    layers = cache.for_layers(lm.config.num_layers)
    if length > lm.config.max_len and not all(layer.positions.slot for layer in layers):
        raise CapacityError(
            f"{length} tokens exceed the model's {lm.config.max_len} positions; use fewer, or a "
            "window with positions='unrotated_slot'"
        )


def implementations(cache: CacheChoice, lm: LanguageModel) -> str:
    """Names of the attention implementations that run, "auto" resolved."""
    shapes = jax.eval_shape(lambda: cache.init(lm.dims, batch=1, max_len=1))
    return " + ".join(shapes.implementations)


def changes(
    cache: CacheChoice, baseline: CacheChoice, num_layers: int, *, converted: bool = False
) -> str:
    """Which of the four choices differ from the baseline's, and whether the model does.

    >>> changes(CacheConfig(codec="int(bits=4)"), CacheConfig(), num_layers=2)
    'codec'
    """
    layers = cache.for_layers(num_layers)
    differing = [
        choice
        for choice in CHOICES
        if any(
            getattr(ours, choice) != getattr(theirs, choice)
            for ours, theirs in zip(layers, baseline.for_layers(num_layers), strict=True)
        )
    ]
    differing = ["model"] * converted + differing
    mixed = "per layer: " if len(set(layers)) > 1 else ""
    return mixed + (" + ".join(differing) or "nothing")


class Exact:
    """The baseline's logits: kept on the host, or run again along with each variant."""

    def __init__(self, config: AblationConfig, material: Material, stage: Stage):
        self._config, self._material, self._stage = config, material, stage
        self.lm = material.lm
        self._kept: list[tuple[int, np.ndarray]] = []

    def chunks(self) -> Chunks:
        """(start, logits [1, t, V]) of the whole text; computed when first asked for."""
        _, T = self._material.tokens.shape
        if 4 * T * self._material.lm.config.vocab_size > MAX_KEPT_BYTES:
            return self._run()
        if not self._kept:
            run = _announced(self._run(), T, self._stage)
            self._kept = [(start, np.asarray(logits)) for start, logits in run]
        return self._kept

    def _run(self) -> Chunks:
        cache = self._config.variants[self._config.baseline]
        return self._material.lm.teacher_forced(self._material.tokens, cache, self._config.chunk)


def measure_bytes(config: AblationConfig, material: Material, cache: CacheChoice) -> dict[str, Any]:
    """Bytes of the cache that quality is measured with: predicted, allocated, held together."""
    dims = material.lm.dims
    report = check_prediction(cache, dims, batch=1, max_len=config.num_tokens)
    lines = report.as_dict()
    return {
        "bytes_per_token": bytes_per_token(report, config.num_tokens),
        "cache_bytes": lines.pop("total"),
        **{f"{name}_bytes": value for name, value in lines.items()},
        "effective_bits": effective_bits(cache, dims),
    }


def measure_quality(
    config: AblationConfig,
    material: Material,
    cache: CacheChoice,
    exact: Exact,
    reference: Mapping[str, Any] | None,
    stage: Stage,
) -> dict[str, Any]:
    """Perplexity, KL and top-1 agreement over the positions that count.

    Args:
        config: what to measure.
        material: model and text.
        cache: the variant.
        exact: the baseline's logits.
        reference: the baseline's row; None if the variant is the baseline.
        stage: told how far the text is.
    """
    _, T = material.tokens.shape
    start_s = time.perf_counter()
    if cache == config.variants[config.baseline] and material.lm is exact.lm:
        run = exact.chunks()
    else:
        run = material.lm.teacher_forced(material.tokens, cache, config.chunk)
    scores = divergence(exact.chunks(), _announced(run, T, stage), material.tokens)
    found = perplexity(scores.nll, start=config.score_from)
    figures = {
        "perplexity": found,
        "perplexity_ratio": found / (found if reference is None else reference["perplexity"]),
        "kl": scores.mean_kl(config.score_from),
        "top1_agreement": scores.top1_agreement(config.score_from),
        "quality_s": time.perf_counter() - start_s,
    }
    for name, value in figures.items():
        if not math.isfinite(value):
            raise FloatingPointError(
                f"{name} is {value}: the cache gave logits that are no numbers"
            )
    return figures


def measure_generation(
    config: AblationConfig,
    material: Material,
    cache: CacheChoice,
    reference: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Prefill and decode speed, compile time apart, and how long the greedy text stays exact."""
    length = config.speed_capacity
    speed = measure_speed(
        material.lm,
        material.prompts,
        cache,
        new_tokens=config.new_tokens,
        repetitions=config.repetitions,
        max_len=length,
    )
    greedy = speed.tokens[0]
    report = cache.predict_nbytes(material.lm.dims, batch=config.batch, max_len=length)
    return {
        "greedy_divergence": greedy_divergence(
            greedy if reference is None else reference["greedy_tokens"], greedy
        ),
        "prefill_tokens_per_s": speed.prefill_tokens_per_s,
        "decode_tokens_per_s": speed.decode_tokens_per_s,
        "compile_s": speed.compile_s,
        "speed_cache_bytes": report.total,
        "greedy_tokens": greedy,
    }


def _announced(chunks: Chunks, total: int, stage: Stage) -> Iterator[tuple[int, Any]]:
    """Pass chunks on and tell how far the text is."""
    for start, logits in chunks:
        jax.block_until_ready(logits)
        stage(f"{start + logits.shape[1]:,} of {total:,} tokens")
        yield start, logits
