"""RequestsInFlight: table of the requests of a session that have not ended, and of their sequences.

It gives each request what arrives for it. Several threads may use it: a request is removed once, whichever of
them try.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from carousel.client.core.labels import LabelBook
from carousel.client.core.state.request_state import RequestState
from carousel.client.core.state.sequence_state import SequenceState
from runtime.wire.messages import SequenceOutput

T = TypeVar("T")


class RequestsInFlight:
    def __init__(self, labels: LabelBook) -> None:
        """labels: book in which the labels of requests are held, which it releases when they end."""
        self._labels = labels
        # Taking a request out of it ends the request.
        self._requests: dict[int, RequestState] = {}
        self._sequences: dict[bytes, tuple[RequestState, SequenceState]] = {}
        """Sequences without a terminal message, by the handle of the newest attempt."""
        self._left: dict[bytes, int] = {}
        """Requests, by number, of sequences whose callers have left and whose end has not arrived yet."""

    def __bool__(self) -> bool:
        return bool(self._requests)

    def __iter__(self) -> Iterator[RequestState]:
        """Yield the requests that are there now."""
        return iter(list(self._requests.values()))

    @property
    def num_sequences(self) -> int:
        """Number of sequences without a terminal message."""
        return len(self._sequences)

    def get(self, number: int) -> RequestState | None:
        return self._requests.get(number)

    def of_sequence(self, handle: bytes) -> RequestState | None:
        """Return the request of the sequence whose newest attempt has this handle."""
        known = self._sequences.get(handle)
        return None if known is None else known[0]

    def add(self, request: RequestState) -> None:
        """Add a request that is about to be sent."""
        self._sequences.update((each.handle, (request, each)) for each in request.sequences)
        self._requests[request.number] = request

    def rename(self, old: bytes, request: RequestState, sequence: SequenceState) -> None:
        """Find a sequence by the handle of its newest attempt from now on, and no longer by `old`."""
        self._sequences.pop(old, None)
        self._sequences[sequence.handle] = request, sequence

    def end(self, request: RequestState) -> bool:
        """Remove a request. Returns True for the one caller that has removed it."""
        if self._requests.pop(request.number, None) is None:
            return False
        self.release(request)
        return True

    def release(self, request: RequestState) -> None:
        """Forget the sequences and the label of a request that has been removed."""
        for sequence in request.sequences:
            self._sequences.pop(sequence.handle, None)
        self._labels.release(request.request.tenant, request.request.label, request.number)

    def take_all(self) -> Iterator[RequestState]:
        """Remove all requests, each for only one of the threads that do so."""
        for request in pop_all(self._requests):
            self.release(request)
            yield request

    # -- callers that have left ------------------------------------------------------------------------------

    def note_left(self, request: RequestState) -> None:
        """Note the sequences of a request whose caller leaves, until they end."""
        self._left.update(dict.fromkeys(request.open_handles, request.number))
        for sequence in request.sequences:
            if not sequence.is_open:  # it may have ended a moment ago
                self._left.pop(sequence.handle, None)

    def left(self) -> list[tuple[bytes, int]]:
        """Return the handle and the request's number of each sequence whose caller has left."""
        return list(self._left.items())

    def forget_left(self, handle: bytes) -> None:
        self._left.pop(handle, None)

    # -- what arrives ----------------------------------------------------------------------------------------

    def deliver(self, outputs: Sequence[SequenceOutput]) -> list[RequestState]:
        """Give outputs to their requests, and remove those that end. Returns the requests that have failed
        while other sequences of them are open.
        """
        sequences = self._sequences
        failed: list[RequestState] = []
        for output in outputs:
            known = sequences.get(output.handle)
            if known is None:
                if self._left and output.finish is not None:
                    self._left.pop(output.handle, None)
                continue
            request, sequence = known
            if request.has_logprobs:
                sequence.note_logprobs(output)
            if output.finish is None:
                sequence.ids += output.token_ids
                sequence.num_noted_chars += len(output.text)
            elif self._finish(request, sequence, output):
                failed.append(request)
            request.put(output)
        ended = {output.handle for output in outputs if output.finish is not None} if failed else ()
        for request in failed:
            for sequence in request.sequences:
                sequence.is_open = sequence.is_open and sequence.handle not in ended
        return failed

    def _finish(self, request: RequestState, sequence: SequenceState, output: SequenceOutput) -> bool:
        """Record a terminal message. Returns True if it has ended a request with open sequences."""
        sequence.is_open = False
        if self._left:
            self._left.pop(output.handle, None)
        sequence.ids.clear()  # the sequence is not sent again
        request.num_open -= 1
        self._sequences.pop(output.handle, None)
        # The request is removed before the caller can see the end, because the caller may use the label again
        # at once.
        if not request.num_open:
            self.end(request)
            return False
        assert output.finish is not None
        return output.finish.reason == "error" and self.end(request)


def pop_all(book: dict[int, T]) -> Iterator[T]:
    """Empty a book that other threads use, so that each entry is returned to only one of them."""
    while True:
        try:
            _, entry = book.popitem()
        except KeyError:
            return
        yield entry
