"""Backend over ZMQ with the client library: the runtime's own performance, without HTTP. Every delta says how
many tokens it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench_serving.backends.base import BenchPrompt, GenerationOptions
from bench_serving.records import Clock, RequestRecord
from carousel.client.async_ import AsyncClient
from carousel.client.core.logprobs import TokenLogprob
from carousel.client.core.request.submission import RequestOptions
from carousel.client.core.result import Completion
from carousel.http_client import RequestFailure
from runtime.base.errors import CarouselError, ConfigError
from runtime.wire.messages import Usage
from runtime.wire.sampling_params import SamplingParams

OWN_FIELDS = frozenset({"max_tokens"})
# A float32 and, for each of the likeliest tokens, an int32 beside it.
LOGPROB_BYTES = 4
TOP_LOGPROB_BYTES = 8


class SdkBackend:
    def __init__(
        self, client: AsyncClient, options: GenerationOptions, *, timeout_s: float, clock: Clock
    ) -> None:
        """Connect to a runtime. Raises ConfigError if --extra-request-body has a field that the client
        library does not.
        """
        self._client = client
        self._stream = options.stream
        self._timeout_s = timeout_s
        self._clock = clock
        sampling_fields = set(SamplingParams.__struct_fields__) - OWN_FIELDS
        request_fields = set(RequestOptions.__annotations__)
        for name in options.extra:
            if name not in sampling_fields | request_fields:
                raise ConfigError(f"--extra-request-body: the sdk backend has no field {name!r}")
        self._sampling: dict[str, Any] = {
            "temperature": 0.0,
            "ignore_eos": options.ignore_eos,
            "logprobs": options.num_logprobs,
            "return_context_logits": options.context_logits,
            "return_generation_logits": options.generation_logits,
        }
        self._request: dict[str, Any] = {"add_special_tokens": options.add_special_tokens}
        for name, value in options.extra.items():
            (self._sampling if name in sampling_fields else self._request)[name] = value

    async def generate(self, prompt: BenchPrompt, output_len: int, record: RequestRecord) -> None:
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

    async def _generate_stream(
        self, prompt: BenchPrompt, sampling: SamplingParams, record: RequestRecord
    ) -> None:
        stream = self._client.stream(prompt, sampling, timeout=self._timeout_s, **self._request)
        async with stream:
            async for delta in stream:
                record.end_s = self._clock()
                record.add_chunk(record.end_s, delta.text, len(delta.token_ids))
                if delta.logprobs:
                    record.extra_bytes += _logprobs_bytes(delta.logprobs)
                if delta.usage is not None:
                    _take_end(delta.finish_reason, delta.usage, record)
            assert stream.state is not None
            record.extra_bytes += _logits_bytes(stream.state.completion())

    async def _generate_whole(
        self, prompt: BenchPrompt, sampling: SamplingParams, record: RequestRecord
    ) -> None:
        completion = await self._client.generate(prompt, sampling, timeout=self._timeout_s, **self._request)
        record.end_s = self._clock()
        record.texts.append(completion.text)
        record.extra_bytes = _logprobs_bytes(completion.logprobs) + _logits_bytes(completion)
        _take_end(completion.finish_reason, completion.usage, record)

    async def aclose(self) -> None:
        await self._client.aclose()

    async def flush_cache(self) -> None:
        try:
            await self._client.flush_cache()
        except (CarouselError, TimeoutError) as error:
            raise RequestFailure(f"--flush-cache: {error}") from None


def _logprobs_bytes(logprobs: Sequence[TokenLogprob]) -> int:
    return sum(LOGPROB_BYTES + TOP_LOGPROB_BYTES * len(each.top) for each in logprobs)


def _logits_bytes(completion: Completion) -> int:
    arrays = (completion.context_logits, completion.outputs[0].generation_logits)
    return sum(array.nbytes for array in arrays if array is not None)


def _take_end(finish_reason: str | None, usage: Usage, record: RequestRecord) -> None:
    if finish_reason == "abort":
        raise RequestFailure("the server ended the request early: finish_reason abort")
    record.input_len = usage.prompt_tokens
    record.reported_output_len = usage.completion_tokens
    record.cached_len = usage.cached_tokens
