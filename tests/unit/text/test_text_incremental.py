"""runtime.text.incremental: the text of decoding everything at once, no piece of a character early."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache
from typing import NoReturn

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers

from runtime.text.incremental import MAX_PENDING_TOKENS, DecoderFactory, WindowDecoder
from runtime.text.tokenizer import Tokenizer

ALPHABET = "ab \n😀漢é🏳️\u200d🌈ö\x00"


@pytest.fixture(scope="module")
def byte_fallback() -> Tokenizer:
    """Tokenizer made as sentencepiece models are: spaces are a character of their own, rare characters are
    byte tokens.
    """
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["\u2581", *"abö", "\u2581a", "\u2581ab", "aab", "漢"]
    backend = Backend(models.Unigram([(piece, -1.0 - 0.01 * n) for n, piece in enumerate(pieces)], 0, True))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(backend, no_conversation)


@pytest.fixture(scope="module")
def word_piece() -> Tokenizer:
    vocabulary = {token: n for n, token in enumerate(["[UNK]", "[SEP]", "play", "##ing", "##s", "a", "."])}
    backend = Backend(models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens(["[SEP]"])
    return Tokenizer(backend, no_conversation)


def no_conversation() -> NoReturn:
    raise AssertionError("nothing here is a conversation")


factory_of = lru_cache(DecoderFactory)
"""Made once for a tokenizer: that of the demo model reads its vocabulary, which took longer than a text."""


def incremental_text(
    loaded: Tokenizer, ids: Sequence[int], *, tail: Sequence[int] = (), skip_special_tokens: bool = True
) -> str:
    decoder = factory_of(loaded).open(tail, skip_special_tokens=skip_special_tokens)
    return "".join(map(decoder.push, ids)) + decoder.flush()


def random_text(rng: random.Random) -> str:
    return "".join(rng.choices(ALPHABET, k=rng.randrange(12)))


@pytest.mark.parametrize("skip", [False, True])
def test_byte_level_text_of_any_ids_is_the_text_decoded_at_once(demo: Tokenizer, skip: bool) -> None:
    rng = random.Random(0)
    factory = factory_of(demo)
    partial_characters = demo.encode_batch(["😀漢é<|im_start|>"])[0].tolist()
    for _ in range(1500):
        ids = [
            rng.choice([rng.randrange(4096), rng.randrange(260), rng.choice(partial_characters), 4096, 99999])
            for _ in range(rng.randrange(24))
        ]
        decoder = factory.open([], skip_special_tokens=skip)
        text = "".join(map(decoder.push, ids)) + decoder.flush()
        assert text == demo.decode(ids, skip_special_tokens=skip), ids


@pytest.mark.parametrize("skip", [False, True])
def test_output_goes_on_from_a_prompt_tail_as_from_its_tokens(demo: Tokenizer, skip: bool) -> None:
    rng = random.Random(3)
    factory = factory_of(demo)
    partial_characters = demo.encode_batch(["😀漢é<|im_start|>"])[0].tolist()
    for _ in range(1500):
        ids = [
            rng.choice([rng.randrange(4096), rng.choice(partial_characters), rng.randrange(260), 4096, -1])
            for _ in range(rng.randrange(2, 12))
        ]
        at = rng.randrange(1, len(ids))
        decoder = factory.open([], skip_special_tokens=skip)
        for token in ids[:at]:
            decoder.push(token)
        expected = "".join(map(decoder.push, ids[at:])) + decoder.flush()
        assert incremental_text(demo, ids[at:], tail=ids[:at], skip_special_tokens=skip) == expected, ids


def test_no_replacement_character_comes_for_a_character_that_is_not_complete(demo: Tokenizer) -> None:
    ids = demo.encode_batch(["x😀y"])[0].tolist()
    decoder = DecoderFactory(demo).open([])
    pieces = [decoder.push(token) for token in ids]
    assert len(pieces) > 3, "the test needs a character of several tokens"
    assert "".join(pieces) == "x😀y"
    assert "\ufffd" not in "".join(pieces)


def test_an_incomplete_character_is_flushed_at_the_end(demo: Tokenizer) -> None:
    ids = demo.encode_batch(["😀"])[0].tolist()[:-1]
    assert incremental_text(demo, ids) == "\ufffd"


def test_output_completes_a_character_that_the_prompt_began(demo: Tokenizer) -> None:
    ids = demo.encode_batch(["漢"])[0].tolist()
    assert len(ids) > 1
    assert incremental_text(demo, ids[1:], tail=ids[:1]) == "漢"


@pytest.mark.parametrize("name", ["byte_fallback", "word_piece"])
def test_window_text_of_any_text_is_the_text_decoded_at_once(
    name: str, request: pytest.FixtureRequest
) -> None:
    loaded: Tokenizer = request.getfixturevalue(name)
    rng = random.Random(1)
    assert not loaded.is_byte_level
    for _ in range(400):
        if name == "byte_fallback":
            encoded = loaded.encode_batch([random_text(rng) for _ in range(3)])
            ids = [token for part in encoded for token in (*part.tolist(), 1)]
        else:
            ids = [rng.randrange(8) for _ in range(rng.randrange(20))]
        for skip in (False, True):
            expected = loaded.decode(ids, skip_special_tokens=skip)
            assert incremental_text(loaded, ids, skip_special_tokens=skip) == expected, (ids, skip)


@pytest.mark.parametrize("name", ["demo", "byte_fallback", "word_piece"])
def test_a_fork_goes_on_from_where_it_was_made_and_changes_nothing(
    name: str, request: pytest.FixtureRequest
) -> None:
    loaded: Tokenizer = request.getfixturevalue(name)
    factory, rng = factory_of(loaded), random.Random(2)
    for _ in range(60):
        ids = loaded.encode_batch([random_text(rng) + "漢😀"])[0].tolist() + [
            rng.randrange(8) for _ in range(6)
        ]
        at = rng.randrange(len(ids))
        decoder = factory.open(())
        before = "".join(map(decoder.push, ids[:at]))
        fork = decoder.fork()
        other = "".join(map(fork.push, ids[::-1])) + fork.flush()
        assert before + "".join(map(decoder.push, ids[at:])) + decoder.flush() == incremental_text(
            loaded, ids
        )
        assert before + other == incremental_text(loaded, ids[:at] + ids[::-1])


def test_the_prompt_tail_gives_the_first_token_its_space(byte_fallback: Tokenizer) -> None:
    a = byte_fallback.encode_batch(["ab"])[0].tolist()
    assert byte_fallback.decode(a) == "ab"
    assert incremental_text(byte_fallback, a) == "ab"
    assert incremental_text(byte_fallback, a, tail=a) == " ab"


def test_the_window_stays_short_whatever_the_tokens_are(byte_fallback: Tokenizer) -> None:
    """Invalid bytes, tokens without text and characters that never end must not make a step slower."""
    lengths: list[int] = []

    class Spy(Tokenizer):
        def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
            lengths.append(len(ids))
            return super().decode(ids, skip_special_tokens=skip_special_tokens)

    spy = Spy(byte_fallback._backend, byte_fallback._open_wrapper)
    continuation = spy._backend.token_to_id("<0xBF>")
    space = spy._backend.token_to_id("\u2581")
    assert continuation is not None
    assert space is not None
    for token in (continuation, space, 1, 99999):
        decoder = WindowDecoder(spy, [1, token], skip_special_tokens=True)
        for _ in range(100):
            decoder.push(token)
        decoder.flush()
    assert max(lengths) <= 2 * MAX_PENDING_TOKENS


def test_byte_fallback_holds_a_character_until_its_last_byte(byte_fallback: Tokenizer) -> None:
    ids = byte_fallback.encode_batch(["a😀b"])[0].tolist()
    decoder = DecoderFactory(byte_fallback).open([])
    pieces = [decoder.push(token) for token in ids]
    assert "".join(pieces) == "a😀b"
    assert pieces.count("") >= 3
