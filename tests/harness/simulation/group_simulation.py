"""Random beam searches through the real scheduler, among other requests, and a reference search that knows
only prompts.

    python -m tests.harness.simulation.group_simulation --runs 300 [--seed 0]

Everything is drawn from one seed. Groups fork at nearly every step, are aborted, are retracted for lack of
pages or because generation is paused, and are replaced by higher attempts. After every step pages and rows
are conserved. At the end every output equals that of the reference, and every sequence has one terminal.
"""

from __future__ import annotations

import argparse
import logging
import random
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from runtime.ring.tenants import OWNER, Tenant, TenantLimits
from runtime.wire.format import FloatArray, IntArray, pack_ids
from runtime.wire.guide import Guide
from runtime.wire.handle import attempt_of, make_handle, next_sibling, with_attempt
from runtime.wire.messages import AbortRequest, ControlRequest, TokenizedRequest
from runtime.wire.plan import AdapterRef, ProcessorCall
from runtime.wire.sampling_params import SamplingParams
from scheduler_proc.features.beam_search.beam_search import BeamSearch
from scheduler_proc.features.beam_search.hypotheses import (
    EarlyStopping,
    Hypotheses,
    Hypothesis,
    SearchSettings,
)
from scheduler_proc.features.beam_search.score_rules import NO_RULES, BeamTokens, NextTokens, ScoreRules
from scheduler_proc.features.speculation.speculation import SpeculationSettings
from scheduler_proc.waiting.waiting_room import FOR_EVER
from tests.harness.simulation.fake_sampling import (
    BANS,
    RAISES,
    RAISES_AT,
    VOCAB_SIZE,
    adapter_salt,
    banned_ids,
    choose,
    fake_logprobs,
    hash_of,
    seen,
)
from tests.harness.simulation.sim_branches import FakeMatcher, make_branches, num_matchers, number_from_now
from tests.harness.simulation.sim_grammar import FORKING, GUIDES, NUM_SLOTS, REFUSED, FakeGrammar, place_in
from tests.harness.simulation.sim_reference import EOS_IDS
from tests.harness.simulation.sim_system import Setting, System
from tests.harness.simulation.sim_traffic import SECRET, stream_open
from tokenizer_proc.sequences import namespace

CLIENT = 5
MAX_STEPS_EACH = 350
NUM_TOP = 40
MAX_WIDTH = 4
GROUP_POOLS = [(1, 200), (4, 40), (4, 80), (8, 30), (16, 20)]
TENANTS = (Tenant("running", "user", TenantLimits(max_running=MAX_WIDTH)), Tenant("other"))
ADAPTERS = [AdapterRef(name, number, "1", f"/{name}") for number, name in enumerate("abc", 1)]


@dataclass(slots=True)
class Asked:
    """One request of the run."""

    handle: bytes
    prompt: list[int]
    sampling: SamplingParams
    guide: Guide | None = None
    processors: tuple[str, ...] = ()
    tenant: str = OWNER
    adapter: AdapterRef | None = None
    ended_from_outside: bool = False

    @property
    def stop_ids(self) -> frozenset[int]:
        return frozenset() if self.sampling.ignore_eos else EOS_IDS

    @property
    def is_refused(self) -> bool:
        return self.guide is not None and self.guide.text == REFUSED

    def in_cache(self, tokens: list[int]) -> npt.NDArray[np.int64]:
        """Return what the fake model's KV holds of them."""
        return np.array(tokens, np.int64) + adapter_salt(self.adapter)

    def message(self) -> TokenizedRequest:
        handles = [next_sibling(self.handle, number) for number in range(self.sampling.n)]
        opens = [stream_open(handle, len(self.prompt)) for handle in handles]
        return TokenizedRequest(
            self.handle,
            pack_ids(self.prompt),
            self.sampling,
            opens[0],
            more_opens=tuple(opens[1:]),
            guide=self.guide,
            processors=tuple(map(ProcessorCall, self.processors)),
            tenant=self.tenant,
            adapter=self.adapter,
            namespace=b"" if self.adapter is None else namespace("", "", SECRET, self.adapter),
        )


class ProcessorRaised(Exception):
    """The search comes to a token for which a processor raises."""


def consistent_logits(h: int) -> FloatArray:
    """[VOCAB_SIZE] float32: logits of which the fake logprobs are the log-softmax, but for a constant."""
    _, ids, values = fake_logprobs(h, choose(h, None, ()), VOCAB_SIZE)
    logits = np.empty(VOCAB_SIZE, np.float32)
    logits[ids] = np.array(values, np.float32) + np.float32(h % 8)
    return logits


def next_tokens(
    search: SearchSettings, rules: ScoreRules | None, asked: Asked, tokens: IntArray, h: int
) -> NextTokens:
    """Return what a search may go on with, by looking at the whole vocabulary where it has rules or a
    guide.
    """
    rules = rules or (NO_RULES if asked.guide is not None or asked.processors else None)
    _, ids, values = fake_logprobs(h, choose(h, None, ()), VOCAB_SIZE if rules else search.num_wanted)
    top = np.array(ids, np.int32), np.array(values, np.float32)
    if rules is None:
        return NextTokens(*top, top[1])
    may_come = None
    if asked.guide is not None:
        place = place_in(asked.guide.text, tokens[len(asked.prompt) :].tolist())
        may_come = np.zeros(VOCAB_SIZE, np.bool_)
        may_come[[*place.allowed, *(asked.stop_ids if place.is_complete else ())]] = True
    processed = None
    if asked.processors:
        processed = np.empty(VOCAB_SIZE, np.float32)
        processed[top[0]] = top[1]
        processed[sorted(banned_ids(tokens.tolist()))] = -np.inf
    return rules.best(
        tokens, len(asked.prompt), consistent_logits(h), top, search.num_wanted, may_come, processed
    )


def expected(asked: Asked, setting: Setting) -> list[Hypothesis]:
    """Return what a search finds that has every context at hand."""
    sampling, prompt = asked.sampling, asked.prompt
    assert sampling.max_tokens is not None
    search = SearchSettings(
        sampling.num_beams,
        asked.stop_ids,
        min(sampling.max_tokens, setting.max_len - len(prompt)),
        1.0 if sampling.length_penalty is None else sampling.length_penalty,
        EarlyStopping(sampling.early_stopping or 0),
        diversity=sampling.beam_search_diversity_rate,
        widths=sampling.beam_width_array,
        stop_words=sampling.stop_words_ids,
    )
    hypotheses, rules = Hypotheses(search), ScoreRules.of(sampling)
    contexts = [prompt]
    while contexts:
        if RAISES in asked.processors and len(contexts[0]) - len(prompt) >= RAISES_AT:
            raise ProcessorRaised
        each = []
        for context in contexts:
            tokens = np.array(context, np.int32)
            h = hash_of(seen(asked.in_cache(context), setting.window), sampling.seed or 0, ())
            each.append(next_tokens(search, rules, asked, tokens, h))
        live = range(hypotheses.num_beams)
        hypotheses.end([beam for beam in live if is_over(asked, contexts[beam])])
        beams = hypotheses.advance(BeamTokens.joined(each[: hypotheses.num_beams]), len(each))
        contexts = [[*contexts[parent], token] for parent, token in beams]
    return hypotheses.ended


def is_over(asked: Asked, context: list[int]) -> bool:
    """Return True if nothing may follow an output, not even a stop id, as it is complete."""
    if asked.guide is None or asked.stop_ids:
        return False
    place = place_in(asked.guide.text, context[len(asked.prompt) :])
    return place.is_complete and not place.allowed


def greedy(asked: Asked, setting: Setting) -> list[int]:
    tokens = list(asked.prompt)
    assert asked.sampling.max_tokens is not None
    end = min(len(tokens) + asked.sampling.max_tokens, setting.max_len)
    while len(tokens) < end:
        h = hash_of(seen(asked.in_cache(tokens), setting.window), asked.sampling.seed or 0, ())
        tokens.append(choose(h, None, ()))
        if tokens[-1] in EOS_IDS:
            break
    return tokens[len(asked.prompt) :]


class GroupSimulation:
    def __init__(self, seed: int, num_requests: int = 14, **changes: Any) -> None:
        """changes: of the setting that the seed draws."""
        rng = self.rng = random.Random(seed)
        self._guides = random.Random(f"guides {seed}")
        self._processors = random.Random(f"processors {seed}")
        self._tenants = random.Random(f"tenants {seed}")
        self._adapters = random.Random(f"adapters {seed}")
        drawn = Setting.draw(rng)
        page_size, num_pages = rng.choice(GROUP_POOLS)
        drains_widths = changes.pop("drains_widths", rng.random() < 0.3)
        in_order = {"policy": "fcfs", "request_scheduler": "", "micro_batch_scheduler": ""}
        self.setting = replace(
            drawn,
            **{
                "page_size": page_size,
                "num_pages": num_pages,
                "max_rows": rng.choice([4, 6, 8]),
                "max_len": min(64, page_size * num_pages),
                "max_live": 1000,
                "max_iterations": 1,
                "patience": FOR_EVER,
                "tenants": () if drains_widths else self._tenants.choice([(), TENANTS]),
                "speculation": SpeculationSettings(),
                "has_adapters": not drains_widths and self._adapters.random() < 0.3,
                "guided": self._guides.choice([0.0, 0.5, 0.5]),
                "late": self._guides.choice([0.0, 0.3, 0.3]),
                "processed": self._processors.choice([0.0, 0.5, 0.5]),
                "expiring": 0.0,
                "num_stages": 1,
                "max_requests": rng.choice([0, 0, 3]),
                "drains_widths": drains_widths,
                **(in_order if drains_widths else {}),
                **changes,
            },
        )
        self.grammar = FakeGrammar(self.setting.late, seed=seed, refusal=0.1)
        self.grammar.branches, self.grammar.start_of = make_branches(), FakeMatcher
        client = self.grammar.client(lambda: self.system.port.now_s())
        self.system = System(self.setting, rng, grammar=client)
        self.grammar.pass_time, self.grammar.now_s = self.system.pass_time, self.system.port.now_s
        self.grammar.refuse = self.system.inbox.send
        self.system.executor.num_top = NUM_TOP
        self.system.executor.logits_of = consistent_logits
        self._first_matcher = number_from_now()
        self.counts: Counter[str] = Counter()
        self.asked: list[Asked] = []
        for number in range(num_requests):
            self.asked.append(self._draw(number))
        self._todo = list(self.asked)

    def _prompt(self) -> list[int]:
        """Some begin the same, and some with what an earlier request is to find, the KV of which the tree may
        have then.
        """
        rng = self.rng
        earlier = [each for each in self.asked if each.sampling.num_beams > 1]
        if earlier and rng.random() < 0.4:
            each = rng.choice(earlier)
            try:
                won = expected(each, self.setting)[:1]  # nothing where rules and a guide let nothing come
            except ProcessorRaised:
                won = []
            prompt = each.prompt + [link.token for best in won for link in best.path.from_the_first()]
            if len(prompt) < self.setting.max_len - 20:
                return [*prompt, rng.randrange(VOCAB_SIZE)]
        prompt = [(7 * n) % VOCAB_SIZE for n in range(rng.randrange(1, 30))]
        prompt[-1] = rng.randrange(VOCAB_SIZE)
        return prompt

    def _draw(self, number: int) -> Asked:
        rng, prompt = self.rng, self._prompt()
        sampling = SamplingParams(max_tokens=rng.randrange(1, 20), temperature=0.0, seed=7)
        if rng.random() < 0.6:
            width = rng.randrange(2, min(MAX_WIDTH, self.setting.max_rows) + 1)
            sampling = msgspec.structs.replace(
                sampling,
                use_beam_search=True,
                beam_width=width,
                n=rng.randrange(1, width + 1),
                length_penalty=rng.choice([None, 0.0, 2.0]),
                early_stopping=rng.choice([None, 0, 1, 2]),
            )
            if rng.random() < 0.5:
                sampling = self._with_rules(sampling)
            if rng.random() < 0.3:
                widths = [*[rng.randrange(1, width + 1) for _ in range(rng.randrange(1, 5))], width]
                rng.shuffle(widths)
                sampling = msgspec.structs.replace(sampling, beam_width_array=tuple(widths))
                self.counts["searches of several widths"] += 1
            if rng.random() < 0.3:
                sampling = msgspec.structs.replace(
                    sampling, beam_search_diversity_rate=rng.choice([-1.5, 0.5])
                )
        guide = None
        if sampling.num_beams > 1 and self._guides.random() < self.setting.guided:
            guide = Guide("regex", self._guides.choice([*GUIDES, *[FORKING] * 3, REFUSED]))
            self.counts["guided searches"] += guide.text != REFUSED
            if self._processors.random() < 0.4:
                sampling = msgspec.structs.replace(sampling, ignore_eos=True)
                self.counts["guided searches without end tokens"] += 1
        tenant = self._tenants.choice([OWNER, *(each.name for each in self.setting.tenants)])
        asked = Asked(make_handle(CLIENT, number), prompt, sampling, guide, tenant=tenant)
        if self.setting.has_adapters:
            asked.adapter = self._adapters.choice([None, *ADAPTERS])
            self.counts["searches with adapters"] += sampling.num_beams > 1 and asked.adapter is not None
        if (
            sampling.num_beams > 1
            and self.setting.batching != "static"
            and self._processors.random() < self.setting.processed
        ):
            asked.processors = self._processors.choice([(BANS,), (BANS,), (BANS, RAISES)])
            self.counts["searches with processors"] += 1
        return asked

    def _with_rules(self, sampling: SamplingParams) -> SamplingParams:
        """Some of them leave fewer tokens than the search is wide."""
        rng = self.rng
        changes: list[dict[str, Any]] = [
            {"repetition_penalty": rng.choice([0.5, 1.5])},
            {"presence_penalty": rng.choice([-1.5, 1.5]), "frequency_penalty": rng.choice([-0.5, 0.5])},
            {"stop_words_ids": tuple((rng.randrange(VOCAB_SIZE),) for _ in range(3))},
            {"no_repeat_ngram_size": rng.choice([1, 2])},
            {"logit_bias": ((rng.randrange(VOCAB_SIZE), rng.choice([-2.5, 2.5])),)},
            {"allowed_token_ids": tuple(rng.sample(range(VOCAB_SIZE), rng.choice([2, 20])))},
        ]
        self.counts["searches with rules"] += 1
        return msgspec.structs.replace(sampling, **rng.choice(changes))

    def _interfere(self) -> None:
        rng, system = self.rng, self.system
        if self.grammar.is_dead:
            if self._guides.random() < 0.2:
                self.grammar.start()
        elif self.setting.guided and self._guides.random() < 0.02:
            self.grammar.die()
            self.counts["grammar deaths"] += 1
        if rng.random() >= self.setting.turbulence:
            return
        draw = rng.random()
        sent = [each for each in self.asked if each.handle in system.detokenizer.opened]
        live = [each for each in sent if each.handle not in system.detokenizer.closed]
        if draw < 0.03 and live:
            each = rng.choice(live)
            each.ended_from_outside = True
            system.inbox.send(AbortRequest((each.handle,)))
            self.counts["aborted"] += 1
        elif draw < 0.06 and live:
            each = rng.choice(live)
            if each.sampling.num_beams > 1 and attempt_of(each.handle) == 0:
                each.handle = with_attempt(each.handle, 1)
                system.inbox.send(each.message())
                self.counts["replaced"] += 1
        elif draw < 0.12 and self.setting.capacity == "max_utilization":
            system.inbox.send(ControlRequest(1, 1, "pause_generation", mode="retract"))
            system.inbox.send(ControlRequest(1, 2, "continue_generation"))
        elif draw < 0.15:
            system.inbox.send(ControlRequest(1, 1, "flush_cache"))

    def run(self) -> Counter[str]:
        system = self.system
        try:
            for _ in range(MAX_STEPS_EACH * len(self.asked)):
                if (
                    not self._todo
                    and system.scheduler.is_idle
                    and not any(o.messages for o in system.outboxes)
                ):
                    break
                while self._todo and self.rng.random() < 0.5:
                    assert system.inbox.send(self._todo.pop(0).message())
                self._interfere()
                system.step()
                self._check_rows()
            system.step()
        finally:
            system.executor.close()
        self._judge()
        self.counts["retracted"] += system.lifecycle.num_retracted
        return self.counts

    def _check_order(self) -> None:
        """Where widths are drained, those that run have one, and nobody has overtaken anybody."""
        lifecycle = self.system.lifecycle
        running = self.system.rows.running_requests()
        assert len({req.width for req in running}) <= 1, "two widths run"
        first = min((req.seq for req in lifecycle.waiting if not req.num_retractions), default=None)
        assert first is None or all(req.seq < first for req in running), "a request was overtaken"
        gate = lifecycle.room.width_gate
        assert gate is not None
        self.counts["width changes"] = gate.num_changes

    def _check_rows(self) -> None:
        """A group holds all of its rows or none; no hypothesis is in the tree beside one that has won."""
        if self.setting.drains_widths:
            self._check_order()
        rows = self.system.rows
        most = self.grammar.num_open * MAX_WIDTH
        assert num_matchers(self._first_matcher) <= most, "matchers of hypotheses that are no more"
        self.counts["held back"] += self.system.lifecycle.room.num_held
        for req in rows.running_requests():
            if req.group is None:
                continue
            assert len(req.group.members) == req.group.width, "a group with another number of rows"
            assert all(rows.holder[each.row] is each for each in req.group.members)
            assert self.system.kv.num_shared.item(req.row) <= req.num_prompt // self.setting.page_size
            if len(req.group.beams) > 1:
                outputs = {each.tokens.tobytes() for each in req.group.beams}
                (search,) = [each for each in req.features if isinstance(each, BeamSearch)]
                assert len(outputs) == search.num_beams, "two beams are the same"
                self.counts["steps of groups"] += 1

    def _judge(self) -> None:
        system = self.system
        assert system.scheduler.is_idle, "no end"
        assert system.rows.num_free == system.rows.max_rows
        assert system.rows.num_running == 0
        assert system.kv.num_available == system.kv.pages.num_pages, "pages are lost"
        assert not system.kv.pages.num_more_owners.any(), "a page has owners that are no more"
        self.grammar.catch_up()
        assert self.grammar.num_open == 0, "a matcher of a search that has ended"
        assert self.grammar.slots.num_free == NUM_SLOTS, "a slot of a search that has ended"
        assert num_matchers(self._first_matcher) == 0, "matchers of hypotheses that are no more"
        self.counts["late masks"] += self.grammar.num_late
        for each in self.asked:
            self._judge_one(each)

    def _judge_one(self, asked: Asked) -> None:
        detokenizer, sampling = self.system.detokenizer, asked.sampling
        handles = [next_sibling(asked.handle, number) for number in range(sampling.n)]
        closed = [detokenizer.closed[handle] for handle in handles]
        reasons = {each.reason for each in closed}
        if asked.ended_from_outside and reasons == {"abort"}:
            assert sampling.num_beams == 1 or not any(detokenizer.tokens[handle] for handle in handles)
            return
        if closed[0].reason == "error":
            assert closed[0].error is not None
            assert reasons == {"error"}
            if closed[0].error.code == "invalid_guide":
                assert asked.is_refused
                self.counts["refused"] += 1
                return
            if closed[0].error.code == "logits_processor_failed":
                with pytest.raises(ProcessorRaised):
                    expected(asked, self.setting)
                self.counts["processors that raised"] += 1
                return
            assert closed[0].error.code == "request_too_large", closed[0].error
            self.counts["too large"] += 1
            return
        assert not asked.is_refused, "a guide that was refused"
        got = [detokenizer.tokens[handle] for handle in handles]
        if sampling.num_beams == 1:
            assert got == [greedy(asked, self.setting)], "a sequence beside groups is another one"
            return
        won = expected(asked, self.setting)[: sampling.n]
        wanted = [[link.token for link in each.path.from_the_first()] for each in won]
        # Rules may leave fewer hypotheses than were asked for.
        wanted += [[]] * (sampling.n - len(won))
        assert got == wanted, "another hypothesis has won"
        for each, hypothesis in zip(closed, won, strict=False):
            assert each.beam is not None
            assert each.beam.score == hypothesis.score
            assert each.reason == ("stop" if hypothesis.by_stop else "length")
        self.counts["searches"] += 1


def run(seed: int, **changes: Any) -> Counter[str]:
    """One run. Whatever goes wrong names the seed that shows it."""
    simulation = GroupSimulation(seed, **changes)
    try:
        return simulation.run()
    except BaseException as error:
        error.add_note(f"seed {seed}: {simulation.setting}")
        raise


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    logging.disable()
    counts: Counter[str] = Counter()
    for seed in range(args.seed, args.seed + args.runs):
        counts += run(seed)
    print(", ".join(f"{n} {what}" for what, n in sorted(counts.items())))


if __name__ == "__main__":
    main()
