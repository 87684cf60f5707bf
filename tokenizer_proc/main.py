"""The tokenizer process: puts the loop together and runs it until it is told to stop."""

from __future__ import annotations

import gc
import os
from pathlib import Path

from runtime.model_config import ModelConfig
from runtime.process import HEARTBEAT_S, ProcessContext, run_process
from runtime.transport import Waiter
from text import tokenizer
from tokenizer_proc.loop import TokenizerLoop
from tokenizer_proc.validation import Admission, Validator

BUSY_WAIT_S = 0.005
SECRET_BYTES = 32


def main(context: ProcessContext) -> None:
    config = context.config
    chat_template = Path(config.chat_template) if config.chat_template else None
    inbox = context.inbox("tokenizer_in", context.endpoints.tokenizer_in)
    loop = TokenizerLoop(
        inbox=inbox,
        scheduler=context.outbox(context.endpoints.scheduler_in),
        detokenizer=context.outbox(context.endpoints.detokenizer_in),
        tokenizer=tokenizer.load(Path(config.tokenizer), chat_template=chat_template),
        validator=Validator(ModelConfig.from_path(Path(config.model)).vocab_size, config.context_length),
        admission=Admission(max_waiting=config.max_waiting, max_running=config.max_running_requests),
        scheduler_status=lambda: context.status.read("scheduler"),
        secret=os.urandom(SECRET_BYTES),
    )
    waiter = Waiter([inbox.socket])
    # Vocabularies are a million objects that never change: keep the collector from walking them.
    gc.freeze()
    context.ready()
    while not context.stop.is_set():
        context.beat()
        if loop.turn():
            continue
        if loop.is_busy:
            # Reading has stopped, so the socket may be readable all the time: sleep by the clock instead.
            context.stop.wait(BUSY_WAIT_S)
        else:
            waiter.wait(HEARTBEAT_S / 2)
    loop.close()


if __name__ == "__main__":
    run_process("tokenizer", main)
