"""Upload of weights that come with requests. On this machine they are written into the run directory and
named. Over TCP they are sent in pieces. Each piece is answered before the next one is sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import time
import uuid
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from carousel.client.core.control import control_result
from carousel.client.core.mailbox import Mailbox
from carousel.client.core.request.submission import RequestOptions, Submission
from carousel.client.core.session import Session
from carousel.lora import PackedWeights, inline_for_wire
from carousel.prompt_tables import table_for_wire
from runtime.base.errors import InvalidRequest, RequestError
from runtime.ring.adapters_file import incoming_in
from runtime.ring.endpoints import Endpoints
from runtime.wire.plan import MAX_PIECE_BYTES, AdapterPiece

PATIENCE_S = 60.0
"""Seconds to wait for one answer."""
Dialogue: TypeAlias = Generator[AdapterPiece, dict[str, Any], None]


class Brought(NamedTuple):
    """Weights or vectors that come with a request."""

    kind: Literal["lora", "prompt"]
    number: int
    packed: PackedWeights


def brought_by(options: RequestOptions) -> list[Brought]:
    """Return the weights and vectors that come with a request. Raises InvalidRequest."""
    config, table = options.get("lora_config"), options.get("prompt_tuning_config")
    inline_for_wire(config)
    table_for_wire(None, table)
    brought: list[Brought] = []
    if config is not None and config.packed is not None:
        brought.append(Brought("lora", config.task_id, config.packed))
    if table is not None:
        brought.append(Brought("prompt", table.number, table.packed))
    return brought


def put(session: Session[Any], submission: Submission, deadline: float | None) -> None:
    """Upload the weights of a request, if it has any and the runtime does not have them, and wait. Raises
    RequestError, RingClosed, TimeoutError.
    """
    for brought in brought_by(submission.options):
        dialogue = _dialogue(brought, session.connection.run_dir)
        answer: dict[str, Any] | None = None
        while (piece := _next(dialogue, answer)) is not None:
            with session.asking("put_adapter", adapter=piece, tenant=submission.tenant) as mailbox:
                last = time.monotonic() + PATIENCE_S
                if deadline is not None and deadline <= last:
                    items = mailbox.take(deadline)
                else:
                    with _naming(brought):
                        items = mailbox.take(last)
            answer = control_result(items[0])


async def put_async(session: Session[Mailbox], submission: Submission) -> None:
    """Do what `put` does, in an event loop."""
    if not submission.options.keys() & {"lora_config", "prompt_tuning_config"}:
        return
    for brought in await asyncio.to_thread(brought_by, submission.options):
        dialogue = _dialogue(brought, session.connection.run_dir)
        answer: dict[str, Any] | None = None
        while (piece := await asyncio.to_thread(_next, dialogue, answer)) is not None:
            asking = session.asking("put_adapter", adapter=piece, tenant=submission.tenant)
            with asking as mailbox, _naming(brought):
                async with asyncio.timeout(PATIENCE_S):
                    items = await mailbox.take_async()
            answer = control_result(items[0])


@contextlib.contextmanager
def _naming(brought: Brought) -> Iterator[None]:
    """Context manager that says in a timeout's error that the upload timed out, since the caller has set the
    timeout for something else.
    """
    try:
        yield
    except TimeoutError:
        param = "lora_config" if brought.kind == "lora" else "prompt_tuning_config"
        raise RequestError(
            f"{param}: the server has not taken it in within {PATIENCE_S:g} s; try again later",
            param=param,
            code="timeout",
            status=503,
        ) from None


def _next(dialogue: Dialogue, answer: dict[str, Any] | None) -> AdapterPiece | None:
    try:
        return next(dialogue) if answer is None else dialogue.send(answer)
    except StopIteration:
        return None


def _dialogue(brought: Brought, run_dir: Path | None) -> Dialogue:
    kind, number, packed = brought
    size = len(packed.weights)
    if len(packed.config) > MAX_PIECE_BYTES:
        raise InvalidRequest("lora_config: config is longer than 1 MiB", param="lora_config")
    answer = yield AdapterPiece(kind, number, packed.digest, size, packed.config)
    if answer["is_resident"]:
        return
    if run_dir is not None:
        folder = _write(packed, run_dir)
        try:
            yield AdapterPiece(kind, number, packed.digest, size, folder=folder.name)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return
    for offset in range(0, size, MAX_PIECE_BYTES):
        data = packed.weights[offset : offset + MAX_PIECE_BYTES]
        yield AdapterPiece(kind, number, packed.digest, size, offset=offset, data=data)


def _write(packed: PackedWeights, run_dir: Path) -> Path:
    """Write the directory of an adapter into the folder of uploads. Raises InvalidRequest."""
    folder = incoming_in(Endpoints(run_dir).inline_adapters) / uuid.uuid4().hex
    try:
        folder.mkdir(parents=True, mode=0o700)
        (folder / "adapter_config.json").write_bytes(packed.config)
        (folder / "adapter_model.safetensors").write_bytes(packed.weights)
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        reason = os.strerror(error.errno or 0)
        raise InvalidRequest(
            f"lora_config: the weights cannot be written: {reason}", param="lora_config"
        ) from None
    return folder
