"""TextStream: one sequence on its way to its client.

Owns its text, its stop strings, its usage and its terminal. Knows no socket and no other sequence.

    tokens ──► decoder ──► stop strings ──► parts ──► SequenceOutput
               (holds an    (hold what may   (what has not
                incomplete   become one)      been sent yet)
                character)
"""

from __future__ import annotations

from typing import Protocol

from detokenizer_proc.logprobs import LogprobColumns
from detokenizer_proc.stop_strings import StopStringMatcher
from runtime.messages import Closed, ErrorInfo, Finish, SequenceOutput, StreamOpen, TokenLogprobs, Usage
from text.incremental import IncrementalDecoder


class Outgoing(Protocol):
    """What a client's outgoing queue holds."""

    is_queued: bool
    """Whether the queue has it already."""

    def output(self) -> SequenceOutput:
        """Everything that has not been sent. Changes nothing."""

    def mark_sent(self) -> None:
        """The last `output` has gone out."""


class TextStream:
    """Takes tokens until it is finished; gives what is new since the last `mark_sent`."""

    __slots__ = (
        "_decoder",
        "_ids",
        "_logprobs",
        "_matched",
        "_matcher",
        "_min_tokens",
        "_num_prompt_tokens",
        "_num_replayed",
        "_num_skip",
        "_parts",
        "_replayed_logprob",
        "finish",
        "handle",
        "is_queued",
        "num_tokens",
        "stream",
    )

    def __init__(self, opened: StreamOpen, decoder: IncrementalDecoder) -> None:
        self.handle = opened.handle
        self.stream = opened.stream
        """Whether the client wants what is new as it comes; otherwise everything at the end."""
        self.is_queued = False
        self.finish: Finish | None = None
        """Set once; nothing is taken after it."""
        self.num_tokens = 0
        self._decoder = decoder
        self._matcher: StopStringMatcher | None = None
        if opened.stop:
            self._matcher = StopStringMatcher(opened.stop, include_match=opened.include_stop_str_in_output)
        self._matched: str | None = None
        self._min_tokens = opened.min_tokens
        self._num_prompt_tokens = opened.num_prompt_tokens
        self._num_skip = 0
        self._num_replayed = 0
        self._replayed_logprob = 0.0
        self._parts: list[str] = []
        self._ids = bytearray()
        self._logprobs: LogprobColumns | None = None

    def replay(self, output_ids: list[int], num_chars: int, cumulative_logprob: float) -> bool:
        """Take what an earlier attempt has delivered: all of these ids, and the first `num_chars` characters
        of the text. Returns True when a stop string is complete in it.
        """
        self._num_skip = num_chars
        self._num_replayed = len(output_ids)
        self._replayed_logprob = cumulative_logprob
        return any(self.push(token, b"") for token in output_ids)

    def push(self, token: int, packed: bytes) -> bool:
        """Take one token; `packed` is its id as it goes on the wire. Returns True when it completes a stop
        string.

        What comes after a stop string is dropped.
        """
        if self._matched is not None:
            return False
        self.num_tokens += 1
        self._ids += packed
        text = self._decoder.push(token)
        if self._matcher is None:
            if text:
                self._emit(text)
            return False
        return self._match(text)

    def push_stop_token(self, packed: bytes) -> None:
        """Take the token that ended the sequence: it counts, but stands for no text."""
        if self._matched is None:
            self.num_tokens += 1
            self._ids += packed

    def add_logprobs(self, record: TokenLogprobs) -> None:
        """Take the logprobs of the tokens that this step has pushed."""
        if self._logprobs is None:
            self._logprobs = LogprobColumns(self._num_replayed, self._replayed_logprob)
        self._logprobs.add(record, self.num_tokens)

    def close(self, closed: Closed, eos_token_ids: frozenset[int]) -> None:
        """Finish as the scheduler says; a stop string in the text goes first."""
        if self._matched is None:
            self._flush_text()
        usage = Usage(self._num_prompt_tokens, self.num_tokens, closed.cached_tokens)
        cumulative = self._cumulative_logprob()
        if self._matched is not None:
            self.finish = Finish("stop", usage, self._matched, cumulative)
        elif closed.reason == "stop" or closed.reason == "stop_string":
            is_users = closed.stop_token >= 0 and closed.stop_token not in eos_token_ids
            self.finish = Finish("stop", usage, closed.stop_token if is_users else None, cumulative)
        elif closed.reason == "error":
            error = closed.error or ErrorInfo("the sequence failed")
            self.finish = Finish("error", usage, None, cumulative, error)
        else:
            self.finish = Finish(closed.reason, usage, None, cumulative)

    def fail(self, error: ErrorInfo) -> None:
        """Finish without the scheduler; text that is held back is lost."""
        usage = Usage(self._num_prompt_tokens, self.num_tokens)
        self.finish = Finish("error", usage, None, self._cumulative_logprob(), error)

    def has_news(self) -> bool:
        return bool(self._ids or self._parts or self.finish is not None)

    def output(self) -> SequenceOutput:
        parts = self._parts
        text = parts[0] if len(parts) == 1 else "".join(parts)
        logprobs = self._logprobs
        if logprobs is None:
            return SequenceOutput(self.handle, text, bytes(self._ids), b"", b"", b"", self.finish)
        return SequenceOutput(
            self.handle,
            text,
            bytes(self._ids),
            bytes(logprobs.logprobs),
            bytes(logprobs.top_ids),
            bytes(logprobs.top_logprobs),
            self.finish,
        )

    def mark_sent(self) -> None:
        self._parts.clear()
        self._ids.clear()
        if self._logprobs is not None:
            self._logprobs.clear()

    def _cumulative_logprob(self) -> float | None:
        if self._logprobs is not None:
            return self._logprobs.cumulative
        return self._replayed_logprob or None

    def _match(self, text: str) -> bool:
        assert self._matcher is not None
        text, self._matched = self._matcher.push(text, may_match=self.num_tokens > self._min_tokens)
        if text:
            self._emit(text)
        return self._matched is not None

    def _flush_text(self) -> None:
        text = self._decoder.flush()
        if self._matcher is None:
            self._emit(text)
        elif not self._match(text):
            self._emit(self._matcher.flush())

    def _emit(self, text: str) -> None:
        if self._num_skip:
            num_skip = min(self._num_skip, len(text))
            self._num_skip -= num_skip
            text = text[num_skip:]
        if text:
            self._parts.append(text)


class Refusal:
    """The terminal of a sequence that never had a stream."""

    __slots__ = ("_output", "is_queued")

    def __init__(self, handle: bytes, error: ErrorInfo) -> None:
        self.is_queued = False
        self._output = SequenceOutput(handle, finish=Finish("error", Usage(0, 0), error=error))

    def output(self) -> SequenceOutput:
        return self._output

    def mark_sent(self) -> None:
        """Nothing to do: it is sent once."""
