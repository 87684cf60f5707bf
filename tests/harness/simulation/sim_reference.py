"""Reference of the simulation's sequences, from prompts, seeds and limits only."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from runtime.wire.format import TOKEN_BYTES, unpack_ids
from runtime.wire.messages import TokenizedRequest
from runtime.wire.sampling_params import SamplingParams
from tests.harness.models.stand_ins import parity_mask
from tests.harness.simulation.fake_sampling import (
    NAMESPACE_SHIFT,
    IdArray,
    adapter_salt,
    allowed_ids,
    banned_ids,
    choose,
    forbidden_ids,
    hash_of,
    next_top_p_age,
    prompt_hash,
    seen,
)
from tests.harness.simulation.sim_grammar import place_in

EOS_IDS = frozenset({5, 11})
COMPLETE, UNSATISFIABLE = -1, -2
"""Stand-in for a token where an output is complete as it is, or cannot go on."""


@dataclass(slots=True)
class Spec:
    """One sequence as the simulation wants it; `message` is its latest attempt."""

    message: TokenizedRequest
    traits: frozenset[str]
    max_len: int
    start: list[int] = field(default_factory=list)
    """Tokens it begins with when it is a fork: prompt and output of its parent."""
    window: int = 0
    """Tokens that the model sees; 0: all."""
    ended_from_outside: bool = False
    """An abort or a stop string may have cut it short."""
    is_sent: bool = False
    aborted_before_sent: bool = False

    @property
    def handle(self) -> bytes:
        return self.message.handle


def next_token(spec: Spec, tokens: list[int]) -> tuple[int, int]:
    """(token, hash) of what follows `tokens` in a sequence."""
    sampling = spec.message.sampling
    seed = sampling.seed or 0
    num_prompt = len(spec.message.input_ids) // TOKEN_BYTES
    age = 0
    if sampling.top_p_decay != 1.0:
        for token in tokens[num_prompt:]:
            age = next_top_p_age(age, token, sampling.top_p_reset_ids)
    h = hash_of(
        seen(context_of(spec, tokens), spec.window), seed, tokens if sampling.presence_penalty else (), age
    )
    forbidden = forbidden_ids(tokens, sampling.bad_words_ids, sampling.no_repeat_ngram_size)
    if spec.message.processors:
        forbidden |= banned_ids(tokens)
    if len(tokens) < num_prompt + sampling.min_tokens:
        forbidden |= stop_ids_of(sampling)
    if spec.message.guide is not None:
        return guided_token(spec, spec.message.guide.text, tokens, h, forbidden), h
    if "grammar" in spec.traits:
        return choose(h, allowed_ids(parity_mask(tokens[-1])), forbidden), h
    return choose(h, sampling.allowed_token_ids or None, forbidden), h


def guided_token(spec: Spec, guide: str, tokens: list[int], h: int, forbidden: set[int]) -> int:
    sampling = spec.message.sampling
    num_prompt = len(spec.message.input_ids) // TOKEN_BYTES
    place = place_in(guide, tokens[num_prompt:])
    may_stop = place.is_complete and len(tokens) >= num_prompt + sampling.min_tokens
    allowed, stops = set(place.allowed), stop_ids_of(sampling) if may_stop else frozenset()
    if sampling.allowed_token_ids:
        allowed &= set(sampling.allowed_token_ids)
        stops &= set(sampling.allowed_token_ids)
    if not may_stop:
        allowed = allowed - set(sampling.stop_token_ids) or allowed
    if not allowed:
        return COMPLETE if place.is_complete else UNSATISFIABLE
    return choose(h, sorted(allowed | stops), forbidden)


def context_of(spec: Spec, tokens: list[int]) -> IdArray:
    """[len(tokens)]: what the fake model's KV holds of them."""
    salt = ((spec.message.sampling.seed or 0) >> NAMESPACE_SHIFT) * 1000
    return np.array(tokens, np.int64) + (salt + adapter_salt(spec.message.adapter))


def prompt_hashes(spec: Spec) -> list[int]:
    """Return the hashes of the logits at each position of its prompt."""
    prompt = context_of(spec, unpack_ids(spec.message.input_ids).tolist())
    return [prompt_hash(seen(prompt[: position + 1], spec.window)) for position in range(len(prompt))]


def stop_ids_of(sampling: SamplingParams) -> frozenset[int]:
    own = frozenset(sampling.stop_token_ids)
    return own if sampling.ignore_eos else own | EOS_IDS


def reference(spec: Spec) -> tuple[list[int], list[int], str]:
    """(output ids, their hashes, reason) of a sequence that nobody interferes with."""
    sampling = spec.message.sampling
    tokens = list(spec.start) or unpack_ids(spec.message.input_ids).tolist()
    num_prompt = len(spec.message.input_ids) // TOKEN_BYTES
    hashes: list[int] = []
    while len(tokens) < spec.max_len:
        token, h = next_token(spec, tokens)
        if token in (COMPLETE, UNSATISFIABLE):
            return tokens[num_prompt:], hashes, "complete" if token == COMPLETE else "unsatisfiable"
        tokens.append(token)
        hashes.append(h)
        if token in stop_ids_of(sampling) and len(tokens) - 1 >= num_prompt + sampling.min_tokens:
            return tokens[num_prompt:], hashes, "stop"
    return tokens[num_prompt:], hashes, "length"
