"""The CUDA path from plan to token: the same tokens as on the CPU, in float32, with overlap and without.

Float32 sums come in another order on a GPU, so a greedy sequence may part from the CPU's where the two best
logits are nearer to each other than the errors of that run, and only there. A seeded draw has noise between
them: parting is rare, and a wrong table or stream shows in most sequences at once.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from msgspec import structs

from model_worker.device.cuda import has_fp8
from model_worker.kernels.kv_scale import UNSCALED, KVScale
from runtime.settings.config import DEMO_MODEL
from runtime.wire.sampling_params import SamplingParams
from tests.cpu.triton.test_pretended_models import tokens_in_float8
from tests.gpu.conftest import launched_so_far
from tests.harness.models.no_waits import no_waits
from tests.harness.models.plans import VOCAB, save_tiny_llama
from tests.harness.pretended_gpu import is_pretended
from tests.harness.ring.launched import SLACK, Launched, is_alive, launched, leftovers
from tests.harness.ring.serving_ring import Generated, Ring, Setting

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

IS_SMALL = is_pretended()  # an interpreter takes seconds for what a GPU does in microseconds
NUM_TOKENS = 5 if IS_SMALL else 32
NUM_PROMPTS = 4 if IS_SMALL else 16
NUM_STREAMS = 2 if IS_SMALL else 16
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, seed=0, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=NUM_TOKENS, temperature=1.0, seed=5, ignore_eos=True)
EDITED = SamplingParams(
    max_tokens=NUM_TOKENS,
    ignore_eos=True,
    stop_token_ids=(5, 6),
    min_tokens=NUM_TOKENS,
    temperature=0.8,
    top_p=0.9,
    repetition_penalty=1.1,
    frequency_penalty=0.2,
    logit_bias=((11, 2.0), (40, -100.0)),
    logprobs=3,
    seed=9,
)
ALL_KINDS = [GREEDY, SEEDED, EDITED, SEEDED] * (NUM_PROMPTS // 4)
MAX_PARTED = 2
TIMEOUT_S = 30.0 * SLACK


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not IS_SMALL:
        return DEMO_MODEL
    path = tmp_path_factory.mktemp("tiny")
    save_tiny_llama(path)
    return path


def prompts() -> list[list[int]]:
    """Return prompts of different lengths, some longer than a chunk."""
    vocab_size, longer = (VOCAB, 9) if IS_SMALL else (4000, 13)
    return [
        [3 + (7 * n + 11 * i) % (vocab_size - 3) for i in range(5 + longer * n)] for n in range(NUM_PROMPTS)
    ]


@pytest.fixture(scope="module")
def on_cpu(model: Path) -> Iterator[Ring]:
    ring = Ring(model, Setting(max_rows=NUM_PROMPTS))
    yield ring
    ring.close()


# Where work is done when it is launched, steps one at a time are nothing else.
OVERLAPS = {"overlap": True} if IS_SMALL else {"overlap": True, "one step at a time": False}


@pytest.fixture(scope="module", params=list(OVERLAPS.values()), ids=list(OVERLAPS))
def on_cuda(model: Path, request: pytest.FixtureRequest) -> Iterator[Ring]:
    chunk = 16 if IS_SMALL else 64
    ring = Ring(model, Setting(device="cuda", overlap=request.param, chunk=chunk, max_rows=NUM_PROMPTS))
    yield ring
    ring.close()


def outputs(ring: Ring, sampling: SamplingParams) -> list[Generated]:
    return ring.generate_each(prompts(), [sampling] * NUM_PROMPTS, solo=False)


def first_difference(a: Generated, b: Generated) -> int | None:
    """Where their tokens part."""
    pairs = enumerate(zip(a.tokens, b.tokens, strict=True))
    return next((i for i, (left, right) in pairs if left != right), None)


def test_no_step_waits_for_the_device(on_cuda: Ring) -> None:
    """Once all is warm: prompts in chunks, decodes as graphs, edits and logprobs."""
    on_cuda.generate([prompt[::-1] for prompt in prompts()], ALL_KINDS, solo=False)
    with no_waits():
        on_cuda.generate(prompts(), ALL_KINDS, solo=False)


def test_greedy_tokens_part_only_where_the_reference_is_undecided(on_cuda: Ring, on_cpu: Ring) -> None:
    with_logits = structs.replace(GREEDY, return_generation_logits=True)
    references = outputs(on_cpu, with_logits)
    measured, recorded = outputs(on_cuda, with_logits), outputs(on_cuda, GREEDY)
    all_logits = [np.concatenate(each.generation_logits) for each in references]
    error = 0.0
    for logits, expected, got in zip(all_logits, references, measured, strict=True):
        parted = first_difference(expected, got)
        same = slice(None if parted is None else parted + 1)  # up to there they have read the same tokens
        error = max(error, float(np.abs(np.concatenate(got.generation_logits) - logits)[same].max()))
    assert error < 1e-2
    for logits, expected, *others in zip(all_logits, references, measured, recorded, strict=True):
        for got in others:
            if (parted := first_difference(expected, got)) is not None:
                second, best = np.sort(logits[parted])[-2:]
                assert best - second <= 2 * error


@pytest.mark.parametrize("sampling", [SEEDED, EDITED], ids=["seeded", "edited"])
def test_drawn_tokens_are_those_of_the_cpu(on_cuda: Ring, on_cpu: Ring, sampling: SamplingParams) -> None:
    pairs = zip(outputs(on_cpu, sampling), outputs(on_cuda, sampling), strict=True)
    assert sum(first_difference(a, b) is not None for a, b in pairs) <= MAX_PARTED


def test_keys_and_values_beyond_float8_are_divided_by_their_scales(model: Path, tmp_path: Path) -> None:
    """By powers of two, so that nothing changes but the numbers' size. Weights are in float8, too, and what
    is computed with them in bfloat16. The pretended GPU computes first, and then records.
    """
    if not has_fp8():
        pytest.skip("float8 needs compute capability 8.9")
    num_before = len(launched_so_far())
    recorded: dict[str, Any] = {"cuda_graph_bs": "3"}
    first = {"disable_cuda_graph": True} if IS_SMALL else recorded
    plain = tokens_in_float8(model, tmp_path / "plain", UNSCALED, **first)
    assert tokens_in_float8(model, tmp_path / "scaled", KVScale(64.0, 2048.0), **recorded) == plain
    if IS_SMALL:
        assert {"_scaled_mm", "_scale_row"} <= set(
            launched_so_far()[num_before:]
        )  # some products are refused


@pytest.fixture
def two_ranks(model: Path) -> Iterator[Launched]:
    """A server on two GPUs, over NCCL, with collectives inside its graphs."""
    small = (
        *("--max-running-requests", "2", "--cuda-graph-bs", "2", "--max-total-tokens", "256"),
        *("--chunked-prefill-size", "16"),
    )
    settings = ("--model", str(model), "--device", "cuda", "--dtype", "float32", "--skip-tokenizer-init")
    arguments = (*settings, "--tp-size", "2", *(small if IS_SMALL else ()))
    with launched(
        *arguments, module="tests.harness.pretended_gpu.launch" if IS_SMALL else "launch"
    ) as launch:
        yield launch


def streamed(launch: Launched, prompt: list[int], sampling: SamplingParams) -> Iterator[int]:
    """Token ids over HTTP, as they come."""
    names = ("max_tokens", "temperature", "seed", "ignore_eos")
    body = {"prompt": prompt, "stream": True, **{name: getattr(sampling, name) for name in names}}
    url = f"{launch.url}/v1/completions"
    with httpx.stream("POST", url, json=body, timeout=TIMEOUT_S) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                yield from json.loads(line.removeprefix("data: "))["choices"][0]["token_ids"]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_gpus_serve_the_tokens_of_the_cpu_also_over_the_death_of_a_rank(
    two_ranks: Launched, on_cpu: Ring
) -> None:
    """Greedy ones and drawn ones, streamed over HTTP."""
    sampling = [GREEDY, SEEDED] * (NUM_STREAMS // 2)
    requests = list(zip(prompts(), sampling, strict=False))
    expected = on_cpu.generate(prompts()[:NUM_STREAMS], sampling, solo=False)
    streams = [streamed(two_ranks, *request) for request in requests]
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        first = next(streams[0])
        rest = [pool.submit(list, stream) for stream in streams]
        os.kill(two_ranks.pid_of("worker", 1), signal.SIGKILL)
        got = [each.result() for each in rest]
    got[0].insert(0, first)
    parted = sum(a != b for a, b in zip(got, expected, strict=True))
    assert parted <= (0 if IS_SMALL else MAX_PARTED)
    pids, run_dir = two_ranks.pids(), two_ranks.run_dir
    assert two_ranks.stop() == 0, two_ranks.log()
    assert "worker:1: the process was killed by SIGKILL; restarting engine" in two_ranks.log()
    assert not any(is_alive(pid) for pid in pids)
    assert not leftovers(run_dir)
    assert "Error" not in two_ranks.log()
