"""ServerState: objects that all endpoints share. Made once by main."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from carousel.client.async_ import AsyncClient
from carousel.lora import LoRARequest
from carousel.server.admin.metrics import Metrics
from carousel.server.admin.shared_answer import SNAPSHOT_INTERVAL_S, SharedAnswer
from carousel.server.admin.siblings import Siblings
from carousel.server.answer.quiet_streams import QuietStreams
from carousel.server.http.body_pace import BodyPace
from carousel.server.http.body_pool import KEEPING, KEPT_BYTES, BodyPool
from carousel.server.request.tokenizer import ServerTokenizer
from carousel.server.request.unknown_fields import IgnoredLog
from carousel.server.running import RunningRequests
from carousel.server.sglang.grown_logprobs import JsonRoom
from carousel.server.tenancy.entrance import Entrance
from carousel.server.tenancy.fair_threads import FairThreads
from carousel.server.tenancy.places import Places
from carousel.server.tenancy.tenant_table import TenantTable
from carousel.server.tenancy.unread_answers import UnreadAnswers
from carousel.server.tenancy.write_pace import WritePace
from carousel.server.tracing.http_spans import HttpSpans
from carousel.server.tracing.sampling import new_traceparent
from carousel.server.tracing.tracing import RequestTrace, TracedRequest, Tracing
from carousel.server.vectors.vector_room import VectorRoom
from runtime.base.errors import InvalidRequest, RequestError, RingClosed
from runtime.base.random_ids import random_id
from runtime.checkpoint.checkpoint_config import SamplingDefaults
from runtime.ring.adapters_file import AdaptersFile
from runtime.ring.process import LaunchFile, process_name
from runtime.settings.config import RuntimeConfig
from runtime.wire.plan import NO_LORA
from runtime.wire.status_page import ProcessStatus, StatusPage

# Less than the ten seconds after which a scrape gives up by default.
CONTROL_TIMEOUT_S = 5.0
MIN_MAX_IDS = 1 << 16
DEFAULT_MODEL = "default"
MAX_LONG_ANSWER_BYTES = 64 << 20
"""Maximum number of bytes of answers that wait to be formatted: long ones, and those with more than text."""


class ServedModel(NamedTuple):
    """Model or adapter that a request names."""

    name: str
    """Name in the answer."""
    adapter: LoRARequest | None = None


@dataclass(slots=True, eq=False)
class ServerState:
    client: AsyncClient
    config: RuntimeConfig
    defaults: SamplingDefaults
    status: StatusPage
    metrics: Metrics
    tenants: TenantTable = field(default_factory=TenantTable)
    tokenizer: ServerTokenizer = field(init=False)
    adapters: AdaptersFile = field(init=False)
    vocab_size: int = 0
    """Number of ids for which the model gives logits."""
    output_width: int = 0
    """Numbers in a row of one additional output; 0 if there are none."""
    running: RunningRequests = field(default_factory=RunningRequests)
    siblings: Siblings | None = None
    """The other HTTP processes; None: this is the only one."""
    ignored: IgnoredLog = field(default_factory=IgnoredLog)
    tracing: Tracing = field(default_factory=Tracing)
    http_spans: HttpSpans | None = None
    """Times of sampled requests for profiles; None: profiles do not show requests to this process."""
    profile_dir: Path = Path()
    profile_turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while the timelines of requests are made events of a profile."""
    launch_file: Path = Path()
    """File with the settings of the launch, which changes when weights are replaced."""
    entrance: Entrance = field(default_factory=Entrance)
    unread: UnreadAnswers = field(default_factory=UnreadAnswers)
    pace: WritePace = field(default_factory=WritePace)
    quiet: QuietStreams = field(init=False)
    json_room: JsonRoom = field(default_factory=JsonRoom)
    probe: asyncio.Task[tuple[str, str]] | None = None
    """The latest request of /health_generate."""
    snapshots: SharedAnswer = field(init=False)
    metric_texts: SharedAnswer = field(init=False)
    """Answers of /metrics, each of which asks the scheduler and takes the loop 1 ms or more."""
    long_answers: FairThreads = field(init=False)
    """Thread that formats long answers. Their cost is their number of bytes."""
    bodies: BodyPool = field(init=False)
    """Room for the large bodies that are read."""
    kept_prompts: BodyPool = field(init=False)
    """Room for the large bodies whose requests are in progress."""
    body_pace: BodyPace = field(init=False)
    places: Places = field(init=False)
    vectors: VectorRoom = field(init=False)
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        config = self.config
        self.tokenizer = ServerTokenizer(
            config.tokenizer,
            config.chat_template,
            config.context_length,
            allow_special_tokens=config.allow_special_tokens,
            has_tenants=config.may_have_tenants,
            is_divided=self._has_several_tenants,
        )
        self.quiet = QuietStreams(config.sse_keep_alive_interval)
        self.adapters = AdaptersFile(None, config.adapter_paths)
        self.snapshots = SharedAnswer(self._snapshot, SNAPSHOT_INTERVAL_S)
        self.metric_texts = SharedAnswer(self._metric_text)
        self.long_answers = FairThreads(
            1,
            "answers",
            self._has_several_tenants,
            max_waiting=MAX_LONG_ANSWER_BYTES,
            queue=("long answers", "the thread that formats them"),
        )
        self.bodies = BodyPool(self._has_several_tenants)
        self.kept_prompts = BodyPool(self._has_several_tenants, size=KEPT_BYTES, use=KEEPING)
        self.body_pace = BodyPace(lambda: self.bodies.num_bodies)
        self.vectors = VectorRoom(self._has_several_tenants)
        self.places = Places(config, self._has_several_tenants, self._is_only_client)

    def begin_trace(self, asked: TracedRequest) -> RequestTrace:
        """Begin the trace of a request. While a profile is taken, every request is sampled, but the collector
        gets no more traces.
        """
        trace = self.tracing.begin(asked)
        if trace.traceparent is None and self.status.read("scheduler").is_profiling:
            return RequestTrace(new_traceparent())
        return trace

    def _has_several_tenants(self) -> bool:
        return self.tenants.is_shared

    def _is_only_client(self) -> bool:
        return self.status.read("detokenizer").num_clients <= 1

    @property
    def max_ids(self) -> int:
        """Return the maximum length of a list of token ids in a body; a longer one is refused without being
        read.
        """
        return max(2 * self.config.context_length, MIN_MAX_IDS)

    @property
    def longest_sequence(self) -> int:
        """Return the maximum number of tokens of a sequence, prompt and output, that the model accepts and
        the KV cache holds.
        """
        context_length = self.config.context_length
        return min(context_length, self.status.read("scheduler").max_len or context_length)

    def check_serving(self) -> None:
        """Check that the launch serves. Raises RequestError (503) or RingClosed if it is not ready as a
        whole, or no longer.
        """
        if self.client.error is not None:
            raise self.client.error
        state = self.status.read("launcher").state
        if state == "failed":
            raise RingClosed("the runtime has failed")
        if state == "draining":
            raise RequestError("the server is shutting down", code="shutting_down", status=503)
        if state != "ready" or not self.client.is_connected:
            raise RequestError("the server is not ready yet", code="not_ready", status=503)

    def processes(self) -> dict[str, ProcessStatus]:
        """Return the slots of the status page by the names of the processes."""
        return {
            process_name(role, index, self.config): self.status.read(role, index)
            for role, index in self.status.slots()
        }

    async def _snapshot(self) -> bytes:
        return msgspec.json.encode(await self.ask(self.client.snapshot))

    async def _metric_text(self) -> bytes:
        info = await self.ask(self.client.server_info)
        return self.metrics.render(self.status.read("scheduler"), info, self.processes())

    async def statistics(self, read: Callable[..., Awaitable[list[Any]]], about: Any) -> list[Any]:
        """Return the statistics that the client's method `read` returns for `about`. Raises RequestError
        (503, 400), RingClosed.
        """
        self.check_serving()
        try:
            return await read(about, timeout=CONTROL_TIMEOUT_S)
        except TimeoutError:
            raise _no_answer() from None

    async def ask(self, question: Callable[..., Awaitable[dict[str, Any]]], *about: Any) -> dict[str, Any]:
        """Return the ring's answer to a control call of the client, made with `about`.

        Raises: RequestError (503) if it does not answer in time or is not ready; RingClosed.
        """
        self.check_serving()
        try:
            return await question(*about, timeout=CONTROL_TIMEOUT_S)
        except TimeoutError:
            raise _no_answer() from None

    async def served_config(self) -> RuntimeConfig:
        """Return the settings with the weights that are served, or that are being loaded."""
        if not self.config.weights_dir:
            return self.config
        return (await asyncio.to_thread(LaunchFile.read, self.launch_file)).config

    def check_model(self, name: str | None) -> None:
        """Check the name of a model. None means the model there is, and so do names that clients send if none
        is set: SGLang's `default`, and an empty one. Raises RequestError (404) for a name that is not served
        here.
        """
        if name not in (None, "", DEFAULT_MODEL, *self.config.model_names):
            raise RequestError(
                f"The model `{name:.100}` does not exist", param="model", code="model_not_found", status=404
            )

    def adapter(self, name: str) -> LoRARequest:
        """Return the adapter with this name. Raises InvalidRequest if there is none."""
        if not self.config.enable_lora:
            raise InvalidRequest(f"lora_path: {NO_LORA}", param="lora_path", code="lora_not_enabled")
        if name not in self.adapters.read():
            raise InvalidRequest(
                f"lora_path: there is no adapter {name!r:.100}", param="lora_path", code="unknown_adapter"
            )
        return LoRARequest(name, 1)

    def served_model(self, name: str | None) -> ServedModel:
        """Return the model or adapter that a request names: `adapter`, or `model:adapter` as in SGLang.
        Raises RequestError (404) for a name that is not served here.
        """
        config = self.config
        if name is not None and config.enable_lora and name not in config.model_names:
            base, colon, adapter = name.rpartition(":")
            if colon and base in config.model_names:
                name = adapter
            if name in self.adapters.read():
                return ServedModel(name, self.adapter(name))
        self.check_model(name)
        return ServedModel(config.model_names[0])


def _no_answer() -> RequestError:
    return RequestError("the runtime has not answered in time", code="timeout", status=503)


def new_id(prefix: str) -> str:
    return f"{prefix}-{random_id()}"
