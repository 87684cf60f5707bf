"""Words that fill the cache of the tokenizer library before the first caller's do.

The library keeps the ids of the first 10,000 different words that it meets, and finds them in two thirds of
the time. So the time of a text would tell one tenant which words others have sent. The cache never forgets:
once it is full of words that come from here, it tells nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

CACHE_WORDS = 10_000
"""Number of words that the library keeps (its DEFAULT_CACHE_CAPACITY)."""
CONSONANTS, VOWELS = "bdfgjklmnpqrstvwxz", "aeiou"
SLACK_WORDS = 2_000
TEXT_WORDS = 500


def filling_texts(vocabulary: Iterable[str]) -> Iterator[str]:
    """Yield texts of more different words than the cache keeps: first those of the vocabulary, which callers
    use most, and then made up ones, since some tokenizers do not keep a word that is a single token.
    """
    letters = ("".join(filter(str.isalpha, token)) for token in vocabulary)
    known = itertools.islice(dict.fromkeys(filter(None, letters)), CACHE_WORDS)
    parts = (CONSONANTS, VOWELS, CONSONANTS, VOWELS, CONSONANTS, VOWELS)
    made_up = map("".join, itertools.islice(itertools.product(*parts), CACHE_WORDS + SLACK_WORDS))
    words = itertools.chain(known, made_up)
    while part := list(itertools.islice(words, TEXT_WORDS)):
        yield " ".join(part)
