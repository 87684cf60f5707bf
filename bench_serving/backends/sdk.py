"""The client library over ZMQ: what the runtime does without HTTP. Every delta says how many tokens it
brings.
"""

from __future__ import annotations

from typing import Any

from bench_serving.backends.base import GenerationOptions, Prompt
from bench_serving.records import Clock, RequestFailure, RequestRecord
from client.async_client import AsyncClient
from client.request_builder import RequestOptions
from runtime.errors import CarouselError, ConfigError
from runtime.messages import Usage
from runtime.sampling_params import SamplingParams

OWN_FIELDS = frozenset({"max_tokens"})


class SdkBackend:
    def __init__(
        self, client: AsyncClient, options: GenerationOptions, *, timeout_s: float, clock: Clock
    ) -> None:
        """Raises ConfigError when --extra-request-body has a field that the client library does not."""
        self._client = client
        self._stream = options.stream
        self._timeout_s = timeout_s
        self._clock = clock
        sampling_fields = set(SamplingParams.__struct_fields__) - OWN_FIELDS
        request_fields = set(RequestOptions.__annotations__)
        for name in options.extra:
            if name not in sampling_fields | request_fields:
                raise ConfigError(f"--extra-request-body: the sdk backend has no field {name!r}")
        self._sampling: dict[str, Any] = {"temperature": 0.0, "ignore_eos": options.ignore_eos}
        self._request: dict[str, Any] = {"add_special_tokens": options.add_special_tokens}
        for name, value in options.extra.items():
            (self._sampling if name in sampling_fields else self._request)[name] = value

    async def generate(self, prompt: Prompt, output_len: int, record: RequestRecord) -> None:
        sampling = SamplingParams(max_tokens=output_len, **self._sampling)
        record.start_s = self._clock()
        try:
            if self._stream:
                await self._generate_stream(prompt, sampling, record)
            else:
                await self._generate_whole(prompt, sampling, record)
        except TimeoutError:
            raise RequestFailure(f"no complete answer within {self._timeout_s:g} s") from None
        except CarouselError as error:
            raise RequestFailure(str(error)) from None

    async def _generate_stream(self, prompt: Prompt, sampling: SamplingParams, record: RequestRecord) -> None:
        stream = self._client.stream(prompt, sampling, timeout=self._timeout_s, **self._request)
        async with stream:
            async for delta in stream:
                record.end_s = self._clock()
                record.add_chunk(record.end_s, delta.text, len(delta.token_ids))
                if delta.usage is not None:
                    _take_end(delta.finish_reason, delta.usage, record)

    async def _generate_whole(self, prompt: Prompt, sampling: SamplingParams, record: RequestRecord) -> None:
        completion = await self._client.generate(prompt, sampling, timeout=self._timeout_s, **self._request)
        record.end_s = self._clock()
        record.texts.append(completion.text)
        _take_end(completion.finish_reason, completion.usage, record)

    async def aclose(self) -> None:
        await self._client.aclose()


def _take_end(finish_reason: str | None, usage: Usage, record: RequestRecord) -> None:
    if finish_reason == "abort":
        raise RequestFailure("the server ended the request early: finish_reason abort")
    record.input_len = usage.prompt_tokens
    record.reported_output_len = usage.completion_tokens
    record.cached_len = usage.cached_tokens
