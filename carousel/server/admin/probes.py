"""Probes of operators: /live, /ready and /health, answered from the status page, and /health_generate, which
sends a request through the whole ring.
"""

from __future__ import annotations

import asyncio
from typing import Literal, TypeAlias

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from carousel.server.server_state import ServerState
from runtime.base.errors import CarouselError, Overloaded
from runtime.ring.liveness import is_stopped, may_be_silent
from runtime.ring.process import process_name
from runtime.settings.config import RuntimeConfig
from runtime.wire.sampling_params import SamplingParams
from runtime.wire.status_page import StatusPage

STALLED_S = 2.5
PROBE_TIMEOUT_S = 20.0
"""Seconds until /health_generate gives up, as in SGLang."""
PROBE_PRIORITY = 1000
"""The highest priority, so that the probe does not wait behind other requests."""
ROLES = ("launcher", "worker", "scheduler", "tokenizer", "detokenizer")
Problem: TypeAlias = tuple[str, str]
"""Process that is not ready, and the reason; both empty if all are ready."""


class ProbeAnswer(msgspec.Struct, omit_defaults=True):
    status: Literal["live", "ready", "not ready"]
    role: str | None = None
    """Role of the process that is not ready."""
    reason: str | None = None
    """Reason for which it is not ready."""
    loaded: float | None = None
    """Share of the weights that is loaded, 0 to 1, while they are being loaded."""


async def live(_: Request) -> Response:
    """Answer that this process is alive. It says nothing about the others."""
    return Response(msgspec.json.encode(ProbeAnswer("live")), media_type="application/json")


async def ready(request: Request) -> Response:
    """Answer 200 if a request would be served, else 503 with the process that is not ready."""
    server: ServerState = request.app.state.server
    return _answer(*_seen(server), loaded=_loaded(server.status, server.config))


async def health_generate(request: Request) -> Response:
    """Answer as `ready`, after one token has been generated (by an embedding server: one vector). Callers who
    come while a probe is running share its answer, so that many probes do not make many requests.
    """
    server: ServerState = request.app.state.server
    role, problem = _seen(server)
    if not role:
        probe = server.probe
        if probe is None or probe.done():
            probe = server.probe = asyncio.create_task(_try_a_request(server))
        role, problem = await asyncio.shield(probe)
    return _answer(role, problem)


async def _try_a_request(server: ServerState) -> Problem:
    try:
        await _go_round(server)
    except Overloaded:
        pass  # a full queue is not unhealthy, and the processes are ready
    except TimeoutError:
        return "scheduler", f"no answer within {PROBE_TIMEOUT_S:g} s"
    except CarouselError as error:
        return "scheduler", str(error)
    return "", ""


async def _go_round(server: ServerState) -> None:
    """Send a request of one token id that every vocabulary has, and wait for its end. Raises CarouselError,
    TimeoutError.
    """
    if server.config.task == "embed":
        await server.client.embed([0], timeout=PROBE_TIMEOUT_S, priority=PROBE_PRIORITY)
    else:
        one_token = SamplingParams(max_tokens=1, temperature=0.0)
        await server.client.generate([0], one_token, timeout=PROBE_TIMEOUT_S, priority=PROBE_PRIORITY)


def _seen(server: ServerState) -> Problem:
    """Return what `_problem` does, and also consider this process's own connection."""
    role, problem = _problem(server.status, server.config)
    if not role and not server.client.is_connected:
        return "api", "not connected"
    return role, problem


def _loaded(page: StatusPage, config: RuntimeConfig) -> float | None:
    """Return the smallest share of loaded weights among the ranks; None if no rank is loading."""
    # The first rank is in the scheduler's process, except on a CPU.
    loaders = [("worker", index) for index in range(page.counts["worker"]) if index or config.device == "cpu"]
    if config.device != "cpu":
        loaders.append(("scheduler", 0))
    slots = [page.read(role, index) for role, index in loaders]
    loading = [slot.loaded for slot in slots if slot.state != "ready"]
    return round(min(loading), 3) if loading else None


def _answer(role: str, problem: str, loaded: float | None = None) -> Response:
    if not role:
        return Response(msgspec.json.encode(ProbeAnswer("ready")), media_type="application/json")
    body = msgspec.json.encode(ProbeAnswer("not ready", role, problem, loaded))
    return Response(body, 503, {"Retry-After": "1"}, media_type="application/json")


def _problem(page: StatusPage, config: RuntimeConfig) -> Problem:
    """Return the first process that is not ready, and the reason."""
    scheduler = page.read("scheduler")
    slots = [(role, index) for role in ROLES for index in range(page.counts[role])]
    for role, index in slots:
        if role == "worker" and index == 0 and config.device != "cpu":
            continue  # its part of the model is in the scheduler's process
        status = page.read(role, index)
        # The launcher waits for all others, so its own state counts only if they are all ready.
        if status.state != "ready" and not (role == "launcher" and status.state == "loading"):
            return process_name(role, index, config), status.state
        if is_stopped(status.pid):
            return process_name(role, index, config), "stopped"
        limit_s = config.step_timeout if may_be_silent(role, config, scheduler) else STALLED_S
        if status.age_s() > limit_s:
            return process_name(role, index, config), f"no sign of life for {limit_s:g} s"
    if page.read("scheduler").is_paused:
        return "scheduler", "generation is paused"
    launcher = page.read("launcher")
    return ("", "") if launcher.state == "ready" else ("launcher", launcher.state)
