"""Random traffic through the real scheduler, and a reference that knows only prompts.

    python -m tests.harness.simulation.simulation --runs 1000 [--seed 0]

Everything is drawn from one seed: sizes, depth of overlap, policy, cache, back-pressure, and requests that
are aborted, resumed, replaced, forked, retracted for lack of pages, or stopped from outside at any moment.
After every step pages and rows are conserved. At the end every output equals that of the reference, and every
accepted sequence has one terminal.
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

from runtime.ring.suspects.roster import suspect_of
from runtime.wire.format import pack_ids, unpack_ids
from runtime.wire.handle import attempt_of, make_handle, sequence_key
from runtime.wire.messages import (
    AbortRequest,
    ControlOp,
    ControlRequest,
    PauseMode,
    StopMatched,
    TokenizedRequest,
    ToScheduler,
)
from scheduler_proc.core.request import Request, Status, StopIds
from scheduler_proc.features.base import RequestFeature
from scheduler_proc.intake.intake import MAX_MADE_AGAIN
from tests.harness.models.stand_ins import Adapter, ParityGrammar, Speculation, WideStart
from tests.harness.scheduler.scheduler_parts import try_fork
from tests.harness.simulation.sim_grammar import NUM_SLOTS, FakeGrammar
from tests.harness.simulation.sim_judge import judge
from tests.harness.simulation.sim_reference import Spec, next_token, reference, stop_ids_of
from tests.harness.simulation.sim_system import STEP_S, Setting, System
from tests.harness.simulation.sim_tenants import NAMES, REFUSED_AGAIN, tenants_with
from tests.harness.simulation.sim_traffic import Traffic, keys_of, next_attempt, stream_open, with_attempt

MAX_STEPS = 20_000
FORBIDDEN = 3
"""Number of the control calls that a tenant makes."""
MAX_IDLE_STEPS = 400
"""In a row, while a request lives: longer than any back-pressure or deadline of the traffic lasts."""


class Simulation:
    """One run: draws traffic, feeds it in, and judges the output."""

    def __init__(self, seed: int, setting: Setting | None = None, **changes: Any) -> None:
        """changes: of the setting that is drawn where none is given."""
        self.rng = random.Random(seed)
        self.setting = setting or dataclasses.replace(Setting.draw(self.rng), **changes)
        self.specs: dict[bytes, Spec] = {}
        self.grammar: FakeGrammar | None = None
        self._grammar_dies = seed % 2 == 0  # in the others nobody opens again what was lost
        self.system = self._make_system()
        self.counts: Counter[str] = Counter()
        traffic = self._traffic = Traffic(self.rng, self.setting, self.specs)
        self._todo: list[list[Spec]] = []
        self._num_launched = self._num_idle = 0
        self._aside = random.Random(seed)
        self._num_paused_steps = 0
        for number in range(self.setting.num_requests):
            sequences = traffic.draw(number)
            self.specs |= keys_of(sequences)
            self._todo.append(sequences)

    def _make_system(self) -> System:
        setting = self.setting
        if not setting.guided:
            return System(setting, self.rng, (self._features,))
        grammar = self.grammar = FakeGrammar(setting.late, seed=setting.num_pages, refusal=0.1)
        client = grammar.client(lambda: self.system.port.now_s())
        system = System(setting, self.rng, (self._features,), grammar=client)
        grammar.pass_time, grammar.now_s = system.pass_time, system.port.now_s
        grammar.refuse = self._send
        return system

    # -- traffic --------------------------------------------------------------------------------------------

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
        num_tokens = len(tokens)
        for _ in range(num_guesses):
            token = next_token(spec, tokens)[0]
            if token < 0:  # nothing may follow
                break
            tokens.append(token)
        return tokens[num_tokens:]

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
            detokenizer = self.system.detokenizer
            in_prompt = [
                spec
                for spec in live
                if detokenizer.prompt_logprobs[spec.handle] and not detokenizer.tokens[spec.handle]
            ]
            self._resubmit(rng.choice(in_prompt or live))
        elif draw < 0.13:
            self._send(ControlRequest(1, 1, rng.choice(["flush_cache", "server_info"])))
        elif draw < 0.14:
            never_retracts = self.system.setting.capacity != "max_utilization"
            mode: PauseMode = "in_place" if never_retracts or rng.random() < 0.5 else "retract"
            self._send(ControlRequest(1, 1, "pause_generation", mode=mode))
            self._send(ControlRequest(1, 2, "continue_generation"))
        elif draw < 0.17:
            self._fork()
        elif draw < 0.19:
            self._abort_stale()

    def _pause(self) -> None:
        """Pause the scheduler for some steps, now and then, if waiting is measured."""
        if self._num_paused_steps:
            self._num_paused_steps -= 1
            if not self._num_paused_steps:
                self._send(ControlRequest(1, 2, "continue_generation"))
        elif any(self.setting.patience) and self._aside.random() < 0.02:
            self._num_paused_steps = self._aside.randrange(1, 30)
            self._send(ControlRequest(1, 1, "pause_generation"))

    def _interfere_as_tenant(self) -> None:
        """Limits change, and tenants ask for what only the owner or another one may."""
        aside, draw = self._aside, self._aside.random()
        if draw < 0.01:
            self.system.change_tenants(tenants_with(aside))
        elif draw < 0.03:
            ops: list[ControlOp] = ["pause_generation", "flush_cache", "server_info"]
            self._send(ControlRequest(1, FORBIDDEN, aside.choice(ops), tenant=aside.choice(NAMES[1:])))
        elif draw < 0.04:
            spec, tenant = aside.choice(list(self.specs.values())), aside.choice(NAMES[1:])
            if spec.message.tenant == tenant:
                spec.ended_from_outside = True
                spec.aborted_before_sent |= not spec.is_sent
            self._send(AbortRequest((spec.handle,), tenant=tenant))
        elif draw < 0.045:
            tenant = aside.choice(NAMES[1:])
            for spec in self.specs.values():
                mine = spec.message.tenant == tenant and spec.handle[:8] == make_handle(3, 0)[:8]
                spec.ended_from_outside |= mine
            self._send(AbortRequest(client=3, tenant=tenant))

    def _hurt_grammar(self, grammar: FakeGrammar) -> None:
        """It dies every now and then, and the next one comes some steps later."""
        if grammar.is_dead:
            if self._aside.random() < 0.2:
                grammar.start()
        elif self._aside.random() < 0.02:
            grammar.die()
            self.counts["grammar deaths"] += 1

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
        have = detokenizer.tokens[old.handle]
        if reference(spec)[0] == unpack_ids(old.output_ids).tolist() + have:
            return  # it would end where it arrives, and its stale copy would begin anew
        num_prompt_logprobs = len(detokenizer.prompt_logprobs[old.handle])
        deadline_s = max(0.0, self._traffic.draw_deadline(self.system.now + 3 * STEP_S))
        spec.message = next_attempt(spec, have, num_prompt_logprobs, deadline_s)
        self.counts["resumed"] += 1
        self.counts["resumed within its prompt"] += num_prompt_logprobs > 0 and not have
        self._send(spec.message)
        is_refused = old.tenant in REFUSED_AGAIN or attempt_of(spec.handle) > MAX_MADE_AGAIN
        if self.setting.max_live >= len(self.specs) and not is_refused:
            self._send(old)  # else it may be refused, and its stale copy begin anew

    def _fork(self) -> None:
        """A second continuation of a running request, as beam search would make it."""
        system, rng = self.system, self.rng
        if len(system.lifecycle.requests) >= self.setting.max_live:
            return
        candidates = [
            req
            for req in system.rows.running_requests()
            if req.num_output
            and not req.num_in_flight
            and not req.features
            and req.adapter is None
            and req.predicted_len < req.max_len
        ]
        if not candidates:
            return
        parent = rng.choice(candidates)
        number = len(self.specs)
        handle = make_handle(1, 1000 + number)
        sampling = msgspec.structs.replace(
            parent.sampling,
            seed=(parent.sampling.seed or 0) + 7,
            prompt_logprobs=None,
            return_context_logits=False,
        )
        tokens = parent.tokens.tolist()
        prompt = tokens[: parent.num_prompt]
        message = TokenizedRequest(
            handle, pack_ids(prompt), sampling, stream_open(handle, len(prompt)), 0, parent.namespace
        )
        spec = Spec(message, frozenset(), parent.max_len, tokens, window=self.setting.window, is_sent=True)
        self.specs[sequence_key(handle)] = spec
        stops = StopIds(stop_ids_of(sampling))
        child = Request(
            handle, sequence_key(handle), suspect_of(handle), 10_000 + number, system.rows, sampling, stops,
            len(prompt), parent.max_len, parent.min_len, pack_ids(tokens), parent.namespace,
        )  # fmt: skip
        lifecycle = system.lifecycle
        # No policy was asked whether it fits, so where none may be taken back it waits.
        if self.setting.capacity == "max_utilization" and try_fork(lifecycle.kv, parent, child):
            lifecycle.num_accepted += 1
            lifecycle.output.open(handle, message.stream_open)
            lifecycle.requests[child.key] = child
            lifecycle.accounts.add(child)
            child.account.num_running += 1
            child.account.num_rows += 1
            child.status = Status.RUNNING
            system.watch.note_fork(child)
            self.counts["forked"] += 1
        else:
            lifecycle.add(child, message.stream_open)
            lifecycle.tick()  # as in each turn in which somebody comes

    def _send_request(self, sequences: list[Spec]) -> None:
        deadline_s = self._traffic.draw_deadline(self.system.now)
        for spec in sequences:
            spec.is_sent = True
            spec.message = msgspec.structs.replace(spec.message, deadline_s=deadline_s)
            self._send(spec.message)

    # -- the run --------------------------------------------------------------------------------------------

    def run(self) -> Counter[str]:
        system = self.system
        try:
            self._run_to_the_end()
            system.step()
        finally:
            system.executor.close()
        self._judge()
        self.counts["runs"] += 1
        self.counts["sequences"] += len(self.specs)
        self.counts["retracted"] += system.lifecycle.num_retracted
        self.counts["replaced"] += system.lifecycle.num_replaced
        drafts = [closed.drafts for closed in system.detokenizer.closed.values() if closed.drafts]
        self.counts["guesses right"] += sum(each.num_accepted for each in drafts)
        self.counts["guesses wrong"] += sum(each.num_drafted - each.num_accepted for each in drafts)
        self.counts["predicted right"] += sum(each.num_accepted_prediction for each in drafts)
        self.counts["adapters loaded"] += system.slots.counts.num_loads
        self.counts["adapters evicted"] += system.slots.counts.num_evicted
        if self.grammar is not None:
            self.grammar.catch_up()
            assert self.grammar.num_open == 0, "a matcher of a sequence that has ended"
            assert self.grammar.slots.num_free == NUM_SLOTS, "a slot of a sequence that has ended"
            self.counts["guided"] += sum(spec.message.guide is not None for spec in self.specs.values())
            self.counts["late masks"] += self.grammar.num_late
            self.counts["masks behind guesses"] += self.grammar.num_behind_guesses
        self.counts["processed"] += sum(bool(spec.message.processors) for spec in self.specs.values())
        self.counts["tapped"] += sum(
            bool(spec.message.sampling.additional_outputs) for spec in self.specs.values()
        )
        self.counts["processors that raised"] += sum(
            closed.error is not None and closed.error.code == "logits_processor_failed"
            for closed in system.detokenizer.closed.values()
        )
        self.counts["evicted pages"] += system.kv.counts.num_evicted
        self.counts["given back"] += len(system.gave_back)
        self.counts["steps that somebody starved"] += system.waiting_watch.num_starved
        self.counts["steps beside others"] += system.pipe_watch.num_shared
        self.counts["steps that somebody was held back"] += system.tenant_watch.num_held
        for limit, num_refused in system.tenant_watch.num_refused.items():
            self.counts[f"refused for {limit}"] += num_refused
        self.counts["evictions by share"] += system.shares_watch.num_over
        self.counts["evictions within shares"] += system.shares_watch.num_within
        return self.counts

    def _run_to_the_end(self) -> None:
        system = self.system
        while self._todo or not system.scheduler.is_idle or any(o.messages for o in system.outboxes):
            while self._todo and self.rng.random() < 0.5:
                self._send_request(self._todo.pop(0))
            self._interfere()
            self._pause()
            if self.grammar is not None and self._grammar_dies:
                self._hurt_grammar(self.grammar)
            if self.setting.tenants:
                self._interfere_as_tenant()
            system.step()
            self.counts["steps"] += 1
            assert self.counts["steps"] < MAX_STEPS, "no progress"
            self._check_liveness()

    def _check_liveness(self) -> None:
        """Check that of the steps with something to do one is launched every now and then."""
        num_launched, lives = self.system.scheduler.num_steps, bool(self.system.lifecycle.requests)
        if not lives or num_launched != self._num_launched:
            self._num_launched = num_launched
            self._num_idle = 0
        self._num_idle += 1
        assert self._num_idle < MAX_IDLE_STEPS, "no progress: nothing is launched"

    def _judge(self) -> None:
        self.system.check_empty()
        detokenizer = self.system.detokenizer
        assert set(detokenizer.closed) <= detokenizer.opened
        for spec in self.specs.values():
            assert spec.handle in detokenizer.closed, "no terminal"
            self.counts[judge(spec, detokenizer)] += 1
        self.system.waiting_watch.judge(detokenizer.closed.values())
        self.system.tenant_watch.judge(detokenizer.tokens)
        for reply in detokenizer.replies:
            assert reply.ok is (reply.number != FORBIDDEN), "an answer for who may not ask"


def setting_of(seed: int, **changes: Any) -> Setting:
    """The setting that a seed draws, with some of it changed."""
    return dataclasses.replace(Setting.draw(random.Random(seed)), **changes)


def run(seed: int, setting: Setting | None = None, **changes: Any) -> Counter[str]:
    """One run, as Simulation's. Whatever goes wrong names the seed that shows it."""
    simulation = Simulation(seed, setting, **changes)
    try:
        return simulation.run()
    except BaseException as error:
        error.add_note(
            f"seed {seed}: python -m tests.harness.simulation.simulation --runs 1 --seed {seed}; "
            f"{simulation.setting}"
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
