"""The bars on the real model: exactness, the sink effect, sensible text."""

from pathlib import Path

import numpy as np
import pytest

import kvjax
from kvjax import CacheConfig, Paged, SinkWindow, Window
from kvjax.data import load_text
from kvjax.errors import MissingPackageError

pytestmark = pytest.mark.real_model

FIXTURE = Path(__file__).parents[1] / "fixtures" / "smollm2_logits.npz"
STRIDE = 192
# f32 through 30 layers in another order of operations; logits reach 40. Measured: 6e-5.
AGAINST_TRANSFORMERS = 1e-3
AGAINST_UNCACHED = 1e-4


@pytest.fixture(scope="module")
def lm():
    try:
        return kvjax.load("smollm2-135m")
    except MissingPackageError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def ids(lm):
    return lm.tokenizer.encode(load_text("python-reference:execmodel+types"))


def test_logits_are_those_of_transformers(lm):
    with np.load(FIXTURE) as fixture:
        stored = dict(fixture)
    names = sorted({key.partition("/")[0] for key in stored if "/" in key})
    assert len(names) == 3
    for name in names:
        prompt = stored[f"{name}/ids"]
        logits = np.asarray(lm.logits(prompt))[0]
        chosen = logits[stored[f"{name}/positions"]][:, ::STRIDE]
        np.testing.assert_allclose(
            chosen, stored[f"{name}/logits"], atol=AGAINST_TRANSFORMERS, rtol=0
        )
        np.testing.assert_array_equal(logits.argmax(-1), stored[f"{name}/argmax"])
        generated = lm.generate([prompt.tolist()], max_new_tokens=24, stop=[])
        np.testing.assert_array_equal(generated.tokens[0], stored[f"{name}/greedy"])


EXACT = {
    "contiguous": CacheConfig(),
    "paged": CacheConfig(layout=Paged(page_size=16)),
    "window-longer-than-text": CacheConfig(policy=Window(window=600)),
    "sinks-and-window-longer-than-text": CacheConfig(
        policy=SinkWindow(sinks=4, window=600), positions="unrotated_slot"
    ),
}


@pytest.mark.parametrize("name", EXACT)
def test_exact_caches_give_the_uncached_logits(lm, ids, name):
    text = ids[:300]
    want = np.asarray(lm.logits(text))
    pieces = [np.asarray(logits) for _, logits in lm.teacher_forced(text, EXACT[name], chunk=128)]
    np.testing.assert_allclose(np.concatenate(pieces, axis=1), want, atol=AGAINST_UNCACHED, rtol=0)


def test_the_sink_effect_shows(lm, ids):
    """An independent run with absolute positions and masks gave 11.0, 20.5 and 12.6."""
    want = {
        11.0: CacheConfig(),
        20.5: CacheConfig(policy=Window(window=256)),
        12.6: CacheConfig(policy=SinkWindow(sinks=4, window=252)),
    }
    got = {}
    for figure, config in want.items():
        scores = lm.log_likelihood(ids[:2048], config)[0]
        got[figure] = float(np.exp(-scores[300:].mean()))
        assert abs(got[figure] - figure) < 0.1, got
    assert got[20.5] / got[12.6] >= 1.5


def test_greedy_text_is_sensible(lm):
    result = lm.generate("The capital of France is", max_new_tokens=8)
    assert result.text[0].startswith(" Paris")
