"""Prompts without common prefixes: token ids, text, or conversations of several turns."""

from __future__ import annotations

from collections.abc import Sequence

from bench_serving.datasets.base import Generator, LoadConversation, PromptSource, Turn, random_lengths

MAX_WARM_UP_OUTPUT = 32


def random_ids(
    source: PromptSource, rng: Generator, num: int, *, input_len: int, output_len: int, range_ratio: float
) -> list[LoadConversation]:
    """Return prompts of uniformly drawn token ids. Raises ConfigError if no vocabulary is known."""
    inputs = random_lengths(rng, input_len, range_ratio, num)
    outputs = random_lengths(rng, output_len, range_ratio, num)
    return [
        LoadConversation((Turn(source.ids(rng, length), length, output),))
        for length, output in zip(inputs, outputs, strict=True)
    ]


def random_text(
    source: PromptSource,
    rng: Generator,
    num: int,
    *,
    input_len: int,
    output_len: int,
    range_ratio: float,
    num_turns: int = 1,
) -> list[LoadConversation]:
    """Return conversations of random words; the lengths are those of each turn."""
    inputs = random_lengths(rng, input_len, range_ratio, num * num_turns)
    outputs = random_lengths(rng, output_len, range_ratio, num * num_turns)
    turns = []
    for length, output in zip(inputs, outputs, strict=True):
        text = source.text(rng, length)
        turns.append(Turn(text, source.count(text), output))
    return [
        LoadConversation(tuple(turns[first : first + num_turns])) for first in range(0, len(turns), num_turns)
    ]


def warm_up_like(
    conversations: Sequence[LoadConversation], source: PromptSource, rng: Generator, num: int
) -> list[LoadConversation]:
    """Return `num` single requests as long as the first ones, but with other prompts, so that the run finds
    none cached.
    """
    warm_up = []
    for index in range(num):
        turn = conversations[index % len(conversations)].turns[0]
        prompt = (source.text if isinstance(turn.prompt, str) else source.ids)(rng, turn.input_len)
        output_len = min(turn.output_len, MAX_WARM_UP_OUTPUT)
        warm_up.append(LoadConversation((Turn(prompt, turn.input_len, output_len),)))
    return warm_up
