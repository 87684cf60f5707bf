"""Servers with SGLang's own /generate, streamed or not. Every event repeats the text so far, and has its
number of tokens.
"""

from __future__ import annotations

from typing import Any

import msgspec

from bench_serving.backends.base import BenchPrompt, GenerationOptions
from bench_serving.backends.stream_reader import StreamReader, ask_streamed, ask_whole
from bench_serving.records import Clock, RequestRecord
from carousel.http_client import HttpClient, RequestFailure

PATH = "/generate"


class _Finish(msgspec.Struct, gc=False):
    type: str
    message: str | None = None


class _MetaInfo(msgspec.Struct, gc=False):
    finish_reason: _Finish | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    output_token_logprobs: msgspec.Raw = msgspec.Raw(b"")
    output_top_logprobs: msgspec.Raw = msgspec.Raw(b"")

    def logprobs_bytes(self) -> int:
        return sum(memoryview(each).nbytes for each in (self.output_token_logprobs, self.output_top_logprobs))


class _Answer(msgspec.Struct, gc=False):
    """Event, or whole answer."""

    text: str = ""
    meta_info: _MetaInfo | None = None
    error: Any = None


_decode_answer = msgspec.json.Decoder(_Answer).decode


class SglangBackend:
    def __init__(self, client: HttpClient, options: GenerationOptions, clock: Clock) -> None:
        self._client = client
        self._options = options
        self._clock = clock
        self._fields: dict[str, Any] = {"stream": options.stream}
        if options.num_logprobs is not None:
            self._fields |= {"return_logprob": True, "top_logprobs_num": options.num_logprobs}

    def request_body(self, prompt: BenchPrompt, output_len: int) -> bytes:
        sampling = {
            "temperature": 0.0,
            "max_new_tokens": output_len,
            "ignore_eos": self._options.ignore_eos,
        }
        name = "text" if isinstance(prompt, str) else "input_ids"
        extra = self._options.extra
        given = extra.get("sampling_params")
        if isinstance(given, dict):
            extra = extra | {"sampling_params": sampling | given}
        asked = {name: prompt, "sampling_params": sampling, **self._fields}
        return msgspec.json.encode(asked | extra)

    async def generate(self, prompt: BenchPrompt, output_len: int, record: RequestRecord) -> None:
        body = self.request_body(prompt, output_len)
        if self._options.stream:
            reader = _StreamReader(record)
            await ask_streamed(self._client, PATH, body, reader, record, self._clock)
        else:
            await ask_whole(self._client, PATH, body, _take_whole, record, self._clock)

    async def aclose(self) -> None:
        return

    async def flush_cache(self) -> None:
        await self._client.post("/flush_cache", b"", lambda _data, _now: None)


class _StreamReader(StreamReader):
    __slots__ = ("_num_chars",)

    def __init__(self, record: RequestRecord) -> None:
        super().__init__(record)
        self._num_chars = 0

    def _take_answer(self, event: bytes, now: float) -> None:
        answer, meta = _decode(event)
        record = self._record
        record.end_s = now
        num_tokens = meta.completion_tokens
        new = None if num_tokens is None else max(0, num_tokens - record.num_chunk_tokens)
        record.add_chunk(now, answer.text[self._num_chars :], new)
        self._num_chars = len(answer.text)
        _take_meta(meta, record)
        self._has_ended = self._has_ended or meta.finish_reason is not None


def _take_whole(body: bytes, record: RequestRecord) -> None:
    answer, meta = _decode(body)
    record.texts.append(answer.text)
    record.received_bytes = len(body)
    if meta.completion_tokens is None:
        raise RequestFailure("the answer has no completion_tokens, its only token count")
    _take_meta(meta, record)


def _decode(data: bytes) -> tuple[_Answer, _MetaInfo]:
    try:
        answer = _decode_answer(data)
    except msgspec.DecodeError as error:
        raise RequestFailure(f"not an answer of SGLang's /generate: {error}") from None
    if answer.error is not None:
        message = answer.error.get("message") if isinstance(answer.error, dict) else None
        raise RequestFailure(str(message or answer.error))
    if answer.meta_info is None:
        raise RequestFailure("not an answer of SGLang's /generate: it has no meta_info")
    return answer, answer.meta_info


def _take_meta(meta: _MetaInfo, record: RequestRecord) -> None:
    """Record the counts of an event, which are those of the whole answer so far.

    Raises: RequestFailure for an answer that the server ended early.
    """
    if meta.finish_reason is not None and meta.finish_reason.type == "abort":
        why = meta.finish_reason.message or "finish_reason abort"
        raise RequestFailure(f"the server ended the request early: {why}")
    if meta.prompt_tokens is not None:
        record.input_len = meta.prompt_tokens
    if meta.cached_tokens is not None:
        record.cached_len = meta.cached_tokens
    if meta.completion_tokens is not None:
        record.reported_output_len = meta.completion_tokens
    record.extra_bytes = meta.logprobs_bytes()
