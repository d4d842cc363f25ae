"""Generation: the tokens of the uncached model, whoever the batch mates are; ends; refusals."""

import dataclasses
import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import CacheConfig, Int, Paged, SinkWindow, Window
from kvjax.decode import Sampling, assert_max_traces, generate
from kvjax.errors import CapacityError, ConfigError
from tests.decode.models import (
    CACHES,
    EXACT,
    LOSSY,
    assert_same_scores,
    log_softmax,
    uncached_logits,
)
from tests.models import tiny
from tests.tolerances import TINY_LOGITS, TINY_LOST

PROMPTS = [[5, 17, 3, 60, 8], [9], list(range(40, 55))]
NEW = 20
# Different, but of the same stages, so that every batch of them is one program.
SETTINGS = [
    Sampling(temperature=1.0, top_k=50, seed=1),
    Sampling(temperature=0.7, top_p=0.9),
    Sampling(temperature=2.0, min_p=0.01, seed=7),
]


@pytest.mark.parametrize("name", EXACT)
def test_greedy_equals_argmax_without_a_cache(name: str):
    """Teacher-forced: each new token is the likeliest after all that came before it."""
    lm = tiny()
    result = lm.generate(PROMPTS, EXACT[name], max_new_tokens=NEW, stop=[], max_len=64)
    assert result.reasons == ["length"] * 3
    rows = [p + new for p, new in zip(PROMPTS, result.tokens, strict=True)]
    assert len({token for row in result.tokens for token in row}) > 20
    for b, logits in enumerate(uncached_logits(lm, rows)):
        following = logits[len(PROMPTS[b]) - 1 : -1]
        assert result.tokens[b] == following.argmax(-1).tolist()
        wanted = log_softmax(following).max(-1)
        np.testing.assert_allclose(result.logprobs[b], wanted, atol=TINY_LOGITS)


@pytest.mark.parametrize("name", LOSSY)
def test_log_probabilities_are_those_of_teacher_forcing(name: str):
    """Lossy caches and short windows too: generation and `log_likelihood` see the same cache."""
    lm = tiny(scale=1.0)
    result = lm.generate(PROMPTS, LOSSY[name], NEW, SETTINGS, stop=[], max_len=64)
    rows = np.zeros((3, 40), np.int32)
    for row, prompt, new in zip(rows, PROMPTS, result.tokens, strict=True):
        row[: len(prompt) + NEW] = prompt + new
    scores = lm.log_likelihood(rows, LOSSY[name], chunk=16, max_len=64)
    exact = lm.log_likelihood(rows, chunk=16, max_len=64)
    spans = [slice(len(prompt) - 1, len(prompt) - 1 + NEW) for prompt in PROMPTS]
    wanted = [row[span] for row, span in zip(scores, spans, strict=True)]
    assert_same_scores(result.logprobs, wanted)
    assert np.abs(scores - exact).max() > TINY_LOST, "little was lost: a weak test"


@pytest.mark.parametrize("name", ["contiguous", *LOSSY])
def test_a_batch_equals_its_members_alone(name: str):
    """Each row has settings and a seed of its own."""
    lm, cache = tiny(scale=1.0), CACHES[name]
    together = lm.generate(PROMPTS, cache, NEW, SETTINGS, stop=[], max_len=64)
    alone = [
        lm.generate([prompt], cache, NEW, [setting], stop=[], max_len=64)
        for prompt, setting in zip(PROMPTS, SETTINGS, strict=True)
    ]
    assert [result.tokens[0] for result in alone] == together.tokens
    assert_same_scores([result.logprobs[0] for result in alone], together.logprobs)


def test_a_greedy_batch_equals_its_members_alone():
    lm = tiny()
    together = lm.generate(PROMPTS, max_new_tokens=NEW, stop=[], max_len=64)
    for b, prompt in enumerate(PROMPTS):
        alone = lm.generate([prompt], max_new_tokens=NEW, stop=[], max_len=64)
        assert alone.tokens[0] == together.tokens[b]
        np.testing.assert_allclose(alone.logprobs[0], together.logprobs[b], atol=TINY_LOGITS)


def test_prompts_draw_from_seeds_of_their_own():
    lm, setting = tiny(), Sampling(temperature=1.5, seed=11)
    same = [PROMPTS[0]] * 3
    spread = lm.generate(same, max_new_tokens=NEW, sampling=setting, stop=[]).tokens
    assert spread[0] != spread[1] != spread[2] != spread[0]
    settings = [dataclasses.replace(setting, seed=s) for s in (13, 11, 11)]
    given = lm.generate(same, max_new_tokens=NEW, sampling=settings, stop=[]).tokens
    assert given == [spread[2], spread[0], spread[0]]


def test_callback_tells_tokens_as_they_come():
    """Step by step, prompts in order, each token once, nothing after a sequence's end."""
    lm, told = tiny(), []
    stops = [[], [], []]
    whole = lm.generate(PROMPTS, max_new_tokens=6, stop=stops)
    stops[1] = [whole.tokens[1][2]]
    wanted = lm.generate(PROMPTS, max_new_tokens=6, stop=stops)
    result = lm.generate(
        PROMPTS, max_new_tokens=6, stop=stops, on_token=lambda b, token: told.append((b, token))
    )
    assert result == wanted
    longest = max(map(len, result.tokens))
    assert told == [
        (b, result.tokens[b][step])
        for step in range(longest)
        for b in range(3)
        if step < len(result.tokens[b])
    ]
    # Without new tokens there is nothing to tell.
    lm.generate([[1]], max_new_tokens=0, on_token=lambda *_: pytest.fail("told a token"))


class TestEnds:
    """Case B126: an ended sequence stays as it is while the others go on."""

    @pytest.mark.parametrize("name", ["contiguous", *LOSSY])
    def test_each_sequence_has_its_own_stop_tokens(self, name: str):
        lm, cache = tiny(), CACHES[name]
        free = lm.generate(PROMPTS, cache, 8, stop=[], max_len=64).tokens
        stops = [[free[0][1]], [96, free[1][4]], []]
        ends = [row.index(s[-1]) + 1 if s else 8 for row, s in zip(free, stops, strict=True)]
        tokens, logprobs, reasons, after = generate(
            lm.model,
            lm.params,
            cache.init(lm.dims, 3, 64),
            PROMPTS,
            vocab_size=lm.config.vocab_size,
            max_new_tokens=8,
            settings=[Sampling()] * 3,
            stops=stops,
        )
        assert tokens == [row[:n] for row, n in zip(free, ends, strict=True)]
        assert list(map(len, logprobs)) == ends
        assert reasons == ["stop", "stop", "length"]
        # The last token of each is not in the cache yet; an ended one is never fed again.
        assert after.lengths.tolist() == [
            len(p) + n - 1 for p, n in zip(PROMPTS, ends, strict=True)
        ]

    def test_stop_tokens_inside_a_prompt_stop_nothing(self):
        lm = tiny()
        free = lm.generate([PROMPTS[2]], max_new_tokens=5, stop=[])
        inside = [t for t in PROMPTS[2] if t not in free.tokens[0]]
        assert lm.generate([PROMPTS[2]], max_new_tokens=5, stop=inside) == free

    def test_the_default_is_the_checkpoint_s_own(self):
        lm = tiny()
        free = lm.generate([PROMPTS[0]], max_new_tokens=6, stop=[]).tokens[0]
        n = free.index(free[3]) + 1
        ending = dataclasses.replace(lm, eos_ids=(free[3],))
        result = ending.generate([PROMPTS[0]], max_new_tokens=6)
        assert (result.tokens, result.reasons) == ([free[:n]], ["stop"])
        assert result.text == [lm.tokenizer.decode(free[:n])]

    @pytest.mark.parametrize(
        ("stop", "message"), [([97], "stop.*97"), ([[1], [2]], "2 lists for 1")]
    )
    def test_bad_stop_tokens_are_refused(self, stop, message: str):
        with pytest.raises(ConfigError, match=message):
            tiny().generate([[1]], stop=stop)


class TestRoom:
    """Cases B120 and B128: capacity is counted before anything runs; nothing is cut silently."""

    @pytest.mark.parametrize("layout", ["contiguous", "paged(page_size=4)"])
    def test_prompts_around_the_capacity(self, layout: str):
        lm, cache = tiny(num_layers=1), CacheConfig(layout=layout)
        prompt = list(range(17))
        result = lm.generate([prompt[:15]], cache, 1, max_len=16)
        assert list(map(len, result.tokens)) == [1] and result.reasons == ["length"]
        result = lm.generate([prompt[:16]], cache, 0, max_len=16)
        assert (result.tokens, result.reasons, result.text) == ([[]], ["length"], [""])
        assert lm.log_likelihood([prompt[:16]], cache, max_len=16).shape == (1, 15)
        assert len(lm.generate([prompt[:10]], cache, 6, max_len=16, stop=[]).tokens[0]) == 6
        with assert_max_traces(extend_step=0, generate_loop=0):
            for n, new in ((15, 2), (16, 1), (17, 0), (10, 20)):
                need = n + new
                message = (
                    rf"{n} prompt \+ {new} new tokens = {need} exceed the cache's 16; .*{need}"
                )
                with pytest.raises(CapacityError, match=message):
                    lm.generate([prompt[:n]], cache, new, max_len=16)
            with pytest.raises(CapacityError, match=r"17 .* exceed the cache's 16"):
                lm.log_likelihood([prompt], cache, max_len=16)

    def test_the_longest_prompt_counts(self):
        with pytest.raises(CapacityError, match=r"12 prompt \+ 5 new tokens = 17"):
            tiny(num_layers=1).generate([[1], [2] * 12, [3]], max_new_tokens=5, max_len=16)

    def test_positions_of_the_model_end(self):
        lm = tiny(num_layers=1, max_len=32)
        assert len(lm.generate([[1] * 12], max_new_tokens=20, stop=[]).tokens[0]) == 20
        windowed = CacheConfig(policy=Window(window=4))
        for cache in (None, windowed):
            with pytest.raises(
                CapacityError, match=r"12 prompt \+ 21 .* = 33 exceed the model's 32"
            ):
                lm.generate([[1] * 12], cache, max_new_tokens=21)
        stream = CacheConfig(policy=SinkWindow(sinks=2, window=6), positions="unrotated_slot")
        assert len(lm.generate([[1] * 12], stream, 40, stop=[]).tokens[0]) == 40

    def test_slot_positions_without_a_window_end_too(self):
        """Ranks only stay small where a policy evicts."""
        lm = tiny(num_layers=1, max_len=32)
        for cache in (
            CacheConfig(positions="unrotated_slot"),
            CacheConfig(policy=Window(window=33), positions="unrotated_slot"),
        ):
            with pytest.raises(CapacityError, match="exceed the model's 32"):
                lm.generate([[1] * 12], cache, max_new_tokens=40)


class TestRefusals:
    """Case B122: one clear line, and the model works on."""

    @pytest.mark.parametrize("prompts", [[], [[]], "", [""], [[1], []], [np.zeros(0, np.int32)]])
    def test_nothing_to_continue(self, prompts):
        with pytest.raises(ConfigError, match=r"empty|no prompts"):
            tiny(num_layers=1).generate(prompts)

    @pytest.mark.parametrize("prompts", [[None], [[1], None], None, [[1.5]], [[True]], [[[1]]]])
    def test_what_is_no_prompt(self, prompts):
        with pytest.raises(ConfigError, match="prompt"):
            tiny(num_layers=1).generate(prompts)

    @pytest.mark.parametrize("token", [-1, 97, 2**31, -(2**40)])
    def test_tokens_outside_the_vocabulary(self, token: int):
        lm = tiny(num_layers=1)
        with pytest.raises(ConfigError, match=rf"prompt 1: token id {token} .* 0\.\.96"):
            lm.generate([[1], [2, token]])
        with pytest.raises(ConfigError, match=rf"token id {token} "):
            lm.log_likelihood([[1, token]])
        with pytest.raises(ConfigError, match=rf"token id {token} "):
            lm.logits([[1, token]])

    @pytest.mark.parametrize("count", [-1, 2.0, True, "3", None])
    def test_counts_of_new_tokens(self, count):
        with pytest.raises(ConfigError, match=f"max_new_tokens={count!r}"):
            tiny(num_layers=1).generate([[1]], max_new_tokens=count)

    def test_settings_that_do_not_match_the_prompts(self):
        with pytest.raises(ConfigError, match="2 settings for 1 prompts"):
            tiny(num_layers=1).generate([[1]], sampling=[Sampling(), Sampling()])

    @pytest.mark.parametrize(
        ("cache", "message"),
        [
            (CacheConfig(implementation="tpu"), "'tpu' needs a TPU; this process runs on"),
            (CacheConfig(implementation="xlas"), "unknown attention implementation 'xlas'"),
            (
                CacheConfig(layout="paged(page_size=4)", implementation="tpu_interpreted"),
                "pages are multiples of 8 tokens.*got 4",
            ),
        ],
    )
    def test_kernels_that_cannot_run_here(self, cache: CacheConfig, message: str):
        lm = tiny(num_layers=1)
        with pytest.raises(ConfigError, match=message):
            lm.generate([[1, 2]], cache=cache)
        with pytest.raises(ConfigError, match=message):
            lm.log_likelihood([[1, 2]], cache=cache)

    def test_text_without_a_tokenizer(self):
        lm = dataclasses.replace(tiny(num_layers=1), tokenizer=None)
        with pytest.raises(ConfigError, match="no tokenizer"):
            lm.generate("text")
        assert lm.generate([[1]], max_new_tokens=1).text == [""]

    def test_one_prompt_may_come_without_a_list(self):
        lm = tiny(num_layers=1)
        alone = lm.generate([[1, 2, 3]], max_new_tokens=2)
        for prompt in ([1, 2, 3], np.array([1, 2, 3]), (1, 2, 3)):
            assert lm.generate(prompt, max_new_tokens=2) == alone
        assert lm.generate('!"#', max_new_tokens=2) == alone


class TestNotFinite:
    """One sequence whose model gives NaN ends with that reason; the others go on (B124)."""

    @pytest.mark.parametrize("value", [np.nan, np.inf])
    @pytest.mark.parametrize(
        "cache", [CacheConfig(), CacheConfig(codec=Int(bits=8))], ids=["raw", "int8"]
    )
    def test_others_go_on(self, cache, value: float):
        lm = tiny(num_layers=1, tie_embeddings=False)
        wanted = lm.generate(PROMPTS, cache, 6, stop=[])
        bad = dict(lm.params["params"])
        table = bad["embed"]["embedding"].at[:, 3].set(value)
        bad["embed"] = {"embedding": table}
        broken = dataclasses.replace(lm, params={"params": bad})
        prompts = [[1, 2, 3], *PROMPTS[1:]]
        result = broken.generate(prompts, cache, 6, stop=[])
        assert result.reasons[0] == "not finite" and result.tokens[0] == result.logprobs[0] == []
        for b in (1, 2):
            n = (wanted.tokens[b] + [3]).index(3)  # until it meets the bad token itself
            assert result.tokens[b][:n] == wanted.tokens[b][:n]
        assert np.isfinite([x for row in result.logprobs for x in row]).all()

    def test_an_infinite_logit_is_not_finite(self):
        """Its log-probability would be NaN."""
        lm = tiny(num_layers=1, tie_embeddings=False)
        bad = dict(lm.params["params"])
        bad["head"] = {"kernel": bad["head"]["kernel"].at[0, 5].set(jnp.inf)}
        broken = dataclasses.replace(lm, params={"params": bad})
        signs = np.sign([row[-1, 5] for row in uncached_logits(broken, PROMPTS)])
        assert 1 in signs, "no prompt meets the bad weight"
        result = broken.generate(PROMPTS, max_new_tokens=3, stop=[])
        for b in np.flatnonzero(signs == 1):
            assert (result.tokens[b], result.reasons[b]) == ([], "not finite")

    def test_a_sequence_may_break_on_the_way(self):
        lm = tiny(num_layers=1, tie_embeddings=False)
        free = lm.generate([PROMPTS[0], PROMPTS[2]], max_new_tokens=8, stop=[]).tokens
        token = free[0][3]
        n = free[0].index(token) + 1
        bad = dict(lm.params["params"])
        bad["embed"] = {"embedding": bad["embed"]["embedding"].at[:, token].set(jnp.nan)}
        broken = dataclasses.replace(lm, params={"params": bad})
        result = broken.generate([PROMPTS[0]], max_new_tokens=8, stop=[])
        assert (result.tokens, result.reasons) == ([free[0][:n]], ["not finite"])


def test_memory_is_given_back():
    """No array of a cache outlives its generation (B164)."""
    lm, cache = tiny(num_layers=1), CacheConfig(layout=Paged(page_size=4), codec=Int(bits=8))

    def arrays() -> int:
        gc.collect()
        return len(jax.live_arrays())

    def one_round():
        result = lm.generate([[1, 2, 3], [4]], cache, 5, stop=[])
        lm.log_likelihood([[1, 2, 3, 4]], cache)
        lm.generate([[1], [2]], cache, 3, stop=[], on_token=lambda b, token: None)
        return result

    one_round()  # constants of compiled programs stay
    base = arrays()
    for _ in range(5):
        result = one_round()
        assert arrays() == base
    del result
    assert arrays() == base
