"""Tiny random checkpoint of transformers, and the checks that a model of ours must pass beside it.

Both implementations are held to the same checks: specs (test_models_vs_hf.py), and the library's own modules
over our attention (test_transformers_backend.py).
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from model_worker.attention.base import AttentionBackend
from model_worker.models.base import LoadedModel
from runtime.base.cpu_isa import cpu_isa
from tests.harness.models.model_registry import VOCAB_SIZE, Case
from tests.harness.models.paged_forward import PagedForward

# Of a logit, float32; transformers and we add up in different orders, and without a fused multiply-add each
# product is rounded, too.
TOLERANCE = 2e-4 if cpu_isa() == "portable" else 1e-4
SPREAD = 3.0  # the least standard deviation of a reference's logits
NEAR_TIE = 1e-3  # two logits of the reference so close that either token is right
NUM_GREEDY = 36
PAGE_SIZE = 16


class Pair(NamedTuple):
    case: Case
    hf: PreTrainedModel
    model: LoadedModel
    backend: AttentionBackend

    def paged(self, page_size: int = PAGE_SIZE) -> PagedForward:
        return PagedForward(self.model, page_size, backend=self.backend)


def make_checkpoint(case: Case, path: Path, kind: Any = AutoModelForCausalLM) -> PreTrainedModel:
    """Save a model with random weights, biases and norms in `path`; the reference in eager attention. kind:
    its class, where the library does not know it for one that continues a text.
    """
    torch.manual_seed(7)
    make = getattr(kind, "from_config", None) or kind._from_config
    hf: PreTrainedModel = make(case.config, attn_implementation="eager").float().eval()
    vary_norms_and_biases(hf)
    with torch.no_grad():
        _spread_logits(hf)
    hf.save_pretrained(path)
    return hf


def generated(hf: Any, ids: list[int], num_tokens: int) -> list[int]:
    """So many greedy tokens from a model of transformers, whose `generate` no model's type fits."""
    out = hf.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        do_sample=False,
        pad_token_id=0,
    )
    tokens: list[int] = out[0, len(ids) :].tolist()
    return tokens


@torch.no_grad()
def vary_norms_and_biases(hf: PreTrainedModel) -> None:
    """Draw norms and biases: all ones and zeros, as they are made, a model that forgets them computes the
    same.
    """
    for name, weight in hf.named_parameters():
        if "norm" in name and name.endswith("weight"):
            weight.add_(0.3 * torch.randn_like(weight))
        elif name.endswith("bias"):
            weight.copy_(0.5 * torch.randn_like(weight))


def _spread_logits(hf: PreTrainedModel) -> None:
    """Scale the head until logits differ as those of a trained model do, so that a token is a statement."""
    for _ in range(20):
        if reference_logits(hf, prompts()[0]).std() >= SPREAD:
            return
        hf.get_output_embeddings().weight.mul_(1.3)
    raise AssertionError("the logits cannot be spread")


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(2, VOCAB_SIZE, (n,), generator=generator).tolist() for n in (53, 7, 31, 6)]


@torch.inference_mode()
def reference_logits(hf: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    logits: torch.Tensor = hf(torch.tensor([ids])).logits[0]
    return logits


@torch.inference_mode()
def _reference_by_token(hf: PreTrainedModel, ids: list[int], num_prompt: int) -> torch.Tensor:
    cache = "cache" if "cache" in inspect.signature(hf.forward).parameters else "past_key_values"
    out = hf(torch.tensor([ids[:num_prompt]]), use_cache=True)
    logits = [out.logits[0]]
    for position in range(num_prompt, len(ids)):
        out = hf(
            torch.tensor([[ids[position]]]),
            position_ids=torch.tensor([[position]]),
            use_cache=True,
            **{cache: getattr(out, cache)},
        )
        logits.append(out.logits[0])
    return torch.cat(logits)


def check_chunks_and_decodes_in_one_forward(pair: Pair, page_size: int) -> None:
    """Four sequences advance by 1 to 17 tokens a step: chunks after a cached prefix beside decodes."""
    ids_of = prompts()
    forward = pair.paged(page_size)
    parts: list[list[torch.Tensor]] = [[] for _ in ids_of]
    rows = [5, 0, 3, 6]
    sizes = [17, 3, 1, 1]
    done = [0] * len(ids_of)
    while any(done[i] < len(ids) for i, ids in enumerate(ids_of)):
        active = [i for i, ids in enumerate(ids_of) if done[i] < len(ids)]
        work = [(rows[i], ids_of[i][done[i] : done[i] + sizes[i]]) for i in active]
        order = sorted(range(len(active)), key=lambda k: len(work[k][1]) > 1)
        logits = forward.step(work).split([len(work[k][1]) for k in order])
        for k, part in zip(order, logits, strict=True):
            parts[active[k]].append(part)
            done[active[k]] += part.shape[0]
        sizes = [sizes[-1], *sizes[:-1]]
    for ids, got in zip(ids_of, parts, strict=True):
        expected = reference_logits(pair.hf, ids)
        assert expected.std() > SPREAD / 2
        assert (torch.cat(got) - expected).abs().max() < TOLERANCE


def check_a_prefix_of_another_sequence(pair: Pair) -> None:
    """Two sequences continue after pages that a third one computed."""
    first, _, tail, _ = prompts()
    forward = pair.paged()
    forward.prefill(0, first, chunk=20)
    shared = 2 * PAGE_SIZE
    for row in (1, 2):
        forward.share_prefix(0, row, shared)
    got = forward.step([(1, tail[:20]), (2, tail[7:])]).split([20, len(tail) - 7])
    for part, ids in zip(got, (tail[:20], tail[7:]), strict=True):
        expected = reference_logits(pair.hf, first[:shared] + ids)[shared:]
        assert (part - expected).abs().max() < TOLERANCE


def check_greedy_tokens(pair: Pair) -> None:
    """Our tokens, given back to the reference: its own choice at every position, or one as good."""
    ids_of = prompts()[:3]
    forward = pair.paged()
    first = [forward.prefill(row, ids, chunk=9) for row, ids in enumerate(ids_of)]
    outputs = forward.decode(range(len(ids_of)), first, num_steps=NUM_GREEDY - 1)
    for ids, output in zip(ids_of, outputs, strict=True):
        all_ids = ids + output[:-1]
        if pair.case.by_token:
            logits = _reference_by_token(pair.hf, all_ids, len(ids))
        else:
            logits = reference_logits(pair.hf, all_ids)
        logits = logits[len(ids) - 1 :]
        ours = logits.gather(1, torch.tensor(output).unsqueeze(1)).squeeze(1)
        assert len(ours) == NUM_GREEDY
        assert (logits.max(-1).values - ours).max() < NEAR_TIE
