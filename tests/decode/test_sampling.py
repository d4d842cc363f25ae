"""Drawing the next token: the distribution itself, each filter against NumPy, seeds."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.decode import Sampling
from kvjax.decode.sampling import Sampler
from kvjax.errors import ConfigError
from tests.decode.models import uncached_logits
from tests.models import tiny

DRAWS = 4000


@functools.partial(jax.jit, static_argnames=("rows",))
def _sample(sampler: Sampler, logits, step, seen, rows: int):
    wide = jnp.broadcast_to(logits, (rows, logits.shape[-1]))
    return sampler.sample(wide, step, seen)


def draw(logits, settings, step: int = 0, seen=None) -> np.ndarray:
    """One token for each of `settings`, from the same logits [1, V] or from a row each."""
    logits = jnp.asarray(np.atleast_2d(np.asarray(logits, np.float32)))
    seen = jnp.zeros((len(settings), 0), bool) if seen is None else jnp.asarray(seen)
    sampler = Sampler.of(settings)
    return np.asarray(_sample(sampler, logits, jnp.int32(step), seen, len(settings)))


def frequencies(logits, V: int, **knobs) -> np.ndarray:
    """Share of each token in 4,000 draws, each from a seed of its own."""
    settings = [Sampling(**{"temperature": 1.0, **knobs}, seed=seed) for seed in range(DRAWS)]
    return np.bincount(draw(logits, settings), minlength=V) / DRAWS


def assert_within_3_sigma(found: np.ndarray, wanted: np.ndarray) -> None:
    sigma = np.sqrt(wanted * (1 - wanted) / DRAWS)
    assert (np.abs(found - wanted) <= 3 * sigma + 1e-9).all(), (found, wanted)


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


def reference(logits, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> np.ndarray:
    """Probabilities after all filters, in NumPy: temperature, top-k, top-p, min-p."""
    x = np.asarray(logits, np.float64) / temperature
    order = np.argsort(-x, kind="stable")
    kept = order[: top_k or len(x)]
    p = softmax(x[kept])
    kept = kept[np.cumsum(p) - p < top_p]
    p = softmax(x[kept])
    kept = kept[p >= min_p * p[0]]
    out = np.zeros(len(x))
    out[kept] = softmax(x[kept])
    return out


LOGITS = np.log([0.3, 0.02, 0.2, 0.05, 0.16, 0.01, 0.12, 0.14])


class TestDistribution:
    """Case B124."""

    def test_draws_follow_the_distribution(self):
        """Temperature 1 and defaults otherwise: [0.5, 0.3, 0.2] in 4,000 draws."""
        wanted = np.array([0.5, 0.3, 0.2])
        assert_within_3_sigma(frequencies(np.log(wanted), 3), wanted)

    @pytest.mark.parametrize("temperature", [0.5, 2.0, 50.0])
    def test_temperature(self, temperature: float):
        wanted = reference(LOGITS, temperature=temperature)
        assert_within_3_sigma(frequencies(LOGITS, 8, temperature=temperature), wanted)

    @pytest.mark.parametrize(
        "knobs",
        [
            {"top_k": 1},
            {"top_k": 3},
            {"top_k": 13},
            {"top_p": 1e-6},
            {"top_p": 0.55},
            {"top_p": 0.999},
            {"min_p": 0.3},
            {"min_p": 1.0},
            {"top_k": 5, "top_p": 0.7, "min_p": 0.5},
            {"temperature": 1.5, "top_k": 6, "top_p": 0.9},
        ],
        ids=str,
    )
    def test_filters(self, knobs: dict):
        wanted = reference(LOGITS, **knobs)
        found = frequencies(LOGITS, 8, **knobs)
        np.testing.assert_array_equal(found > 0, wanted > 0)
        assert_within_3_sigma(found, wanted)

    def test_top_k_keeps_k_where_values_tie(self):
        found = frequencies([1.0, 0.0, 0.0, 0.0, -5.0], 5, top_k=2)
        assert (found > 0).sum() == 2 and found[0] > found[1:].max()

    @pytest.mark.parametrize("knobs", [{}, {"top_k": 2}, {"top_p": 0.9}, {"min_p": 0.1}], ids=str)
    def test_impossible_tokens_are_never_drawn(self, knobs: dict):
        logits = np.array([-np.inf, 0.0, -np.inf, 1.0])
        found = frequencies(logits, 4, **knobs)
        assert (found[[0, 2]] == 0).all() and (found[[1, 3]] > 0).all()


class TestGreedy:
    @pytest.mark.parametrize("top_k", [0, 1, 102])
    @pytest.mark.parametrize("top_p", [1e-9, 1.0])
    def test_temperature_0_is_argmax_whatever_follows(self, top_k: int, top_p: float):
        logits = np.random.default_rng(0).standard_normal((5, 97))
        settings = [Sampling(temperature=0, top_k=top_k, top_p=top_p, seed=s) for s in range(5)]
        assert draw(logits, settings).tolist() == logits.argmax(-1).tolist()

    def test_rows_have_their_own_settings(self):
        logits = np.random.default_rng(1).standard_normal((400, 30))
        settings = [
            Sampling(temperature=b % 2, top_k=1 if b % 4 == 3 else 0, seed=b) for b in range(400)
        ]
        tokens, best = draw(logits, settings), logits.argmax(-1)
        same = tokens == best
        assert same[::2].all() and same[3::4].all() and not same[1::4].all()
        assert (tokens == draw(logits, settings)).all()

    @pytest.mark.parametrize("knobs", [{}, {"temperature": 1.0, "top_k": 1}], ids=str)
    def test_minus_infinity_is_no_obstacle(self, knobs: dict):
        logits = np.array([-np.inf, 1.0, -np.inf, 3.0])
        assert draw(logits, [Sampling(**knobs)]).tolist() == [3]

    def test_very_small_temperatures_are_greedy(self):
        logits = np.random.default_rng(2).standard_normal((50, 30))
        for temperature in (1e-4, 1e-30, 1e-44):
            settings = [Sampling(temperature=temperature, seed=s) for s in range(50)]
            assert draw(logits, settings).tolist() == logits.argmax(-1).tolist(), temperature


class TestSeeds:
    LOGITS = np.zeros(1000)

    def test_a_seed_is_a_stream(self):
        def stream(seed: int) -> list[int]:
            return [
                draw(self.LOGITS, [Sampling(temperature=1.0, seed=seed)], step=step).item()
                for step in range(12)
            ]

        assert stream(3) == stream(3)
        assert len(set(stream(3))) > 9
        assert stream(3) != stream(4)
        assert stream(2**32 - 1) != stream(0)

    def test_a_row_draws_the_same_wherever_it_stands(self):
        setting = Sampling(temperature=1.0, seed=5)
        alone = draw(self.LOGITS, [setting]).item()
        others = [Sampling(temperature=2.0, seed=s, top_k=7) for s in range(3)]
        for at in range(4):
            batch = [*others[:at], setting, *others[at:]]
            assert draw(self.LOGITS, batch)[at] == alone


class TestRepetitionPenalty:
    def test_divides_positive_and_multiplies_negative_logits(self):
        """A seen 4 is worth 2 < 3; a seen -1 is worth -2 < -1.5, and would be -0.5 if divided."""
        logits = np.array([[4.0, 3.0, -9.0], [4.0, 3.0, -9.0], [-1.0, -1.5, -9.0]])
        seen = np.array([[True, False, False], [False, False, True], [True, False, False]])
        settings = [Sampling(repetition_penalty=2.0)] * 3
        assert draw(logits, settings, seen=seen).tolist() == [1, 0, 1]
        rewarded = [Sampling(repetition_penalty=0.5)] * 3
        assert draw(logits, rewarded, seen=seen).tolist() == [0, 0, 0]
        assert draw(-logits, rewarded, seen=seen).tolist() == [2, 2, 2]

    def test_rows_without_it_are_left_alone(self):
        logits, seen = np.array([[4.0, 3.0], [4.0, 3.0]]), np.array([[True, False]] * 2)
        settings = [Sampling(repetition_penalty=2.0), Sampling()]
        assert draw(logits, settings, seen=seen).tolist() == [1, 0]

    def test_generation_equals_a_loop_in_numpy(self):
        """Prompt and output count; log-probabilities stay the model's own."""
        lm, prompts, penalty = tiny(), [[5, 6, 7], [50]], 1.8
        result = lm.generate(
            prompts, max_new_tokens=8, sampling=Sampling(repetition_penalty=penalty), stop=[]
        )
        rows = [list(prompt) for prompt in prompts]
        for step in range(8):
            for b, logits in enumerate(uncached_logits(lm, rows)):
                last = logits[-1].copy()
                held = list(set(rows[b]))
                last[held] = np.where(last[held] > 0, last[held] / penalty, last[held] * penalty)
                own = np.asarray(jax.nn.log_softmax(logits[-1]))[last.argmax()]
                np.testing.assert_allclose(result.logprobs[b][step], own, atol=1e-4)
                rows[b].append(int(last.argmax()))
        assert [p + new for p, new in zip(prompts, result.tokens, strict=True)] == rows
        assert lm.generate(prompts, max_new_tokens=8, stop=[]).tokens != result.tokens


@pytest.mark.parametrize(
    "knobs",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_k": -1},
        {"top_k": 1.0},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": -0.1},
        {"min_p": 1.1},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": -1.0},
        {"seed": -1},
        {"seed": 2**32},
        {"seed": 1.5},
    ],
    ids=str,
)
def test_settings_out_of_range_are_refused(knobs: dict):
    ((name, value),) = knobs.items()
    with pytest.raises(ConfigError, match=f"Sampling.{name}={value!r}"):
        Sampling(**knobs)
