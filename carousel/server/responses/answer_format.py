"""ResponsesFormat: spells the answers of /v1/responses, whole and as events, independent of HTTP."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
from msgspec import Raw

from carousel.client.core.logprobs import TokenLogprob, packed_logprobs
from carousel.client.core.result import Completion, Delta
from carousel.server.answer.sse import COMMENT
from carousel.server.chat.answer import PIECE_CHARS
from carousel.server.chat.events import Event, ItemBegun, ItemDelta
from carousel.server.openai.chat_format import ChatView
from carousel.server.openai.logprobs import delta_pieces, item_pieces
from carousel.server.openai.response_types import UsageBody
from carousel.server.openai.usage import UsageCount, usage_of
from carousel.server.responses.item_reader import ItemReader
from carousel.server.responses.output_items import GrowingItem, OutputItems
from carousel.server.responses.tool_names import CalledTool, text_of
from carousel.server.responses.types import (
    IncompleteDetails,
    InputDetails,
    OutputDetails,
    ResponseBody,
    ResponseError,
    ResponseUsage,
    empty_list,
)
from carousel.server.spelling.large_parts import LargeParts
from runtime.base.errors import RequestError

_encode = msgspec.json.Encoder().encode

LIMITS = ("length", "timeout")
"""Finish reasons of an answer that a limit has cut off."""
NUM_TEXTS = {"text": "output_text", "reasoning": "reasoning_text", "tool_call": "function_call_arguments"}


class ResponsesFormat:
    done = b""
    keeps_open = COMMENT
    write_cost = 1
    is_parsed = True

    def __init__(
        self, view: ChatView, head: ResponseBody, called: Mapping[str, CalledTool], *, skips_special: bool
    ) -> None:
        """`head` is the answer without anything that has been generated. `called` has tools that go by other
        names here, or whose calls have another form. `skips_special`: special tokens are left out of the
        text.
        """
        self._view = view
        self._head = head
        self._reader = ItemReader(view, skips_special=skips_special)
        self._items = OutputItems(called)
        self._large = LargeParts()
        self._usage = UsageCount(1)
        self._finish_reason: str | None = None
        self._num_events = 0
        self._plain = b""
        """Beginning of a delta of the open message, up to its text; empty while there is none."""

    # -- a whole answer --------------------------------------------------------------------------------------

    def pieces(self, completions: Sequence[Completion]) -> Iterator[bytes]:
        usage = usage_of(completions)
        (completion,) = completions
        (output,) = completion.outputs
        self._finish_reason = output.finish_reason
        whole = Delta(output.text, output.token_ids, output.logprobs, output.finish_reason)
        for part in self._parts(whole):
            told = self._reader.read(part.text, part.token_ids, part.logprobs, part.finish_reason)
            for each in told:
                if each is not None:
                    item = self._apply(*each)
                    if isinstance(each[0], ItemBegun):
                        self._mark(item)
        del completions, completion, output, whole  # the items have their logprobs
        yield from self._large.filled(_encode(self._ended(usage)))

    def _parts(self, delta: Delta) -> Iterator[Delta]:
        return delta_pieces(delta) if self._view.shows_logprobs else iter((delta,))

    # -- a stream --------------------------------------------------------------------------------------------

    def events(self, prompt: int, delta: Delta) -> Iterator[bytes]:
        data = b"" if self._num_events else self._first_events()
        self._usage.add(prompt, delta)
        is_last = delta.finish_reason is not None
        if is_last:
            self._finish_reason = delta.finish_reason
        elif self._plain and delta.text and self._reader.is_plain(delta.text):
            yield data + self._plain_event(delta.text)
            return
        parts = self._parts(delta)
        del delta  # the items have its logprobs while the last events wait
        for part in parts:
            told = self._reader.read(part.text, part.token_ids, part.logprobs, part.finish_reason)
            for each in told:
                if each is not None:
                    data += self._event(*each)
                if each is None or len(data) >= PIECE_CHARS:
                    yield from self._written(data)
                    data = b""
            if data:
                yield from self._written(data)
                data = b""
        del parts
        if is_last:
            response = self._ended(self._usage.body())
            kind = "completed" if response.status == "completed" else "incomplete"
            yield from self._written(self._sse(f"response.{kind}", response=response))

    @property
    def num_kept_bytes(self) -> int:
        return self._items.num_logprob_bytes

    def last_events(self) -> bytes:
        """Return no events: the last one may be long, and comes in pieces with the last delta."""
        return b""

    def failure_events(self, error: RequestError) -> Iterator[bytes]:
        begun = b"" if self._num_events else self._first_events()
        if self._items.open is not None:
            self._items.end(is_whole=False)
        failed = msgspec.structs.replace(
            self._head,
            status="failed",
            error=ResponseError(
                "rate_limit_exceeded" if error.status == 429 else "server_error", error.message
            ),
            output=self._items.bodies(),
        )
        told = self._sse("error", code=error.code, message=error.message, param=error.param)
        yield from self._written(begun + told + self._sse("response.failed", response=failed))

    def _first_events(self) -> bytes:
        begun = self._sse("response.created", response=self._head)
        return begun + self._sse("response.in_progress", response=self._head)

    def _event(self, event: Event, logprobs: Sequence[TokenLogprob]) -> bytes:
        """Return the events of the client for one of an item."""
        item = self._apply(event, logprobs)
        if isinstance(event, ItemBegun):
            return self._begin_events(item)
        if isinstance(event, ItemDelta):
            return self._delta_event(item, event.text, self._spelled(logprobs))
        return self._end_events(item)

    def _begin_events(self, item: GrowingItem) -> bytes:
        body = item.body(is_empty=True)
        data = self._sse("response.output_item.added", output_index=item.index, item=body)
        if item.kind == "tool_call":
            return data
        if item.kind == "text" and not self._view.shows_logprobs:
            head = _encode({"type": "response.output_text.delta", **_place(item), "logprobs": []})
            self._plain = b"event: response.output_text.delta\ndata: " + head[:-1] + b',"delta":'
        data += self._sse("response.content_part.added", **_place(item), part=item.part())
        self._mark(item)
        return data

    def _mark(self, item: GrowingItem) -> None:
        """Show the item's logprobs in the events from now on. Earlier ones have none."""
        speller = self._view.speller
        if item.kind == "text" and self._view.shows_logprobs and speller is not None:
            item.shown_logprobs = self._large.add(Raw, partial(item_pieces, item.logprobs, speller))

    def _written(self, data: bytes) -> Iterator[bytes]:
        """Yield events in pieces, with logprobs for the marks in them."""
        return self._large.filled(data) if self._view.shows_logprobs else iter((data,))

    def _spelled(self, logprobs: Sequence[TokenLogprob]) -> Raw:
        """Return the logprobs of a few tokens."""
        if not logprobs or self._view.speller is None:
            return empty_list()
        return Raw(b"".join(item_pieces(logprobs, self._view.speller)))

    def _plain_event(self, text: str) -> bytes:
        assert self._items.open is not None
        self._items.open.add(text)
        self._num_events += 1
        return b'%b%b,"sequence_number":%d}\n\n' % (self._plain, _encode(text), self._num_events - 1)

    def _delta_event(self, item: GrowingItem, text: str, logprobs: Raw) -> bytes:
        if item.tool.is_custom:
            return b""  # its text is known when the JSON around it has ended
        kind = f"response.{NUM_TEXTS[item.kind]}.delta"
        more = {"logprobs": logprobs} if item.kind == "text" else {}
        return self._sse(kind, **_place(item), **more, delta=text)

    def _end_events(self, item: GrowingItem) -> bytes:
        self._plain = b""
        kind = f"response.{NUM_TEXTS[item.kind]}.done"
        if item.tool.is_custom:
            kind, text = "response.custom_tool_call_input", text_of(item.text)
            data = self._sse(f"{kind}.delta", **_place(item), delta=text)
            data += self._sse(f"{kind}.done", **_place(item), input=text)
        elif item.kind == "tool_call":
            data = self._sse(kind, **_place(item), name=item.tool.name, arguments=item.text)
        else:
            part = item.part()
            more = {"logprobs": item.shown_logprobs} if item.kind == "text" else {}
            data = self._sse(kind, **_place(item), **more, text=item.text)
            data += self._sse("response.content_part.done", **_place(item), part=part)
        return data + self._sse("response.output_item.done", output_index=item.index, item=item.body())

    def _sse(self, kind: str, **fields: Any) -> bytes:
        """Return an event with the next number."""
        body = _encode({"type": kind, **fields, "sequence_number": self._num_events})
        self._num_events += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), body)

    # -- both ------------------------------------------------------------------------------------------------

    def _apply(self, event: Event, logprobs: Sequence[TokenLogprob]) -> GrowingItem:
        """Add an event to the items. Returns the item that it belongs to."""
        if isinstance(event, ItemBegun):
            return self._items.begin(event)
        item = self._items.open
        assert item is not None, "an event of an item that has not begun"
        if not isinstance(event, ItemDelta):
            return self._items.end(is_whole=event.is_whole)
        item.add(event.text)
        if logprobs:
            item.logprobs.extend(packed_logprobs(logprobs))
        return item

    def _ended(self, usage: UsageBody) -> ResponseBody:
        """Return the answer after its end."""
        reason = self._finish_reason
        status = "incomplete" if reason in LIMITS else "cancelled" if reason == "abort" else "completed"
        return msgspec.structs.replace(
            self._head,
            status=status,
            completed_at=int(time.time()) if status == "completed" else None,
            incomplete_details=IncompleteDetails("max_output_tokens") if status == "incomplete" else None,
            output=self._items.bodies(),
            usage=ResponseUsage(
                usage.prompt_tokens,
                InputDetails(usage.prompt_tokens_details.cached_tokens),
                usage.completion_tokens,
                OutputDetails(self._reader.num_reasoning_tokens),
                usage.total_tokens,
            ),
        )


def _place(item: GrowingItem) -> dict[str, Any]:
    """Return the fields of an event that say to which item and part it belongs."""
    place: dict[str, Any] = {"item_id": item.id, "output_index": item.index}
    return place if item.kind == "tool_call" else {**place, "content_index": 0}
