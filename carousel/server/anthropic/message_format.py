"""MessagesFormat: spells the answers of /v1/messages, independent of HTTP."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from carousel.client.core.result import Completion, CompletionOutput, Delta
from carousel.server.answer.sse import COMMENT, TEXT_MARK, DoneEvents, TextEvent, sse_event
from carousel.server.anthropic.responses import (
    BlockDelta,
    BlockStart,
    BlockStop,
    InputDelta,
    MadeBlock,
    MadeText,
    MadeThinking,
    MadeToolUse,
    MessageDelta,
    MessageEnd,
    MessagesResponse,
    MessageStart,
    MessageStop,
    MessagesUsage,
    OutputTokensDetails,
    PingEvent,
    SignatureDelta,
    StopReason,
    TextDelta,
    ThinkingDelta,
)
from carousel.server.chat.answer import PIECE_CHARS, AnswerReader
from carousel.server.chat.events import Event, ItemBegun, ItemDelta, ItemDone
from carousel.server.http.errors import anthropic_error_body
from carousel.server.openai.chat_format import ChatView
from carousel.server.spelling.large_parts import WholeFormat
from runtime.base.errors import RequestError
from runtime.base.random_ids import random_id
from runtime.wire.messages import Usage

UNSIGNED = "unsigned"
"""Signature of all reasoning. Some clients send reasoning back only if it has one."""
NO_INPUT = msgspec.Raw(b"{}")
NO_USAGE = Usage(0, 0, 0)
DELTA = b"content_block_delta"
PING = sse_event(PingEvent(), b"ping")


class MessagesFormat(WholeFormat, DoneEvents):
    done = sse_event(MessageStop(), b"message_stop")

    def __init__(self, view: ChatView, max_tokens: int, request_id: str) -> None:
        self._id = f"msg_{random_id()}"
        self._view = view
        self._max_tokens = max_tokens
        self._request_id = request_id
        self._answer = None if view.plan is None else AnswerReader(view.plan, view.vocabulary)
        self._has_begun = False
        self._num_blocks = 0
        """Number of blocks that have ended."""
        self._is_open = False
        """True if a block has begun and not ended."""
        self._text: TextEvent | None = None
        """Event with text for the open block."""

    @property
    def is_parsed(self) -> bool:
        return self._answer is not None

    # -- a stream --------------------------------------------------------------------------------------------

    @property
    def keeps_open(self) -> bytes:
        # Clients expect message_start before all other events, so a comment stands for those before it.
        return PING if self._has_begun else COMMENT

    def events(self, prompt: int, delta: Delta) -> Iterator[bytes]:
        data = b""
        if not self._has_begun:
            self._has_begun = True
            message = self._message([], MessagesUsage(delta.num_prompt_tokens, 0))
            data = _event(MessageStart(message))
        is_last = delta.finish_reason is not None
        if self._answer is None:
            data += self._plain(delta.text)
        elif not is_last and self._text is not None and self._answer.is_plain(delta.text):
            data += self._text.with_text(delta.text) if delta.text else b""
        else:
            for events in self._answer.pieces(delta.text, delta.token_ids, is_last=is_last):
                data += b"".join(map(self._spelled, events))
                if len(delta.text) > PIECE_CHARS:  # others have a turn behind each piece, shown or not
                    yield data
                    data = b""
        if is_last:
            data += self._stop()
            end = MessageEnd(*self._end_of(delta, delta.usage or NO_USAGE))
            data += _event(MessageDelta(end, self._usage(delta.usage or NO_USAGE)))
        if data:
            yield data

    def last_events(self) -> bytes:
        return b""

    def failure_events(self, error: RequestError) -> Iterable[bytes]:
        return (b"event: error\ndata: %b\n\n" % anthropic_error_body(error, self._request_id),)

    def _plain(self, text: str) -> bytes:
        """Return the events for text of an answer that is nothing else."""
        if not text:
            return b""
        begin = b"" if self._is_open else self._start(MadeText(""))
        assert self._text is not None
        return begin + self._text.with_text(text)

    def _spelled(self, event: Event) -> bytes:
        if isinstance(event, ItemBegun):
            if event.kind == "tool_call":
                return self._start(MadeToolUse(event.id, event.name, NO_INPUT))
            return self._start(MadeText("") if event.kind == "text" else MadeThinking("", ""))
        if isinstance(event, ItemDone):
            signature = b""
            if event.kind == "reasoning":
                signature = _event(BlockDelta(self._num_blocks, SignatureDelta(UNSIGNED)))
            return signature + self._stop()
        if event.kind == "text" and self._text is not None:
            return self._text.with_text(event.text)
        kind = InputDelta if event.kind == "tool_call" else ThinkingDelta
        return _event(BlockDelta(self._num_blocks, kind(event.text)))

    def _start(self, block: MadeBlock) -> bytes:
        self._is_open = True
        if isinstance(block, MadeText):
            self._text = TextEvent(BlockDelta(self._num_blocks, TextDelta(TEXT_MARK)), DELTA)
        return _event(BlockStart(self._num_blocks, block))

    def _stop(self) -> bytes:
        """Return the event that ends the open block, if there is one."""
        if not self._is_open:
            return b""
        self._is_open, self._text = False, None
        self._num_blocks += 1
        return _event(BlockStop(self._num_blocks - 1))

    # -- a whole answer --------------------------------------------------------------------------------------

    def response(self, completions: Sequence[Completion]) -> MessagesResponse:
        (completion,) = completions
        (output,) = completion.outputs
        content: list[MadeBlock] = [MadeText(output.text)] if output.text else []
        if self._answer is not None:
            content = _blocks(self._answer.read(output.text, output.token_ids, is_last=True))
        message = self._message(content, self._usage(completion.usage))
        message.stop_reason, message.stop_sequence = self._end_of(output, completion.usage)
        return message

    def _message(self, content: list[MadeBlock], usage: MessagesUsage) -> MessagesResponse:
        return MessagesResponse(self._id, self._view.model, content, usage)

    # -- both ------------------------------------------------------------------------------------------------

    def _end_of(self, part: Delta | CompletionOutput, usage: Usage) -> tuple[StopReason, str | None]:
        """Return the reason why the answer has ended, and the stop sequence if that was one."""
        if part.finish_reason == "stop":
            if self._answer is not None and self._answer.num_whole_calls:
                return "tool_use", None
            if isinstance(part.matched_stop, str):
                return "stop_sequence", part.matched_stop
            return "end_turn", None
        if part.finish_reason == "length" and usage.completion_tokens < self._max_tokens:
            return "model_context_window_exceeded", None
        return "max_tokens", None

    def _usage(self, usage: Usage) -> MessagesUsage:
        made = MessagesUsage(
            usage.prompt_tokens - usage.cached_tokens, usage.completion_tokens, usage.cached_tokens
        )
        if self._view.vocabulary is not None and self._answer is not None:
            made.output_tokens_details = OutputTokensDetails(self._answer.num_reasoning_tokens)
        return made


def _blocks(events: Sequence[Event]) -> list[MadeBlock]:
    """Return the blocks of a whole answer."""
    blocks: list[MadeBlock] = []
    parts: list[str] = []
    for event in events:
        if isinstance(event, ItemDelta):
            parts.append(event.text)
        elif isinstance(event, ItemBegun):
            parts = []
            begun = event
        elif event.kind == "text":
            blocks.append(MadeText("".join(parts)))
        elif event.kind == "reasoning":
            blocks.append(MadeThinking("".join(parts), UNSIGNED))
        else:
            blocks.append(MadeToolUse(begun.id, begun.name, _input("".join(parts))))
    return blocks


def _input(arguments: str) -> msgspec.Raw:
    """Return the arguments of a call; an empty object for those that are none, because the call broke off."""
    try:
        msgspec.json.decode(arguments, type=dict[str, msgspec.Raw])
    except msgspec.MsgspecError:
        return NO_INPUT
    return msgspec.Raw(arguments.encode())


def _event(body: Any) -> bytes:
    """Return an event of the type that its body has."""
    return sse_event(body, body.__struct_config__.tag.encode())
