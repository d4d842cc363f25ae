"""`kvjax generate`: continue a prompt with any cache, token by token on the terminal."""

import time
from collections.abc import Sequence
from typing import TextIO

import kvjax
from experiments.overrides import set_value
from kvjax.cache import UNROTATED_ABSOLUTE, CacheConfig
from kvjax.errors import ConfigError
from kvjax.language_model import LanguageModel

UNFINISHED = "�"  # what a decoder gives for half a character


def parse_cache(choices: Sequence[str]) -> CacheConfig:
    """Build a cache from choices such as `codec=int(bits=4)`; what is not named stays exact.

    >>> parse_cache(["codec=int(bits=4)", "layout=paged"]).label
    'paged / int(bits=4) / keep_all / rotated_absolute'
    """
    values = {}
    for choice in choices:
        name, equals, text = choice.partition("=")
        if not equals:
            raise ConfigError(f"--cache {choice!r} must look like codec=int(bits=4)")
        # Each is read on its own, then all are put together: legality is a matter of the whole.
        values[name.strip()] = getattr(_read(name.strip(), text.strip()), name.strip())
    return CacheConfig(**values)


def _read(name: str, text: str) -> CacheConfig:
    return set_value(CacheConfig(positions=UNROTATED_ABSOLUTE), name, text)


class Stream:
    """Writes tokens as they come, as soon as they make whole characters."""

    def __init__(self, lm: LanguageModel, prompt: str, out: TextIO):
        self._decode, self._out = lm.tokenizer.decode if lm.tokenizer else str, out
        self._hidden = lm.eos_ids
        self._ids: list[int] = []
        self._written = 0
        self._prompt = prompt

    def __call__(self, index: int, token: int) -> None:
        """Take one token; `index` is that of the only prompt."""
        del index
        self._out.write(self._prompt)  # now that it is sure that there is a continuation
        self._prompt = ""
        if token in self._hidden:
            return
        self._ids.append(token)
        text = self._decode(self._ids)
        if not text.endswith(UNFINISHED):
            self._out.write(text[self._written :])
            self._out.flush()
            self._written = len(text)


def generate(
    prompt: str,
    *,
    cache: CacheConfig,
    model: str,
    dtype: str | None,
    max_new_tokens: int,
    sampling: kvjax.Sampling,
    out: TextIO,
    notes: TextIO,
) -> None:
    """Print the prompt and its continuation to `out`, and what the cache costs to `notes`."""
    lm = kvjax.load(model, dtype=dtype)
    start = time.perf_counter()
    result = lm.generate(
        prompt,
        cache=cache,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        on_token=Stream(lm, prompt, out),
    )
    seconds = time.perf_counter() - start
    out.write("\n")
    out.flush()
    assert lm.tokenizer is not None
    tokens = len(lm.tokenizer.encode(prompt)) + len(result.tokens[0])
    report = cache.predict_nbytes(lm.dims, batch=1, max_len=tokens)
    notes.write(
        f"[{cache.label}: {report.total:,} bytes for {tokens} tokens; {len(result.tokens[0])} new "
        f"ones in {seconds:.1f} s with compilation; ended by {result.reasons[0]}]\n"
    )
