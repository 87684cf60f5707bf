"""TextStream: one sequence on its way to its client.

Owns its text, its stop strings and stop words, its usage and its terminal. Knows no socket and no other
sequence.

    tokens ──► decoder ──► stop matchers ──► parts ──► SequenceOutput
               (holds an    (hold what may    (what has not
                incomplete   become one)       been sent yet)
                character)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from detokenizer_proc.logprobs import Columns, OutputLogprobs
from detokenizer_proc.stop_strings import StopStringMatcher
from detokenizer_proc.stop_words import StopWordMatcher
from runtime.text.codec import IncrementalDecoder
from runtime.wire.format import TOKEN_BYTES
from runtime.wire.messages import Closed, ErrorInfo, Finish, SequenceOutput, StreamOpen, TokenLogprobs, Usage

_NO_COLUMNS = Columns()


class Outgoing(Protocol):
    """Entry of a client's outgoing queue."""

    is_queued: bool
    """True if it is in the queue already."""

    @property
    def num_ended_bytes(self) -> int:
        """Number of bytes of its prompt's logprobs that are still to be sent, once it has ended."""

    def output(self) -> SequenceOutput:
        """Return everything that has not been sent. Changes nothing."""

    def mark_sent(self) -> None:
        """Record that the last `output` was sent."""


class TextStream:
    """Output of one sequence. It takes tokens until a stop string or word matches or the sequence finishes,
    and returns what is new since the last `mark_sent`.
    """

    __slots__ = (
        "_decoder",
        "_ids",
        "_is_told",
        "_is_watched",
        "_logprobs",
        "_min_tokens",
        "_num_prompt_tokens",
        "_num_replayed",
        "_num_skip",
        "_parts",
        "_piece_tokens",
        "_prompt",
        "_replayed_logprob",
        "_shown",
        "_strings",
        "_words",
        "due_at",
        "finish",
        "handle",
        "is_queued",
        "label",
        "matched",
        "num_tokens",
        "stream",
    )

    def __init__(
        self,
        opened: StreamOpen,
        decoder: IncrementalDecoder,
        word_text: Callable[[Sequence[int]], str],
        piece_tokens: int = 1,
    ) -> None:
        """Start without tokens. word_text: returns the text of a stop word. piece_tokens: number of tokens
        after which output is sent again.
        """
        self.handle = opened.handle
        self.label = opened.label
        self.stream = opened.stream
        """True if the client wants output as it comes. Otherwise it is sent in larger pieces."""
        self.is_queued = False
        self.matched: str | None = None
        """Stop string, or text of the stop word, that has ended the text; None before. Nothing is pushed
        after it.
        """
        self.finish: Finish | None = None
        """Terminal part, set once. Nothing is taken after it."""
        self.num_tokens = 0
        self.due_at = 1 if opened.stream else piece_tokens
        """Number of tokens from which on its output is to be sent."""
        self._piece_tokens = piece_tokens
        self._decoder = decoder
        self._strings: StopStringMatcher | None = None
        self._words: StopWordMatcher | None = None
        include_match = opened.include_stop_str_in_output
        if opened.stop:
            self._strings = StopStringMatcher(opened.stop, include_match=include_match)
        if opened.stop_words:
            self._words = StopWordMatcher(
                opened.stop_words, include_match=include_match, strings=self._strings, word_text=word_text
            )
        self._is_watched = bool(opened.stop or opened.stop_words)
        self._min_tokens = opened.min_tokens
        self._num_prompt_tokens = opened.num_prompt_tokens
        self._is_told = not opened.stream
        """True if the client knows the length of the prompt, or will get it at the end."""
        self._num_skip = 0
        self._num_replayed = 0
        self._replayed_logprob = 0.0
        self._parts: list[str] = []
        self._ids: list[bytes] = []
        self._logprobs: OutputLogprobs | None = None
        self._prompt: Columns | None = None
        self._shown = b""

    @property
    def num_prompt_bytes(self) -> int:
        """Number of bytes of the prompt's logprobs that are still to be sent."""
        return 0 if self._prompt is None else self._prompt.num_bytes

    @property
    def num_ended_bytes(self) -> int:
        """Number of bytes of its prompt's logprobs that are still to be sent, once it has ended."""
        return 0 if self.finish is None else self.num_prompt_bytes

    @property
    def num_missing_chars(self) -> int:
        """Number of characters that an earlier attempt is said to have delivered and that the replay has not
        produced yet.
        """
        return self._num_skip

    def replay(self, output_ids: Sequence[int], num_chars: int, cumulative_logprob: float) -> bool:
        """Replay what an earlier attempt has delivered: all of these ids, and the first `num_chars`
        characters of the text. Returns True if a stop string or word is complete in it.
        """
        self._num_skip = num_chars
        self._num_replayed = len(output_ids)
        self._replayed_logprob = cumulative_logprob
        is_matched = any(self.push(token, b"") for token in output_ids)
        self._ids.clear()
        return is_matched

    def push(self, token: int, packed: bytes) -> bool:
        """Process one token. packed: its id in the form of the wire. Returns True if it completes a stop
        string or word.
        """
        self.num_tokens += 1
        self._ids.append(packed)
        text = self._decoder.push(token)
        if self._is_watched:
            strings = self._strings
            if self._words is not None or strings is None or strings.concerns(text):
                return self._match(token, text)
        if self._num_skip:
            self._emit(text)
        elif text:
            self._parts.append(text)
        return False

    def push_stop_token(self, token: int, packed: bytes) -> None:
        """Process the token that ended the sequence. It counts but has no text."""
        self.num_tokens += 1
        self._ids.append(packed)
        if self._words is not None:
            self._match(token, "")

    def show(self, packed_ids: bytes) -> None:
        """Set the current hypothesis of a beam search: all of its ids, which replace the earlier ones."""
        self._shown = packed_ids

    def add_logprobs(self, record: TokenLogprobs) -> None:
        """Append the logprobs of the tokens that this step has pushed."""
        if self._logprobs is None:
            self._logprobs = OutputLogprobs(self._num_replayed, self._replayed_logprob)
        self._logprobs.add(record, self.num_tokens)

    def add_prompt_logprobs(self, record: TokenLogprobs) -> None:
        """Append the next logprobs of the prompt."""
        num_new = len(record.logprobs) // TOKEN_BYTES
        if num_new:
            if self._prompt is None:
                self._prompt = Columns()
            self._prompt.extend(record, num_new)

    def close(self, closed: Closed, eos_token_ids: frozenset[int]) -> None:
        """Finish as the scheduler says, unless a stop string or word in the text comes first."""
        self._shown = b""
        if self.matched is None:
            self._flush_text()
        usage = Usage(self._num_prompt_tokens, self.num_tokens, closed.cached_tokens, closed.drafts)
        beam = closed.beam
        cumulative = self._cumulative_logprob() if beam is None else beam.logprob
        reason, error = closed.reason, None
        matched: str | int | None = self.matched
        if matched is not None or reason == "stop_string":
            reason = "stop"
        elif reason == "stop" and closed.stop_token >= 0 and closed.stop_token not in eos_token_ids:
            matched = closed.stop_token
        elif reason == "error":
            error = closed.error or ErrorInfo("the sequence failed")
        score = None if beam is None else beam.score
        self.finish = Finish(
            reason,
            usage,
            matched,
            cumulative,
            error,
            closed.perf_metrics,
            closed.trace,
            score,
            closed.weight_version,
        )

    def fail(self, error: ErrorInfo) -> None:
        """Finish without the scheduler. Held text and unsent logprobs of the prompt are lost."""
        self._prompt, self._shown = None, b""
        usage = Usage(self._num_prompt_tokens, self.num_tokens)
        self.finish = Finish("error", usage, None, self._cumulative_logprob(), error)

    def has_news(self) -> bool:
        return bool(self._ids or self._parts or self._prompt or self._shown or self.finish is not None)

    def output(self) -> SequenceOutput:
        text, ids = "".join(self._parts), b"".join(self._ids)
        if self._logprobs is None and self._prompt is None and self._is_told and not self._shown:
            return SequenceOutput(self.handle, text, ids, b"", b"", b"", self.finish)
        own = _NO_COLUMNS if self._logprobs is None else self._logprobs.columns
        prompt = self._prompt or _NO_COLUMNS
        return SequenceOutput(
            self.handle,
            text,
            ids,
            bytes(own.logprobs),
            bytes(own.top_ids),
            bytes(own.top_logprobs),
            self.finish,
            bytes(prompt.logprobs),
            bytes(prompt.top_ids),
            bytes(prompt.top_logprobs),
            0 if self._is_told else self._num_prompt_tokens,
            self._shown,
            bytes(prompt.ranks),
        )

    def mark_sent(self) -> None:
        self._is_told = True
        if self.num_tokens:
            self.due_at = self.num_tokens + self._piece_tokens
        self._parts.clear()
        self._ids.clear()
        if self._logprobs is not None:
            self._logprobs.columns.clear()
        self._prompt, self._shown = None, b""

    def _cumulative_logprob(self) -> float | None:
        if self._logprobs is not None:
            return self._logprobs.cumulative
        return self._replayed_logprob or None

    def _match(self, token: int, text: str) -> bool:
        may_match = self.num_tokens > self._min_tokens
        if self._words is not None:
            text, self.matched = self._words.push(token, text, may_match=may_match)
        elif self._strings is not None:
            text, self.matched = self._strings.push(text, may_match=may_match)
        self._emit(text)
        return self.matched is not None

    def _flush_text(self) -> None:
        """Process the end of the text: an incomplete character, which may complete a stop string."""
        text = self._decoder.flush()
        matcher = self._words or self._strings
        if matcher is not None:
            may_match = self.num_tokens > self._min_tokens
            text, self.matched = matcher.push_end(text, may_match=may_match)
        self._emit(text)

    def _emit(self, text: str) -> None:
        if self._num_skip:
            num_skip = min(self._num_skip, len(text))
            self._num_skip -= num_skip
            text = text[num_skip:]
        if text:
            self._parts.append(text)


class Refusal:
    """Terminal message of a sequence that never had a stream."""

    __slots__ = ("_output", "is_queued")

    def __init__(self, handle: bytes, error: ErrorInfo) -> None:
        self.is_queued = False
        self._output = SequenceOutput(handle, finish=Finish("error", Usage(0, 0), error=error))

    @property
    def num_ended_bytes(self) -> int:
        return 0

    def output(self) -> SequenceOutput:
        return self._output

    def mark_sent(self) -> None:
        """Do nothing: a refusal is sent once."""
