"""runtime.text.spelling and runtime.text.token_lengths: what a token stands for by itself, and how much text
it can hold.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.decoders import Decoder
from tokenizers.normalizers import Normalizer
from tokenizers.pre_tokenizers import PreTokenizer

from runtime.text.spelling import ByteLevelSpelling, ContextualSpelling, SentencePieceSpelling, spelling_of
from runtime.text.token_lengths import max_token_chars
from runtime.text.tokenizer import Tokenizer
from tests.harness.cases import for_each

BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]
COMPOSED = "\u1f82"  # decomposes into four characters


def most_chars(backend: Backend) -> int | None:
    return max_token_chars(backend, backend.get_vocab(with_added_tokens=True))


def bpe(tokens: list[str], **options: Any) -> Backend:
    vocabulary = {token: n for n, token in enumerate(dict.fromkeys(tokens))}
    return Backend(models.BPE(vocabulary, [], **options))


def byte_level(*, normalizer: Normalizer | None = None, longest: str = "") -> Backend:
    backend = bpe([*ByteLevelSpelling().byte_of, *filter(None, [longest])])
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if normalizer is not None:
        backend.normalizer = normalizer
    return backend


def byte_fallback() -> Backend:
    backend = bpe(
        ["<unk>", *BYTE_TOKENS, "a", "\u2581"], unk_token="<unk>", byte_fallback=True, fuse_unk=True
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    return backend


# -- bytes ---------------------------------------------------------------------------------------------------


def test_the_bytes_of_byte_level_tokens_are_those_of_the_text(demo: Tokenizer) -> None:
    text = "def f(x): return '\U0001f600\u6f22\u00e9'<|im_start|>\n"
    ids = demo.encode_batch([text])[0].tolist()
    pieces = [demo.token_bytes(token) for token in ids]
    assert b"".join(piece for piece in pieces if piece is not None) == text.encode()
    assert any(piece is not None and len(piece) == 1 and piece[0] >= 0x80 for piece in pieces)
    assert demo.token_bytes(99999) is None


def test_sentencepiece_tokens_are_text_with_a_mark_for_the_space_or_single_bytes() -> None:
    sequence = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    spelling = spelling_of(sequence)
    assert isinstance(spelling, SentencePieceSpelling)
    assert spelling.bytes_of("\u2581ab\u6f22") == " ab\u6f22".encode()
    assert spelling.bytes_of("<0xE6>") == b"\xe6"
    assert spelling.bytes_of("<0xE6>a") == b"<0xE6>a"


def test_without_byte_fallback_such_a_spelling_is_text() -> None:
    assert spelling_of(decoders.Metaspace()).bytes_of("\u2581<0xE6>") == b" <0xE6>"
    assert spelling_of(decoders.Metaspace()).bytes_of("<0xE6>") == b"<0xE6>"


@pytest.mark.parametrize("decoder", [decoders.WordPiece(), decoders.BPEDecoder(), None])
def test_a_vocabulary_whose_tokens_depend_on_their_neighbours_gives_no_bytes(
    decoder: Decoder | None,
) -> None:
    spelling = spelling_of(decoder)
    assert isinstance(spelling, ContextualSpelling)
    bytes_of: Callable[[str], bytes | None] = spelling.bytes_of
    assert bytes_of("##ing") is None


# -- lengths -------------------------------------------------------------------------------------------------


def test_no_text_has_fewer_tokens_than_the_bound_says(demo: Tokenizer) -> None:
    most = demo.max_token_chars()
    assert most == max(map(len, demo.vocabulary.values()))
    rng = random.Random(0)
    spellings = [demo.decode([token], skip_special_tokens=False) for token in demo.vocabulary]
    longest = sorted(spellings, key=len)[-20:]
    for _ in range(300):
        text = "".join(
            rng.choices(rng.choice([spellings, longest, [" ", "\n", "x"]]), k=rng.randrange(1, 30))
        )
        assert len(demo.encode_batch([text])[0]) * most >= len(text), text


def test_a_normalizer_that_composes_characters_is_counted_with() -> None:
    backend = byte_level(normalizer=normalizers.NFC(), longest="abcde")
    assert most_chars(backend) == 4 * 5
    decomposed = normalizers.NFD().normalize_str(COMPOSED)
    assert len(decomposed) == 4
    assert normalizers.NFC().normalize_str(decomposed) == COMPOSED


def test_byte_fallback_has_a_bound() -> None:
    assert most_chars(byte_fallback()) == len("<0x00>")


@for_each(
    "normalizer",
    [
        normalizers.Strip(),
        normalizers.StripAccents(),
        normalizers.BertNormalizer(),
        normalizers.Replace("aaa", "b"),
        normalizers.Sequence([normalizers.NFC(), normalizers.Strip()]),
    ],
)
def test_a_normalizer_that_may_drop_text_leaves_no_bound(normalizer: Normalizer) -> None:
    assert most_chars(byte_level(normalizer=normalizer)) is None


@pytest.mark.parametrize(
    "pre_tokenizer",
    [
        pre_tokenizers.Whitespace(),
        pre_tokenizers.Sequence(
            [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        ),
    ],
)
def test_a_pre_tokenizer_that_drops_text_leaves_no_bound(pre_tokenizer: PreTokenizer) -> None:
    backend = byte_level()
    backend.pre_tokenizer = pre_tokenizer
    assert most_chars(backend) is None


def test_unknown_text_that_may_become_one_token_leaves_no_bound() -> None:
    assert most_chars(bpe(["<unk>", "a"], unk_token="<unk>", fuse_unk=True)) is None
    assert most_chars(Backend(models.WordLevel({"<unk>": 0}, "<unk>"))) is None
    incomplete = bpe(list(ByteLevelSpelling().byte_of)[:-1])
    incomplete.pre_tokenizer = pre_tokenizers.ByteLevel()
    assert most_chars(incomplete) is None


def test_a_token_that_takes_the_space_beside_it_leaves_no_bound() -> None:
    backend = byte_level()
    assert most_chars(backend) is not None
    backend.add_special_tokens([AddedToken("<|mask|>", lstrip=True)])
    assert most_chars(backend) is None
