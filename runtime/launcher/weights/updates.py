"""WeightUpdates: other weights for a model that is being served, from the request to the answer.

    idle → checking → checked → leaving → trying → idle
                                            └────► going back → idle

    checking    a thread looks at the checkpoint; a disk that hangs delays nothing else
    checked     waits until every process is ready
    leaving     the engine has been told to give way
    trying      an engine is being started with the new weights, which the launch file names from now on
    going back  it could not be: the launch file names the old weights again, and one is started with those

The supervisor ends and starts the processes, as it does after a death. Requests in flight continue as they do
after one: their clients submit them again.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec
import zmq

from runtime.base.errors import Forbidden, InvalidRequest, RequestError
from runtime.launcher.weights.checks import check_new_weights
from runtime.ring.endpoints import Endpoints
from runtime.ring.launch_state import write_atomically
from runtime.ring.process import FIRST_EPOCH, LaunchFile
from runtime.settings.config import RuntimeConfig
from runtime.wire.error_info import error_info
from runtime.wire.messages import ControlReply, ControlRequest, GiveWay
from runtime.wire.outbox import KeepingOutbox
from runtime.wire.plan import NO_UPDATES, WeightsUpdate
from runtime.wire.transport import ZmqOutbox

logger = logging.getLogger(__name__)

GIVE_WAY_S = 5.0
"""Seconds that an engine has to commit its steps and to send the results."""
_NOT_SERVING = RequestError("the launch starts or ends", code="not_ready", status=503)
UpdatePhase: TypeAlias = Literal["idle", "checking", "checked", "leaving", "trying", "going back"]


class _Answer(NamedTuple):
    """The answer to a request for other weights."""

    request: ControlRequest
    body: object
    is_ok: bool

    def reply(self) -> ControlReply:
        raw = msgspec.Raw(msgspec.msgpack.encode(self.body))
        return ControlReply(self.request.client, self.request.number, raw, self.is_ok)

    def answers(self, request: ControlRequest) -> bool:
        return (self.request.client, self.request.number) == (request.client, request.number)


class WeightUpdates:
    def __init__(self, config: RuntimeConfig, endpoints: Endpoints, context: zmq.Context[Any]) -> None:
        """config: settings of the launch. context: for sockets, which end with it."""
        self.wake: Callable[[], None] = lambda: None
        """Ends the wait of the launcher's thread. It is called in another one; everything else in that
        thread.
        """
        self.phase: UpdatePhase = "idle"
        self._launch = LaunchFile(config)
        self._old = self._launch
        """The launch file of the weights that served last."""
        self._endpoints = endpoints
        self._request: ControlRequest | None = None
        self._last: _Answer | None = None
        self._checked: RequestError | str | None = None
        """Directory of the weights, or the reason why they cannot be served, once they were looked at."""
        self._failure = ""
        self._began_at = self._deadline = 0.0
        self._context = context
        self._outboxes: dict[str, KeepingOutbox[Any]] = {}

    def write_launch(self) -> None:
        """Write the launch file of the run directory. Raises OSError."""
        data = msgspec.json.format(msgspec.json.encode(self._launch))
        write_atomically(self._endpoints.config_file, data)

    @property
    def config(self) -> RuntimeConfig:
        """Settings with the weights that engines are started with."""
        return self._launch.config

    @property
    def awaits_end(self) -> bool:
        """True while the engine's end is followed by a start with other weights, whatever its cause."""
        return self.phase in ("leaving", "trying")

    @property
    def grace_s(self) -> float:
        """Seconds that the engine's other processes have to end by themselves when one has ended."""
        return GIVE_WAY_S if self.phase == "leaving" else 0.0

    @property
    def is_overdue(self) -> bool:
        """True if the engine has not given way in time."""
        return self.phase == "leaving" and time.monotonic() > self._deadline

    # -- requests and answers --------------------------------------------------------------------------------

    def receive(self, request: ControlRequest, *, may_begin: bool) -> None:
        """Begin an update. A request that is there already, submitted again after a restart, changes
        nothing. may_begin: False while the launch starts or ends.
        """
        if self._last is not None and self._last.answers(request):
            self._send(self._last)
        elif self._request is None or not _Answer(self._request, None, True).answers(request):
            try:
                self._begin(request, may_begin)
            except RequestError as error:
                self._send(_Answer(request, error_info(error), False))

    def _begin(self, request: ControlRequest, may_begin: bool) -> None:
        if not self.config.weights_dir:
            raise Forbidden(NO_UPDATES)
        if request.weights is None:
            raise InvalidRequest("weights: say which", param="weights")
        if not may_begin:
            raise _NOT_SERVING
        if self._request is not None:
            raise RequestError("other weights are being loaded", code="update_in_progress", status=409)
        self._request, self._checked, self._failure = request, None, ""
        self._began_at = time.monotonic()
        self.phase = "checking"
        arguments = (request, request.weights, self.config)
        threading.Thread(target=self._check, args=arguments, name="carousel-weights", daemon=True).start()

    def _check(self, request: ControlRequest, weights: WeightsUpdate, config: RuntimeConfig) -> None:
        """Look at the checkpoint, in a thread of its own."""
        try:
            found: RequestError | str = check_new_weights(config, weights.path)
        except RequestError as error:
            found = error
        except Exception as error:
            logger.exception("weights could not be checked")
            found = RequestError(f"the weights could not be checked: {type(error).__name__}")
        self._checked = found
        self.wake()

    def _finish(self, body: object, is_ok: bool) -> None:
        assert self._request is not None
        self._last = _Answer(self._request, body, is_ok)
        self._request, self.phase = None, "idle"
        self._send(self._last)

    def _send(self, answer: _Answer) -> None:
        index = answer.request.client % self.config.detokenizer_workers
        self._outbox(self._endpoints.detokenizer_in(index)).send(answer.reply())

    def _outbox(self, address: str) -> KeepingOutbox[Any]:
        if address not in self._outboxes:
            self._outboxes[address] = KeepingOutbox(ZmqOutbox(self._context, address, FIRST_EPOCH).send)
        return self._outboxes[address]

    # -- the change ------------------------------------------------------------------------------------------

    def turn(self, engine_epoch: int, *, is_whole: bool, may_begin: bool) -> None:
        """Continue. is_whole: every process of the launch is ready, with an engine of this epoch. may_begin:
        as in `receive`.
        """
        for outbox in self._outboxes.values():
            outbox.flush()
        if self.phase == "checking" and self._checked is not None:
            self.phase = "checked"
            if isinstance(self._checked, RequestError):
                logger.warning("weights are not replaced: %s", self._checked.message)
                self._finish(error_info(self._checked), False)
        if self.phase == "checked" and not may_begin:
            self._finish(error_info(_NOT_SERVING), False)
        elif self.phase == "checked" and is_whole:
            asked = self._asked()
            self._outbox(self._endpoints.scheduler_in).send(GiveWay(engine_epoch, asked.aborts))
            self.phase, self._deadline = "leaving", time.monotonic() + GIVE_WAY_S

    def _asked(self) -> WeightsUpdate:
        assert self._request is not None
        assert self._request.weights is not None
        return self._request.weights

    def engine_ended(self, reason: str) -> str:
        """Choose the weights of the next engine after the end of one that `awaits_end`. Returns the reason
        for its start.
        """
        if self.phase == "leaving":
            assert isinstance(self._checked, str)
            self._old, self.phase = self._launch, "trying"
            version = self._asked().version or os.path.basename(self._checked)
            new = msgspec.structs.replace(self._old.config, model=self._checked, weight_version=version)
            self._launch = msgspec.structs.replace(self._old, config=new)
            try:
                self.write_launch()
                return f"weights {version} from {self._checked}"
            except OSError as error:
                reason = f"the run directory cannot be written: {error}"
        self.phase, self._failure = "going back", reason
        self._launch = self._old
        try:
            self.write_launch()
        except OSError as error:
            logger.warning("the launch file keeps its content: %s", error)
        return f"back to the weights in {self._launch.config.model}: {reason}"

    def engine_ready(self) -> None:
        """Answer, if the engine that is ready now has been started for an update."""
        if self.phase == "trying":
            path, version = self.config.model, self.config.weight_version
            logger.info("weights %s from %s serve", version, path)
            seconds = round(time.monotonic() - self._began_at, 3)
            self._finish({"model_path": path, "weight_version": version, "seconds": seconds}, True)
        elif self.phase == "going back":
            error = RequestError(
                f"the weights could not be loaded, and the old ones ({self.config.weight_version}) serve: "
                f"{self._failure}",
                code="weights_not_loaded",
            )
            self._finish(error_info(error), False)
