"""Three loops of a ring and their channels in memory, around a fake worker, driven by random callers."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from detokenizer_proc.clients import Clients
from detokenizer_proc.loop import DetokenizerLoop
from runtime.text.incremental import DecoderFactory
from runtime.text.tokenizer import Tokenizer
from runtime.wire.format import PROTOCOL_VERSION, Message, pack_ids
from runtime.wire.handle import make_handle, split_handle
from runtime.wire.messages import (
    UNIONS,
    AbortRequest,
    Finish,
    GenerateRequest,
    Hello,
    HelloAck,
    OutputBatch,
    Ping,
)
from runtime.wire.sampling_params import SamplingParams
from runtime.wire.status_page import ProcessStatus
from runtime.wire.transport import SCHEMA, MemoryChannel, MessageCodec
from scheduler_proc.loop import SchedulerLoop
from scheduler_proc.scheduler import Scheduler
from tests.harness.ring.detokenizer_ring import SECRET, FakePeers
from tests.harness.simulation.fake_sampling import VOCAB_SIZE
from tests.harness.simulation.sim_system import Setting, System
from tokenizer_proc.admission import QueueAdmission
from tokenizer_proc.loop import TokenizerLoop
from tokenizer_proc.receipt import Receipt
from tokenizer_proc.validation import QueueBound, Validator

EPOCH = 1
MAX_LEN = 96
MAX_ROWS = 8
MAX_WAITING = 16
SLOW_S = 0.5
SETTING = Setting(
    page_size=4,
    num_pages=200,
    max_rows=MAX_ROWS,
    max_len=MAX_LEN,
    depth=2,
    feeds_back=True,
    budget=64,
    policy="fcfs",
    cache="radix",
    conservativeness=1.0,
    num_slots=0,
    refusal=0.0,
    num_requests=0,
    max_output=8,
    turbulence=0.0,
)


class Caller:
    """One client: what it asked, what came back. It may stop reading, and leave without a word."""

    def __init__(self, peer: bytes) -> None:
        self.peer = peer
        self.id = 0
        self.num_asked = 0
        self.live: set[bytes] = set()
        self.finished: dict[bytes, Finish] = {}


class MemoryRing:
    """Everything between the callers and the fake worker; `turn` gives each loop one turn in random order."""

    def __init__(self, loaded: Tokenizer, rng: random.Random, *, capacity: int) -> None:
        self._rng = rng
        self.now = 1.0
        self._tokenizer_in = MemoryChannel("tokenizer_in", EPOCH, capacity)
        scheduler_in = MemoryChannel("scheduler_in", EPOCH, capacity)
        detokenizer_in = MemoryChannel("detokenizer_in", EPOCH, capacity)
        self._system = System(SETTING, rng, clock=lambda: self.now, inbox=scheduler_in)
        self.scheduler: Scheduler = self._system.scheduler
        self.channels = (self._tokenizer_in, scheduler_in, detokenizer_in)
        self._system.output._outbox = detokenizer_in  # type: ignore[attr-defined]
        self._scheduler_loop = SchedulerLoop(self.scheduler)
        self.tokenizer = TokenizerLoop(
            inbox=self._tokenizer_in,
            scheduler=scheduler_in,
            detokenizers=[detokenizer_in],
            tokenizer=loaded,
            validator=Validator(VOCAB_SIZE, MAX_LEN),
            admission=QueueAdmission(QueueBound(MAX_WAITING, MAX_WAITING, MAX_ROWS), lambda: self.status),
            secret=SECRET,
            clock=lambda: Receipt(self.now, self.now),
        )
        self.peers = FakePeers()
        self.detokenizer = DetokenizerLoop(
            inbox=detokenizer_in,
            scheduler=scheduler_in,
            clients=Clients(self.peers, EPOCH, SECRET),
            decoders=DecoderFactory(loaded),
            eos_token_ids=(0,),
            slow_reader_timeout_s=SLOW_S,
        )
        self.status = ProcessStatus()
        self.callers: dict[bytes, Caller] = {}
        self.outcomes: Counter[str] = Counter()
        self._to_client = MessageCodec(UNIONS["client_out"], EPOCH)
        self._from_client = MessageCodec(UNIONS["client_in"], EPOCH)
        self._num_callers = 0

    def close(self) -> None:
        self.tokenizer.close()
        self._system.executor.close()

    # -- callers ---------------------------------------------------------------------------------------------

    def connect(self) -> Caller:
        caller = Caller(b"peer%d" % self._num_callers)
        self._num_callers += 1
        self.callers[caller.peer] = caller
        self._say(caller, Hello(PROTOCOL_VERSION, SCHEMA.hex()))
        while not caller.id:
            self.turn()
        return caller

    def leave(self, caller: Caller) -> None:
        del self.callers[caller.peer]
        self.peers.gone.add(caller.peer)
        self.peers.full.discard(caller.peer)

    def ask(self, caller: Caller) -> bytes | None:
        """Submit a short request; None: there was no room."""
        rng = self._rng
        handle = make_handle(caller.id, caller.num_asked)
        sampling = SamplingParams(
            seed=rng.randrange(1 << 30),
            max_tokens=rng.randrange(1, 9),
            stop=tuple(rng.sample("!\"#$%&'()*+,-./0123456789:;", rng.choice([0, 0, 8]))),
        )
        prompt = rng.choices(range(3, VOCAB_SIZE), k=rng.randrange(1, 12))
        request = GenerateRequest(handle, sampling, input_ids=pack_ids(prompt), stream=rng.random() < 0.5)
        if not self._tokenizer_in.send(request):
            return None
        caller.num_asked += 1
        caller.live.add(handle)
        return handle

    def abort(self, caller: Caller, *handles: bytes) -> bool:
        """Abort these, or with none named all of the caller's."""
        return self._tokenizer_in.send(AbortRequest(handles, 0 if handles else caller.id))

    def _say(self, caller: Caller, message: Message) -> None:
        self.peers.incoming.append((caller.peer, self._from_client.encode(message)))

    # -- time ------------------------------------------------------------------------------------------------

    def turn(self) -> None:
        self.now += 0.01
        turns = [self.tokenizer.turn, self._turn_scheduler, self._turn_detokenizer]
        self._rng.shuffle(turns)
        for turn in turns:
            turn()
        self._read()

    def _turn_scheduler(self) -> None:
        self._scheduler_loop.turn()
        self.status = ProcessStatus(**self._scheduler_loop.status())  # type: ignore[arg-type]

    def _turn_detokenizer(self) -> None:
        if int(self.now * 100) % 100 == 0:
            for caller in self.callers.values():
                self._say(caller, Ping(caller.id))
        self.detokenizer.turn(self.now)
        for caller in list(self.callers.values()):
            if caller.id and self.detokenizer._clients.get(caller.id) is None:
                # It has not read for so long that nothing is sent to it any more, so it hears nothing and
                # gives the ring up.
                assert caller.peer in self.peers.full
                self.outcomes["given up"] += len(caller.live)
                self.leave(caller)

    def _read(self) -> None:
        sent, self.peers.sent = self.peers.sent, []
        for peer, frame in sent:
            caller = self.callers.get(peer)
            if caller is None:
                continue
            message: Any = self._to_client.decode(frame)
            if isinstance(message, HelloAck):
                caller.id = message.client
            elif isinstance(message, OutputBatch):
                for output in message.outputs:
                    assert output.handle in caller.live, f"{split_handle(output.handle)}: after its terminal"
                    if output.finish is not None:
                        self._end(caller, output.handle, output.finish)

    def _end(self, caller: Caller, handle: bytes, finish: Finish) -> None:
        caller.live.discard(handle)
        caller.finished[handle] = finish
        self.outcomes[finish.error.code if finish.error else finish.reason] += 1

    def run_until_rest(self, max_turns: int = 20_000) -> None:
        """Turn until everybody has every answer and nothing is left anywhere."""
        for _ in range(max_turns):
            self.turn()
            if not any(caller.live for caller in self.callers.values()) and self.is_at_rest:
                return
        raise AssertionError(f"no rest: {[len(caller.live) for caller in self.callers.values()]}")

    @property
    def is_at_rest(self) -> bool:
        is_busy = self.tokenizer.is_busy or self.detokenizer.is_busy or not self.scheduler.is_idle
        return not is_busy and not any(channel._messages for channel in self.channels)

    def check(self) -> None:
        """Assert that nothing has leaked. Call at rest."""
        assert self.detokenizer.num_live == 0
        assert not self.detokenizer._sequences._handle_of
        assert not any(client.handles for client in self.detokenizer._clients._by_id.values())
        assert all(channel.bad_frames.count == 0 for channel in self.channels)
        self.scheduler.kv.check()
        self.scheduler.lifecycle.check()
