"""Random requests through the whole ring in memory, and properties that each of them must have.

The worker is the fake one, whose tokens depend only on the prompt and the seed. So each sequence has a
reference without a ring: the tokens from tests.harness.simulation.sim_reference, and the text by decoding
them at once.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from carousel.client.core.mailbox import Mailbox
from carousel.client.core.result import Delta
from carousel.client.core.state.request_state import RequestState
from runtime.base.errors import Overloaded
from runtime.text.tokenizer import Tokenizer
from runtime.wire.format import pack_ids, unpack_floats, unpack_ids
from runtime.wire.handle import make_handle, sibling, split_handle
from runtime.wire.messages import (
    UNIONS,
    AbortRequest,
    Finish,
    GenerateRequest,
    HelloAck,
    OutputBatch,
    SequenceOutput,
    TokenizedRequest,
)
from runtime.wire.sampling_params import SamplingParams
from runtime.wire.transport import MessageCodec
from tests.harness.ring.memory_ring import EPOCH, MAX_LEN, Caller, MemoryRing
from tests.harness.simulation.fake_sampling import NUM_TOP, VOCAB_SIZE, fake_logprobs
from tests.harness.simulation.sim_reference import EOS_IDS, Spec, reference

CHARACTERS = "!\"#$%&'()*+,-./0123456789:;"
MAX_PROMPT = 24
MAX_TOKENS = 16


@dataclass(slots=True)
class Asked:
    """One request and everything that came back for it."""

    request: GenerateRequest
    state: RequestState
    outputs: dict[bytes, list[SequenceOutput]]
    deltas: list[Delta] = field(default_factory=list)
    disturbed: bool = False
    """It was aborted, or has a deadline: it may end early."""
    abandoned: bool = False
    """Its caller has left."""


class PropertyRing(MemoryRing):
    """Keeps what was asked beside what comes back."""

    def __init__(self, loaded: Tokenizer, rng: random.Random, *, capacity: int) -> None:
        super().__init__(loaded, rng, capacity=capacity)
        self.rng = rng
        self.asked: dict[bytes, Asked] = {}
        """By the first handle."""
        self._text = loaded
        self._codec = MessageCodec(UNIONS["client_out"], EPOCH)

    # -- callers ---------------------------------------------------------------------------------------------

    def ask_any(self, caller: Caller) -> Asked | None:
        """Submit a random request; None: there was no room."""
        handle = make_handle(caller.id, caller.num_asked)
        sampling = self._random_sampling()
        prompt = self.rng.choices(range(3, VOCAB_SIZE), k=self.rng.randrange(1, MAX_PROMPT))
        has_deadline = self.rng.random() < 0.1
        request = GenerateRequest(
            handle,
            sampling,
            input_ids=pack_ids(prompt),
            stream=self.rng.random() < 0.5,
            time_limit_ms=self.rng.choice([10, 50, 200]) if has_deadline else 0,
        )
        if not self._tokenizer_in.send(request):
            return None
        caller.num_asked += 1
        handles = [sibling(handle, index) for index in range(sampling.n)]
        caller.live.update(handles)
        asked = Asked(
            request,
            RequestState(request, sampling, Mailbox().put),
            {each: [] for each in handles},
            disturbed=has_deadline,
        )
        self.asked[handle] = asked
        return asked

    def _random_sampling(self) -> SamplingParams:
        rng = self.rng
        max_tokens = rng.randrange(1, MAX_TOKENS)
        kind = rng.choice(["plain", "plain", "strings", "words", "min_tokens"])
        return SamplingParams(
            n=rng.choice([1, 1, 1, 2, 3, 4]),
            seed=rng.randrange(1 << 30),
            max_tokens=max_tokens,
            min_tokens=rng.randrange(max_tokens + 1) if kind == "min_tokens" else 0,
            stop=tuple(rng.sample(CHARACTERS, rng.randrange(1, 9))) if kind == "strings" else (),
            stop_words_ids=self._random_words() if kind == "words" else (),
            include_stop_str_in_output=rng.random() < 0.3,
            logprobs=rng.choice([None, None, 0, NUM_TOP]),
            ignore_eos=rng.random() < 0.2,
        )

    def _random_words(self) -> tuple[tuple[int, ...], ...]:
        """Draw bad words, most often of one token: longer ones come up by chance too seldom. End tokens are
        left out: which of the two ended a sequence would be a matter of taste.
        """
        rng = self.rng
        ids = [token for token in range(3, VOCAB_SIZE) if token not in EOS_IDS]
        return tuple(tuple(rng.choices(ids, k=rng.choice([1, 1, 1, 2]))) for _ in range(rng.randrange(1, 9)))

    def request_of(self, handle: bytes) -> Asked:
        return self.asked[sibling(handle, 0)]

    def abort_request(self, asked: Asked) -> None:
        if self._tokenizer_in.send(AbortRequest(tuple(asked.outputs))):
            asked.disturbed = True

    def leave(self, caller: Caller) -> None:
        for asked in self.asked.values():
            if split_handle(asked.request.handle)[0] == caller.id and not asked.state.ended:
                asked.abandoned = True
        super().leave(caller)

    # -- what comes back -------------------------------------------------------------------------------------

    def _read(self) -> None:
        sent, self.peers.sent = self.peers.sent, []
        for peer, frame in sent:
            caller = self.callers.get(peer)
            if caller is None:
                continue
            message: Any = self._codec.decode(frame)
            if isinstance(message, HelloAck):
                caller.id = message.client
            elif isinstance(message, OutputBatch):
                self._take(caller, message)

    def _take(self, caller: Caller, message: OutputBatch) -> None:
        for output in message.outputs:
            assert output.handle in caller.live, "something came after the terminal"
            asked = self.asked[sibling(output.handle, 0)]
            asked.outputs[output.handle].append(output)
            asked.deltas += asked.state.receive([output])
            if output.finish is not None:
                self._end(caller, output.handle, output.finish)

    # -- what must be true -----------------------------------------------------------------------------------

    def check_requests(self) -> None:
        """Call at rest: every request has been answered as it must be, or its caller has gone."""
        for asked in self.asked.values():
            if asked.abandoned:
                continue
            assert asked.state.ended, "a sequence has no terminal"
            finishes = [outputs[-1].finish for outputs in asked.outputs.values()]
            refused = [finish is not None and finish.error is not None for finish in finishes]
            if any(refused):
                assert isinstance(asked.state.error, Overloaded), asked.state.error
                continue
            for handle, outputs in asked.outputs.items():
                self._check_sequence(asked, handle, outputs)
            self._check_whole(asked)

    def _check_sequence(self, asked: Asked, handle: bytes, outputs: list[SequenceOutput]) -> None:
        finish = outputs[-1].finish
        assert finish is not None
        assert [output.finish for output in outputs[:-1]] == [None] * (len(outputs) - 1)
        if not asked.request.stream:
            assert len(outputs) == 1, "who does not stream gets one answer"
        assert all(output.text or output.token_ids for output in outputs[:-1]), "an output with nothing new"
        ids = [token for output in outputs for token in unpack_ids(output.token_ids).tolist()]
        text = "".join(output.text for output in outputs)
        expected = self._expected(asked, split_handle(handle)[2])
        assert finish.usage.prompt_tokens == len(unpack_ids(asked.request.input_ids or b""))
        assert finish.usage.completion_tokens == len(ids)
        if asked.disturbed and finish.reason in ("abort", "timeout"):
            assert ids == expected.ids[: len(ids)]
            # What was held back as the beginning of a stop string or word is told at the end after all.
            prompt = unpack_ids(asked.request.input_ids or b"").tolist()
            assert self._decode(prompt, ids).startswith(text)
        else:
            assert (finish.reason, finish.matched) == (expected.reason, expected.matched)
            assert ids == expected.ids
            assert text == expected.text
        self._check_logprobs(asked, finish, outputs, ids, expected.hashes)

    def _check_logprobs(
        self, asked: Asked, finish: Finish, outputs: list[SequenceOutput], ids: list[int], hashes: list[int]
    ) -> None:
        num_top = asked.request.sampling.logprobs
        values = [value for output in outputs for value in unpack_floats(output.logprobs).tolist()]
        tops = [token for output in outputs for token in unpack_ids(output.top_ids).tolist()]
        if num_top is None:
            assert values == []
            return
        expected = [fake_logprobs(h, token) for h, token in zip(hashes, ids, strict=False)]
        assert values == [chosen for chosen, _, _ in expected]
        assert tops == [token for _, top_ids, _ in expected for token in top_ids[:num_top]]
        if ids:
            assert finish.cumulative_logprob == pytest.approx(sum(values), abs=1e-5)

    def _check_whole(self, asked: Asked) -> None:
        """The request as the client library makes it."""
        n = asked.request.sampling.n
        finals = [delta.index for delta in asked.deltas if delta.finish_reason is not None]
        assert sorted(finals) == list(range(n)), "one end for each sequence"
        completion = asked.state.completion()
        assert [output.index for output in completion.outputs] == list(range(n))
        for output in completion.outputs:
            mine = [delta for delta in asked.deltas if delta.index == output.index]
            assert "".join(delta.text for delta in mine) == output.text
            assert [token for delta in mine for token in delta.token_ids] == output.token_ids
        total = sum(len(output.token_ids) for output in completion.outputs)
        assert completion.usage.completion_tokens == total

    def _expected(self, asked: Asked, index: int) -> Expected:
        request = asked.request
        sampling = msgspec.structs.replace(
            request.sampling, n=1, seed=((request.sampling.seed or 0) + index) % (1 << 63)
        )
        prompt = unpack_ids(request.input_ids or b"").tolist()
        message = TokenizedRequest(request.handle, pack_ids(prompt), sampling, msgspec.Raw(b""))
        assert sampling.max_tokens is not None
        max_len = min(len(prompt) + sampling.max_tokens, MAX_LEN)
        ids, hashes, reason = reference(Spec(message, frozenset(), max_len))
        return self._cut(prompt, sampling, ids, hashes, reason)

    def _cut(
        self, prompt: list[int], sampling: SamplingParams, ids: list[int], hashes: list[int], reason: str
    ) -> Expected:
        """End the reference at the first stop string or stop word."""
        shown = ids[:-1] if reason == "stop" else ids
        for count in range(1, len(shown) + 1):
            text = self._decode(prompt, shown[:count])
            word = next((w for w in sampling.stop_words_ids if shown[:count][-len(w) :] == list(w)), None)
            if word is not None:
                kept = self._decode(prompt, shown[: count - len(word)])
                return Expected(
                    ids[:count],
                    hashes,
                    text if sampling.include_stop_str_in_output else kept,
                    "stop",
                    text[len(kept) :],
                )
            found = [(text.index(stop), stop) for stop in sampling.stop if stop in text]
            if found:
                at, stop = min(found)
                end = at + len(stop) if sampling.include_stop_str_in_output else at
                return Expected(ids[:count], hashes, text[:end], "stop", stop)
        # The ring's detokenizer takes none of the scheduler's end tokens for the model's own.
        matched = ids[-1] if reason == "stop" else None
        return Expected(ids, hashes, self._decode(prompt, shown), reason, matched)

    def _decode(self, prompt: list[int], ids: list[int]) -> str:
        """The text that ids add behind the prompt."""
        before = self._text.decode(prompt[-8:], skip_special_tokens=True)
        return self._text.decode([*prompt[-8:], *ids], skip_special_tokens=True)[len(before) :]


@dataclass(slots=True, frozen=True)
class Expected:
    ids: list[int]
    hashes: list[int]
    text: str
    reason: str
    matched: str | int | None
