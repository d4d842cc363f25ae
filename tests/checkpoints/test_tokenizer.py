import json
from pathlib import Path

import hypothesis
import numpy as np
import pytest
import tokenizers
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers, processors

from kvjax.checkpoints import Checkpoint, Tokenizer
from kvjax.checkpoints.tokenizer import _GGUF_PRE_TOKENIZERS
from kvjax.errors import CheckpointError, ConfigError

FIXTURES = Path(__file__).parents[1] / "fixtures"
ABSENT = "\x04\x06\x13\x14\x16\x1d"
FIELDS = {
    "tokens": ["<start>", "<end>", "a", "b", "ab", "1", "2", "Ġ"],
    "token_types": [3, 3, 1, 1, 1, 1, 1, 1],
    "merges": ["a b", "1 2"][:1],
    "pre": "smollm",
    "bos_id": 0,
    "eos_id": 1,
}


@pytest.fixture
def smol(smollm2: Checkpoint) -> Tokenizer:
    assert smollm2.tokenizer is not None
    return smollm2.tokenizer


def test_bos_is_put_in_front_exactly_once() -> None:
    asked = Tokenizer.from_gguf_fields(**FIELDS, add_bos=True)
    assert asked.encode("ab") == [0, 4]
    assert asked.encode("<start>ab") == [0, 4]
    assert asked.encode("") == [0]
    assert asked.encode("a<start>") == [0, 2, 0]
    assert Tokenizer.from_gguf_fields(**FIELDS).encode("ab") == [4]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"pre": "tekken"}, "tekken.*known: llama-bpe, qwen2, gpt-2, smollm"),
        ({"token_types": [3]}, "8 tokens but 1 token types"),
        ({"tokens": ["a"] * 8}, "7 tokens appear twice"),
        ({"merges": ["x y"]}, "merges do not fit"),
        ({"merges": ["ab"]}, "not a pair"),
        ({"eos_id": 8}, "eos_id=8"),
        ({"bos_id": None, "add_bos": True}, "beginning"),
    ],
    ids=["pre", "types", "twice", "merges", "pairs", "eos", "bos"],
)
def test_contradicting_fields_are_refused(change: dict, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        Tokenizer.from_gguf_fields(**FIELDS | change)


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("llama-bpe", ["It", "'s", " ", "123", "456", "7", " cafés", "!\n", " ", " a", "\n\n"]),
        ("qwen2", ["It", "'s", " ", *"1234567", " cafés", "!\n", " ", " a", "\n\n"]),
        ("smollm", ["It", "'s", "Ġ", *"1234567", " cafés", "!", "\n ", " a", "\n\n"]),
    ],
)
def test_rules_split_text(pre: str, pieces: list[str]) -> None:
    text = "It's 1234567 cafés!\n  a\n\n"
    split = _GGUF_PRE_TOKENIZERS[pre]().pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in split] == [
        piece.replace("Ġ", " ") for piece in pieces
    ]


def test_what_comes_with_a_rule() -> None:
    """Llama 3 takes a piece that is a token without its merges; Qwen joins accents."""
    whole = FIELDS | {"merges": []}
    assert Tokenizer.from_gguf_fields(**whole | {"pre": "llama-bpe"}).encode("ab") == [4]
    assert Tokenizer.from_gguf_fields(**whole).encode("ab") == [2, 3]
    accent = FIELDS | {"tokens": [*FIELDS["tokens"][:6], "Ã", "©"]}
    assert Tokenizer.from_gguf_fields(**accent | {"pre": "qwen2"}).encode("é") == [6, 7]


def test_ids_outside_of_the_vocabulary_are_refused() -> None:
    tokenizer = Tokenizer.from_gguf_fields(**FIELDS)
    assert tokenizer.decode(np.array([4, 7, 4], np.int32)) == "ab ab"
    for id in (8, -1):
        with pytest.raises(ConfigError, match=rf"token id {id} .* 8 tokens"):
            tokenizer.decode([2, id])


def test_special_tokens_can_be_left_out() -> None:
    tokenizer = Tokenizer.from_gguf_fields(**FIELDS)
    assert tokenizer.decode([0, 4, 1]) == "<start>ab<end>"
    assert tokenizer.decode([0, 4, 1], skip_special_tokens=True) == "ab"
    assert tokenizer.special_tokens == {"<start>": 0, "<end>": 1}


def test_chat_needs_its_tokens() -> None:
    with pytest.raises(ConfigError, match="ChatML"):
        Tokenizer.from_gguf_fields(**FIELDS).chat("hello")


@pytest.fixture
def tokenizer_json(tmp_path: Path) -> Path:
    """A tokenizer.json whose own post-processor puts <s> in front."""
    vocabulary = {"<s>": 0, "</s>": 1, "a": 2, "b": 3}
    built = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.add_special_tokens(["<s>", "</s>"])
    built.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    path = tmp_path / "tokenizer.json"
    built.save(str(path))
    return path


@pytest.mark.parametrize(
    ("config", "add_bos"),
    [
        (None, True),
        ({}, True),
        ({"bos_token": "<s>", "eos_token": {"content": "</s>"}}, True),
        ({"bos_token": "<s>", "add_bos_token": True}, True),
        ({"bos_token": "<s>", "add_bos_token": False}, False),
    ],
    ids=["no-file", "silent", "named", "asked", "declined"],
)
def test_from_file_adds_bos_once(tokenizer_json: Path, config: dict | None, add_bos: bool) -> None:
    if config is not None:
        tokenizer_json.with_name("tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.from_file(tokenizer_json)
    assert tokenizer.encode("ab") == ([0, 2, 3] if add_bos else [2, 3])
    assert tokenizer.encode("<s>ab") == [0, 2, 3]
    assert tokenizer.bos_id == 0
    assert tokenizer.eos_id == (1 if config and "eos_token" in config else None)


def test_broken_files_are_named(tokenizer_json: Path) -> None:
    config = tokenizer_json.with_name("tokenizer_config.json")
    config.write_text('{"add_bos_token": true, "bos_token": "<none>"}')
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json.*beginning"):
        Tokenizer.from_file(tokenizer_json)
    for content in ("{", "[]"):
        config.write_text(content)
        with pytest.raises(CheckpointError, match=r"tokenizer_config\.json"):
            Tokenizer.from_file(tokenizer_json)
    tokenizer_json.write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer.from_file(tokenizer_json)
    with pytest.raises(CheckpointError, match="no such file"):
        Tokenizer.from_file(tokenizer_json.with_name("absent.json"))


@pytest.mark.real_model
class TestSmolLM2:
    def test_facts(self, smol: Tokenizer) -> None:
        assert smol.vocab_size == 49_152
        assert (smol.bos_id, smol.eos_id, smol.add_bos) == (1, 2, False)
        assert len(smol.special_tokens) == 17
        assert smol.special_tokens["<|im_end|>"] == 2

    def test_no_bos(self, smol: Tokenizer) -> None:
        assert smol.encode("The capital of France is") == [504, 3575, 282, 4649, 314]
        assert smol.encode("") == []

    def test_digits_stand_alone(self, smol: Tokenizer) -> None:
        assert smol.encode("1234567890") == [*range(33, 42), 32]
        # The space before a number is a token of its own.
        assert [smol.decode([id]) for id in smol.encode("in 1984")] == ["in", " ", *"1984"]

    def test_special_tokens_are_recognized(self, smol: Tokenizer) -> None:
        assert smol.encode("<|im_start|>user<|im_end|>") == [1, *smol.encode("user"), 2]

    @pytest.mark.parametrize(
        "text",
        [
            "naïve café, Straße, 東京, Привет, مرحبا",
            "👩‍👩‍👧 🏳️‍🌈 \u200b\ufeff\x00\x7f",
            "  two  spaces\n\n\ttabs\r\n and trailing   ",
            "x = {'a': [1, 22, 333]}  # 4_444",
        ],
    )
    def test_round_trip(self, smol: Tokenizer, text: str) -> None:
        assert smol.decode(smol.encode(text)) == text

    def test_any_text_comes_back(self, smol: Tokenizer) -> None:
        # The vocabulary has no token for these bytes, nor for the first bytes of planes 4 to 11.
        known = st.characters(max_codepoint=0x3FFFF, exclude_characters=ABSENT, codec="utf-8")

        @hypothesis.given(text=st.text(known, max_size=60))
        def comes_back(text: str) -> None:
            ids = smol.encode(text)
            assert smol.decode(ids) == text
            assert all(0 <= id < 49_152 for id in ids)

        comes_back()
        assert smol.encode(f"a{ABSENT}b") == smol.encode("a") + smol.encode("b")

    def test_chat(self, smol: Tokenizer) -> None:
        assert smol.chat("Hi", system="Be brief.") == (
            "<|im_start|>system\nBe brief.<|im_end|>\n"
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        )
        assert "You are a helpful AI assistant named SmolLM, trained by Hugging Face" in (
            smol.chat("Hi")
        )

    def test_ids_of_the_fixture(self, smol: Tokenizer) -> None:
        rows = json.loads((FIXTURES / "smollm2_prompts.json").read_text(encoding="utf-8"))
        for row in rows.values():
            assert smol.encode(row["text"]) == row["ids"]
