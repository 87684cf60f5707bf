"""write_events: runs the prompts of a request and writes their output as it comes."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import aclosing

import msgspec

from carousel.client.core.result import Delta
from carousel.client.core.streams import AsyncResultStream
from carousel.server.answer.formats import StreamFormat
from carousel.server.answer.merged_stream import merged
from carousel.server.answer.running_prompts import RunningPrompts, aborted_by_server
from carousel.server.answer.sse import LARGE_WRITE_BYTES, AnswerWriter
from carousel.server.tenancy.places import HeldPlaces

DELTAS_AT_ONCE = 128
"""Number of events of one step that are spelled before other tasks of the event loop run: about 2 ms."""
LARGE_DELTA = 8
"""Number of tokens with log-probabilities from which on a delta is spelled in a turn of its own. Single steps
bring fewer.
"""


async def write_events(
    prompts: RunningPrompts, places: HeldPlaces, writer: AnswerWriter, answer: StreamFormat
) -> bytes:
    """Write the result of each step in one piece, or a large one in several, so that other tasks of the event
    loop can run in between. Returns the last piece, which is not written: it goes with the end of the answer.
    """
    server, tenant = prompts.server, prompts.tenant.name
    has_logprobs = prompts.has_logprobs
    data = b""
    with prompts.timers() as timers, server.quiet.watched(writer, answer.keeps_open) as quiet:
        streams = [prompts.open(number) for number in range(len(prompts.submissions))]
        for stream in streams:
            stream.keeps_logprobs = False
        async with aclosing(merged(streams, prompts.wait_for_turn)) as batches:
            async for batch in batches:
                quiet.is_between = False
                batch.reverse()
                for position in range(1, len(batch) + 1):
                    prompt, delta = batch.pop()  # it goes as soon as its events have what they need
                    if not position % DELTAS_AT_ONCE or (has_logprobs and _is_large(delta)):
                        await server.entrance.take_turn(tenant)
                    timers[prompt].note_delta(delta)
                    is_early = delta.finish_reason == "abort" and prompt not in prompts.aborted
                    if is_early:
                        if not writer.has_begun:
                            raise aborted_by_server()
                        # Output that came with the end is sent before the error.
                        delta = msgspec.structs.replace(delta, finish_reason=None, usage=None)
                    if delta.finish_reason is not None:
                        places.give_back(1)
                    is_done = streams[prompt].done_with_logprobs(delta) if has_logprobs else _nothing
                    spelled = answer.events(prompt, delta)
                    del delta
                    for number, events in enumerate(spelled):
                        data = data + events if data else events
                        if number:
                            await server.entrance.take_turn(tenant)
                        if len(data) >= LARGE_WRITE_BYTES:
                            await writer.write(data)
                            # Events that repeat the earlier text hold more tokens, the longer they get.
                            cost = answer.write_cost * len(data)
                            await server.pace.spend(tenant, cost)
                            data = b""
                    is_done()
                    if is_early:
                        if data:
                            await writer.write(data)
                        raise aborted_by_server()
                if data and places.num_sequences:
                    if not writer.try_write(data):
                        await writer.write(data)
                    data = b""
                quiet.is_between, quiet.line = True, answer.keeps_open
    return data


def num_kept_bytes(answer: StreamFormat, streams: Mapping[int, AsyncResultStream]) -> int:
    """Return the number of bytes of a stream that are kept: of logprobs, and of output that has come."""
    return answer.num_kept_bytes + sum(stream.num_kept_bytes for stream in streams.values())


def _is_large(delta: Delta) -> bool:
    return len(delta.logprobs) + len(delta.prompt_logprobs) > LARGE_DELTA


def _nothing() -> None:
    pass
