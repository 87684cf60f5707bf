"""Ring in memory whose processes may die, and callers that are real Sessions over connections in memory.

A death has the effect that it has with sockets: messages that the dead process had read are lost, and so are
the last ones that it had written. Messages in its senders' queues are read by the process that replaces it.
"""

from __future__ import annotations

import dataclasses
import random
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from carousel.client.core.mailbox import Mailbox
from carousel.client.core.ring_state import Restart, RestartedRole
from carousel.client.core.session import Session
from detokenizer_proc.clients import Clients
from detokenizer_proc.loop import DetokenizerLoop
from runtime.launcher.deaths.engine_deaths import DeathCounts
from runtime.ring.suspects.roster import NO_SUSPECTS
from runtime.text.incremental import DecoderFactory
from runtime.text.tokenizer import Tokenizer
from runtime.wire.format import PROTOCOL_VERSION
from runtime.wire.messages import UNIONS, AbortRequest, Hello, HelloAck, OutputBatch, TensorBatch, ToTokenizer
from runtime.wire.status_page import ProcessStatus
from runtime.wire.transport import SCHEMA, Frame, MemoryChannel, MessageCodec, with_frames
from scheduler_proc.loop import SchedulerLoop
from tests.harness.ring.detokenizer_ring import SECRET, FakePeers
from tests.harness.ring.memory_ring import MAX_LEN, SETTING
from tests.harness.simulation.fake_sampling import VOCAB_SIZE
from tests.harness.simulation.sim_system import System
from tokenizer_proc.admission import QueueAdmission
from tokenizer_proc.loop import TokenizerLoop
from tokenizer_proc.receipt import Receipt
from tokenizer_proc.validation import QueueBound, Validator

ROLES: tuple[RestartedRole, ...] = ("tokenizer", "engine", "detokenizer")
MAX_LOAD_TURNS = 12
"""A process that takes another's place is ready after so many turns at most."""
MAX_BLIND_TURNS = 5
"""So long, at most, a client does not see that a process is gone."""
MAX_WAITING = 1000
RECOVERY_S = 0.5
"""So long after a process was missing, or a client came back, requests may be made again."""
PIECE_TOKENS = 5
"""Tokens in a piece of an output that is not streamed: so few that outputs here have several."""


class MemoryConnection:
    """The part of a Connection that a Session needs; `turn` does what its thread does."""

    def __init__(
        self,
        ring: MortalRing,
        on_message: Callable[[Any], None],
        on_restart: Callable[[Restart], None],
    ) -> None:
        self.opened: Future[None] = Future()
        self.error = None
        self.max_waiting = MAX_WAITING
        self.generation = 0
        self.client_id = 0
        self._ring = ring
        self._on_message = on_message
        self._on_restart = on_restart
        self._unsent: deque[ToTokenizer] = deque()
        self._hold_until: dict[RestartedRole, int] = {}
        self._peer = b""
        self._codec = MessageCodec(UNIONS["client_out"], 0)
        self._is_open = False
        self.greet()

    def check_usable(self) -> None:
        """This connection never ends."""

    def client_of(self, number: int) -> int:
        return self.client_id

    def lane_of(self, number: int) -> int:
        return 0

    def tokenizer_of(self, number: int) -> int:
        return 0

    def submit(self, message: ToTokenizer, number: int) -> None:
        self._unsent.append(message)

    resubmit = submit

    def abort(self, handles: tuple[bytes, ...], number: int) -> None:
        self._unsent.append(AbortRequest(handles))

    def greet(self) -> None:
        self._is_open = False
        self._peer = self._ring.new_peer(self)
        hello = Hello(PROTOCOL_VERSION, SCHEMA.hex(), client=self.client_id)
        self._ring.peers.incoming.append((self._peer, MessageCodec(UNIONS["client_in"], 0).encode(hello)))

    def turn(self) -> None:
        is_blind = self._ring.rng.random() < 1 / MAX_BLIND_TURNS
        if self._is_open and (self._ring.is_whole or is_blind):
            while self._unsent and self._ring.tokenizer_in.send(self._unsent[0]):
                self._unsent.popleft()

    def note_restart(self, role: RestartedRole) -> None:
        self.generation += 1
        self._on_restart(Restart(role, 0, self.generation))

    def receive(self, frame: bytes, more: tuple[Any, ...]) -> None:
        message = self._codec.decode(frame, any_epoch=True)
        if isinstance(message, HelloAck):
            assert self.client_id in (0, message.client), "a client keeps its id"
            is_first, self.client_id, self._is_open = not self.client_id, message.client, True
            if not is_first:
                self.note_restart("detokenizer")
        elif isinstance(message, OutputBatch | TensorBatch):
            self._on_message(with_frames(message, more))


class MortalRing:
    """`turn` gives each stage that is there one turn, in random order."""

    def __init__(self, loaded: Tokenizer, rng: random.Random, max_waiting: int = MAX_WAITING) -> None:
        self.rng = rng
        self._max_waiting = max_waiting
        self._recovery_at = -RECOVERY_S
        """Time at which a process was missing, last."""
        self.now = 1.0
        self.epoch = 1
        self.num_deaths = dict.fromkeys(ROLES, 0)
        self.tokenizer_in = MemoryChannel("tokenizer_in")
        self._scheduler_in = MemoryChannel("scheduler_in")
        self._detokenizer_in = MemoryChannel("detokenizer_in")
        self._loaded = loaded
        self._connections: dict[bytes, MemoryConnection] = {}
        self._num_peers = 0
        self._ready_at: dict[RestartedRole, float] = {}
        """When what was killed is there again."""
        self.death_counts = DeathCounts()
        self._suspects = NO_SUSPECTS
        self._interrupted: frozenset[bytes] = frozenset()
        """Keys of the sequences that the engine before had."""
        self.peers = FakePeers()
        self._start_engine()
        self._start_tokenizer()
        self._start_detokenizer()

    def close(self) -> None:
        self._tokenizer.close()
        self.system.executor.close()

    # -- callers ---------------------------------------------------------------------------------------------

    def connect(self) -> Session[Mailbox]:
        def make_connection(on_message: Any, on_restart: Any, **_: Any) -> Any:
            return MemoryConnection(self, on_message, on_restart)

        session: Session[Mailbox] = Session(
            make_connection,
            Mailbox,
        )
        while not session.connection.client_id:  # type: ignore[attr-defined]
            self.turn()
        return session

    def new_peer(self, connection: MemoryConnection) -> bytes:
        self._num_peers += 1
        peer = b"peer%d" % self._num_peers
        self._connections = {p: c for p, c in self._connections.items() if c is not connection}
        self._connections[peer] = connection
        return peer

    @property
    def is_whole(self) -> bool:
        return not self._ready_at

    # -- life and death --------------------------------------------------------------------------------------

    def kill(self, role: RestartedRole, *, is_fault: bool = True) -> None:
        """`is_fault`: of the engine, a request may have done that."""
        if role in self._ready_at:
            return
        self.num_deaths[role] += 1
        self._ready_at[role] = self.now + 0.01 * self.rng.randrange(1, MAX_LOAD_TURNS)
        if role == "tokenizer":
            self._tokenizer.close()
            self._lose_first(self.tokenizer_in)
            self._lose_last(self._scheduler_in)
        elif role == "engine":
            seen = self.system.lifecycle.roster.read()
            self._interrupted = frozenset(seen.present)
            if is_fault:
                self._suspects = self.death_counts.count(seen, self.status.solitary, self.now)
            self.system.executor.close()
            self._lose_first(self._scheduler_in)
            self._lose_last(self._detokenizer_in)
        else:
            self._lose_first(self._detokenizer_in)
            self._read_peers()

    def _lose_first(self, channel: MemoryChannel) -> None:
        for _ in range(self.rng.randrange(len(channel._messages) + 1)):
            channel._messages.popleft()

    def _lose_last(self, channel: MemoryChannel) -> None:
        """Lose the last messages that the dead one wrote, which here is all of them."""
        for _ in range(self.rng.randrange(len(channel._messages) + 1)):
            channel._messages.pop()

    def _revive(self) -> None:
        for role, at in list(self._ready_at.items()):
            if self.now < at:
                continue
            del self._ready_at[role]
            self.epoch += 1
            connections = list(self._connections.values())
            if role == "detokenizer":
                self.peers = FakePeers()
                self._start_detokenizer()
                for connection in connections:
                    connection.greet()
                continue
            (self._start_engine if role == "engine" else self._start_tokenizer)()
            for connection in connections:
                connection.note_restart(role)

    def _start_engine(self) -> None:
        setting = dataclasses.replace(SETTING, max_live=SETTING.max_rows + self._max_waiting)
        self.system = System(
            setting,
            self.rng,
            clock=lambda: self.now,
            epoch=self.epoch,
            suspects=self._suspects,
            interrupted=self._interrupted,
            inbox=self._scheduler_in,
        )
        self.system.output._outbox = self._detokenizer_in  # type: ignore[attr-defined]
        self._scheduler_loop = SchedulerLoop(self.system.scheduler)
        self._engine_epoch = self.epoch
        self.status = ProcessStatus(epoch=self.epoch)

    def _start_tokenizer(self) -> None:
        self._tokenizer = TokenizerLoop(
            inbox=self.tokenizer_in,
            scheduler=self._scheduler_in,
            detokenizers=[self._detokenizer_in],
            tokenizer=self._loaded,
            validator=Validator(VOCAB_SIZE, MAX_LEN),
            admission=QueueAdmission(
                QueueBound(self._max_waiting, self._max_waiting, SETTING.max_rows),
                lambda: self.status,
                is_recovering=self._is_recovering,
            ),
            secret=b"k" * 32,
            clock=lambda: Receipt(self.now, self.now),
        )

    def _is_recovering(self) -> bool:
        return self.now - max(self._recovery_at, self._clients.returned_at) < RECOVERY_S

    def _start_detokenizer(self) -> None:
        self._clients = Clients(self.peers, self.epoch, SECRET)
        self.detokenizer = DetokenizerLoop(
            inbox=self._detokenizer_in,
            scheduler=self._scheduler_in,
            clients=self._clients,
            decoders=DecoderFactory(self._loaded),
            eos_token_ids=(0,),
            slow_reader_timeout_s=1e9,
            piece_tokens=PIECE_TOKENS,
            engine_epoch=lambda: self._engine_epoch,
        )

    # -- time ------------------------------------------------------------------------------------------------

    def turn(self) -> None:
        self.now += 0.01
        if self._ready_at:
            self._recovery_at = self.now
        self._revive()
        turns = [
            turn
            for role, turn in (
                ("tokenizer", self._tokenizer.turn),
                ("engine", self._turn_engine),
                ("detokenizer", lambda: self.detokenizer.turn(self.now)),
            )
            if role not in self._ready_at
        ]
        self.rng.shuffle(turns)
        for turn in turns:
            turn()
        self._read_peers()
        for connection in list(self._connections.values()):
            connection.turn()

    def _turn_engine(self) -> None:
        self._scheduler_loop.turn()
        self.status = ProcessStatus(epoch=self._engine_epoch, **self._scheduler_loop.status())  # type: ignore[arg-type]

    def _read_peers(self) -> None:
        sent, self.peers.sent = self.peers.sent, []
        for peer, frame in sent:
            raw: tuple[Frame, ...] = ()
            if self.peers.raw and self.peers.raw[0][0] == peer and self._is_tensor(frame):
                raw = self.peers.raw.pop(0)[2]
            connection = self._connections.get(peer)
            if connection is not None:
                connection.receive(frame, raw)

    @staticmethod
    def _is_tensor(frame: bytes) -> bool:
        return isinstance(MessageCodec(UNIONS["client_out"], 0).decode(frame, any_epoch=True), TensorBatch)

    @property
    def is_at_rest(self) -> bool:
        is_busy = self._tokenizer.is_busy or self.detokenizer.is_busy or not self.system.scheduler.is_idle
        channels = (self.tokenizer_in, self._scheduler_in, self._detokenizer_in)
        return self.is_whole and not is_busy and not any(channel._messages for channel in channels)

    def check(self) -> None:
        """Assert that nothing has leaked. Call at rest."""
        assert self.detokenizer.num_live == 0
        assert not self.detokenizer._sequences._handle_of
        assert not any(client.handles for client in self.detokenizer._clients._by_id.values())
        self.system.scheduler.kv.check()
        self.system.scheduler.lifecycle.check()
        assert self.system.rows.num_free == self.system.rows.max_rows
