"""Validation: what is wrong with a request, found before the scheduler sees it. Knows no socket.

Every check raises the error that the user gets, naming the field as the user wrote it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from runtime.errors import InvalidRequest, Overloaded, RequestError
from runtime.messages import ErrorInfo, GenerateRequest
from runtime.status_page import Status
from runtime.wire import TOKEN_BYTES, IntArray, unpack_ids

PromptField = Literal["text", "input_ids", "messages"]
MAX_ERROR_CHARS = 4096
RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True)
class Validator:
    """Checks requests against one model."""

    vocab_size: int
    """Ids that the model has an embedding for."""
    context_length: int
    """Longest sequence, prompt and output, that the model takes."""

    def check_request(self, request: GenerateRequest) -> PromptField:
        """Check what needs no tokenizer; say which field holds the prompt. Raises InvalidRequest."""
        request.sampling.validate()
        request.sampling.check_vocabulary(self.vocab_size)
        if request.resume is not None:
            num_output = len(self._ids("resume", request.resume.output_ids))
            if num_output > self.context_length:
                raise InvalidRequest(
                    f"resume: {num_output} tokens of output, the longest sequence is {self.context_length}",
                    param="resume",
                )
        given: list[PromptField] = []
        if request.text is not None:
            given.append("text")
        if request.input_ids is not None:
            given.append("input_ids")
        if request.messages is not None:
            given.append("messages")
        if len(given) != 1:
            names = " and ".join(given) or "none of them"
            raise InvalidRequest(
                f"give exactly one of text, input_ids and messages; got {names}", param="prompt"
            )
        return given[0]

    def check_messages(self, request: GenerateRequest) -> None:
        if not request.messages:
            raise InvalidRequest("messages: at least one is needed", param="messages")

    def input_ids(self, request: GenerateRequest) -> IntArray:
        """The ids of a prompt that came as ids. Raises InvalidRequest."""
        assert request.input_ids is not None
        return self._ids("input_ids", request.input_ids)

    def check_prompt(self, field: PromptField, input_ids: IntArray, max_len: int) -> None:
        """Check a prompt's length. `max_len`: longest sequence that fits the KV cache, 0 while unknown."""
        num_tokens = len(input_ids)
        if num_tokens == 0:
            raise InvalidRequest(f"{field}: the prompt is empty; it needs at least one token", param=field)
        limit = min(self.context_length, max_len or self.context_length)
        if num_tokens >= limit:
            raise InvalidRequest(
                f"{field}: the prompt has {num_tokens} tokens, the longest sequence is {limit} tokens, "
                "and one of them is needed for the output",
                param=field,
                code="context_length_exceeded",
            )

    def _ids(self, field: str, packed: bytes) -> IntArray:
        if len(packed) % TOKEN_BYTES:
            raise InvalidRequest(f"{field}: {len(packed)} bytes are not whole int32 ids", param=field)
        ids = unpack_ids(packed)
        outside = ids[(ids < 0) | (ids >= self.vocab_size)]
        if len(outside):
            raise InvalidRequest(
                f"{field}: token id {outside[0]} is not between 0 and {self.vocab_size - 1}", param=field
            )
        return ids


@dataclass(frozen=True, slots=True)
class Admission:
    """Refuses requests when as many run and wait as may.

    Exact, although the scheduler's slot of the status page is a step old: it says how many requests the
    scheduler had received by then, so what is on the way to it is the difference. Rows are counted whether
    they are taken or not, because between two steps those of ended requests are free while others wait.
    """

    max_waiting: int
    max_running: int

    def check(self, status: Status, num_sent: int) -> None:
        """Let one more request through, or raise Overloaded. `num_sent`:
        let through since the start, by the only tokenizer there is.
        """
        num_on_way = max(0, num_sent - status.num_received)
        num_ahead = status.num_running + status.num_waiting + num_on_way
        if num_ahead >= self.max_running + self.max_waiting:
            raise Overloaded(
                f"{num_ahead} requests are running or waiting; at most {self.max_running} may run and "
                f"{self.max_waiting} wait; try again in {RETRY_AFTER_S:g} s",
                retry_after_s=RETRY_AFTER_S,
            )


def error_info(error: RequestError) -> ErrorInfo:
    return ErrorInfo(error.message[:MAX_ERROR_CHARS], error.code, error.param, error.status)
