"""LoadConversation: the turns of one simulated user, and the ways to make text of a given length.

The same seed gives the same conversations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np

from runtime.base.errors import ConfigError
from runtime.text.tokenizer import Tokenizer

Generator: TypeAlias = np.random.Generator

# Short words of English that the vocabularies of most models hold as one token each.
WORDS = (
    *(
        "the",
        "of",
        "and",
        "to",
        "in",
        "is",
        "that",
        "for",
        "it",
        "was",
        "on",
        "are",
        "as",
        "with",
        "they",
        "be",
    ),
    *(
        "at",
        "one",
        "have",
        "this",
        "from",
        "or",
        "had",
        "by",
        "but",
        "not",
        "what",
        "all",
        "were",
        "we",
        "when",
    ),
    *(
        "your",
        "can",
        "said",
        "there",
        "use",
        "an",
        "each",
        "which",
        "she",
        "do",
        "how",
        "their",
        "if",
        "will",
    ),
    *("up", "other", "about", "out", "many", "then", "them", "these", "so", "some", "her", "would", "make"),
)
MIN_WORD_IDS = 64
MAX_FITTING_ROUNDS = 8


@dataclass(frozen=True, slots=True)
class Turn:
    prompt: str | list[int]
    """Prompt; token ids only in a conversation of a single turn."""
    input_len: int
    """Number of tokens of `prompt`, counted by the client."""
    output_len: int


@dataclass(frozen=True, slots=True)
class LoadConversation:
    """Turns that are sent one after the other, each with everything before it."""

    turns: tuple[Turn, ...]


class PromptSource(Protocol):
    """Makes prompts of a given length in tokens, and counts the tokens of given ones."""

    def ids(self, rng: Generator, length: int) -> list[int]:
        """Return random token ids, none of them special. Raises ConfigError if no vocabulary is known."""

    def text(self, rng: Generator, length: int) -> str:
        """Return random words."""

    def count(self, text: str) -> int:
        """Return the number of tokens of a text, without those that a server adds."""


class TokenizerSource:
    """Source of prompts for the model with this tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids = np.array(sorted(set(tokenizer.vocabulary) - tokenizer.special_ids))
        # Whole words with their space: such a sequence is encoded as it was drawn, whatever the neighbours.
        words = [
            token_id
            for token_id, token in sorted(tokenizer.vocabulary.items())
            if token[:1] in ("Ġ", "▁") and token[1:].isascii() and token[1:].isalpha()
        ]
        self._word_ids = np.array(words) if len(words) >= MIN_WORD_IDS else self._ids

    def ids(self, rng: Generator, length: int) -> list[int]:
        ids: list[int] = rng.choice(self._ids, length).tolist()
        return ids

    def text(self, rng: Generator, length: int) -> str:
        ids = rng.choice(self._word_ids, length).tolist()
        for _ in range(MAX_FITTING_ROUNDS):
            text = self._tokenizer.decode(ids)
            encoded = self._encode(text)
            if len(encoded) == length:
                break
            ids = encoded[:length] + rng.choice(self._word_ids, max(0, length - len(encoded))).tolist()
        return text

    def count(self, text: str) -> int:
        return len(self._encode(text))

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode_batch([text], add_special_tokens=False)[0].tolist()
        return ids


class WordSource:
    """Source of prompts without a tokenizer: common words, each counted as one token. The server's usage
    corrects the counts.
    """

    def ids(self, rng: Generator, length: int) -> list[int]:
        raise ConfigError(
            "--tokenizer: token ids need the model's vocabulary; name the tokenizer's directory, "
            "or use --dataset-name random"
        )

    def text(self, rng: Generator, length: int) -> str:
        return " ".join(rng.choice(WORDS, length).tolist())

    def count(self, text: str) -> int:
        return len(text.split())


def random_lengths(rng: Generator, longest: int, range_ratio: float, num: int) -> list[int]:
    """Return lengths that are uniform from longest * range_ratio, at least 1, to longest, both included."""
    lengths: list[int] = rng.integers(max(1, int(longest * range_ratio)), longest + 1, num).tolist()
    return lengths
