"""Requests of the simulation's clients, drawn from the run's randomness."""

from __future__ import annotations

import random
from typing import Any

import msgspec

from runtime.ring.tenants import OWNER
from runtime.sampling.table import MAX_DRAFT_TOKENS
from runtime.wire.format import TENANT_BYTES, TOKEN_BYTES, pack_ids, unpack_ids
from runtime.wire.guide import Guide
from runtime.wire.handle import make_handle, sequence_key, sibling, split_handle
from runtime.wire.messages import StreamOpen, TokenizedRequest
from runtime.wire.plan import AdapterRef, ProcessorCall
from runtime.wire.retention import RetainedRange, Retention
from runtime.wire.sampling_params import SamplingParams
from tests.harness.simulation.fake_sampling import BANS, NAMESPACE_SHIFT, NUM_TOP, RAISES, TAP, VOCAB_SIZE
from tests.harness.simulation.fakes import BAD_ADAPTER
from tests.harness.simulation.sim_grammar import GUIDES, REFUSED
from tests.harness.simulation.sim_reference import Spec, reference
from tests.harness.simulation.sim_system import STEP_S, TENANTS, Setting, aside
from tests.harness.simulation.sim_tenants import NAMES
from tokenizer_proc import sequences

SECRET = b"secret of the launch"
NAMESPACES = {
    1: (b"", b"", TENANTS[0] + b"salt", TENANTS[0] + b"adapter"),
    3: (b"", b"", TENANTS[1], TENANTS[2] + b"salt"),
}
"""By the number of tenants."""
TRAITS = (("grammar", 0.2), ("speculation", 0.2), ("adapter", 0.2), ("wide", 0.1))


class Traffic:
    """Draws requests of one to four sequences; `specs` are those that there are already."""

    def __init__(self, rng: random.Random, setting: Setting, specs: dict[bytes, Spec]) -> None:
        self._rng = rng
        self._aside = aside(rng)
        self._guides = aside(rng)
        self._setting = setting
        self._specs = specs
        self._stems = [[rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(4, 40))] for _ in range(3)]

    def draw(self, number: int) -> list[Spec]:
        """The sequences of one request; they share the prompt and differ in their seeds."""
        rng = self._rng
        ids = self._draw_prompt()
        namespaces = NAMESPACES[self._setting.num_tenants]
        num_namespace = rng.randrange(len(namespaces))
        traits = frozenset(trait for trait, share in TRAITS if rng.random() < share)
        first = TokenizedRequest(
            make_handle(1 + number % 3, number),
            pack_ids(ids),
            self._draw_sampling(num_namespace, "grammar" in traits),
            msgspec.Raw(b""),
            rng.choice([0, 0, 0, 5, -2]),
            namespaces[num_namespace],
            retention=self._draw_retention(),
            tenant=self._aside.choice(NAMES) if self._setting.tenants else OWNER,
        )
        if self._setting.has_adapters:
            first = self._with_adapter(first)
        return [self._sequence(first, index, traits) for index in range(rng.choice([1, 1, 1, 2, 4]))]

    def _with_adapter(self, first: TokenizedRequest) -> TokenizedRequest:
        """Half of them have one, of three names and two versions; or one that cannot be loaded."""
        rng = self._aside
        if rng.random() < 0.5:
            return first
        name = BAD_ADAPTER if rng.random() < 0.1 else rng.choice("abc")
        number, version = 2 + "abc".find(name), rng.choice("12")
        adapter = AdapterRef(name, number, version, f"/{name}")
        digest = sequences.namespace("", "", SECRET, adapter)[TENANT_BYTES:]
        return msgspec.structs.replace(
            first, adapter=adapter, namespace=(first.namespace or bytes(TENANT_BYTES)) + digest
        )

    def _with_guesses(self, spec: Spec) -> Spec:
        """Drafts and a prediction that are right but for one token in eight, and numbers of guesses."""
        rng, has_ngram = self._aside, self._setting.speculation.has_ngram
        message, wanted = spec.message, rng.choice([None, None, 0, 2])
        if has_ngram and wanted is not None:
            sampling = msgspec.structs.replace(message.sampling, speculative_num_draft_tokens=wanted)
            message = spec.message = msgspec.structs.replace(message, sampling=sampling)
        kind = rng.random()
        if kind < 0.8 or (kind < 0.9 and (not has_ngram or wanted == 0)):
            return spec
        output = reference(spec)[0][:MAX_DRAFT_TOKENS]
        guesses = pack_ids([i if rng.random() < 0.9 else rng.randrange(VOCAB_SIZE) for i in output])
        field = "prediction_ids" if kind < 0.9 else "draft_ids"
        spec.message = msgspec.structs.replace(message, **{field: guesses})
        return spec

    def _sequence(self, first: TokenizedRequest, index: int, traits: frozenset[str]) -> Spec:
        handle = sibling(first.handle, index)
        sampling = msgspec.structs.replace(first.sampling, seed=(first.sampling.seed or 0) + index)
        if index:
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=None, return_context_logits=False)
        num_prompt = len(first.input_ids) // TOKEN_BYTES
        message = msgspec.structs.replace(
            first, handle=handle, sampling=sampling, stream_open=stream_open(handle, num_prompt)
        )
        setting = self._setting
        assert sampling.max_tokens is not None
        max_len = min(num_prompt + sampling.max_tokens, setting.max_len)
        spec = self._with_guide(Spec(message, traits, max_len, window=setting.window))
        return self._with_outputs(self._with_processors(self._with_guesses(spec)))

    def _with_guide(self, spec: Spec) -> Spec:
        share = self._setting.guided
        if share and "grammar" not in spec.traits and self._guides.random() < share:
            kind = self._guides.choice([*GUIDES, *GUIDES, *GUIDES, REFUSED])
            spec.message = msgspec.structs.replace(spec.message, guide=Guide("regex", kind))
        return spec

    def _with_processors(self, spec: Spec) -> Spec:
        """None where they are refused: with guesses of the request and in static batches."""
        message, setting, rng = spec.message, self._setting, self._guides
        is_refused = (
            not setting.processed
            or message.draft_ids
            or message.prediction_ids
            or setting.batching == "static"
        )
        if is_refused or spec.traits & {"grammar", "speculation"} or rng.random() >= setting.processed:
            return spec
        names = (BANS, RAISES) if rng.random() < 0.2 else (BANS,)
        sampling = msgspec.structs.replace(message.sampling, speculative_num_draft_tokens=0)
        calls = tuple(map(ProcessorCall, names))
        spec.message = msgspec.structs.replace(
            message,
            processors=calls,
            sampling=sampling if setting.speculation.has_ngram else message.sampling,
        )
        return spec

    def _with_outputs(self, spec: Spec) -> Spec:
        rng, message = self._guides, spec.message
        if self._setting.tapped and rng.random() < self._setting.tapped:
            sampling = msgspec.structs.replace(
                message.sampling, additional_outputs=(TAP,), gather_context=rng.random() < 0.5
            )
            spec.message = msgspec.structs.replace(message, sampling=sampling)
        return spec

    def _draw_retention(self) -> Retention | None:
        rng = self._aside
        if self._setting.cache == "none" or rng.random() < 0.6:
            return None
        edges = sorted(rng.sample(range(50), 4))
        ranges = [
            RetainedRange(start, end, rng.randrange(101), rng.choice([0, 50, 400]))
            for start, end in (edges[:2], edges[2:])
        ]
        return Retention(tuple(ranges), rng.randrange(101), rng.choice([0, 100]))

    def _draw_prompt(self) -> list[int]:
        rng = self._rng
        if self._specs and rng.random() < 0.3:  # the same, at once
            ids: list[int] = unpack_ids(next(reversed(self._specs.values())).message.input_ids).tolist()
        else:
            ids = rng.choice(self._stems) + [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(0, 6))]
        return ids[: rng.randrange(1, 4) if rng.random() < 0.03 else self._setting.max_len - 1]

    def _draw_sampling(self, num_namespace: int, has_grammar: bool) -> SamplingParams:
        rng = self._rng
        max_tokens = rng.randrange(1, self._setting.max_output)
        kind = rng.random()
        prompt_logprobs = rng.randrange(0, NUM_TOP + 1) if rng.random() < 0.15 else None
        return SamplingParams(
            max_tokens=max_tokens,
            min_tokens=rng.randrange(0, max_tokens + 1) if rng.random() < 0.2 else 0,
            presence_penalty=0.5 if rng.random() < 0.15 else 0.0,
            seed=((num_namespace if num_namespace > 1 else 0) << NAMESPACE_SHIFT) + rng.randrange(2),
            stop_token_ids=() if kind < 0.6 else tuple(range(20, 22 if kind < 0.8 else 30)),
            ignore_eos=rng.random() < 0.3,
            logprobs=rng.randrange(0, NUM_TOP + 1) if rng.random() < 0.2 else None,
            prompt_logprobs=prompt_logprobs,
            # Nothing is drawn here and below: the seeds of the mutants stay.
            prompt_logprobs_start=0 if prompt_logprobs is None else max(0, max_tokens % 16 - 8),
            return_context_logits=rng.random() < (0.05 if prompt_logprobs is None else 0.4),
            return_generation_logits=rng.random() < 0.1,
            return_perf_metrics=max_tokens % 5 == 0,
            **({} if has_grammar else self._draw_prohibitions()),
            **self._draw_top_p_decay(),
        )

    def _draw_prohibitions(self) -> dict[str, Any]:
        """Few ids to choose from, so that words and n-grams come up."""
        rng, kind = self._rng, self._rng.random()
        if kind < 0.8:
            return {}
        few = tuple(rng.sample(range(VOCAB_SIZE), 8))
        words = tuple(tuple(rng.choices(few, k=rng.randrange(1, 4))) for _ in range(3))
        return {
            "allowed_token_ids": few,
            "bad_words_ids": words if kind < 0.9 else (),
            "no_repeat_ngram_size": rng.choice([2, 3]) if kind > 0.87 else 0,
        }

    def _draw_top_p_decay(self) -> dict[str, Any]:
        rng = self._rng
        if rng.random() < 0.85:
            return {}
        return {"top_p_decay": 0.9, "top_p_min": 0.1, "top_p_reset_ids": tuple(range(rng.choice([0, 12])))}

    def draw_deadline(self, now: float) -> float:
        """Draw the deadline of a request that is sent now: most have none, some are late already."""
        rng = self._rng
        if rng.random() >= self._setting.expiring:
            return 0.0
        return now + STEP_S * rng.choice([-1, 2, 5, 20, 80])


def with_attempt(handle: bytes, attempt: int) -> bytes:
    client, seq, index, _ = split_handle(handle)
    return make_handle(client, seq, index, attempt)


def stream_open(handle: bytes, num_prompt: int) -> msgspec.Raw:
    return msgspec.Raw(msgspec.msgpack.encode(StreamOpen(handle, num_prompt)))


def next_attempt(
    spec: Spec, have: list[int], num_prompt_logprobs: int, deadline_s: float
) -> TokenizedRequest:
    """Return what a client sends that has got `have` and so many logprobs of the prompt from the last
    attempt.
    """
    old = spec.message
    handle = with_attempt(old.handle, split_handle(old.handle)[3] + 1)
    return msgspec.structs.replace(
        old,
        handle=handle,
        output_ids=old.output_ids + pack_ids(have),
        stream_open=stream_open(handle, len(old.input_ids) // TOKEN_BYTES),
        num_prompt_logprobs=old.num_prompt_logprobs + num_prompt_logprobs,
        deadline_s=deadline_s,
        is_again=True,
    )


def keys_of(specs: list[Spec]) -> dict[bytes, Spec]:
    return {sequence_key(spec.handle): spec for spec in specs}
