"""Handwritten plans, like a scheduler's, for a few rows whose pages the test chooses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from model_worker.device import make_device
from model_worker.loading.loader import load_model
from model_worker.memory.kv_pool import MHATokenToKVPool
from model_worker.ops.torch_ops import TorchOps
from model_worker.runner.build_runner import build_runner
from model_worker.worker import ModelWorker
from runtime.checkpoint.model_config import ModelConfig
from runtime.wire.format import pack_ids, unpack_ids
from runtime.wire.plan import BatchPlan, PromptPositions, RowSetup, StepResult
from tests.harness.row_setups import Row

VOCAB = 97
MAX_LEN = 64
MAX_ROWS = 8
NUM_PAGES = 256
GREEDY = {"temperature": 0.0}
FEEDBACK = -1
PROMPTS = [
    [1, 5, 9, 33, 2, 71, 8, 8, 60, 12, 3, 44, 90, 17, 25, 6, 31, 55, 4, 11],
    [7, 7, 50, 21],
    [96, 3, 14, 15, 92, 65, 35, 89, 79, 32, 38],
]
SCATTERED: list[int] = np.random.default_rng(3).permutation(np.arange(1, NUM_PAGES + 1)).tolist()


def save_tiny_llama(path: Path, *, hidden_size: int = 48, intermediate_size: int = 80) -> LlamaForCausalLM:
    """A random model, in float32, with logits far enough apart for greedy tokens to be stable."""
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=MAX_LEN,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    model: LlamaForCausalLM = LlamaForCausalLM(config).float().eval()
    model.save_pretrained(path)
    return model


def greedy_reference(model: LlamaForCausalLM, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Greedy tokens, each from a forward over everything before it."""
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(num_tokens):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def make_worker(path: Path, page_size: int, *, threaded: bool = False) -> ModelWorker:
    device = make_device("cpu", threaded=threaded)
    config = ModelConfig.from_path(path)
    pool = MHATokenToKVPool(
        NUM_PAGES,
        page_size,
        config.num_layers,
        config.num_kv_heads,
        config.head_dim,
        torch.float32,
        device.torch_device,
    )
    ops = TorchOps()
    model = load_model(path, config, torch.float32, device.torch_device, ops=ops)
    runner = build_runner(
        model, pool, ops, device, max_rows=MAX_ROWS, max_len=MAX_LEN, vocab_size=config.vocab_size
    )
    return ModelWorker(runner, device)


def pages_of(row: int) -> list[int]:
    """Pages of each row's own, not in order; of page size 1 they hold 32 tokens."""
    share = NUM_PAGES // MAX_ROWS
    return SCATTERED[row * share : (row + 1) * share]


class Wanted(NamedTuple):
    """Return what a plan asks of the positions of a row's chunk, from `first` on."""

    prompt: Sequence[int]
    first: int = 0
    num_logprobs: int = -1
    returns_logits: bool = False


class PlanWriter:
    """Numbers the steps and gives each row as many of its pages as its length needs."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.pages: dict[int, list[int]] = {}
        self.kv_len: dict[int, int] = {}
        self._written: dict[int, int] = {}
        self._last_chunk: dict[int, int] = {}
        self._num_drafts: dict[int, int] = {}
        self._setups: list[RowSetup] = []
        self._copies: list[tuple[int, int]] = []
        self._step = 0

    def open_row(self, row: int, prompt: Sequence[int], pages: Sequence[int], **sampling: Any) -> None:
        """A new tenant whose KV will lie in `pages`, in that order."""
        self.pages[row] = list(pages)
        self.kv_len[row] = self._written[row] = 0
        self._setups.append(Row(**{"row": row, "num_prompt": len(prompt), **sampling}).setup())

    def copy_page(self, source: int, target: int) -> None:
        self._copies.append((source, target))

    def plan(
        self,
        decodes: Sequence[tuple[int, int]] = (),
        chunks: Sequence[tuple[int, Sequence[int], bool]] = (),
        *,
        wanted: Mapping[int, Wanted] | None = None,
        drafts: Mapping[int, int] | None = None,
        defer_sampling: bool = False,
    ) -> BatchPlan:
        """decodes: (row, token or FEEDBACK); chunks: (row, token ids, whether it samples); wanted: by row;
        drafts: by row, how many of a chunk's last ids are guesses. `accept` says how many were right.
        """
        drafts = drafts or {}
        work = [(row, [token]) for row, token in decodes] + [(row, list(ids)) for row, ids, _ in chunks]
        rows = [row for row, _ in work]
        starts = [self.kv_len[row] for row in rows]
        spans: list[int] = []
        pages: list[int] = []
        for row, ids in work:
            self.kv_len[row] += len(ids)
            self._last_chunk[row] = len(ids)
            self._num_drafts[row] = drafts.get(row, 0)
            needed, first = -(-self.kv_len[row] // self.page_size), self._written[row]
            if needed > first:
                spans += [row, first, needed - first]
                pages += self.pages[row][first:needed]
                self._written[row] = needed
        setups, self._setups = tuple(self._setups), []
        copies, self._copies = tuple(self._copies), []
        self._step += 1
        return BatchPlan(
            step=self._step,
            setups=setups,
            page_copies=copies,
            table_spans=pack_ids(spans),
            table_pages=pack_ids(pages),
            num_decodes=len(decodes),
            rows=pack_ids(rows),
            starts=pack_ids(starts),
            input_ids=pack_ids([token for _, ids in work for token in ids]),
            lens=pack_ids([len(ids) for _, ids, _ in chunks]),
            samples=pack_ids([int(samples) for _, _, samples in chunks]),
            drafts=pack_ids([drafts.get(row, 0) for row, _, _ in chunks]),
            prompt_positions=tuple(
                self._positions(index, row, wanted[row])
                for index, row in enumerate(rows)
                if wanted is not None and row in wanted
            ),
            defer_sampling=defer_sampling,
        )

    def accept(self, row: int, num_tokens: int) -> None:
        """The row's newest chunk brought so many tokens: of its guesses all but the last of them."""
        self.kv_len[row] += num_tokens - 1 - self._num_drafts[row]

    def _positions(self, index: int, row: int, wanted: Wanted) -> PromptPositions:
        prompt, first, num_logprobs, returns_logits = wanted
        end = self.kv_len[row]
        start = end - self._last_chunk[row] + first
        targets = [*prompt, 0][start + 1 : end - self._num_drafts[row] + 1]
        return PromptPositions(index, first, pack_ids(targets), num_logprobs, returns_logits)


def tokens_of(result: StepResult) -> list[int]:
    tokens: list[int] = unpack_ids(result.tokens).tolist()
    return tokens
