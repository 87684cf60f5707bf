"""Random traffic through the real scheduler, and a reference that knows nothing but prompts.

    python -m tests.simulation --runs 1000 [--seed 0]

Everything is drawn from one seed: sizes, depth of overlap, policy, cache, back-pressure, and requests that
are aborted, resumed, replaced, forked, retracted for want of pages, or stopped from outside at any moment.
After every step the pages and rows are conserved; at the end every output is what the reference says and
every accepted sequence has one terminal.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import random
import time
from collections import Counter
from typing import Any

import msgspec

from runtime.handle import attempt_of, make_handle, sequence_key, split_handle
from runtime.messages import (
    AbortRequest,
    Closed,
    ControlRequest,
    StopMatched,
    StreamOpen,
    TokenizedRequest,
    ToScheduler,
)
from runtime.sampling_params import SamplingParams
from runtime.wire import TOKEN_BYTES, pack_ids, unpack_ids
from scheduler_proc.features.base import RequestFeature
from scheduler_proc.request import Request, Status, StopIds
from tests.fakes import NAMESPACE_SHIFT, NUM_TOP, VOCAB_SIZE, fake_logprobs
from tests.sim_reference import Spec, next_token, reference, stop_ids_of
from tests.sim_system import Setting, System
from tests.stand_ins import Adapter, ParityGrammar, Speculation, WideStart

NAMESPACES = (b"", b"", b"tenant", b"adapter")
MAX_STEPS = 20_000


class Simulation:
    """One run: draws traffic, feeds it in, and judges the output."""

    def __init__(self, seed: int, setting: Setting | None = None) -> None:
        self.rng = random.Random(seed)
        self.setting = setting or Setting.draw(self.rng)
        self.specs: dict[bytes, Spec] = {}
        self.system = System(self.setting, self.rng, (self._features,))
        self.counts: Counter[str] = Counter()
        self._stems = [
            [self.rng.randrange(VOCAB_SIZE) for _ in range(self.rng.randrange(4, 40))] for _ in range(3)
        ]
        self._todo = [self._draw_spec(i) for i in range(self.setting.num_requests)]

    # -- traffic --------------------------------------------------------------------------------------------

    def _draw_spec(self, number: int) -> Spec:
        rng = self.rng
        ids = rng.choice(self._stems) + [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(0, 6))]
        if self.specs and rng.random() < 0.3:
            ids = unpack_ids(
                next(reversed(self.specs.values())).message.input_ids
            ).tolist()  # the same, at once
        num_namespace = rng.randrange(len(NAMESPACES))
        traits = {
            trait
            for trait, share in (("grammar", 0.2), ("speculation", 0.2), ("adapter", 0.2), ("wide", 0.1))
            if rng.random() < share
        }
        handle = make_handle(1 + number % 3, number)
        message = TokenizedRequest(
            handle,
            pack_ids(ids[: self.setting.max_len - 1]),
            self._draw_sampling(num_namespace),
            stream_open(handle, len(ids)),
            rng.choice([0, 0, 0, 5, -2]),
            NAMESPACES[num_namespace],
        )
        return self._keep(message, frozenset(traits))

    def _keep(self, message: TokenizedRequest, traits: frozenset[str]) -> Spec:
        num_prompt = len(message.input_ids) // TOKEN_BYTES
        spec = Spec(message, traits, min(num_prompt + message.sampling.max_tokens, self.setting.max_len))
        self.specs[sequence_key(message.handle)] = spec
        return spec

    def _draw_sampling(self, num_namespace: int) -> SamplingParams:
        rng = self.rng
        max_tokens = rng.randrange(1, self.setting.max_output)
        kind = rng.random()
        return SamplingParams(
            max_tokens=max_tokens,
            min_tokens=rng.randrange(0, max_tokens + 1) if rng.random() < 0.2 else 0,
            presence_penalty=0.5 if rng.random() < 0.15 else 0.0,
            seed=((num_namespace if num_namespace > 1 else 0) << NAMESPACE_SHIFT) + rng.randrange(2),
            stop_token_ids=() if kind < 0.6 else tuple(range(20, 22 if kind < 0.8 else 30)),
            ignore_eos=rng.random() < 0.3,
            logprobs=rng.randrange(0, NUM_TOP + 1) if rng.random() < 0.2 else None,
        )

    def _features(self, req: Request) -> RequestFeature | None:
        """The stand-ins that its traits ask for; one object
        each, so several may be attached through one factory.
        """
        spec = self.specs[req.key]
        rng = self.rng
        if "grammar" in spec.traits:
            return ParityGrammar(
                req, rng.randrange(0, 5), rng.random() < 0.2, rng.randrange(8) if rng.random() < 0.1 else -1
            )
        if "speculation" in spec.traits:
            return Speculation(req, self._propose, rng)
        if "adapter" in spec.traits:
            return Adapter(req.namespace + b"x" * (req.seq % 3))
        if "wide" in spec.traits:
            return WideStart(2)
        return None

    def _propose(self, req: Request, num_guesses: int) -> list[int]:
        spec = self.specs[req.key]
        tokens: list[int] = req.tokens.tolist()
        self.counts["drafted"] += num_guesses
        for _ in range(num_guesses):
            tokens.append(next_token(spec, tokens)[0])
        return tokens[-num_guesses:]

    # -- what happens from outside --------------------------------------------------------------------------

    def _send(self, message: ToScheduler) -> None:
        assert self.system.inbox.send(message)

    def _live(self) -> list[Spec]:
        """Sequences that the client has not seen the end of."""
        detokenizer = self.system.detokenizer
        return [
            spec
            for spec in self.specs.values()
            if spec.handle in detokenizer.opened and spec.handle not in detokenizer.closed
        ]

    def _interfere(self) -> None:
        rng, live = self.rng, self._live()
        if rng.random() >= self.setting.turbulence:
            return
        draw = rng.random()
        if draw < 0.04:
            spec = rng.choice(list(self.specs.values()))  # live, finished, or not yet sent
            spec.ended_from_outside = True
            spec.aborted_before_sent |= not spec.is_sent
            self._send(AbortRequest((spec.handle,)))
        elif draw < 0.045:
            for spec in self.specs.values():
                spec.ended_from_outside |= spec.handle[:8] == make_handle(2, 0)[:8]
            self._send(AbortRequest(client=2))
        elif draw < 0.07 and live:
            spec = rng.choice(live)
            spec.ended_from_outside = True
            self._send(StopMatched(spec.handle, len(self.system.detokenizer.tokens[spec.handle])))
        elif draw < 0.12 and live:
            self._resubmit(rng.choice(live))
        elif draw < 0.13:
            self._send(ControlRequest(1, 1, rng.choice(["flush_cache", "server_info"])))
        elif draw < 0.17:
            self._fork()
        elif draw < 0.19:
            self._abort_stale()

    def _abort_stale(self) -> None:
        """The abort of an attempt that a higher one has replaced ends nothing."""
        resumed = [spec for spec in self._live() if attempt_of(spec.handle)]
        if resumed:
            handle = self.rng.choice(resumed).handle
            self._send(AbortRequest((with_attempt(handle, attempt_of(handle) - 1),)))

    def _resubmit(self, spec: Spec) -> None:
        """The client lost sight of it: a higher attempt resumes,
        and a stale copy of the old one arrives after it.
        """
        if spec.start:
            return  # a fork has no message of its own that says how it began
        old, detokenizer = spec.message, self.system.detokenizer
        if reference(spec)[0] == unpack_ids(old.output_ids).tolist() + detokenizer.tokens[old.handle]:
            return  # it would end where it arrives, and its stale copy would begin anew
        handle = with_attempt(old.handle, attempt_of(old.handle) + 1)
        spec.message = msgspec.structs.replace(
            old,
            handle=handle,
            output_ids=old.output_ids + pack_ids(detokenizer.tokens[old.handle]),
            stream_open=stream_open(handle, len(old.input_ids) // TOKEN_BYTES),
        )
        self.counts["resumed"] += 1
        self._send(spec.message)
        self._send(old)

    def _fork(self) -> None:
        """A second continuation of a running request, as beam search would make it."""
        system, rng = self.system, self.rng
        candidates = [
            req
            for req in system.rows.running_requests()
            if req.num_output
            and not req.num_in_flight
            and not req.features
            and req.predicted_len < req.max_len
        ]
        if not candidates:
            return
        parent = rng.choice(candidates)
        number = len(self.specs)
        handle = make_handle(1, 1000 + number)
        sampling = msgspec.structs.replace(
            parent.sampling, seed=(parent.sampling.seed or 0) + 7, logprobs=None
        )
        tokens = parent.tokens.tolist()
        prompt = tokens[: parent.num_prompt]
        message = TokenizedRequest(
            handle, pack_ids(prompt), sampling, stream_open(handle, len(prompt)), 0, parent.namespace
        )
        spec = self._keep(message, frozenset())
        spec.start = tokens
        spec.is_sent = True
        stops = StopIds(stop_ids_of(sampling))
        child = Request(
            handle, sequence_key(handle), 10_000 + number, system.rows, sampling, stops, len(prompt),
            parent.max_len, parent.min_len, pack_ids(tokens), parent.namespace,
        )  # fmt: skip
        lifecycle = system.lifecycle
        if lifecycle.kv.try_fork(parent, child):
            lifecycle.open(message.stream_open)
            lifecycle.requests[child.key] = child
            child.status = Status.RUNNING
            self.counts["forked"] += 1
        else:
            lifecycle.add(child, message.stream_open)

    # -- the run --------------------------------------------------------------------------------------------

    def run(self) -> Counter[str]:
        system = self.system
        try:
            while self._todo or not system.scheduler.is_idle or len(system.outbox.messages):
                while self._todo and self.rng.random() < 0.5:
                    spec = self._todo.pop(0)
                    spec.is_sent = True
                    self._send(spec.message)
                self._interfere()
                system.step()
                self.counts["steps"] += 1
                assert self.counts["steps"] < MAX_STEPS, "no progress"
            system.step()
        finally:
            system.executor.close()
        self._judge()
        self.counts["runs"] += 1
        self.counts["sequences"] += len(self.specs)
        self.counts["retracted"] += system.lifecycle.num_retracted
        self.counts["replaced"] += system.lifecycle.num_replaced
        self.counts["evicted pages"] += system.kv.cache.num_evicted
        return self.counts

    def _judge(self) -> None:
        self.system.check_empty()
        detokenizer = self.system.detokenizer
        assert set(detokenizer.closed) <= detokenizer.opened
        for spec in self.specs.values():
            assert spec.handle in detokenizer.closed, "no terminal"
            self._judge_one(spec, detokenizer.closed[spec.handle])

    def _judge_one(self, spec: Spec, closed: Closed) -> None:
        want, hashes, reason = reference(spec)
        num_prompt = len(spec.message.input_ids) // TOKEN_BYTES
        given = spec.start[num_prompt:] or unpack_ids(spec.message.output_ids).tolist()
        have = given + self.system.detokenizer.tokens[spec.handle]
        self.counts[closed.reason] += 1
        if spec.aborted_before_sent:
            assert (closed.reason, have) == ("abort", []), "it was aborted before it came"
        elif closed.reason in ("abort", "stop_string"):
            assert spec.ended_from_outside
            assert have == want[: len(have)], "output of an ended sequence"
        elif closed.reason == "error":
            assert "grammar" in spec.traits
            assert closed.error is not None
            assert closed.error.code in ("invalid_grammar", "grammar_error")
            assert have == want[: len(have)]
        else:
            assert have == want, f"output differs at {first_difference(have, want)} of {len(want)}"
            assert closed.reason == reason
            assert closed.stop_token == (want[-1] if reason == "stop" else -1)
        assert 0 <= closed.cached_tokens <= num_prompt
        self._judge_logprobs(spec, have, given, hashes)

    def _judge_logprobs(self, spec: Spec, have: list[int], given: list[int], hashes: list[int]) -> None:
        got = self.system.detokenizer.logprobs[spec.handle]
        k = spec.message.sampling.logprobs
        if k is None:
            assert not got
            return
        assert len(got) == len(have) - len(given)
        for i, (chosen, top_ids, top) in enumerate(got, len(given)):
            want = fake_logprobs(hashes[i], have[i])
            assert (chosen, top_ids, top) == (want[0], want[1][:k], want[2][:k]), "another token's logprobs"


def with_attempt(handle: bytes, attempt: int) -> bytes:
    client, seq, index, _ = split_handle(handle)
    return make_handle(client, seq, index, attempt)


def stream_open(handle: bytes, num_prompt: int) -> msgspec.Raw:
    return msgspec.Raw(msgspec.msgpack.encode(StreamOpen(handle, num_prompt)))


def first_difference(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def setting_of(seed: int, **changes: Any) -> Setting:
    """The setting that a seed draws, with some of it changed."""
    return dataclasses.replace(Setting.draw(random.Random(seed)), **changes)


def run(seed: int, setting: Setting | None = None) -> Counter[str]:
    """One run. Whatever goes wrong names the seed that shows it."""
    simulation = Simulation(seed, setting)
    try:
        return simulation.run()
    except BaseException as error:
        error.add_note(
            f"seed {seed}: python -m tests.simulation --runs 1 --seed {seed}; {simulation.setting}"
        )
        raise


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    logging.disable()  # what a user's bad policy makes the scheduler say
    started = time.monotonic()
    counts: Counter[str] = Counter()
    for seed in range(args.seed, args.seed + args.runs):
        counts += run(seed)
    print(
        f"{time.monotonic() - started:.1f} s: "
        + ", ".join(f"{n} {what}" for what, n in sorted(counts.items()))
    )


if __name__ == "__main__":
    main()
