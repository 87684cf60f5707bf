"""GenerationExecutor of each back end over a fake ring."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeAlias

import pytest

from carousel import GenerationExecutor, RayExecutor
from carousel.trtllm import runtime_link
from runtime.settings.config import RuntimeConfig
from runtime.wire.format import unpack_ids
from runtime.wire.messages import GenerateRequest, SequenceOutput
from tests.harness.ring.fake_ring import Answer, FakeRing, finish, output, say_nothing
from tests.harness.ring.stand_in_runtime import StandInRuntime

BACK_ENDS = ("attached", "own", pytest.param("ray", marks=pytest.mark.full))
"""A runtime that is there, one of its own, and one of its own on machines that Ray finds."""
Make: TypeAlias = Callable[..., tuple[GenerationExecutor, FakeRing]]
"""Function (answer, config) -> an executor and the ring behind it."""


@contextmanager
def executors(back_end: str, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    with ExitStack() as stack:

        def make(
            answer: Answer = say_nothing, config: RuntimeConfig | None = None
        ) -> tuple[GenerationExecutor, FakeRing]:
            ring = FakeRing(run_dir, answer, config)
            stack.callback(ring.close)
            monkeypatch.setattr(runtime_link, "OwnRuntime", lambda *_: StandInRuntime(ring))
            if back_end == "ray":
                executor: GenerationExecutor = RayExecutor.create(nnodes=2)
            elif back_end == "own":
                executor = GenerationExecutor.create()
            else:
                executor = GenerationExecutor.create(run_dir=run_dir)
            stack.callback(executor.shutdown)
            return executor, ring

        yield make


def spell_each(*texts: str) -> Answer:
    """Sequence i spells texts[i]: in a stream one character of each by turns, else text after text."""

    def answer(request: GenerateRequest) -> list[SequenceOutput]:
        if not request.stream:
            return [
                output(request, text, index=index, finish=finish("stop", len(text)))
                for index, text in enumerate(texts)
            ]
        spelled = []
        for at in range(max(map(len, texts))):
            for index, text in enumerate(texts):
                end = finish("stop", len(text)) if at + 1 == len(text) else None
                spelled += [output(request, each, index=index, finish=end) for each in text[at : at + 1]]
        return spelled

    return answer


def echo(request: GenerateRequest) -> list[SequenceOutput]:
    """Answers with its prompt, as characters."""
    assert request.input_ids is not None
    text = "".join(map(chr, unpack_ids(request.input_ids).tolist()))
    return [output(request, text, finish=finish())]
