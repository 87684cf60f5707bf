"""Ring: the real scheduler and the real worker in one process, no sockets. Token ids in, token ids out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from model_worker.attention.torch_native import TorchNativeAttention
from model_worker.device import make_device
from model_worker.executors.inproc import InprocExecutor
from model_worker.kv_pool import MHATokenToKVPool
from model_worker.loader import load_model
from model_worker.model_runner import ModelRunner
from model_worker.worker import ModelWorker
from runtime.handle import make_handle
from runtime.messages import Closed, StreamOpen, TokenBatch, TokenizedRequest
from runtime.model_config import ModelConfig
from runtime.registry import resolve
from runtime.sampling_params import SamplingParams
from runtime.wire import pack_ids, unpack_ids
from scheduler_proc.cache import CACHES
from scheduler_proc.cache.kv_cache_manager import KVCacheManager
from scheduler_proc.capacity import MaxUtilization, SlotPool
from scheduler_proc.features.logprobs import attach_logprobs
from scheduler_proc.intake import Intake, ModelLimits
from scheduler_proc.lifecycle import Lifecycle
from scheduler_proc.output import Output
from scheduler_proc.policy import POLICIES
from scheduler_proc.rows import Rows
from scheduler_proc.scheduler import Scheduler
from scheduler_proc.step_log import StepLog
from tests.fakes import RecordingOutbox

CLIENT = 77
MAX_STEPS = 100_000


@dataclass(frozen=True)
class Setting:
    """What may change how a sequence is computed, and must not change what comes out."""

    radix: bool = True
    overlap: bool = True
    page_size: int = 16
    chunk: int = 512
    pool_tokens: int = 65536
    max_rows: int = 64


class Ring:
    """A model of the folder `model_path` in float32, behind a scheduler of the given setting."""

    def __init__(self, model_path: Path, setting: Setting) -> None:
        self.setting = setting
        config = ModelConfig.from_path(model_path)
        self._load_worker(model_path, config)
        rows = Rows(setting.max_rows, config.max_position_embeddings)
        cache = resolve("prefix cache", "radix" if setting.radix else "none", CACHES)(setting.page_size)
        self.kv = KVCacheManager(setting.pool_tokens // setting.page_size, setting.page_size, rows, cache)
        self._outbox = RecordingOutbox()
        output = Output(self._outbox)
        self.lifecycle = Lifecycle(self.kv, SlotPool(0), output)
        max_len = min(config.max_position_embeddings, setting.pool_tokens)
        self.scheduler = Scheduler(
            self.lifecycle,
            Intake(
                self.lifecycle,
                ModelLimits(config.vocab_size, max_len, frozenset(config.eos_token_ids)),
                (attach_logprobs(output.add_logprobs),),
            ),
            resolve("schedule policy", "fcfs", POLICIES)(),
            MaxUtilization(rows, self.kv, conservativeness=0.1),
            self._executor,
            setting.chunk,
            StepLog(self.kv, self.lifecycle.waiting, 1000),
        )
        self._num_requests = 0

    def _load_worker(self, model_path: Path, config: ModelConfig) -> None:
        setting = self.setting
        device = make_device("cpu", threaded=setting.overlap)
        model = load_model(model_path, config, torch.float32, torch.device("cpu"), "auto", None)
        kv_pool = MHATokenToKVPool(
            setting.pool_tokens // setting.page_size,
            setting.page_size,
            config.num_layers,
            config.num_kv_heads,
            config.head_dim,
            torch.float32,
            torch.device("cpu"),
        )
        runner = ModelRunner(
            model,
            kv_pool,
            TorchNativeAttention(),
            device,
            max_rows=setting.max_rows,
            max_len=config.max_position_embeddings,
            vocab_size=config.vocab_size,
        )
        self._executor = InprocExecutor(
            ModelWorker(runner, device), max_in_flight=2 if setting.overlap else 1
        )

    def submit(self, prompt: Sequence[int], sampling: SamplingParams) -> bytes:
        """Hand a request to the scheduler; returns its handle."""
        handle = make_handle(CLIENT, self._num_requests)
        self._num_requests += 1
        stream = msgspec.Raw(msgspec.msgpack.encode(StreamOpen(handle, len(prompt))))
        self.scheduler.intake.receive(TokenizedRequest(handle, pack_ids(prompt), sampling, stream))
        return handle

    def run(self) -> dict[bytes, list[int]]:
        """Step until everything has ended; what came out, by handle. Checks conservation at the end."""
        tokens: dict[bytes, list[int]] = {}
        closed: dict[bytes, Closed] = {}
        for _ in range(MAX_STEPS):
            self.scheduler.step([])
            for batch in self._outbox.take():
                self._read(batch, tokens, closed)
            if self.scheduler.is_idle:
                break
        assert self.scheduler.is_idle, "no end"
        assert set(closed) >= set(tokens)
        self.kv.check()
        self.lifecycle.check()
        return tokens

    def _read(self, batch: Any, tokens: dict[bytes, list[int]], closed: dict[bytes, Closed]) -> None:
        assert isinstance(batch, TokenBatch)
        for i, token in enumerate(unpack_ids(batch.tokens).tolist()):
            tokens.setdefault(batch.handles[16 * i : 16 * i + 16], []).append(token)
        for end in batch.closed:
            assert end.handle not in closed, "second terminal"
            assert end.error is None, end.error
            closed[end.handle] = end

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sequence[SamplingParams], *, solo: bool
    ) -> list[list[int]]:
        """Output ids of each prompt; `solo`: one after the other, else all at once."""
        if not solo:
            handles = [self.submit(*request) for request in zip(prompts, sampling, strict=True)]
            done = self.run()
            return [done[handle] for handle in handles]
        outputs = []
        for request in zip(prompts, sampling, strict=True):
            handle = self.submit(*request)
            outputs.append(self.run()[handle])
        return outputs

    def close(self) -> None:
        self._executor.close()
