"""Kernels that a server launches while it serves have been compiled when it starts: on the pretended GPU,
which knows what Triton would compile a kernel anew for.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from transformers import Qwen3MoeConfig

from runtime.wire.sampling_params import SamplingParams
from tests.cpu.triton.test_pretended_models import SetRing
from tests.harness.models.model_registry import TINY, Case
from tests.harness.models.plans import save_tiny_llama
from tests.harness.models.reference import make_checkpoint
from tests.harness.pretended_gpu import pretended_gpu
from tests.harness.ring.serving_ring import Ring


def sampling(max_tokens: int = 1, **parameters: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=3, **parameters)  # type: ignore[arg-type]


KINDS = {
    "chunks beside one decode, and two": [sampling(n, temperature=0.0) for n in (4, 3, 2)],
    "truncated draws": [sampling(top_k=5), sampling(min_p=0.1)],
    "edits": [
        sampling(repetition_penalty=1.2, logprobs=3),
        sampling(logit_bias=((11, 2.0), (12, 1.0), (13, -1.0)), bad_words_ids=((3, 4), (5,))),
    ],
    "edits before a truncated draw": [sampling(frequency_penalty=0.4, top_p=0.9)],
    "a minimum": [sampling(min_tokens=2, stop_token_ids=(5, 6), logprobs=20, prompt_logprobs=1)],
    "decaying top-p": [sampling(top_p=0.9, top_p_decay=0.9)],
}


def serve(ring: Ring, kinds: dict[str, list[SamplingParams]]) -> None:
    """Prompts of odd and even lengths, the third in chunks beside the others' decodes; then a long one."""
    for start, kind in enumerate(kinds.values()):
        prompts = [[start + 1, n + 2] + [9] * (1 + 5 * n * n) for n in range(len(kind))]
        ring.generate(prompts, kind, solo=False)
    ring.generate([[8] * 41], [sampling(3, temperature=0.0)], solo=True)


def compiled_while_serving(path: Path, kinds: dict[str, list[SamplingParams]], chunk: int = 16) -> list[str]:
    """By a server that records nothing: what is recorded is compiled before."""
    with pretended_gpu() as gpu:
        ring = SetRing(path, "cuda", chunk=chunk, disable_cuda_graph=True)
        at_start = list(gpu.compiled)
        serve(ring, kinds)
        ring.close()
    return list(gpu.compiled)[len(at_start) :]


def test_no_kernel_is_compiled_while_requests_are_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The longest of this model's contexts, too, are attended to in several splits, and the others in one.
    monkeypatch.setattr("model_worker.kernels.triton.decode_attention.KEYS_PER_SPLIT", 32)
    save_tiny_llama(tmp_path)
    assert compiled_while_serving(tmp_path, KINDS) == []


def test_no_kernel_of_experts_is_compiled_for_chunks_of_another_size(tmp_path: Path) -> None:
    """With more pairs of token and expert than there are small tiles for, and fewer."""
    few = TINY | {"num_hidden_layers": 1, "num_experts_per_tok": 1, "head_dim": 16}
    make_checkpoint(Case(Qwen3MoeConfig(**few, num_experts=2, moe_intermediate_size=16)), tmp_path)
    kinds = {"chunks beside decodes": KINDS["chunks beside one decode, and two"]}
    assert compiled_while_serving(tmp_path, kinds, chunk=40) == []


@triton.jit(do_not_specialize=["free"])
def _add(x, n, free, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(x + i, tl.load(x + i, mask=i < n) + free, mask=i < n)


@pytest.mark.parametrize(
    ("second", "is_other"),
    [
        ((0, 7, 1, 8), False),
        ((0, 6, 16, 8), False),
        ((0, 1, 0, 8), True),
        ((0, 16, 0, 8), True),
        ((1, 7, 0, 8), True),
        ((4, 7, 0, 8), False),
        ((0, 7, 0, 16), True),
    ],
)
def test_what_a_kernel_is_compiled_anew_for(second: tuple[int, int, int, int], is_other: bool) -> None:
    with torch.inference_mode(), pretended_gpu() as gpu:
        x = torch.zeros(64, device="cuda")
        for offset, n, free, block in ((0, 7, 0, 8), second):
            _add[(1,)](x[offset:], n, free, BLOCK=block)
    assert len(gpu.compiled) == 1 + is_other
