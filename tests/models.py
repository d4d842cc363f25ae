"""Tiny models that tests share: each is built once a process."""

import functools

from kvjax.language_model import LanguageModel
from kvjax.testing.tiny import tiny_lm


@functools.cache
def tiny(**sizes) -> LanguageModel:
    """`kvjax.testing.tiny.tiny_lm`, kept."""
    return tiny_lm(**sizes)
