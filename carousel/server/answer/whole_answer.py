"""WholeAnswer: runs the prompts of a request whose answer is sent as one body, at its end."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Protocol

from carousel.client.core.result import Completion, aborted_completion
from carousel.server.answer.merged_stream import all_results
from carousel.server.answer.running_prompts import RunningPrompts, aborted_by_server
from carousel.server.tenancy.places import HeldPlaces

MANY_CHARS = 8192
"""Number of characters and ids from which on an answer is formatted beside the event loop. So many take up
to 20 ms where they are tool calls.
"""
MANY_COPIED_CHARS = 1 << 18
"""The same for an answer whose text is not parsed. So many take 1 ms, and 4 ms with their ids."""
BYTES_OF_ID = 40
"""Bytes of an id in a list: a pointer, and an integer of Python's."""


class RoomForVectors(Protocol):
    """Room for the vectors of one request, in an HTTP process."""

    async def take(self) -> None:
        """Wait until there is room for one more."""

    def note(self, vector_bytes: int) -> None:
        """Record how many bytes a vector has."""


class WholeAnswer:
    """Run of all prompts, each of which begins when there is room for it."""

    def __init__(
        self,
        prompts: RunningPrompts,
        places: HeldPlaces,
        vectors: RoomForVectors | None,
        at_once: int,
        *,
        is_parsed: bool = False,
    ) -> None:
        """`places` are held for the sequences of `at_once` prompts. `vectors` is None for generated text.
        `is_parsed`: True if the text is to be parsed, as in Format. Parsing may take longer than generation,
        so the places are kept until the caller gives them back.
        """
        self._prompts = prompts
        self._places = places
        self._vectors = vectors
        self._keeps_places = is_parsed
        self._room = asyncio.Semaphore(at_once)
        self._num_unbegun = len(prompts.submissions) - at_once
        """Number of prompts that wait for others of the request to end."""

    async def completions(self) -> list[Completion]:
        """Return the results of all prompts. Raises the first error of any, and aborts the others then."""
        return await all_results(len(self._prompts.submissions), self._begin, self._generate)

    async def _begin(self, number: int) -> None:
        """Wait until there is room for prompt `number`."""
        await self._room.acquire()
        if self._vectors is not None:
            await self._vectors.take()
        await self._prompts.wait_for_turn(number)

    async def _generate(self, number: int) -> Completion:
        """Answer prompt `number`, which has been begun, and leave its room to another one."""
        prompts, vectors = self._prompts, self._vectors
        try:
            with prompts.timer() as timer:
                if number in prompts.aborted:
                    completion = aborted_completion(prompts.submissions[number].sampling.n)
                else:
                    completion = await prompts.open(number).completion()
                    if vectors is not None and completion.embedding is not None:
                        vectors.note(completion.embedding.nbytes)
                if all(output.finish_reason != "abort" for output in completion.outputs):
                    timer.note_finished(completion.usage, prompts.end_reasons(number))
                elif number not in prompts.aborted:
                    raise aborted_by_server()
                if self._num_unbegun:
                    self._num_unbegun -= 1  # the next prompt takes its places
                elif not self._keeps_places:
                    self._places.give_back(prompts.num_sequences)
                return completion
        finally:
            self._room.release()


async def first_piece(
    prompts: RunningPrompts, pieces: Iterator[bytes], completions: Sequence[Completion], *, is_parsed: bool
) -> bytes:
    """Return the first piece of the answer. Long texts and vectors take long to encode: that is done beside
    the event loop, since other callers' tokens must not wait for it. `is_parsed` is that of the Format.
    """
    make_first: Callable[[], bytes] = partial(next, pieces, b"")
    num_chars = sum(len(each.text) + len(each.token_ids) for one in completions for each in one.outputs)
    # Answers in the thread's line are kept meanwhile. It is bounded, and tenants take turns in it.
    if prompts.has_large_parts or num_chars > (MANY_CHARS if is_parsed else MANY_COPIED_CHARS):
        return await prompts.server.long_answers.run(prompts.tenant.name, make_first, _num_bytes(completions))
    return make_first()


def _num_bytes(completions: Sequence[Completion]) -> int:
    """Return the number of bytes that completions hold."""
    of_outputs = sum(
        sys.getsizeof(each.text) + BYTES_OF_ID * len(each.token_ids)
        for completion in completions
        for each in completion.outputs
    )
    return of_outputs + sum(each.num_packed_bytes for each in completions)
