"""Model worker that gives texts of a script, which the prompt names. So clients that need tool calls or
reasoning get them over a whole launch, and through restarts: the token at a position depends only on the
prompt.

A prompt names its script with `script: NAME` anywhere in it. Its answer is the one whose number is that of
the conversation's assistant turns. `python -m tests.harness.ring.scripted_worker ARGUMENT ...` is launch.py
with this worker instead of its own. SCRIPT_FILE names a JSON file with the answers of each script.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np

from runtime.ring.process import ProcessContext
from runtime.text.tokenizer import Tokenizer, load
from runtime.wire.format import pack_ids, unpack_ids
from runtime.wire.plan import BatchPlan, SampleMasks, StepResult
from tests.harness.ring.sleeping_worker import launch_with, serve

SCRIPT_FILE = "CAROUSEL_TEST_SCRIPT"
ARGUMENTS = ("--disable-radix-cache", "--device", "cpu")
"""Every prompt is computed whole: the worker reads it."""
STEP_S = 0.003
END = 0
"""The demo model's own end token."""
_SCRIPT = re.compile(r"script: ([\w-]+)")
_TURN = "# assistant\n"
"""Header in the demo model's chat template."""


class ScriptedModel:
    """Rows of a worker: their prompts, and what they say."""

    def __init__(self, tokenizer: Tokenizer, scripts: dict[str, list[str]]) -> None:
        self._tokenizer = tokenizer
        self._scripts = scripts
        self._num_prompt: dict[int, int] = {}
        self._prompts: dict[int, list[int]] = {}
        self._answers: dict[int, list[int]] = {}

    def step(self, plan: BatchPlan, masks: SampleMasks | None) -> StepResult:
        """Say what the scripts say, which keep to their guides by themselves."""
        for setup in plan.setups:
            self._num_prompt[setup.row] = setup.num_prompt
            self._prompts[setup.row] = [END] * setup.num_prompt
            self._answers.pop(setup.row, None)
        rows, starts = unpack_ids(plan.rows).tolist(), unpack_ids(plan.starts).tolist()
        lens = [1] * plan.num_decodes + unpack_ids(plan.lens).tolist()
        samples = [1] * plan.num_decodes + unpack_ids(plan.samples).tolist()
        ends = np.cumsum(lens).tolist()
        ids = unpack_ids(plan.input_ids).tolist()
        tokens = []
        for row, start, size, end, is_sampled in zip(rows, starts, lens, ends, samples, strict=True):
            for position, token in enumerate(ids[end - size : end], start):
                if position < self._num_prompt[row]:
                    self._prompts[row][position] = token
            if is_sampled:
                tokens.append(self._token(row, start + size - self._num_prompt[row]))
        return StepResult(plan.step, pack_ids(tokens), plan.samples)

    def _token(self, row: int, index: int) -> int:
        if row not in self._answers:
            prompt = self._tokenizer.decode(self._prompts[row])
            found = _SCRIPT.search(prompt)
            answers = self._scripts[found[1]] if found else [""]
            turn = min(max(0, prompt.count(_TURN) - 1), len(answers) - 1)
            (answer,) = self._tokenizer.encode_batch([answers[turn]], add_special_tokens=False)
            self._answers[row] = answer.tolist()
        ids = self._answers[row]
        return ids[index] if index < len(ids) else END


def main(context: ProcessContext) -> None:
    config: Any = context.config
    model = ScriptedModel(load(Path(config.tokenizer)), json.loads(Path(os.environ[SCRIPT_FILE]).read_text()))
    serve(context, STEP_S, model.step)


if __name__ == "__main__":
    launch_with("tests.harness.ring.scripted_worker", main)
