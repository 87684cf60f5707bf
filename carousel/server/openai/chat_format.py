"""ChatCompletionFormat: spells the answers of /v1/chat/completions, independent of HTTP."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from msgspec import UNSET, UnsetType
from msgspec.json import encode

from carousel.client.core.result import Completion, CompletionOutput, Delta
from carousel.server.answer.sse import TEXT_MARK, DoneEvents, TextEvent, sse_event
from carousel.server.chat.answer import PIECE_CHARS, AnswerPlan
from carousel.server.openai.logprobs import (
    TokenSpeller,
    chat_logprobs,
    chat_pieces,
    delta_pieces,
    prompt_pieces,
)
from carousel.server.openai.message import MessageReader, is_text
from carousel.server.openai.response_types import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatMessageBody,
    ChatResponse,
    PromptLogprobsJson,
    UsageBody,
    last_hidden_states,
)
from carousel.server.openai.stop_reason import finish_reason_of, reason_with_calls, stop_reason_of
from carousel.server.openai.usage import UsageCount, usage_of
from carousel.server.request.tokenizer import Vocabulary
from carousel.server.server_state import new_id
from carousel.server.spelling.large_parts import LargeParts


@dataclass(slots=True)
class ChatView:
    """Parts of an answer beside the text."""

    model: str
    num_choices: int = 1
    shows_logprobs: bool = False
    num_prompt_logprobs: int | None = None
    shows_ids: bool = False
    shows_hidden_states: bool = False
    streams_usage: bool = False
    counts_continuously: bool = False
    speller: TokenSpeller | None = None
    """Given if there are logprobs of any kind."""
    prompt_ids: list[int] = field(default_factory=list)
    """Given if the answer shows or counts them."""
    plan: AnswerPlan | None = None
    """Given if the answer is more than text."""
    vocabulary: Vocabulary | None = None
    """Given if reasoning is counted."""


class ChatCompletionFormat(DoneEvents):
    def __init__(self, view: ChatView) -> None:
        self._id = new_id("chatcmpl")
        self._created = int(time.time())
        self._view = view
        self._plain: list[TextEvent | None] = [None] * view.num_choices
        self._begun: set[int] = set()
        self._large = LargeParts()
        self._messages: list[MessageReader] = []
        if (plan := view.plan) is not None:
            self._messages = [MessageReader(plan, view.vocabulary) for _ in range(view.num_choices)]
        self._usage = UsageCount(1)
        if view.vocabulary is not None:
            self._usage.reasoning = dict.fromkeys(range(view.num_choices), 0)
        if view.prompt_ids:
            self._usage.expect_prompts([len(view.prompt_ids)])
        self._is_plain = not (view.counts_continuously or view.shows_ids or view.shows_logprobs)

    @property
    def is_parsed(self) -> bool:
        return bool(self._messages)

    def events(self, prompt: int, delta: Delta) -> Iterator[bytes]:
        """Yield the events for a delta in OpenAI's form: the role comes first and alone, and the finish
        reason last and alone.
        """
        data = b""
        if delta.index not in self._begun:
            self._usage.add_prompt(prompt, delta)
            data = self._first_event(delta.index)  # with the usage before this delta's tokens
        self._usage.add(prompt, delta)
        reason = finish_reason_of(delta)
        is_only_text = delta.text and not reason
        if is_only_text and self._messages:
            is_only_text = self._messages[delta.index].is_plain(delta.text)
        if is_only_text and self._is_plain:
            yield data + self._plain_event(delta.index, delta.text)
            return
        if self._messages and not is_only_text:
            for part in delta_pieces(delta):
                for events in self._message_events(part):
                    yield data + events
                    data = b""
            reason = reason_with_calls(reason, self._messages[delta.index].num_whole_calls)
        elif delta.text or delta.logprobs or (self._view.shows_ids and delta.token_ids):
            for part in delta_pieces(delta):
                yield data + self._text_event(part)
                data = b""
        if delta.finish_reason is not None:
            choice = ChatChunkChoice(
                delta.index, ChatDelta(), None, reason, delta.matched_stop, stop_reason_of(delta)
            )
            data += self._event(choice)
        if data:
            yield data

    def _message_events(self, delta: Delta) -> Iterator[bytes]:
        """Yield the events for the text of a delta, of a long one in pieces. Its logprobs and ids come with
        the first event.
        """
        message = self._messages[delta.index]
        has_more = bool(delta.logprobs or (self._view.shows_ids and delta.token_ids))
        for deltas in message.pieces(delta):
            if self._usage.reasoning is not None:
                self._usage.reasoning[delta.index] = message.num_reasoning_tokens
            if self._is_plain and len(deltas) == 1 and is_text(deltas[0]):
                yield self._plain_event(delta.index, deltas[0].content or "")
                continue
            data = b""
            for each in deltas:
                data += self._event(self._choice(delta, each, has_more=has_more))
                has_more = False
            if data or len(delta.text) > PIECE_CHARS:  # others have a turn behind each piece, shown or not
                yield data
        if has_more:
            yield self._event(self._choice(delta, ChatDelta(), has_more=True))

    def _choice(self, delta: Delta, body: ChatDelta, *, has_more: bool) -> ChatChunkChoice:
        """Return the part of an event for a delta, with its logprobs and ids if `has_more`."""
        choice = ChatChunkChoice(delta.index, body)
        if has_more:
            choice.logprobs = self._logprobs(delta)
            choice.token_ids = delta.token_ids if self._view.shows_ids else None
        return choice

    def last_events(self) -> bytes:
        if not self._view.streams_usage:
            return b""
        return sse_event(self._chunk([], self._usage.body()))

    def pieces(self, completions: Sequence[Completion]) -> Iterator[bytes]:
        yield from self._large.filled(encode(self._response(completions)))

    def _response(self, completions: Sequence[Completion]) -> ChatResponse:
        (completion,) = completions
        view = self._view
        choices = [self._whole_choice(output) for output in completion.outputs]
        counts = [message.num_reasoning_tokens for message in self._messages]
        usage = usage_of(completions, None if view.vocabulary is None else sum(counts))
        response = ChatResponse(self._id, "chat.completion", self._created, view.model, choices, usage)
        if view.num_prompt_logprobs is not None:
            response.prompt_logprobs = self._prompt_logprobs(completion, view.num_prompt_logprobs)
        if view.shows_ids:
            response.prompt_token_ids = view.prompt_ids
        return response

    def _first_event(self, index: int) -> bytes:
        chunk = self._chunk([ChatChunkChoice(index, ChatDelta("assistant", ""))], self._event_usage())
        if self._view.shows_ids and not self._begun:
            chunk.prompt_token_ids = self._view.prompt_ids
        self._begun.add(index)
        return sse_event(chunk)

    def _text_event(self, delta: Delta) -> bytes:
        if not self._is_plain:
            choice = ChatChunkChoice(delta.index, ChatDelta(content=delta.text), self._logprobs(delta))
            if self._view.shows_ids:
                choice.token_ids = delta.token_ids
            return self._event(choice)
        return self._plain_event(delta.index, delta.text)

    def _plain_event(self, index: int, text: str) -> bytes:
        event = self._plain[index]
        if event is None:
            choice = ChatChunkChoice(index, ChatDelta(content=TEXT_MARK))
            event = self._plain[index] = TextEvent(self._chunk([choice], self._event_usage()))
        return event.with_text(text)

    def _event(self, choice: ChatChunkChoice) -> bytes:
        return sse_event(self._chunk([choice], self._event_usage()))

    def _event_usage(self) -> UsageBody | UnsetType | None:
        if self._view.counts_continuously:
            return self._usage.body()
        return None if self._view.streams_usage else UNSET

    def _chunk(self, choices: list[ChatChunkChoice], usage: UsageBody | UnsetType | None) -> ChatChunk:
        return ChatChunk(self._id, "chat.completion.chunk", self._created, self._view.model, choices, usage)

    def _whole_choice(self, output: CompletionOutput) -> ChatChoice:
        reason = finish_reason_of(output)
        assert reason is not None, "the sequence has not finished"
        message = ChatMessageBody("assistant", output.text)
        if self._messages:
            reader = self._messages[output.index]
            message = reader.whole(output)
            reason = reason_with_calls(reason, reader.num_whole_calls)
        choice = ChatChoice(
            output.index,
            message,
            self._logprobs(output),
            reason,
            output.matched_stop,
            stop_reason_of(output),
        )
        if self._view.shows_ids:
            choice.token_ids = output.token_ids
        if self._view.shows_hidden_states:
            choice.hidden_states = last_hidden_states(output)
        if output.score is not None and output.cumulative_logprob is not None:
            choice.score, choice.cumulative_logprob = output.score, output.cumulative_logprob
        return choice

    def _logprobs(self, part: Delta | CompletionOutput) -> ChatLogprobs | None:
        if not self._view.shows_logprobs or self._view.speller is None:
            return None
        if isinstance(part, Delta):
            return chat_logprobs(part.logprobs, self._view.speller)
        return self._large.add(ChatLogprobs, partial(chat_pieces, part.logprobs, self._view.speller))

    def _prompt_logprobs(self, completion: Completion, num_top: int) -> PromptLogprobsJson:
        assert self._view.speller is not None
        pieces = partial(prompt_pieces, completion.prompt_logprobs, self._view.speller, num_top)
        return self._large.add(PromptLogprobsJson, pieces)
