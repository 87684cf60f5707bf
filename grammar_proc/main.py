"""Entry point of the grammar process: builds the loop and runs it until it is told to stop."""

from __future__ import annotations

import gc
import math
import os
import time
from collections.abc import Callable
from pathlib import Path

import zmq

from grammar_proc.compiler import GuideCompiler
from grammar_proc.loop import GrammarLoop
from grammar_proc.open_backend import open_vocabulary
from grammar_proc.vocabulary import MAX_THREADS
from runtime.ring.process import HEARTBEAT_S, ProcessContext, run_process
from runtime.ring.suspects.in_hand import SequencesInHand


def main(context: ProcessContext) -> None:
    num_cores = len(os.sched_getaffinity(0))
    backend = context.config.grammar_backend
    compiler = GuideCompiler(context.config.tokenizer, backend=backend)
    inbox = context.inbox("grammar_in", context.endpoints.grammar_in)
    loop = GrammarLoop(
        inbox,
        context.outbox(context.endpoints.scheduler_in),
        context.outbox(context.endpoints.grammar_out),
        open_vocabulary(backend, Path(context.config.tokenizer), min(MAX_THREADS, num_cores)),
        compiler,
        lambda: context.beat(num_running=loop.num_matchers),
        SequencesInHand.open(context.endpoints),
    )
    compiler.wait_for_child()  # it reads the same vocabulary; guides can be tried only after that
    gc.freeze()
    context.ready()
    while not context.stop.is_set():
        wait_s = loop.turn()
        poller = zmq.Poller()  # the children's files change
        for source in (context.stop_wake.fd, *loop.files):
            poller.register(source, zmq.POLLIN)
        if loop.reads:
            poller.register(inbox.socket, zmq.POLLIN)
        rest(wait_s, lambda: context.beat(num_running=loop.num_matchers), poller.poll)
    loop.close()


def rest(wait_s: float, beat: Callable[[], object], poll: Callable[[int], object]) -> None:
    """Wait for wait_s, or until poll, which gets milliseconds, finds something. Calls `beat` at once and then
    in each heartbeat: an idle process does nothing else.
    """
    until_s = time.monotonic() + wait_s
    poll_s = HEARTBEAT_S / 2  # the first beat may show nothing, because the last one was so short ago
    while True:
        beat()
        left_s = until_s - time.monotonic()
        if poll(math.ceil(max(0.0, min(left_s, poll_s)) * 1000)) or left_s <= poll_s:
            return
        poll_s = HEARTBEAT_S


if __name__ == "__main__":
    run_process("grammar", main)
