"""The API process: an HTTP server on the socket that it inherits, and a client of the ring."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import socket
import sys
from contextlib import suppress
from pathlib import Path

import uvloop

from carousel.client.async_ import AsyncClient
from carousel.server.admin.metrics import Metrics
from carousel.server.admin.siblings import Siblings
from carousel.server.app import make_app
from carousel.server.footprint import Footprint
from carousel.server.garbage import GarbageWatch, collect_new_objects_alone
from carousel.server.http.rare_warnings import make_warnings_rare
from carousel.server.http.server import HttpServer
from carousel.server.server_state import ServerState
from carousel.server.tenancy.tenant_table import TenantTable
from carousel.server.tracing.http_spans import HttpSpans
from carousel.server.tracing.tracing import Tracing, has_opentelemetry, wants_traces
from runtime.base.errors import RequestError
from runtime.checkpoint.checkpoint_config import (
    CheckpointConfig,
    SamplingDefaults,
    config_file,
    read_decoder_keys,
)
from runtime.ring.adapters_file import AdaptersFile
from runtime.ring.process import ProcessContext
from runtime.settings.config import RuntimeConfig

# Interval of checks for the end of the launch. The launcher kills the process a second after asking it to
# end.
TICK_S = 0.05
TENANTS_S = 0.125
"""Seconds between checks for a new table of keys, as in the scheduler."""
SHUTDOWN_S = 0.8
FLUSH_S = 0.2
"""Part of SHUTDOWN_S for traces that wait to be sent."""
MAX_LOGGED_CHARS = 256
"""Maximum number of characters of a path in the access log."""
KEEP_ALIVE_S = 20
"""Seconds for which an idle connection is kept. Callers' HTTP libraries keep them for less (httpx and openai
5 s, aiohttp 15 s), so they close first: a request that meets a connection which the server is closing fails.
"""

logger = logging.getLogger(__name__)

SWITCH_S = 0.001
"""Longest time that the event loop keeps the interpreter lock while the client's thread waits for it."""
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
LARGE_BLOCK_BYTES = 1 << 20
KEPT_BYTES = 8 << 20


def return_large_blocks() -> None:
    """Let malloc return large blocks to the system when they are freed, and keep up to KEPT_BYTES of small
    ones at the end of its heap.

    By default glibc keeps blocks as large as the first one that was freed, up to 32 MiB: bodies of 8 MiB left
    the process with 150 MB. With only the first of these settings it keeps no more than 128 KiB. The memory
    for each piece of a large body then came from the system each time, up to 3 MB of it page by page in a
    turn of the event loop.
    """
    with suppress(AttributeError):  # a C library without mallopt
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_THRESHOLD, LARGE_BLOCK_BYTES)
        mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)


def without_query(record: logging.LogRecord) -> bool:
    """Remove the query from a line of uvicorn's access log, because it may be confidential, and the end of a
    long path, so that no caller fills a disk. A filter of that log.
    """
    if isinstance(record.args, tuple) and len(record.args) == 5:
        client, method, path, *rest = record.args
        path = str(path).partition("?")[0]
        if len(path) > MAX_LOGGED_CHARS:
            path = f"{path[:MAX_LOGGED_CHARS]}..."
        record.args = (client, method, path, *rest)
    return True


def main(context: ProcessContext) -> None:
    logging.getLogger("uvicorn.access").addFilter(without_query)
    make_warnings_rare()
    return_large_blocks()
    sys.setswitchinterval(SWITCH_S)
    # Imported objects stay. Walking them took each full collection 29 ms, and nothing is served meanwhile.
    collect_new_objects_alone()
    uvloop.run(serve(context, watches_garbage=True))


async def serve(context: ProcessContext, *, watches_garbage: bool = False) -> None:
    """Answer from the first moment (/live, /ready), and serve requests once the ring has answered, until
    SIGTERM. `watches_garbage` is True if Python collects only new objects in this process.

    Raises: RingClosed if the ring is gone.
    """
    config = context.config
    client = AsyncClient(context.endpoints.run_dir, connect_timeout=config.start_timeout)
    metrics = Metrics(
        config.model_names[0],
        context.endpoints.run_dir,
        context.index,
        has_vllm_names=config.metrics_names == "vllm",
    )
    checkpoint = CheckpointConfig.read(Path(config.model), config.hf_overrides)
    sampling = checkpoint.sampling
    if config.sampling_defaults == "openai":
        sampling = SamplingDefaults()
    tenants = TenantTable(context.endpoints.tenants_file if config.has_api_keys else None)
    state = ServerState(client, config, sampling, context.status, metrics, tenants)
    state.adapters = AdaptersFile(context.endpoints.adapters_file, config.adapter_paths)
    state.tokenizer.prepared = context.endpoints.tokenizer_file
    state.vocab_size = checkpoint.vocab_size
    if config.additional_outputs:
        state.output_width = read_decoder_keys(config_file(Path(config.model)), config.hf_overrides)[
            "hidden_size"
        ]
    state.tracing = make_tracing(config, metrics)
    state.http_spans = HttpSpans(context.endpoints.run_dir, context.index)
    state.launch_file = context.endpoints.config_file
    state.profile_dir = Path(config.profile_dir or context.endpoints.run_dir)
    if config.api_workers > 1:
        places = [context.endpoints.api_orders(index) for index in range(config.api_workers)]
        state.siblings = Siblings(places, context.index, state.running.abort)
    server = _http_server(state)
    listener = _listening_socket(context.listener_fd, config.slow_reader_timeout)
    serving = asyncio.create_task(server.serve([listener]))
    connecting = asyncio.create_task(client.connect())
    watching = asyncio.create_task(tenants.watch(TENANTS_S))
    garbage = GarbageWatch(Footprint(state, server).now)
    is_ready = False
    try:
        while not context.stop.is_set():
            if connecting.done() and not is_ready:
                connecting.result()
                is_ready = True
                context.ready()
            if client.error is not None:
                raise client.error
            if watching.done():
                watching.result()
            if serving.done():
                raise RuntimeError("the HTTP server has ended") from serving.exception()
            if watches_garbage:
                garbage.look()
            context.beat(num_running=len(server.server_state.tasks))
            await asyncio.sleep(TICK_S)
    finally:
        connecting.cancel()
        watching.cancel()
        if state.siblings is not None:
            state.siblings.close()
        # Every caller gets an answer before the connections are closed.
        error = RequestError("the server is shutting down", code="shutting_down", status=503)
        await client.aclose(client.error or error)
        server.stop()
        await asyncio.wait((serving,), timeout=SHUTDOWN_S - FLUSH_S)
        state.tracing.close(FLUSH_S)


def make_tracing(config: RuntimeConfig, metrics: Metrics) -> Tracing:
    """Return the sender of traces, if there is a collector. Without the packages for it, a variable of the
    environment has no effect; the flag was checked before anything started.
    """
    if not wants_traces(config):
        return Tracing(config.timeline_sample_rate)
    if not has_opentelemetry():
        logger.warning("OTEL_* names a collector, but OpenTelemetry is missing: pip install carousel[otel]")
        return Tracing(config.timeline_sample_rate)
    from carousel.server.tracing.otlp import OtlpTracing

    return OtlpTracing(config, metrics)


def _http_server(state: ServerState) -> HttpServer:
    config = state.config
    level = config.log_level if config.log_level_http == "auto" else config.log_level_http
    return HttpServer(
        make_app(state),
        max_connections=config.max_connections,
        max_per_address=config.max_connections_per_address,
        body_pace=state.body_pace,
        unread=state.unread,
        own_root_path=config.root_path,
        ssl_certfile=config.ssl_certfile or None,
        ssl_keyfile=config.ssl_keyfile or None,
        ws="none",
        lifespan="off",
        timeout_keep_alive=KEEP_ALIVE_S,
        log_config=None,
        log_level=level,
        access_log=level in ("debug", "info"),
        server_header=False,
        proxy_headers=bool(config.proxies),
        forwarded_allow_ips="*" if "*" in config.proxies else config.proxies,
    )


def _listening_socket(fd: int, slow_reader_timeout_s: float) -> socket.socket:
    """Return the launcher's listening socket, which all HTTP processes share."""
    listener = socket.socket(fileno=fd)
    listener.setblocking(False)
    # Every connection inherits the timeout. The kernel ends a connection whose client takes nothing for that
    # long, whatever is being written, even after this process has closed it.
    timeout_ms = max(1, round(1000 * slow_reader_timeout_s))
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_ms)
    return listener
