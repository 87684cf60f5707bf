"""Runs of the simulation, recorded at the scheduler's port and replayed from the record.

    python -m tests.harness.simulation.replay FILE      replay the runs of a file

A record has the port's values in order. For a replay a new scheduler gets the same values. If it asks for
something else, or plans another step or sends another message, the replay ends there.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import pickle
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from runtime.base.errors import RequestError
from runtime.ring.tenants import Tenant, Tenants
from runtime.wire.format import Message
from runtime.wire.messages import ToScheduler
from runtime.wire.plan import AdapterFailed, AdapterLoaded, BatchPlan, StepResult
from runtime.wire.transport import Frame, Inbox, Outbox
from scheduler_proc.core.executor import AdapterDevice
from scheduler_proc.core.request import Request
from scheduler_proc.core.scheduled_row import ScheduledRow
from scheduler_proc.features.base import RequestFeature
from scheduler_proc.loop import SchedulerLoop
from scheduler_proc.port import LaunchedStep, Port, Readiness
from tests.harness.models.stand_ins import Adapter, HookOrder, ParityGrammar, WideStart
from tests.harness.simulation.fake_sampling import VOCAB_SIZE
from tests.harness.simulation.fakes import FakeExecutor
from tests.harness.simulation.sim_system import STEP_S, WALL_S, Setting, System
from tests.harness.simulation.simulation import Simulation

NUM_POLLS = 4
"""A grammar is ready after fewer."""
SEEDED_EVERY = 5
"""One in so many runs has the policy that draws from the port."""

encode = msgspec.msgpack.encode


def digest(*parts: Frame) -> bytes:
    h = hashlib.blake2b(digest_size=12)
    for part in parts:
        h.update(part)
    return h.digest()


@dataclasses.dataclass(slots=True)
class Recording:
    """One run. `plans` and `sent` are digests of what the scheduler has made of what it was given."""

    setting: Setting
    rng_seed: int
    traits: dict[bytes, frozenset[str]]
    events: list[tuple[str, Any]] = dataclasses.field(default_factory=list)
    plans: list[bytes] = dataclasses.field(default_factory=list)
    sent: list[bytes] = dataclasses.field(default_factory=list)
    num_turns: int = 0


class Diverged(AssertionError):
    """The replay is another run than the one that was recorded."""


class RecordedOutbox:
    """Notes whether there was room."""

    def __init__(self, outbox: Outbox, recording: Recording) -> None:
        self._outbox = outbox
        self._recording = recording

    def send(self, message: Message, frames: Sequence[Frame] = ()) -> bool:
        has_room = self._outbox.send(message, frames)
        self._recording.events.append(("sent", has_room))
        self._recording.sent.append(digest(encode(message), *frames))
        return has_room

    def close(self) -> None:
        self._outbox.close()


class RecordingPort(Port):
    """Gives what comes, and notes it."""

    def __init__(self, recording: Recording, inbox: Inbox, outboxes: Sequence[Outbox], **fields: Any) -> None:
        self._events = recording.events
        super().__init__(inbox, [RecordedOutbox(each, recording) for each in outboxes], **fields)

    def read_time(self) -> None:
        super().read_time()
        self._events.append(("time", (self.now_s(), self.wall_s())))

    def drain(self, most: int) -> list[ToScheduler]:
        messages = super().drain(most)
        self._events.append(("drained", [encode(message) for message in messages]))
        return messages

    def result(self, handle: LaunchedStep) -> StepResult:
        result = super().result(handle)
        frames = getattr(handle, "frames", ())
        self._events.append(("result", (encode(result), [bytes(frame) for frame in frames])))
        return result

    def adapter_answers(self, device: AdapterDevice) -> Sequence[AdapterLoaded | AdapterFailed]:
        answers = super().adapter_answers(device)
        self._events.append(("adapters", [encode(answer) for answer in answers]))
        return answers

    def is_ready(self, feature: Readiness) -> bool:
        try:
            is_ready = super().is_ready(feature)
        except RequestError as error:
            self._events.append(("ready", (str(error), error.code, error.status)))
            raise
        self._events.append(("ready", is_ready))
        return is_ready

    def is_client_alone(self) -> bool:
        self._events.append(("alone", is_alone := super().is_client_alone()))
        return is_alone

    def new_tenants(self) -> Tenants | None:
        self._events.append(("tenants", tenants := super().new_tenants()))
        return tenants


class ReplayingOutbox:
    def __init__(self, port: ReplayingPort) -> None:
        self._port = port

    def send(self, message: Message, frames: Sequence[Frame] = ()) -> bool:
        self._port.sent.append(digest(encode(message), *frames))
        return bool(self._port.take("sent"))

    def close(self) -> None:
        """There is nothing to close."""


class ReplayingPort(Port):
    """Gives what was noted, and asks nobody."""

    def __init__(self, recording: Recording, inbox: Inbox, num_outboxes: int, **fields: Any) -> None:
        self._events = iter(recording.events)
        self._decode = msgspec.msgpack.Decoder(ToScheduler).decode
        self._decode_answer = msgspec.msgpack.Decoder(AdapterLoaded | AdapterFailed).decode
        self.num_given = 0
        self.sent: list[bytes] = []
        super().__init__(inbox, [ReplayingOutbox(self) for _ in range(num_outboxes)], **fields)

    def take(self, kind: str) -> Any:
        """Raises Diverged unless this was asked for in the recorded run, too."""
        noted, value = next(self._events, ("nothing", None))
        self.num_given += 1
        if noted != kind:
            raise Diverged(f"asked for {kind!r} where {noted!r} was recorded, event {self.num_given}")
        return value

    def read_time(self) -> None:
        self._now_s, self._wall_s = self.take("time")

    def drain(self, most: int) -> list[ToScheduler]:
        return [self._decode(message) for message in self.take("drained")]

    def result(self, handle: Any) -> StepResult:
        self.read_time()
        data, handle.frames = self.take("result")
        return msgspec.msgpack.decode(data, type=StepResult)

    def adapter_answers(self, device: AdapterDevice) -> Sequence[AdapterLoaded | AdapterFailed]:
        answers = [self._decode_answer(answer) for answer in self.take("adapters")]
        assert isinstance(device, FakeExecutor)
        for answer in answers:
            device.settle(answer)
        return answers

    def is_ready(self, feature: Readiness) -> bool:
        verdict = self.take("ready")
        if isinstance(verdict, bool):
            return verdict
        text, code, status = verdict
        raise RequestError(text, code=code, status=status)

    def is_client_alone(self) -> bool:
        return bool(self.take("alone"))

    def new_tenants(self) -> Tenants | None:
        tenants: Tenants | None = self.take("tenants")
        return tenants


class Guesses(HookOrder):
    """A proposer whose guesses follow from the tokens alone."""

    def __init__(self, req: Request) -> None:
        super().__init__()
        self._req = req

    def plan_row(self, row: ScheduledRow[Any]) -> None:
        req = self._req
        room = min(req.num_tokens % 4, req.max_len - req.num_tokens - 1)
        if room > 0 and not req.num_in_flight:
            row.guesses = [(req.tokens.item(-1) + i) % VOCAB_SIZE for i in range(room)]


def feature_of(req: Request, traits: frozenset[str], polls: int) -> RequestFeature | None:
    """A stand-in whose answers follow from the request, but for when it is ready: after so many questions."""
    if "grammar" in traits:
        return ParityGrammar(req, polls, req.num_prompt % 7 == 0, -1)
    if "speculation" in traits:
        return Guesses(req)
    if "adapter" in traits:
        return Adapter(req.namespace + b"x" * (req.seq % 3))
    return WideStart(2) if "wide" in traits else None


class PortedSystem(System):
    """A system that nothing but its port reaches, turned by the loop that the process has."""

    recording: Recording

    def __init__(
        self, recording: Recording, rng: random.Random, feature: Callable[[Request], RequestFeature | None]
    ) -> None:
        self.recording = recording
        self.plans: list[bytes] = []
        self._rng = rng
        self._tenants: Tenants | None = None
        super().__init__(recording.setting, rng, (feature,))

    def begin(self, clock: Callable[[], float]) -> None:
        self.loop = SchedulerLoop(self.scheduler)

    def _check_plan(self, plan: BatchPlan) -> None:
        self.plans.append(digest(encode(plan)))

    def step(self) -> None:
        self.now += STEP_S / 2
        self.loop.turn()
        self.deliver()


class RecordedSystem(PortedSystem):
    """Its time goes on with each reading, as time does."""

    def make_port(self, inbox: Inbox, epoch: int, clock: Callable[[], float]) -> Port:
        aside, setting = random.Random(self.recording.rng_seed), self.recording.setting
        self._tenants = Tenants(setting.tenants) if setting.tenants else None

        def tick() -> float:
            self.now += aside.random() * STEP_S / 2
            return self.now

        return RecordingPort(
            self.recording,
            inbox,
            self.outboxes,
            epoch=epoch,
            clock=tick,
            wall_clock=lambda: WALL_S + self.now,
            new_tenants=self._take_tenants,
            seed=self.recording.rng_seed,
        )

    def change_tenants(self, tenants: tuple[Tenant, ...]) -> None:
        self._tenants = Tenants(tenants)

    def _take_tenants(self) -> Tenants | None:
        tenants, self._tenants = self._tenants, None
        return tenants


class ReplayedSystem(PortedSystem):
    port: ReplayingPort

    def make_port(self, inbox: Inbox, epoch: int, clock: Callable[[], float]) -> Port:
        return ReplayingPort(
            self.recording, inbox, len(self.outboxes), epoch=epoch, seed=self.recording.rng_seed
        )


class RecordedSimulation(Simulation):
    """The simulation's traffic without what does not come through the port: forks, and features that draw."""

    system: RecordedSystem

    def _make_system(self) -> System:
        if self.rng.randrange(SEEDED_EVERY) == 0 and self.setting.policy != "priority":
            self.setting = dataclasses.replace(self.setting, policy="random")
        self.recording = Recording(self.setting, self.rng.getrandbits(64), {})
        return RecordedSystem(self.recording, self.rng, self._features)

    def _features(self, req: Request) -> RequestFeature | None:
        traits = self.recording.traits[req.key] = self.specs[req.key].traits
        return feature_of(req, traits, self.rng.randrange(NUM_POLLS))

    def _fork(self) -> None:
        """It is a call of the simulation's, and no message."""


def record(seed: int, **changes: Any) -> Recording:
    simulation = RecordedSimulation(seed, **changes)
    simulation._run_to_the_end()
    recording, system = simulation.recording, simulation.system
    recording.plans = system.plans
    recording.num_turns = simulation.counts["steps"]
    return recording


def replay(recording: Recording) -> None:
    """Raises Diverged unless all plans and messages come out as they were, byte for byte."""
    traits = recording.traits
    system = ReplayedSystem(
        recording, random.Random(0), lambda req: feature_of(req, traits[req.key], polls=0)
    )
    for turn in range(recording.num_turns):
        system.loop.turn()
        for what, found, wanted in (
            ("plan", system.plans, recording.plans),
            ("message", system.port.sent, recording.sent),
        ):
            if found[-1:] != wanted[len(found) - 1 : len(found)]:
                raise Diverged(f"turn {turn}: {what} {len(found)} is another one")
    if system.port.num_given != len(recording.events):
        raise Diverged("something that was recorded was not asked for")
    if (system.plans, system.port.sent) != (recording.plans, recording.sent):
        raise Diverged("a plan or a message is another one")


def ballast(rng: random.Random) -> Iterator[object]:
    """Objects of many sizes, so that what comes next lies elsewhere and in another order."""
    for _ in range(2000):
        yield bytearray(rng.randrange(600)) if rng.random() < 0.5 else [None] * rng.randrange(40)


def main() -> None:
    logging.disable()
    recordings: list[Recording] = pickle.loads(Path(sys.argv[1]).read_bytes())
    rng = random.Random(hash("another order"))
    kept = []
    for recording in reversed(recordings):
        kept.append([each for each in ballast(rng) if rng.random() < 0.5])
        replay(recording)
    print(len(recordings), sum(len(each.plans) for each in recordings), hash("another order"))


if __name__ == "__main__":
    main()
