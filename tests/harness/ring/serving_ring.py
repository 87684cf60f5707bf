"""Ring: the real scheduler and the real worker in one process, no sockets. Token ids in, token ids out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from model_worker.device import make_device
from model_worker.executors.inproc import InprocExecutor
from model_worker.load_worker import load_worker
from runtime.checkpoint.checkpoint_config import CheckpointConfig
from runtime.settings.config import RuntimeConfig
from runtime.text.codec import Decoders
from runtime.text.selection import open_decoders, open_tokenizer
from runtime.wire.format import FloatArray, IntArray, pack_ids, unpack_floats, unpack_ids
from runtime.wire.guide import Guide
from runtime.wire.handle import HANDLE_BYTES, make_handle
from runtime.wire.messages import Closed, StreamOpen, TensorBatch, TokenBatch, TokenizedRequest, TokenLogprobs
from runtime.wire.plan import ProcessorCall
from runtime.wire.sampling_params import SamplingParams
from runtime.wire.transport import Framed, MemoryChannel
from scheduler_proc.build_scheduler import build_scheduler
from scheduler_proc.features.grammar_client import GrammarClient
from scheduler_proc.port import Port

CLIENT = 77
MAX_STEPS = 100_000


@dataclass(frozen=True)
class Setting:
    """Settings that may change how a sequence is computed, and must not change what comes out."""

    radix: bool = True
    overlap: bool = True
    page_size: int = 16
    chunk: int = 512
    pool_tokens: int = 65536
    max_rows: int = 64
    device: str = "cpu"
    batching: str = "inflight_fused"
    capacity: str = "max_utilization"
    policy: str = "fcfs"
    model_impl: str = "auto"
    window: int = 0
    outputs: str = ""
    speculation: str = "none"
    beams: int = 1
    attention_span: int = 0


def decoders_of(model_path: Path) -> Decoders | None:
    """Return the decoders of a checkpoint's tokenizer, if it has one."""
    if not (model_path / "tokenizer.json").exists():
        return None
    return open_decoders(open_tokenizer(str(model_path)))


@dataclass(slots=True)
class Scores:
    """Logprobs of consecutive tokens, as they came."""

    chosen: list[FloatArray] = field(default_factory=list)  # [n]
    top_ids: list[IntArray] = field(default_factory=list)  # [n, k]
    top: list[FloatArray] = field(default_factory=list)  # [n, k]

    def add(self, got: TokenLogprobs) -> None:
        chosen = unpack_floats(got.logprobs)
        shape = (len(chosen), -1)
        self.chosen.append(chosen)
        self.top_ids.append(unpack_ids(got.top_ids).reshape(shape))
        self.top.append(unpack_floats(got.top_logprobs).reshape(shape))


@dataclass(slots=True)
class Generated:
    """All that the ring said of one sequence."""

    tokens: list[int] = field(default_factory=list)
    logprobs: Scores = field(default_factory=Scores)
    prompt_logprobs: Scores = field(default_factory=Scores)
    context_logits: list[FloatArray] = field(default_factory=list)  # [n, V]
    generation_logits: list[FloatArray] = field(default_factory=list)
    outputs: dict[str, list[FloatArray]] = field(default_factory=dict)  # additional ones, by tensor
    shown: list[list[int]] = field(default_factory=list)  # what a search had, each time all of it
    closed: Closed | None = None

    def tensor(self, name: str) -> list[FloatArray]:
        """The rows of one so far, frame by frame."""
        if name in ("context_logits", "generation_logits"):
            rows: list[FloatArray] = getattr(self, name)
            return rows
        return self.outputs.setdefault(name, [])


class Ring:
    """A model of the folder `model_path` in float32, behind a scheduler of the given setting."""

    def __init__(self, model_path: Path, setting: Setting) -> None:
        model = CheckpointConfig.read(model_path)
        config = RuntimeConfig(
            model=str(model_path),
            dtype="float32",
            device="cuda" if setting.device == "cuda" else "cpu",
            context_length=model.max_position_embeddings,
            max_running_requests=setting.max_rows,
            max_queued_requests=4096,
            max_total_tokens=setting.pool_tokens,
            page_size=setting.page_size,
            chunked_prefill_size=setting.chunk,
            disable_radix_cache=not setting.radix,
            # So low that a small pool is overcommitted and somebody has to give way.
            schedule_conservativeness=0.1,
            batching_type=setting.batching,  # type: ignore[arg-type]
            capacity_scheduler=setting.capacity,
            schedule_policy=setting.policy,
            model_impl=setting.model_impl,  # type: ignore[arg-type]
            max_attention_window=setting.window,
            gather_context_logits=True,
            gather_generation_logits=True,
            additional_output=setting.outputs,
            speculative_algorithm=setting.speculation,  # type: ignore[arg-type]
            max_beam_width=setting.beams,
            disable_overlap_schedule=not setting.overlap,
        )
        config = self.settings(config)
        self._executor = self.make_executor(config, setting)
        self._output = MemoryChannel("detokenizer_in")
        self.scheduler = build_scheduler(
            config,
            frozenset(model.eos_token_ids),
            self._executor,
            self._executor.limits,
            Port(MemoryChannel("scheduler_in"), [self._output]),
            decoders=decoders_of(model_path) if setting.beams > 1 else None,
            grammar=self.make_grammar(),
            attention_span=setting.attention_span,
        )
        self.lifecycle = self.scheduler.lifecycle
        self._num_requests = 0

    def settings(self, config: RuntimeConfig) -> RuntimeConfig:
        """Change the settings of this ring before they are used."""
        return config

    def make_executor(self, config: RuntimeConfig, setting: Setting) -> InprocExecutor:
        worker = load_worker(config, make_device(config.device, threaded=setting.overlap), lambda: None)
        return InprocExecutor(worker, max_in_flight=2 if setting.overlap else 1)

    def make_grammar(self) -> GrammarClient | None:
        """Make the client for guides; None: none are kept."""
        return None

    def submit(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        *,
        shows: bool = False,
        guide: Guide | None = None,
        processors: Sequence[ProcessorCall] = (),
    ) -> bytes:
        """Hand a request to the scheduler; returns its handle. `shows`: hypotheses of a search."""
        number = self._num_requests
        self._num_requests += 1
        num_handles = sampling.n if sampling.num_beams > 1 else 1
        handles = [make_handle(CLIENT, number, index) for index in range(num_handles)]
        first, *more = [
            msgspec.Raw(msgspec.msgpack.encode(StreamOpen(each, len(prompt)))) for each in handles
        ]
        self.scheduler.intake.receive(
            TokenizedRequest(
                handles[0],
                pack_ids(prompt),
                sampling,
                first,
                more_opens=tuple(more),
                shows_hypotheses=shows,
                guide=guide,
                processors=tuple(processors),
            )
        )
        return handles[0]

    def run(self) -> dict[bytes, Generated]:
        """Step until everything has ended; what came out, by handle. Checks conservation at the end."""
        generated: dict[bytes, Generated] = {}
        for _ in range(MAX_STEPS):
            self.scheduler.step([])
            for message in self._output.drain():
                self._read(message, generated)
            if self.scheduler.is_idle:
                break
        assert self.scheduler.is_idle, "no end"
        assert all(each.closed is not None for each in generated.values())
        self.lifecycle.kv.check()
        self.lifecycle.check()
        return generated

    def _read(self, message: Any, generated: dict[bytes, Generated]) -> None:
        def of(handle: bytes) -> Generated:
            each = generated.setdefault(handle, Generated())
            assert each.closed is None, "something after the terminal"
            return each

        if isinstance(message, Framed):
            assert isinstance(message.message, TensorBatch)
            for entry, frame in zip(message.message.entries, message.frames, strict=True):
                logits = of(entry.handle).tensor(entry.name)
                assert entry.start == sum(map(len, logits)), "rows are missing, or came twice"
                logits.append(np.frombuffer(frame, np.float32).reshape(entry.shape))
            return
        assert isinstance(message, TokenBatch)
        for scored in message.prompt_logprobs:
            of(scored.handle).prompt_logprobs.add(scored)
        for i, token in enumerate(unpack_ids(message.tokens).tolist()):
            of(message.handles[HANDLE_BYTES * i : HANDLE_BYTES * (i + 1)]).tokens.append(token)
        for hypothesis in message.shown:
            of(hypothesis.handle).shown.append(unpack_ids(hypothesis.tokens).tolist())
        for scored in message.logprobs:
            of(scored.handle).logprobs.add(scored)
        for end in message.closed:
            assert end.error is None, end.error
            of(end.handle).closed = end

    def generate_each(
        self, prompts: Sequence[Sequence[int]], sampling: Sequence[SamplingParams], *, solo: bool
    ) -> list[Generated]:
        """All about each prompt; `solo`: one after the other, else all at once."""
        if not solo:
            handles = [self.submit(*request) for request in zip(prompts, sampling, strict=True)]
            done = self.run()
            return [done[handle] for handle in handles]
        outputs = []
        for request in zip(prompts, sampling, strict=True):
            handle = self.submit(*request)
            outputs.append(self.run()[handle])
        return outputs

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sequence[SamplingParams], *, solo: bool
    ) -> list[list[int]]:
        """Output ids of each prompt."""
        return [each.tokens for each in self.generate_each(prompts, sampling, solo=solo)]

    def close(self) -> None:
        self._executor.close()
