"""Servers with OpenAI's completions or chat completions API, streamed or not.

OpenAI's API does not say how many tokens a chunk has. The number comes from `token_ids` or a running `usage`
if the server sends one of them; otherwise each chunk with text counts as one token.

NOTE: the code for a chunk runs tens of thousands of times a second, between the arrivals of others;
benchmarks/bench_load_client.py measures it.
"""

from __future__ import annotations

from typing import Any, Literal, NoReturn

import msgspec

from bench_serving.backends.base import BenchPrompt, GenerationOptions
from bench_serving.backends.stream_reader import StreamReader, ask_streamed, ask_whole
from bench_serving.records import Clock, RequestRecord
from carousel.http_client import HttpClient, RequestFailure

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
Api = Literal["completions", "chat"]


class _Message(msgspec.Struct, gc=False):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None

    def output(self) -> str:
        return self.content or self.reasoning_content or self.reasoning or ""


class _Choice(msgspec.Struct, gc=False):
    text: str | None = None
    delta: _Message | None = None
    message: _Message | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    logprobs: msgspec.Raw = msgspec.Raw(b"null")

    def output(self) -> str:
        message = self.delta or self.message
        return message.output() if message is not None else self.text or ""

    def logprobs_bytes(self) -> int:
        size = memoryview(self.logprobs).nbytes
        return 0 if size == len(b"null") else size


class _PromptDetails(msgspec.Struct, gc=False):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None


class _Answer(msgspec.Struct, gc=False):
    """Chunk or whole answer of either API."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode_answer = msgspec.json.Decoder(_Answer).decode


class OpenAIBackend:
    def __init__(
        self, client: HttpClient, api: Api, model: str, options: GenerationOptions, clock: Clock
    ) -> None:
        self._client = client
        self._api = api
        self._path = PATHS[api]
        self._options = options
        self._clock = clock
        self._fields: dict[str, Any] = {"model": model, "temperature": 0.0, "stream": options.stream}
        if options.stream:
            running = {"continuous_usage_stats": True} if options.counts_tokens else {}
            self._fields["stream_options"] = {"include_usage": True} | running
        if options.num_logprobs is not None:
            self._fields |= _logprobs_fields(api, options.num_logprobs)
        if options.ignore_eos:
            self._fields["ignore_eos"] = True
        if not options.add_special_tokens:
            self._fields["add_special_tokens"] = False

    def request_body(self, prompt: BenchPrompt, output_len: int) -> bytes:
        if self._api == "chat":
            asked = {"messages": prompt, "max_completion_tokens": output_len}
        else:
            asked = {"prompt": prompt, "max_tokens": output_len}
        return msgspec.json.encode({**asked, **self._fields, **self._options.extra})

    async def generate(self, prompt: BenchPrompt, output_len: int, record: RequestRecord) -> None:
        body = self.request_body(prompt, output_len)
        if self._options.stream:
            reader = _StreamReader(record)
            await ask_streamed(self._client, self._path, body, reader, record, self._clock)
        else:
            await ask_whole(self._client, self._path, body, _take_whole, record, self._clock)

    async def aclose(self) -> None:
        return

    async def flush_cache(self) -> None:
        # SGLang's extension, and this server's.
        await self._client.post("/flush_cache", b"", lambda _data, _now: None)


def _logprobs_fields(api: Api, num_top: int) -> dict[str, Any]:
    return {"logprobs": True, "top_logprobs": num_top} if api == "chat" else {"logprobs": num_top}


class _StreamReader(StreamReader):
    __slots__ = ()

    def _take_answer(self, event: bytes, now: float) -> None:
        record = self._record
        answer = _decode(event)
        if answer.choices:
            choice = answer.choices[0]
            record.end_s = now
            record.add_chunk(now, choice.output(), self._num_tokens(choice, answer.usage))
            record.extra_bytes += choice.logprobs_bytes()
            if choice.finish_reason is not None:
                _check_finish(choice.finish_reason)
                self._has_ended = True
        if answer.usage is not None:
            _take_usage(answer.usage, record)

    def _num_tokens(self, choice: _Choice, usage: _Usage | None) -> int | None:
        if choice.token_ids is not None:
            return len(choice.token_ids)
        if usage is not None and usage.completion_tokens is not None:
            return max(0, usage.completion_tokens - self._record.num_chunk_tokens)
        return None


def _take_whole(body: bytes, record: RequestRecord) -> None:
    answer = _decode(body)
    if not answer.choices:
        raise RequestFailure("the answer has no choices")
    choice = answer.choices[0]
    if choice.finish_reason is not None:
        _check_finish(choice.finish_reason)
    record.texts.append(choice.output())
    record.received_bytes = len(body)
    record.extra_bytes = choice.logprobs_bytes()
    if answer.usage is None or answer.usage.completion_tokens is None:
        raise RequestFailure("the answer has no usage, which is the only token count of one not streamed")
    _take_usage(answer.usage, record)


def _decode(data: bytes) -> _Answer:
    try:
        answer = _decode_answer(data)
    except msgspec.DecodeError as error:
        raise RequestFailure(f"not an answer of OpenAI's API: {error}") from None
    if answer.error is not None:
        _raise_error(answer.error)
    return answer


def _raise_error(error: Any) -> NoReturn:
    message = error.get("message") if isinstance(error, dict) else None
    raise RequestFailure(str(message or error))


def _check_finish(reason: str) -> None:
    if reason in ("abort", "error"):
        raise RequestFailure(f"the server ended the request early: finish_reason {reason}")


def _take_usage(usage: _Usage, record: RequestRecord) -> None:
    if usage.prompt_tokens is not None:
        record.input_len = usage.prompt_tokens
    if usage.completion_tokens is not None:
        record.reported_output_len = usage.completion_tokens
    if usage.prompt_tokens_details is not None:
        record.cached_len = usage.prompt_tokens_details.cached_tokens
