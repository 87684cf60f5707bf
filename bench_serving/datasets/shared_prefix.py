"""Groups of prompts that begin with the same system prompt, as applications send them."""

from __future__ import annotations

from dataclasses import dataclass

from bench_serving.datasets.base import Generator, LoadConversation, PromptSource, Turn, random_lengths

SEPARATOR = "\n\n"


@dataclass(frozen=True, slots=True)
class SharedPrefixShape:
    num_groups: int
    prompts_per_group: int
    system_prompt_len: int
    question_len: int
    output_len: int
    range_ratio: float
    """Range of question and output lengths. System prompts have their full length."""
    num_turns: int
    in_order: bool
    """True for group after group; False mixes the groups."""


def generated_shared_prefix(
    source: PromptSource, rng: Generator, shape: SharedPrefixShape
) -> list[LoadConversation]:
    """Return one conversation for each prompt of each group. Only its first turn has the system prompt."""
    num = shape.num_groups * shape.prompts_per_group * shape.num_turns
    questions = iter(random_lengths(rng, shape.question_len, shape.range_ratio, num))
    outputs = iter(random_lengths(rng, shape.output_len, shape.range_ratio, num))
    conversations = []
    for _ in range(shape.num_groups):
        system = source.text(rng, shape.system_prompt_len) + SEPARATOR
        for _ in range(shape.prompts_per_group):
            texts = [source.text(rng, next(questions)) for _ in range(shape.num_turns)]
            texts[0] = system + texts[0]
            turns = [Turn(text, source.count(text), next(outputs)) for text in texts]
            conversations.append(LoadConversation(tuple(turns)))
    if not shape.in_order:
        conversations = [conversations[index] for index in rng.permutation(len(conversations))]
    return conversations
