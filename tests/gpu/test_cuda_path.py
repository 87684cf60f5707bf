"""The CUDA path from plan to token: the same tokens as on the CPU, in float32, with overlap and without.

Float32 sums come in another order on a GPU, so a greedy sequence may part from the CPU's where the two best
logits are nearer to each other than the errors of that run, and only there. A seeded draw has noise between
them: parting is rare, and a wrong table or stream shows in most sequences at once.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from msgspec import structs

from carousel import Client
from runtime.config import DEMO_MODEL
from runtime.sampling_params import SamplingParams
from tests.cpu.ring import Generated, Ring, Setting
from tests.launched import launched

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PROMPTS = [[3 + (7 * n + 11 * i) % 4000 for i in range(5 + 13 * n)] for n in range(16)]
GREEDY = SamplingParams(max_tokens=32, temperature=0.0, seed=0, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=32, temperature=1.0, seed=5, ignore_eos=True)
EDITED = SamplingParams(
    max_tokens=32,
    ignore_eos=True,
    stop_token_ids=(5, 6),
    min_tokens=32,
    temperature=0.8,
    top_p=0.9,
    repetition_penalty=1.1,
    frequency_penalty=0.2,
    logit_bias=((11, 2.0), (40, -100.0)),
    logprobs=3,
    seed=9,
)
MAX_PARTED = 2


def outputs(setting: Setting, sampling: SamplingParams) -> list[Generated]:
    ring = Ring(DEMO_MODEL, setting)
    try:
        return ring.generate_each(PROMPTS, [sampling] * len(PROMPTS), solo=False)
    finally:
        ring.close()


def first_difference(a: Generated, b: Generated) -> int | None:
    """Where their tokens part."""
    pairs = enumerate(zip(a.tokens, b.tokens, strict=True))
    return next((i for i, (left, right) in pairs if left != right), None)


def test_no_step_waits_for_the_device() -> None:
    """Once all is warm: prompts in chunks, decodes as graphs, edits and logprobs, with overlap."""
    ring = Ring(DEMO_MODEL, Setting(device="cuda", chunk=64))
    try:
        ring.generate(PROMPTS[:4], [GREEDY, SEEDED, EDITED, SEEDED], solo=False)
        torch.cuda.set_sync_debug_mode("error")
        try:
            ring.generate(PROMPTS, [GREEDY, SEEDED, EDITED, SEEDED] * 4, solo=False)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    finally:
        ring.close()


@pytest.mark.parametrize("overlap", [True, False])
def test_greedy_tokens_part_only_where_the_reference_is_undecided(overlap: bool) -> None:
    with_logits = structs.replace(GREEDY, return_generation_logits=True)
    on_cpu = outputs(Setting(), with_logits)
    setting = Setting(device="cuda", overlap=overlap, chunk=64)
    measured, recorded = outputs(setting, with_logits), outputs(setting, GREEDY)
    reference = [np.concatenate(each.generation_logits) for each in on_cpu]
    error = 0.0
    for logits, expected, got in zip(reference, on_cpu, measured, strict=True):
        parted = first_difference(expected, got)
        same = slice(None if parted is None else parted + 1)  # up to there they have read the same tokens
        error = max(error, float(np.abs(np.concatenate(got.generation_logits) - logits)[same].max()))
    assert error < 1e-2
    for logits, expected, *others in zip(reference, on_cpu, measured, recorded, strict=True):
        for got in others:
            if (parted := first_difference(expected, got)) is not None:
                second, best = np.sort(logits[parted])[-2:]
                assert best - second <= 2 * error


@pytest.mark.parametrize("sampling", [SEEDED, EDITED], ids=["seeded", "edited"])
@pytest.mark.parametrize("overlap", [True, False])
def test_drawn_tokens_are_those_of_the_cpu(sampling: SamplingParams, overlap: bool) -> None:
    on_cpu = outputs(Setting(), sampling)
    on_cuda = outputs(Setting(device="cuda", overlap=overlap, chunk=64), sampling)
    parted = [first_difference(a, b) is not None for a, b in zip(on_cpu, on_cuda, strict=True)]
    assert sum(parted) <= MAX_PARTED


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_gpus_give_the_tokens_of_one() -> None:
    """Over NCCL, with collectives inside the graphs."""

    def served(num_ranks: int) -> list[list[int]]:
        arguments = ("--device", "cuda", "--dtype", "float32", "--no-http", "--tp-size", str(num_ranks))
        with launched(*arguments) as launch, Client(launch.run_dir) as client:
            kinds = [GREEDY, SEEDED, EDITED, SEEDED] * 4
            return [list(done.token_ids) for done in client.generate(PROMPTS, kinds, timeout=120.0)]

    alone, together = served(1), served(2)
    assert sum(a != b for a, b in zip(alone, together, strict=True)) <= MAX_PARTED
