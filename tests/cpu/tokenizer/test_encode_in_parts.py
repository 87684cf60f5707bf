"""Long texts are encoded in parts, and their ids are those of the whole text."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tokenizers import Encoding, Regex, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from tokenizers.pre_tokenizers import PreTokenizer

from runtime.settings.config import DEMO_MODEL
from runtime.text import tokenizer
from runtime.text.encode_in_parts import PART_CHARS, TextInParts, may_cut_words
from runtime.text.tokenizer import MAX_WHOLE_CHARS
from runtime.wire.format import IntArray
from tests.harness.models import special_tokenizers as made

SMALL_PART = 2000
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
WORDS = [*made.TEXTS[0].split(), "<s>", "</s>", "[CLS]", "<|im_start|>", "<think>", "It's", "12,345.67"]
WORDS += ["naïve", "＜Ｓ＞", "ﷺ", "é́", "中文", "😀👨\u200d👩\u200d👧"]
MARKS = ["<s>", "<", "s>", "</s>", "<|im_", "start|>", "<|im_start|>", " ", "[CLS]", "[C"]
SPACES = [" ", "  ", "\n", "\t", "\r\n", "x", "\n\n\n", " " * 50]


def corpus() -> list[str]:
    draw = random.Random(1)
    numbers = [
        " ".join(str(draw.randrange(10 ** draw.randrange(1, 9))) for _ in range(200)) for _ in range(20)
    ]
    return [f"{each}{' ' * draw.randrange(20)}\n\n hello world aaaaaaa the" for each in numbers]


def digits_in_threes() -> Backend:
    backend = Backend(models.BPE())
    words = pre_tokenizers.Split(Regex(LLAMA_3), "isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([words, as_bytes])
    return trained_on_bytes(backend)


def without_words() -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return trained_on_bytes(backend)


def few_digits_in_threes() -> Backend:
    """Make a tokenizer with one token of two digits, 12, which are in one word."""
    backend = digits_in_threes()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend.model = models.BPE({token: n for n, token in enumerate([*alphabet, "12"])}, [("1", "2")])
    return backend


def unknown_words(words: PreTokenizer) -> Backend:
    backend = Backend(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    backend.pre_tokenizer = words
    return backend


def without_bytes(*, byte_fallback: bool) -> Backend:
    """Make a tokenizer whose vocabulary has the characters of bytes, but which writes no bytes with them."""
    return trained_on_bytes(Backend(models.BPE(byte_fallback=byte_fallback)))


def trained_on_bytes(backend: Backend) -> Backend:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(corpus(), trainers.BpeTrainer(vocab_size=800, initial_alphabet=alphabet))
    return backend


def likeliest_pieces() -> Backend:
    backend = Backend(models.Unigram())
    backend.normalizer = normalizers.NFKC()
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    trainer = trainers.UnigramTrainer(vocab_size=300, unk_token="<unk>", special_tokens=["<unk>"])
    backend.train_from_iterator([*corpus(), *made.TEXTS * 20], trainer)
    return backend


KINDS: dict[str, Callable[[], Backend]] = {
    "demo": lambda: Backend.from_file(str(DEMO_MODEL / "tokenizer.json")),
    "digits in threes": digits_in_threes,
    "few digits in threes": few_digits_in_threes,
    "unknown digits in threes": lambda: unknown_words(pre_tokenizers.Split(Regex(r"\d{1,3}"), "isolated")),
    "unknown words of five": lambda: unknown_words(pre_tokenizers.FixedLength(5)),
    "without bytes": lambda: without_bytes(byte_fallback=False),
    "without bytes to fall back on": lambda: without_bytes(byte_fallback=True),
    "without words": without_words,
    "sentencepiece": lambda: made.sentencepiece()._backend,
    "sentencepiece, first": lambda: made.sentencepiece(prepends="first")._backend,
    "unigram": likeliest_pieces,
    "wordpiece": lambda: made.word_piece()._backend,
    "leaves out characters": lambda: made.folding()._backend,
}


def drawn(chars: list[str] | str, num_chars: int, seed: int) -> str:
    return "".join(random.Random(seed).choices(chars, k=num_chars))[:num_chars]


TEXTS = {
    "words": " ".join(random.Random(1).choices(WORDS, k=1600)),
    "marks": drawn(list(map(chr, range(32, 127))), 6000, 2),
    "digits": drawn("0123456789", 7001, 3),
    "nines, then twelves": "9" * 3001 + "12" * 1500,
    "one letter": "a" * 7001,
    "spaces": " " * 8628,
    "white space": drawn(SPACES, 9000, 4),
    "emojis": drawn(list(map(chr, range(0x1F300, 0x1F600))), 4000, 5),
    "special tokens": drawn(MARKS, 9000, 6),
    "combining": "é" * 3000 + drawn(list(map(chr, range(0x300, 0x370))), 3000, 7),
    "wide": "ﷺ" * 3000,
    "scripts": drawn(list(map(chr, range(0x20, 0x3000))), 9000, 10) + "hello" * 1000,
    "kinds in turn": drawn("ab", 3001, 8)
    + " " * 3001
    + drawn("0123456789", 3001, 9)
    + "\n" * 3001
    + "é" * 99,
}


class Encoder:
    """Functions of one tokenizer that remember how long the texts were."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.lengths: list[int] = []

    def ids(self, text: str) -> IntArray:
        self.lengths.append(len(text))
        return np.array(self.backend.encode_batch_fast([text], add_special_tokens=False)[0].ids, np.int32)

    def places(self, text: str) -> tuple[Encoding, IntArray]:
        encoding = self.backend.encode_batch([text], add_special_tokens=False)[0]
        return encoding, np.array(encoding.ids, np.int32)

    def in_parts(self, text: str) -> IntArray:
        cuts_words = may_cut_words(self.backend)
        parts = TextInParts(text, self.ids, self.places, may_cut_words=cuts_words, part_chars=SMALL_PART)
        return parts.ids()[0]


@pytest.fixture(scope="module", params=KINDS)
def encoder(request: pytest.FixtureRequest) -> Encoder:
    return Encoder(KINDS[request.param]())


@pytest.mark.parametrize("kind", TEXTS)
def test_ids_are_those_of_the_whole_text(encoder: Encoder, kind: str) -> None:
    text = TEXTS[kind]
    assert np.array_equal(encoder.in_parts(text), encoder.ids(text))


@pytest.mark.parametrize("kind", ["demo", "digits in threes", "without words", "sentencepiece"])
def test_no_text_of_many_tokens_is_encoded_in_one_piece(kind: str) -> None:
    for name, text in TEXTS.items():
        encoder = Encoder(KINDS[kind]())
        num_tokens = len(encoder.in_parts(text))
        assert num_tokens < 4000 or max(encoder.lengths) < len(text) * 3 // 4, name


def test_a_word_that_is_one_token_is_encoded_whole() -> None:
    encoder = Encoder(KINDS["wordpiece"]())
    assert len(encoder.in_parts("a" * 20_000)) == 1


def test_equally_likely_pieces_are_not_joined_within_a_word() -> None:
    """Their scores, rounded sums from the beginning of the word, decide."""
    assert not may_cut_words(likeliest_pieces())


@pytest.mark.parametrize("num_last", [0, 1, 700, 5000, 1 << 20])
def test_the_last_ids_are_those_of_all(num_last: int) -> None:
    encoder, text = Encoder(KINDS["demo"]()), TEXTS["marks"]
    parts = TextInParts(text, encoder.ids, encoder.places, may_cut_words=True, part_chars=SMALL_PART)
    last, num_all = parts.ids(num_last)
    whole = encoder.ids(text)
    assert last.tolist() == whole.tolist()[max(0, len(whole) - num_last) :]
    assert num_all == len(whole)


@pytest.mark.parametrize("num_words", [10, 50_000])
@pytest.mark.parametrize("adds", [False, True])
def test_the_end_of_a_text_is_that_of_its_ids(num_words: int, adds: bool) -> None:
    loaded = made.word_piece()
    loaded._backend.post_processor = bert_ends(loaded)
    text = "lazy " * num_words
    (whole,) = loaded.encode_batch([text], add_special_tokens=adds)
    for num_last in (1, 5, len(whole) - 1, len(whole), len(whole) + 1):
        last, num_all = loaded.encode_end(text, num_last, add_special_tokens=adds)
        assert last.tolist() == whole.tolist()[-num_last:]
        assert num_all == len(whole)


@pytest.mark.parametrize(("pattern", "is_short"), [(" {2,}", True), (r"\s+", True), ("<[^>]*>", False)])
def test_a_text_of_which_matches_of_any_length_are_taken_out_is_encoded_whole(
    pattern: str, is_short: bool
) -> None:
    loaded = made.byte_level()
    replaces = normalizers.Replace(Regex(pattern), "")
    loaded._backend.normalizer = normalizers.Sequence([normalizers.NFC(), replaces])
    assert loaded._is_long("x" * (MAX_WHOLE_CHARS + 1)) is is_short
    text = "a<" + "the lazy dog " * 10_000 + ">z"
    assert loaded.encode_batch([text])[0].tolist() == loaded._backend.encode(text).ids


class Watched:
    """Backend that remembers how long the texts were."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.lengths: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def encode_batch_fast(self, texts: list[str], **options: bool) -> Any:
        self.lengths += map(len, texts)
        return self._backend.encode_batch_fast(texts, **options)


def test_a_long_text_is_encoded_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = tokenizer.load(DEMO_MODEL)
    watched = Watched(loaded._backend)
    text, short = "the quick brown fox " * 20_000, "x" * MAX_WHOLE_CHARS
    whole = loaded._backend.encode_batch([text, short])
    monkeypatch.setattr(loaded, "_backend", watched)
    found = loaded.encode_batch([text, short])
    assert [each.tolist() for each in found] == [each.ids for each in whole]
    *parts, whole_text = watched.lengths
    assert max(parts) == PART_CHARS < len(text) // 10
    assert whole_text == len(short)


def test_special_tokens_are_added_around_a_long_text_once() -> None:
    loaded = made.word_piece()
    loaded._backend.post_processor = bert_ends(loaded)
    text = "the lazy dog " * 10_000
    (found,) = loaded.encode_batch([text])
    assert found.tolist() == loaded._backend.encode(text).ids
    assert [loaded.vocabulary[each] for each in found[[0, -1]].tolist()] == ["[CLS]", "[SEP]"]


def bert_ends(loaded: tokenizer.Tokenizer) -> Any:
    from tokenizers.processors import BertProcessing

    ids = {token: token_id for token_id, token in loaded.vocabulary.items()}
    return BertProcessing(("[SEP]", ids["[SEP]"]), ("[CLS]", ids["[CLS]"]))


def test_special_tokens_in_a_long_conversation_are_characters_in_every_part() -> None:
    loaded = made.byte_level()
    content = "the lazy dog <|im_start|> " * 6000
    prompt = loaded.apply_chat_template([{"role": "user", "content": content}])
    assert len(prompt) > MAX_WHOLE_CHARS
    (found,) = loaded.encode_batch([prompt], add_special_tokens=False)
    assert np.array_equal(found, loaded._encode_whole([prompt], add_special_tokens=False)[0])
    special = [each for each in found.tolist() if each in loaded.special_ids]
    assert len(special) == 3, "those of the template"
