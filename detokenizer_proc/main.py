"""The detokenizer process: puts the loop together and runs it until it is told to stop."""

from __future__ import annotations

import gc
import time
from pathlib import Path

from detokenizer_proc.clients import Clients
from detokenizer_proc.loop import DetokenizerLoop
from detokenizer_proc.router import RouterChannel
from runtime.model_config import ModelConfig
from runtime.process import HEARTBEAT_S, ProcessContext, run_process
from runtime.transport import Waiter
from text import tokenizer
from text.incremental import DecoderFactory

BUSY_WAIT_S = 0.02


def main(context: ProcessContext) -> None:
    config = context.config
    inbox = context.inbox("detokenizer_in", context.endpoints.detokenizer_in)
    router = RouterChannel(context.zmq, context.endpoints.client_out)
    loop = DetokenizerLoop(
        inbox=inbox,
        scheduler=context.outbox(context.endpoints.scheduler_in),
        clients=Clients(router, context.epoch),
        decoders=DecoderFactory(tokenizer.load(Path(config.tokenizer))),
        eos_token_ids=ModelConfig.from_path(Path(config.model)).eos_token_ids,
        slow_reader_timeout_s=config.slow_reader_timeout,
    )
    waiter = Waiter([inbox.socket, router.socket])
    # Vocabularies are a million objects that never change: keep the collector from walking them.
    gc.freeze()
    context.ready()
    while not context.stop.is_set():
        context.beat(num_running=loop.num_live)
        loop.turn(time.monotonic())
        waiter.wait(BUSY_WAIT_S if loop.is_busy else HEARTBEAT_S / 2)


if __name__ == "__main__":
    run_process("detokenizer", main)
