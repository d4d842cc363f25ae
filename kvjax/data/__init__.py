"""Texts that experiments run on."""

from kvjax.data.texts import known_texts, load_text

__all__ = ["known_texts", "load_text"]
