"""Bounds of what waits for somebody slow, and nobody else waits for it."""

from __future__ import annotations

import msgspec
import pytest

from detokenizer_proc.router import Delivery
from runtime.text.tokenizer import Tokenizer
from runtime.wire.messages import Ping, TensorBatch, TensorEntry
from runtime.wire.transport import MemoryChannel
from scheduler_proc.core import output as scheduler_output
from scheduler_proc.core.output import DetokenizerOutput
from tests.harness.ring.detokenizer_ring import SLOW_S, FakePeers, Ring
from tests.harness.ring.tokenizer_ring import LONG_TEXT, GatedTokenizer, request
from tests.harness.ring.tokenizer_ring import Ring as TokenizerRing
from tokenizer_proc import arrivals

ONE_ROW = b"\0" * 8


class FullForRawFrames(FakePeers):
    """Peers whose sockets have room for small things, and none for raw frames."""

    def send(self, peer: bytes, frame: bytes, more: object = ()) -> Delivery:
        return Delivery.FULL if more else super().send(peer, frame)


def test_a_ping_that_goes_through_is_no_sign_that_output_is_read(demo: Tokenizer) -> None:
    peers = FullForRawFrames()
    ring = Ring(demo, peers)
    ring.peers = peers
    ring.client = ring.connect(b"peer")
    handle = ring.open(ring.handle())
    entry = TensorEntry(handle, "generation_logits", "float32", (1, 2), 0)
    ring.inbox.send(TensorBatch((entry,)), (ONE_ROW,))
    num_pings = 0
    while ring.now < SLOW_S:
        ring.say(Ping(ring.client))
        ring.now += 1.0
        ring.loop.turn(ring.now)
        num_pings += sum(isinstance(message, Ping) for message in ring.received())
    assert num_pings >= SLOW_S / 2, "it was not pinged"
    ring.say(Ping(ring.client))
    ring.now += 1.0
    ring.turn()
    assert ring.loop.num_live == 0, "its sequence goes on although nobody reads it"


def test_a_long_text_is_refused_when_too_much_waits_and_short_ones_go_on(
    demo: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = 5
    monkeypatch.setattr(arrivals, "MAX_TENANT_CHARS", room * len(LONG_TEXT))
    gated = GatedTokenizer(demo)
    ring = TokenizerRing(gated)
    try:
        ring.send(*(request(number, text=LONG_TEXT) for number in range(room + 3)))
        ring.send(request(1000, text="short"))
        while ring.loop.turn():
            pass
        refused = ring.refusals()
        assert len(refused) == 3
        assert {failed.error.status for failed in refused} == {503}
        assert all(failed.error.retry_after_s > 0 for failed in refused)
        (short,) = ring.scheduler.drain()
        assert short.handle == request(1000).handle
    finally:
        gated.gate.set()
        ring.loop.close()


def test_what_is_opened_for_a_stuck_detokenizer_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_output, "MAX_BACKLOG_BYTES", 1000)
    output = DetokenizerOutput(MemoryChannel("detokenizer_in", capacity=0))
    for number in range(9):
        output.open(b"%016d" % number, msgspec.Raw(b"\0" * 100))
        assert not output.is_full
    output.open(b"%016d" % 9, msgspec.Raw(b"\0" * 100))
    assert output.is_full
