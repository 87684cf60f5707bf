"""Compares a model over the paged KV cache with the same modules as their authors run them.

Nothing guarantees that an unknown model computes the same in pieces. State outside the KV cache, a window
that is not passed on, or positions that are ignored only show in the numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from transformers import PreTrainedModel

from model_worker.attention.base import AttentionBackend
from model_worker.attention.forward_batch import ForwardBatch
from model_worker.memory.kv_pool import MHATokenToKVPool
from model_worker.transformers_backend.attention import ATTENTION_NAME
from model_worker.transformers_backend.model import TransformersModel
from runtime.base.errors import ModelError

# Relative to the norm of the reference's logits. Sums run in another order, 16-bit types round in each layer,
# and a router may choose the other of two nearly equal experts.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.15}

_LENGTHS = (26, 9)  # of the two sequences
# New tokens of each in every step: a chunk alone, a chunk behind it beside a prompt, decodes.
_STEPS = {"chunk": [(13, 0)], "later chunk": [(9, 5)], "decode": [(1, 1)] * 4}
_PAGE_SIZE = 4
_PAGES_EACH = 7


@dataclass(frozen=True, slots=True)
class Reference:
    """Two sequences and their logits [length, vocab_size] by the model's own attention, without a cache."""

    sequences: tuple[Tensor, ...]
    logits: tuple[Tensor, ...]


@torch.inference_mode()
def reference_logits(hf: PreTrainedModel, vocab_size: int, max_len: int) -> Reference:
    """Compute the reference; afterwards the model has our attention function again. max_len: the longest
    sequence to be served; if it is shorter than the usual sequences, these are cut.
    """
    generator = torch.Generator().manual_seed(20)
    lengths = [min(length, max_len) for length in _LENGTHS]
    sequences = [torch.randint(vocab_size, (n,), generator=generator).to(hf.device) for n in lengths]
    hf.set_attn_implementation("eager")
    try:
        logits = [hf(input_ids=ids.unsqueeze(0), use_cache=False).logits[0].float() for ids in sequences]
    except Exception as error:  # whatever the library's code raises, the checkpoint cannot be served
        raise ModelError(
            f"transformers cannot compute this model: {type(error).__name__}: {error}"
        ) from error
    finally:
        hf.set_attn_implementation(ATTENTION_NAME)
    if logits[0].shape[1] != vocab_size:
        raise ModelError(
            f"config.json: vocab_size {vocab_size}, but the model gives {logits[0].shape[1]} logits a token."
        )
    return Reference(tuple(sequences), tuple(logits))


@torch.inference_mode()
def verify(
    model: TransformersModel, backend: AttentionBackend, reference: Reference, dtype: torch.dtype
) -> float:
    """Return the largest difference in any phase, relative to the reference's norm. Raises ModelError if it
    exceeds the dtype's tolerance.
    """
    pages = _Pages(model, backend, dtype, reference.sequences[0].device)
    worst = 0.0
    for phase, steps in _STEPS.items():
        expected, got = [], []
        for sizes in steps:
            before = list(pages.kv_lens)
            work = [
                ids[done : done + size]
                for ids, done, size in zip(reference.sequences, before, sizes, strict=True)
            ]
            if not any(map(len, work)):
                continue  # the served sequences end before
            got.append(pages.step(work))
            expected += [
                logits[done : done + len(ids)]
                for logits, done, ids in zip(reference.logits, before, work, strict=True)
            ]
        if not got:
            continue
        wanted, logits = torch.cat(expected), torch.cat(got)
        error = float((logits - wanted).norm() / wanted.norm())
        # Not "greater": a NaN is refused too.
        if not error <= TOLERANCE[dtype]:
            largest = float((logits - wanted).abs().max())
            raise ModelError(
                "--model-impl transformers cannot serve this model: over the paged KV cache its logits "
                f"differ from its own attention's in the {phase} phase, by {error:.1%} of their norm and "
                f"{largest:.3g} at most; {TOLERANCE[dtype]:.1%} is rounding in "
                f"{str(dtype).removeprefix('torch.')}."
            )
        worst = max(worst, error)
    return worst


class _Pages:
    """KV pool for two rows whose pages alternate."""

    def __init__(
        self, model: TransformersModel, backend: AttentionBackend, dtype: torch.dtype, device: torch.device
    ) -> None:
        layout = model.kv_layout
        num_rows = len(_LENGTHS)
        self.kv_lens = [0] * num_rows
        self._model = model
        self._backend = backend
        self._pool = MHATokenToKVPool(
            num_rows * _PAGES_EACH,
            _PAGE_SIZE,
            layout.num_layers,
            layout.num_kv_heads,
            layout.head_dim,
            dtype,
            device,
        )
        pages = torch.arange(1, num_rows * _PAGES_EACH + 1, dtype=torch.int32, device=device)
        self._page_table = pages.view(_PAGES_EACH, num_rows).T.contiguous()

    def step(self, work: list[Tensor]) -> Tensor:
        """Compute each row's new tokens (one row may have none) and return all logits, row by row."""
        rows = [row for row, ids in enumerate(work) if len(ids)]
        sizes = [len(work[row]) for row in rows]
        device = self._page_table.device
        positions = torch.cat(
            [
                torch.arange(self.kv_lens[row], self.kv_lens[row] + size, device=device)
                for row, size in zip(rows, sizes, strict=True)
            ]
        )
        for row, size in zip(rows, sizes, strict=True):
            self.kv_lens[row] += size
        rows_of_batch = torch.tensor(rows, dtype=torch.int64, device=device)
        row_of_token = rows_of_batch.repeat_interleave(torch.tensor(sizes, dtype=torch.int64, device=device))
        pages = self._page_table[row_of_token, positions // _PAGE_SIZE].long()
        batch = ForwardBatch(
            input_ids=torch.cat([work[row] for row in rows]),
            positions=positions,
            out_slots=pages * _PAGE_SIZE + positions % _PAGE_SIZE,
            query_start=[0, *accumulate(sizes)],
            kv_lens=[self.kv_lens[row] for row in rows],
            rows=rows_of_batch,
            page_table=self._page_table,
            page_size=_PAGE_SIZE,
            num_decodes=len(rows) if all(size == 1 for size in sizes) else 0,
            output_indices=torch.arange(sum(sizes), device=device),
        )
        self._backend.prepare(batch)
        return self._model.compute_logits(self._model(batch, self._pool, self._backend))
