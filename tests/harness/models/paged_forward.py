"""Driver of a model over a paged pool: the work of a worker, without plans."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from model_worker.attention.base import AttentionBackend
from model_worker.attention.forward_batch import ForwardBatch
from model_worker.attention.torch_native import TorchNativeAttention
from model_worker.memory.kv_pool import MHATokenToKVPool
from model_worker.models.base import LoadedModel


class PagedForward:
    """A model with rows 0 .. num_rows - 1 whose pages lie scattered over the pool."""

    def __init__(
        self,
        model: LoadedModel,
        page_size: int,
        *,
        dtype: torch.dtype = torch.float32,
        num_rows: int = 8,
        max_len: int = 128,
        backend: AttentionBackend | None = None,
    ) -> None:
        layout = model.kv_layout
        pages_per_row = -(-max_len // page_size)
        num_pages = num_rows * pages_per_row
        self.model = model
        self.backend = backend or TorchNativeAttention()
        self.pool = MHATokenToKVPool(
            num_pages,
            page_size,
            layout.num_layers,
            layout.num_kv_heads,
            layout.head_dim,
            dtype,
            "cpu",
        )
        shuffled = torch.randperm(num_pages, generator=torch.Generator().manual_seed(page_size)) + 1
        self.page_table = shuffled.to(torch.int32).view(num_rows, pages_per_row)
        self.kv_lens = [0] * num_rows

    @torch.inference_mode()
    def step(
        self, work: Sequence[tuple[int, Sequence[int]]], *, sample: Sequence[int] | None = None
    ) -> Tensor:
        """Compute each (row, new tokens) in one forward, those of one token first, as a worker does.

        Returns the logits of every new token in that order, or of the token indices in `sample`.
        """
        work = sorted(work, key=lambda item: len(item[1]) > 1)
        num_tokens = [len(ids) for _, ids in work]
        positions = torch.cat(
            [torch.arange(self.kv_lens[row], self.kv_lens[row] + len(ids)) for row, ids in work]
        )
        for row, ids in work:
            self.kv_lens[row] += len(ids)
        rows = torch.tensor([row for row, _ in work])
        page_size = self.pool.page_size
        token_rows = rows.repeat_interleave(torch.tensor(num_tokens))
        pages = self.page_table[token_rows, positions // page_size].long()
        total = sum(num_tokens)
        batch = ForwardBatch(
            input_ids=torch.tensor([token for _, ids in work for token in ids]),
            positions=positions,
            out_slots=pages * page_size + positions % page_size,
            query_start=[0, *accumulate(num_tokens)],
            kv_lens=[self.kv_lens[row] for row, _ in work],
            rows=rows,
            page_table=self.page_table,
            page_size=page_size,
            num_decodes=sum(n == 1 for n in num_tokens),
            adapter_rows=token_rows,
            output_indices=torch.tensor(range(total) if sample is None else sample, dtype=torch.int64),
        )
        self.backend.prepare(batch)
        return self.model.compute_logits(self.model(batch, self.pool, self.backend))

    def share_prefix(self, source: int, row: int, num_tokens: int) -> None:
        """Let row begin with source's first num_tokens tokens, whole pages, as a prefix cache does."""
        num_pages, rest = divmod(num_tokens, self.pool.page_size)
        assert rest == 0
        self.page_table[row, :num_pages] = self.page_table[source, :num_pages]
        self.kv_lens[row] = num_tokens

    def prefill(self, row: int, ids: Sequence[int], chunk: int) -> int:
        """Compute a prompt in chunks; the greedy next token."""
        token = -1
        for start in range(0, len(ids), chunk):
            part = ids[start : start + chunk]
            token = int(self.step([(row, part)], sample=[len(part) - 1]).argmax())
        return token

    def decode(self, rows: Sequence[int], tokens: Sequence[int], num_steps: int) -> list[list[int]]:
        """Greedy decoding of rows together, from their first sampled tokens; the outputs, those included."""
        outputs = [[token] for token in tokens]
        for _ in range(num_steps):
            logits = self.step([(row, out[-1:]) for row, out in zip(rows, outputs, strict=True)])
            for out, token in zip(outputs, logits.argmax(-1).tolist(), strict=True):
                out.append(token)
        return outputs
