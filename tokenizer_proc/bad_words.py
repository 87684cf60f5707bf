"""Bad words: conversion of texts that must not be generated to the token ids that spell them."""

from __future__ import annotations

import msgspec

from runtime.base.errors import InvalidRequest
from runtime.sampling.kinds import MAX_WORD_IDS
from runtime.sampling.table import MAX_WORDS
from runtime.text.codec import PromptEncoder
from runtime.wire.sampling_params import SamplingParams

_MAX_WORDS_IDS = 3 * MAX_WORDS


def with_bad_words_as_ids(
    sampling: SamplingParams, tokenizer: PromptEncoder, vocab_size: int
) -> SamplingParams:
    """Return `sampling` with its bad words added to bad_words_ids, each as spelled at the start of a text and
    after a space. Raises InvalidRequest, which names bad_words.
    """
    if not sampling.bad_words:
        return sampling
    # A dict, because it has no duplicates and its order does not depend on hashes.
    words = dict.fromkeys(sampling.bad_words_ids)
    for word in sampling.bad_words:
        spellings = _spellings(word, tokenizer)
        if not spellings:
            raise InvalidRequest(f"bad_words: {word!r} has no tokens", param="bad_words")
        for spelling in spellings:
            if len(spelling) > MAX_WORD_IDS:
                raise InvalidRequest(
                    f"bad_words: {word!r} has {len(spelling)} tokens, at most {MAX_WORD_IDS} are possible",
                    param="bad_words",
                )
            if max(spelling) >= vocab_size:
                raise InvalidRequest(
                    f"bad_words: {word!r} has a token that the model does not know", param="bad_words"
                )
        words.update(dict.fromkeys(spellings))
    if len(words) > _MAX_WORDS_IDS:
        raise InvalidRequest(
            f"bad_words: with bad_words_ids they are {len(words)} words in tokens, at most {_MAX_WORDS_IDS} "
            "are possible",
            param="bad_words",
        )
    return msgspec.structs.replace(sampling, bad_words=(), bad_words_ids=tuple(words))


def _spellings(word: str, tokenizer: PromptEncoder) -> list[tuple[int, ...]]:
    bare = word.removeprefix(" ")
    encoded = tokenizer.encode_batch([bare, " " + bare], add_special_tokens=False)
    return [tuple(ids.tolist()) for ids in encoded if len(ids)]
