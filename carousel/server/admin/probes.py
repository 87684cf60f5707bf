"""/live, /ready, /health: what the operator's probes ask, answered from the status page. /health_generate
sends a request of its own through the whole ring.
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
"""Timeout of /health_generate, which is SGLang's."""
PROBE_PRIORITY = 1000
"""The highest, so that it does not wait behind what others have asked for."""
ROLES = ("launcher", "worker", "scheduler", "tokenizer", "detokenizer")
Problem: TypeAlias = tuple[str, str]
"""Process that is not ready, and why; both empty when all are."""


class ProbeAnswer(msgspec.Struct, omit_defaults=True):
    status: Literal["live", "ready", "not ready"]
    role: str | None = None
    """Role of the process in the way."""
    reason: str | None = None
    """Problem of the process in the way."""
    loaded: float | None = None
    """Share of the weights that is there, 0 to 1, while they are loaded."""


async def live(_: Request) -> Response:
    """This process answers; it says nothing of the others."""
    return Response(msgspec.json.encode(ProbeAnswer("live")), media_type="application/json")


async def ready(request: Request) -> Response:
    """200 when a request would be served, else 503 with the process that is in the way."""
    server: ServerState = request.app.state.server
    return _answer(*_seen(server), loaded=_loaded(server.status, server.config))


async def health_generate(request: Request) -> Response:
    """Answer as `ready`, after one token has been generated (by an embedding server: one vector made) to show
    it. Who asks while one is on its way waits for that one: a crowd that asks makes no crowd of requests.
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
        pass  # a full queue is no illness, and what `ready` looks at is well
    except TimeoutError:
        return "scheduler", f"no answer within {PROBE_TIMEOUT_S:g} s"
    except CarouselError as error:
        return "scheduler", str(error)
    return "", ""


async def _go_round(server: ServerState) -> None:
    """A request of one token id, which every vocabulary has. Raises CarouselError, TimeoutError."""
    if server.config.task == "embed":
        await server.client.embed([0], timeout=PROBE_TIMEOUT_S, priority=PROBE_PRIORITY)
    else:
        one_token = SamplingParams(max_tokens=1, temperature=0.0)
        await server.client.generate([0], one_token, timeout=PROBE_TIMEOUT_S, priority=PROBE_PRIORITY)


def _seen(server: ServerState) -> Problem:
    """Same as `_problem`, with this process's own connection."""
    role, problem = _problem(server.status, server.config)
    if not role and not server.client.is_connected:
        return "api", "not connected"
    return role, problem


def _loaded(page: StatusPage, config: RuntimeConfig) -> float | None:
    """Share of the weights that the rank with the fewest has; None while nobody loads any."""
    # The first rank's part of the model is in the scheduler's process, but for a CPU's.
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
    """Return the first process that is not ready, and why."""
    scheduler = page.read("scheduler")
    slots = [(role, index) for role in ROLES for index in range(page.counts[role])]
    for role, index in slots:
        if role == "worker" and index == 0 and config.device != "cpu":
            continue  # its part of the model is in the scheduler's process
        status = page.read(role, index)
        # The launcher waits for all others; it is in the way only when none of them is.
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
