"""Main program of a detokenizer process: builds the loop and runs it until told to stop."""

from __future__ import annotations

import gc
import time
from pathlib import Path

from detokenizer_proc.clients import Clients, RingShape
from detokenizer_proc.loop import DetokenizerLoop
from detokenizer_proc.router import JoinedChannels, RouterChannel
from runtime.checkpoint.checkpoint_config import CheckpointConfig
from runtime.ring.known_tenants import KnownTenants
from runtime.ring.process import HEARTBEAT_S, ProcessContext, run_process
from runtime.ring.ring_status import ring_status
from runtime.ring.suspects.in_hand import StreamsInHand
from runtime.ring.tcp_gate import TcpGate
from runtime.text.selection import open_decoders, open_tokenizer
from runtime.wire.transport import Waiter

BUSY_WAIT_S = 0.02


def main(context: ProcessContext) -> None:
    config = context.config
    gate = TcpGate.open(config, context.endpoints)
    inbox = context.inbox("detokenizer_in", context.endpoints.detokenizer_in(context.index))
    routers = [RouterChannel(context.zmq, context.endpoints.client_out(context.index))]
    tenants = KnownTenants(context.endpoints.tenants_file)
    if gate is not None:
        tenants.on_change = gate.reload
        address = gate.endpoints.client_out(context.index)
        routers.append(
            RouterChannel(
                gate.context,
                address,
                bind=gate.bind,
                tenant_of=gate.tenant_of,
                note_read=gate.limits.note_read,
            )
        )
    clients = Clients(
        routers[0] if gate is None else JoinedChannels(routers),
        context.epoch,
        context.secret,
        RingShape(
            context.index, config.tokenizer_workers, config.detokenizer_workers, config.max_waiting_of_client
        ),
        ring_status=lambda: ring_status(context.status),
        sees_load=lambda name: tenants.named(name).may("metrics"),
    )
    loop = DetokenizerLoop(
        inbox=inbox,
        scheduler=context.outbox(context.endpoints.scheduler_in),
        clients=clients,
        decoders=open_decoders(open_tokenizer(config.tokenizer, prepared=context.endpoints.tokenizer_file)),
        eos_token_ids=CheckpointConfig.read(Path(config.model), config.hf_overrides).eos_token_ids,
        slow_reader_timeout_s=config.slow_reader_timeout,
        stream_interval=config.stream_interval,
        engine_epoch=lambda: context.status.read_epoch("scheduler"),
        in_hand=StreamsInHand.open_of(context.endpoints, context.index),
    )
    client_sockets = frozenset(router.socket for router in routers)
    waiter = Waiter([inbox.socket, *client_sockets, context.stop_wake.fd])
    # Vocabularies are a million objects that never change: keep the collector from walking them.
    gc.freeze()
    context.ready()

    def beat() -> None:
        context.beat(
            force=True,
            num_running=loop.num_live,
            num_received=loop.num_received,
            num_sent=clients.num_sent,
            num_clients=len(clients),
            recovery_ns=round(clients.returned_at * 1e9),
        )

    # A request that a client sends again may reach a tokenizer before the next turn.
    clients.on_return = beat
    num_live = 0
    while not context.stop.is_set():
        loop.turn(time.monotonic(), have_clients_sent=waiter.has_found(client_sockets))
        now = time.monotonic()
        # Show at once that no sequence is left.
        if context.is_beat_due(now) or (num_live and not loop.num_live):
            beat()
        num_live = loop.num_live
        tenants.refresh(now)
        waiter.wait(BUSY_WAIT_S if loop.is_busy else HEARTBEAT_S / 2)
    if context.is_launch_ending:
        clients.say_farewell(time.monotonic())
    if gate is not None:
        gate.close()


if __name__ == "__main__":
    run_process("detokenizer", main)
