"""Time of the client library's session for one output of one sequence: 256 streams, one batch a step,
mailboxes that keep nothing. CPU time, without sockets.

Run: python -m benchmarks.bench_client_delivery
"""

from __future__ import annotations

import statistics
import time
from concurrent.futures import Future
from typing import Any

from carousel.client.core.mailbox import Mailbox
from carousel.client.core.request.submission import Submission
from carousel.client.core.session import Session
from runtime.wire.format import pack_ids
from runtime.wire.messages import Finish, OutputBatch, SequenceOutput, Usage
from runtime.wire.sampling_params import SamplingParams

NUM_STREAMS = 256
NUM_STEPS = 400
NUM_ROUNDS = 15


class NoMailbox(Mailbox):
    """Mailbox of a caller that reads at once."""

    def put(self, item: Any) -> None:
        pass


class NoConnection:
    """Connection that sends nothing."""

    def __init__(self, **_: Any) -> None:
        self.opened: Future[None] = Future()
        self.client_ids = (1,)
        self.generation = 0
        self.max_waiting = NUM_STREAMS

    def check_usable(self) -> None:
        pass

    def client_of(self, _: int) -> int:
        return 1

    def submit(self, *_: Any) -> None:
        pass


def seconds_per_output() -> float:
    session: Session[NoMailbox] = Session(
        NoConnection,  # type: ignore[arg-type]
        NoMailbox,
    )
    sampling = SamplingParams(max_tokens=NUM_STEPS)
    states = [session.open_request(Submission([1, 2, 3], sampling, True))[0] for _ in range(NUM_STREAMS)]
    handles = [state.request.handle for state in states]
    token = pack_ids([7])
    step = OutputBatch(tuple(SequenceOutput(handle, "word ", token) for handle in handles))
    end = Finish("length", Usage(3, NUM_STEPS))
    last = OutputBatch(tuple(SequenceOutput(handle, finish=end) for handle in handles))
    began = time.process_time()
    for _ in range(NUM_STEPS):
        session._deliver(step)
    took_s = time.process_time() - began
    session._deliver(last)
    assert not session._requests
    return took_s / (NUM_STEPS * NUM_STREAMS)


def main() -> None:
    times = [1e6 * seconds_per_output() for _ in range(NUM_ROUNDS)]
    print(f"{statistics.median(times):.3f} us per output and sequence; least {min(times):.3f}")


if __name__ == "__main__":
    main()
