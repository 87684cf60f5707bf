"""Generation by plans with guesses, as of a scheduler with a proposer, and without them, for comparison."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model_worker.runner.model_runner import ModelRunner
from model_worker.worker import ModelWorker
from runtime.wire.format import pack_ids, unpack_floats, unpack_ids
from runtime.wire.plan import BatchPlan, StepResult
from tests.harness.models.plans import FEEDBACK, PlanWriter

Proposer = Callable[[int, int, random.Random], Sequence[int]]
"""Guesses for a row (first argument) that has so many output tokens (second)."""

Run = Callable[[BatchPlan], tuple[StepResult, Sequence[Any]]]
"""Computes a step: its result, and the frames behind it."""

FEW = (3, 11, 17, 25, 40, 57)
"""Ids that are allowed where what a row looks back at is to be met often."""
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 1.0},
    "top_k": {"temperature": 1.3, "top_k": 7},
    "top_p": {"temperature": 1.1, "top_p": 0.8},
    "min_p": {"temperature": 1.2, "min_p": 0.05},
    "top_n_sigma": {"temperature": 1.2, "top_n_sigma": 1.5},
    "penalties": {"repetition_penalty": 1.4, "presence_penalty": 1.2, "frequency_penalty": 0.9},
    "greedy_penalties": {"temperature": 0.0, "repetition_penalty": 2.5, "frequency_penalty": 1.5},
    "ngrams": {"temperature": 0.5, "no_repeat_ngram": 2, "allowed_ids": pack_ids(FEW)},
    "greedy_ngrams": {"temperature": 0.0, "no_repeat_ngram": 1},
    "bias": {"bias_ids": pack_ids([3, 40]), "bias_values": np.array([4, -2], np.float32).tobytes()},
    "allowed": {"allowed_ids": pack_ids([2, 3, 5, 7, 11, 13, 17, 19, 23])},
    "bad_words": {
        "temperature": 0.6,
        "allowed_ids": pack_ids(FEW),
        "bad_words": tuple(pack_ids([a, b]) for a in FEW for b in FEW if (a + b) % 3),
    },
    "min_tokens": {"min_len": 17, "stop_ids": pack_ids(range(1, 60, 2))},
    "top_p_decay": {
        "top_p": 0.95,
        "top_p_decay": 0.6,
        "top_p_min": 0.1,
        "top_p_reset_ids": pack_ids(range(0, 90, 5)),
    },
    "all": {
        "temperature": 1.1,
        "top_k": 30,
        "top_p": 0.95,
        "top_p_decay": 0.8,
        "repetition_penalty": 1.2,
        "no_repeat_ngram": 3,
        "bias_ids": pack_ids([3]),
        "bias_values": np.array([2], np.float32).tobytes(),
        "min_len": 15,
        "stop_ids": pack_ids([4, 9, 40]),
    },
}


@dataclass
class Output:
    """A row's, each list by token."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[tuple[list[int], NDArray[np.float32]]] = field(default_factory=list)
    logits: list[NDArray[np.float32]] = field(default_factory=list)
    num_steps: int = 0


def no_guesses(row: int, num_output: int, draw: random.Random) -> Sequence[int]:
    return ()


def from_outputs(
    outputs: Sequence[Output], num_guesses: int, *, right: float, vocab: int = 97, always: bool = True
) -> Proposer:
    """Guess outputs that are known, each token right with that probability; if not `always`, up to five."""

    def propose(row: int, num_output: int, draw: random.Random) -> Sequence[int]:
        true = outputs[row].tokens[num_output : num_output + (num_guesses if always else draw.randint(0, 5))]
        return [t if draw.random() < right else (t + draw.randint(1, vocab - 1)) % vocab for t in true]

    return propose


class Generation:
    """Rows 0, 1 ... with a prompt each, computed step by step; results are waited for."""

    def __init__(
        self,
        run: Run,
        page_size: int,
        prompts: Sequence[Sequence[int]],
        samplings: Sequence[dict[str, Any]],
        pages_of: Callable[[int], Sequence[int]],
    ) -> None:
        self._run = run
        self._plans = PlanWriter(page_size)
        self._prompts = prompts
        self._samplings = samplings
        self.outputs = [Output() for _ in prompts]
        for row, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True)):
            own = {"seed": 100 + row, "history_ids": pack_ids(prompt), **sampling}
            self._plans.open_row(row, prompt, list(pages_of(row)), **own)

    def generate(
        self, num_tokens: int, propose: Proposer = no_guesses, *, chunk: int = 64, seed: int = 0
    ) -> list[Output]:
        """num_tokens for each row; drawn rows wait now and then, so that batches differ."""
        draw = random.Random(seed)
        while any(len(out.tokens) < num_tokens for out in self.outputs):
            decodes, chunks, drafts = [], [], {}
            for row, (prompt, out) in enumerate(zip(self._prompts, self.outputs, strict=True)):
                if len(out.tokens) == num_tokens or draw.random() < 0.2:
                    continue
                done, left = self._plans.kv_len[row], num_tokens - len(out.tokens)
                known = prompt[done : done + chunk]
                if done + len(known) < len(prompt):
                    chunks.append((row, known, False))
                    continue
                known = known or [draw.choice([FEEDBACK, out.tokens[-1]])]
                guesses = list(propose(row, len(out.tokens), draw))[: left - 1]
                if done >= len(prompt) and not guesses:
                    decodes.append((row, known[0]))
                else:
                    chunks.append((row, [*known, *guesses], True))
                    drafts[row] = len(guesses)
            if decodes or chunks:
                self._take(self._plans.plan(decodes, chunks, drafts=drafts), drafts)
        return self.outputs

    def _take(self, plan: BatchPlan, drafts: dict[int, int]) -> None:
        result, frames = self._run(plan)
        counts = [1] * plan.num_decodes + unpack_ids(result.counts).tolist()
        rows = unpack_ids(plan.rows).tolist()
        tokens = iter(unpack_ids(result.tokens).tolist())
        logprobs = iter(unpack_floats(result.logprobs).tolist())
        top_ids = iter(unpack_ids(result.top_ids).reshape(-1, max(result.num_top, 1)))
        top = iter(unpack_floats(result.top_logprobs).reshape(-1, max(result.num_top, 1)))
        for row, count in zip(rows, counts, strict=True):
            out, sampling = self.outputs[row], self._samplings[row]
            out.num_steps += count > 0
            for _ in range(count):
                out.tokens.append(next(tokens))
                if (k := sampling.get("num_logprobs", -1)) >= 0:
                    out.logprobs.append(next(logprobs))
                    out.top.append((next(top_ids)[:k].tolist(), next(top)[:k]))
            if row in drafts:
                self._plans.accept(row, count)
        for left in (tokens, logprobs, top_ids, top):
            assert next(left, None) is None, "more was sent than the counts say"
        for tensor, frame in zip(result.tensors, frames, strict=True):
            row = rows[tensor.index]
            out = self.outputs[row]
            assert tensor.start == len(self._prompts[row]) + len(out.logits)
            out.logits += list(np.frombuffer(frame, np.float32).reshape(tensor.shape))


def launched_on(
    worker: ModelWorker, while_launching: Callable[[], AbstractContextManager[Any]] = nullcontext
) -> Run:
    """Steps of a worker."""

    def run(plan: BatchPlan) -> tuple[StepResult, Sequence[Any]]:
        with while_launching():
            step = worker.launch(plan)
        return step.result(), step.frames

    return run


def runs_on(runner: ModelRunner) -> Run:
    """Steps of a runner without a worker around it."""
    return lambda plan: runner.sample(runner.forward(plan), {}).to_result(plan)


def assert_same(got: Sequence[Output], expected: Sequence[Output], *, atol: float = 1e-5) -> None:
    for row, (own, other) in enumerate(zip(got, expected, strict=True)):
        assert own.tokens == other.tokens, row
        np.testing.assert_allclose(own.logprobs, other.logprobs, rtol=0, atol=atol)
        for (ids, values), (other_ids, other_values) in zip(own.top, other.top, strict=True):
            assert ids == other_ids
            np.testing.assert_allclose(values, other_values, rtol=0, atol=atol)
        assert len(own.logits) == len(other.logits)
        for each, other_logits in zip(own.logits, other.logits, strict=True):
            np.testing.assert_allclose(each, other_logits, rtol=0, atol=10 * atol)
