"""Ring: the real scheduler and the real worker in one process, no sockets. Token ids in, token ids out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from model_worker.device import make_device
from model_worker.executors.inproc import InprocExecutor
from model_worker.worker import load_worker
from runtime.config import RuntimeConfig
from runtime.handle import HANDLE_BYTES, make_handle
from runtime.messages import Closed, StreamOpen, TokenBatch, TokenizedRequest
from runtime.model_config import ModelConfig
from runtime.sampling_params import SamplingParams
from runtime.wire import pack_ids, unpack_ids
from scheduler_proc.main import build_scheduler
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
    device: str = "cpu"


class Ring:
    """A model of the folder `model_path` in float32, behind a scheduler of the given setting."""

    def __init__(self, model_path: Path, setting: Setting) -> None:
        model = ModelConfig.from_path(model_path)
        config = RuntimeConfig(
            model=str(model_path),
            dtype="float32",
            device="cuda" if setting.device == "cuda" else "cpu",
            context_length=model.max_position_embeddings,
            max_running_requests=setting.max_rows,
            max_total_tokens=setting.pool_tokens,
            page_size=setting.page_size,
            chunked_prefill_size=setting.chunk,
            disable_radix_cache=not setting.radix,
            # So low that a small pool is overcommitted and somebody has to give way.
            schedule_conservativeness=0.1,
        )
        worker = load_worker(config, make_device(config.device, threaded=setting.overlap), lambda: None)
        self._executor = InprocExecutor(worker, max_in_flight=2 if setting.overlap else 1)
        self._outbox = RecordingOutbox()
        self.scheduler = build_scheduler(
            config, frozenset(model.eos_token_ids), self._executor, worker.limits, self._outbox
        )
        self.lifecycle = self.scheduler.lifecycle
        self._num_requests = 0

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
        self.lifecycle.kv.check()
        self.lifecycle.check()
        return tokens

    def _read(self, batch: Any, tokens: dict[bytes, list[int]], closed: dict[bytes, Closed]) -> None:
        assert isinstance(batch, TokenBatch)
        for i, token in enumerate(unpack_ids(batch.tokens).tolist()):
            handle = batch.handles[HANDLE_BYTES * i : HANDLE_BYTES * (i + 1)]
            tokens.setdefault(handle, []).append(token)
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
