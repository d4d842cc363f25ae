"""Text to token ids and back, from a GGUF file's own vocabulary or from a tokenizer.json."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from kvjax.errors import CheckpointError, ConfigError

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4


def _byte_level() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _split(digits: str) -> Any:
    """Words with what stands before them, runs of `digits`, other characters, space (tiktoken)."""
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits + r"| ?[^\s\p{L}\p{N}]+"
        r"[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


# GGUF names the splitting rule instead of storing it.
_GGUF_PRE_TOKENIZERS = {
    "llama-bpe": lambda: _split(r"\p{N}{1,3}"),
    "qwen2": lambda: _split(r"\p{N}"),
    "gpt-2": _byte_level,
    "smollm": lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), _byte_level()]
    ),
}

# What comes with a rule: accents are joined first; a piece that is a token as it is needs no merge.
_NORMALIZERS = {"qwen2": normalizers.NFC}
_WHOLE_PIECES = {"llama-bpe"}


class Tokenizer:
    """A tokenizer that knows which ids start and end a text.

    Special tokens written in the text are recognized. The beginning-of-text token is put in front
    once where the checkpoint asks for it (`add_bos`), and not again when the text begins with it.

    >>> tokenizer = Tokenizer.from_gguf_fields(
    ...     tokens=["<end>", "H", "i", "Hi", "4", "2"], token_types=[3, 1, 1, 1, 1, 1],
    ...     merges=["H i"], pre="smollm", eos_id=0)
    >>> tokenizer.encode("Hi42<end>")
    [3, 4, 5, 0]
    >>> tokenizer.decode([3, 4, 5])
    'Hi42'
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        *,
        eos_id: int | None = None,
        bos_id: int | None = None,
        add_bos: bool = False,
        chat_template: str | None = None,
    ):
        if add_bos and bos_id is None:
            raise CheckpointError(
                "the checkpoint asks for a beginning-of-text token but names none"
            )
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._default_system = _default_system(chat_template or "")
        self.eos_id = eos_id
        self.bos_id = bos_id
        self.add_bos = add_bos
        self.vocab_size: int = tokenizer.get_vocab_size(with_added_tokens=True)
        # Ids may have holes; decoding is refused beyond the last one.
        self._ids = frozenset(tokenizer.get_vocab(with_added_tokens=True).values())
        self.special_tokens: Mapping[str, int] = {
            token.content: id
            for id, token in sorted(tokenizer.get_added_tokens_decoder().items())
            if token.special
        }

    def __repr__(self) -> str:
        return (
            f"Tokenizer(vocab_size={self.vocab_size}, bos_id={self.bos_id}, "
            f"eos_id={self.eos_id}, add_bos={self.add_bos})"
        )

    @property
    def facts(self) -> dict[str, Any]:
        """Everything but the vocabulary: the keyword arguments that build this tokenizer again."""
        return {
            "eos_id": self.eos_id,
            "bos_id": self.bos_id,
            "add_bos": self.add_bos,
            "chat_template": self._chat_template,
        }

    def to_json(self) -> str:
        """Return the content of a tokenizer.json."""
        return self._tokenizer.to_str()

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`.

        Bytes that the vocabulary lacks are dropped, as by the original (SmolLM2: a few control
        characters and unassigned planes of Unicode).
        """
        # The post-processor of a tokenizer.json is not asked: it would add a second beginning.
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        if self.add_bos and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)  # type: ignore[arg-type]  # checked when built
        return ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of `ids`; bytes that form no character become U+FFFD.

        Raises:
          ConfigError: An id is not in the vocabulary.
        """
        ids = [int(id) for id in ids]
        for id in ids:
            if id not in self._ids:
                raise ConfigError(
                    f"token id {id} is not in the vocabulary of {self.vocab_size} tokens"
                )
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def chat(self, user: str, system: str | None = None) -> str:
        r"""Return a ChatML prompt that ends where the assistant's answer begins.

        Args:
          user: The question.
          system: Instruction in front; by default the one that the checkpoint's own template
            writes, if any.

        Raises:
          ConfigError: The vocabulary has no ChatML tokens.
        """
        if not {"<|im_start|>", "<|im_end|>"} <= self.special_tokens.keys():
            raise ConfigError(
                "this checkpoint has no ChatML tokens (<|im_start|>, <|im_end|>); "
                "write the prompt in the form that the model was trained on"
            )
        system = self._default_system if system is None else system
        head = "" if system is None else f"<|im_start|>system\n{system}<|im_end|>\n"
        return f"{head}<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n"

    @classmethod
    def from_gguf_fields(
        cls,
        *,
        tokens: Sequence[str],
        merges: Sequence[str],
        token_types: Sequence[int],
        pre: str,
        eos_id: int | None = None,
        bos_id: int | None = None,
        add_bos: bool = False,
        chat_template: str | None = None,
    ) -> "Tokenizer":
        """Build a byte-level BPE tokenizer from the lists that a GGUF file stores.

        Args:
          tokens: Token strings in the byte-level alphabet; the place is the id.
          merges: Pairs "left right", strongest first.
          token_types: GGUF's kind of each token; 3 is special, 4 is added by the user.
          pre: Name of the splitting rule ("smollm", "gpt-2").
          eos_id: Id that ends a text.
          bos_id: Id that starts a text.
          add_bos: Put `bos_id` in front of each text.
          chat_template: Jinja text; only its default system message is used.

        Raises:
          CheckpointError: Unknown rule, or lists that contradict each other.
        """
        if pre not in _GGUF_PRE_TOKENIZERS:
            raise CheckpointError(
                f"tokenizer rule {pre!r} is not known; known: {', '.join(_GGUF_PRE_TOKENIZERS)}"
            )
        if len(token_types) != len(tokens):
            raise CheckpointError(f"{len(tokens)} tokens but {len(token_types)} token types")
        vocabulary = {token: id for id, token in enumerate(tokens)}
        if len(vocabulary) != len(tokens):
            raise CheckpointError(f"{len(tokens) - len(vocabulary)} tokens appear twice")
        for name, id in (("eos_id", eos_id), ("bos_id", bos_id)):
            if id is not None and not 0 <= id < len(tokens):
                raise CheckpointError(f"{name}={id} is not among the {len(tokens)} tokens")
        # A token never starts with a space here (byte level writes it Ġ), so the first splits.
        pairs = [tuple(merge.split(" ", 1)) for merge in merges]
        if any(len(pair) != 2 for pair in pairs):
            raise CheckpointError("a merge is not a pair of tokens with a space between")
        try:
            model = models.BPE(
                vocab=vocabulary,
                merges=pairs,  # type: ignore[arg-type]
                ignore_merges=pre in _WHOLE_PIECES,
            )
        except Exception as error:  # tokenizers raises bare Exception
            raise CheckpointError(f"the merges do not fit the vocabulary: {error}") from None
        tokenizer = tokenizers.Tokenizer(model)
        tokenizer.pre_tokenizer = _GGUF_PRE_TOKENIZERS[pre]()
        if pre in _NORMALIZERS:
            tokenizer.normalizer = _NORMALIZERS[pre]()
        tokenizer.decoder = decoders.ByteLevel()
        typed = list(zip(tokens, token_types, strict=True))
        tokenizer.add_special_tokens([token for token, kind in typed if kind == _CONTROL])
        tokenizer.add_tokens([token for token, kind in typed if kind == _USER_DEFINED])
        return cls(
            tokenizer, eos_id=eos_id, bos_id=bos_id, add_bos=add_bos, chat_template=chat_template
        )

    @classmethod
    def from_file(cls, path: str | Path) -> "Tokenizer":
        """Read a tokenizer.json, and the tokenizer_config.json beside it when there is one.

        Raises:
          CheckpointError: A file is missing or damaged; the message names it.
        """
        path = Path(path)
        if not path.is_file():
            raise CheckpointError(f"{path}: no such file")
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises bare Exception
            raise CheckpointError(
                f"{path}: not a readable tokenizer: {' '.join(str(error).split())}"
            ) from None
        config: dict[str, Any] = {}
        config_path = path.with_name("tokenizer_config.json")
        if config_path.is_file():
            try:
                config = json.loads(config_path.read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                raise CheckpointError(f"{config_path}: not readable: {error}") from None
            if not isinstance(config, dict):
                raise CheckpointError(f"{config_path}: expected a JSON object")
        bos_id = _token_id(tokenizer, config.get("bos_token"))
        add_bos = config.get("add_bos_token")
        if not (add_bos is None or type(add_bos) is bool):
            raise CheckpointError(
                f"{config_path}: add_bos_token is {add_bos!r}, expected true or false"
            )
        if add_bos is None:
            # Not said in words: see what the file's own post-processor puts in front of a text.
            try:
                plain = tokenizer.encode("a", add_special_tokens=False).ids
                full = tokenizer.encode("a", add_special_tokens=True).ids
            except Exception:  # a vocabulary without this letter and without an unknown token
                plain = full = []
            if full[:1] != plain[:1] and bos_id in (None, full[0]):
                bos_id, add_bos = full[0], True
        template = config.get("chat_template")
        try:
            return cls(
                tokenizer,
                eos_id=_token_id(tokenizer, config.get("eos_token")),
                bos_id=bos_id,
                add_bos=bool(add_bos),
                chat_template=template if isinstance(template, str) else None,
            )
        except CheckpointError as error:
            raise CheckpointError(f"{config_path}: {error}") from None


def _token_id(tokenizer: tokenizers.Tokenizer, token: Any) -> int | None:
    """Return the id of a token given as text or as the dictionary of an added token."""
    content = token.get("content") if isinstance(token, dict) else token
    return tokenizer.token_to_id(content) if isinstance(content, str) else None


def _default_system(chat_template: str) -> str | None:
    """Return the system message that a ChatML template writes when none is given.

    The newline is written out in GGUF files and escaped inside Jinja strings elsewhere.
    """
    found = re.search(r"<\|im_start\|>system(?:\n|\\n)([^{}']+?)<\|im_end\|>", chat_template)
    return None if found is None else found[1]
