import pytest

from kvjax import CacheConfig, Int
from kvjax.decode import assert_max_traces
from kvjax.errors import ConfigError
from kvjax.evaluation import Timing, measure_speed
from kvjax.language_model import LanguageModel
from kvjax.testing.tiny import tiny_lm


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    return tiny_lm(num_layers=1)


def test_timing_tells_compilation_apart() -> None:
    timing = Timing(first_s=5.0, repetitions_s=(1.0, 3.0, 2.0))
    assert (timing.steady_s, timing.compile_s) == (2.0, 3.0)
    assert Timing(first_s=1.0, repetitions_s=(2.0,)).compile_s == 0


def test_speed_runs_what_generate_runs(lm: LanguageModel) -> None:
    prompts = [lm.tokenizer.encode(text) for text in ("The sea is blue", "Once there was a")]
    prompts = [prompt[:15] for prompt in prompts]
    speed = measure_speed(lm, prompts, CacheConfig(), new_tokens=6, repetitions=2)
    assert len(speed.prefill.repetitions_s) == len(speed.decode.repetitions_s) == 2
    assert speed.prefill_tokens_per_s == pytest.approx(30 / speed.prefill.steady_s)
    assert speed.decode_tokens_per_s == pytest.approx(2 * 5 / speed.decode.steady_s)
    assert speed.tokens == lm.generate(prompts, max_new_tokens=6, stop=[]).tokens


def test_only_the_first_repetition_compiles(lm: LanguageModel) -> None:
    with assert_max_traces(prefill_step=1, generate_loop=1):
        measure_speed(lm, [[1, 2, 3]], CacheConfig(codec=Int(bits=4)), new_tokens=3, repetitions=3)


@pytest.mark.parametrize(("new_tokens", "repetitions"), [(1, 1), (2, 0)])
def test_too_little_to_measure_is_refused(
    new_tokens: int, repetitions: int, lm: LanguageModel
) -> None:
    with pytest.raises(ConfigError, match="at least"):
        measure_speed(lm, [[1]], CacheConfig(), new_tokens=new_tokens, repetitions=repetitions)
