"""Validation: checks of requests before the scheduler sees them. Each check raises the error that the user
gets, naming the field as the user wrote it. Knows no socket.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import numpy as np

from runtime.base.errors import ConfigError, InvalidRequest, Overloaded, RateLimited
from runtime.ring.tenants import OWNER, Tenant
from runtime.sampling.table import MAX_DRAFT_TOKENS
from runtime.text.codec import PromptEncoder, decode_tools
from runtime.text.no_tokenizer import needs_tokenizer
from runtime.wire.format import MAX_PROMPT_TOKENS, TOKEN_BYTES, IntArray, check_template_kwargs, unpack_ids
from runtime.wire.messages import (
    FURTHER_FIELDS,
    ChatMessage,
    ControlRequest,
    GenerateRequest,
    Resume,
    Task,
)
from runtime.wire.plan import PROCESSORS, AdapterRef, check_calls
from runtime.wire.sampling_params import SamplingParams
from runtime.wire.status_page import ProcessStatus
from runtime.wire.transport import DECODE_ERRORS
from tokenizer_proc.sequences import sequence_handles

PromptField = Literal["text", "input_ids", "messages"]
RETRY_AFTER_S = 1.0
EXTRA_ID_BYTES = 8
MAX_PREDICTION_CHARS = 1 << 16
"""Maximum number of characters of a prediction, which take 50 ms to encode."""
MAX_GUIDE_COPIES = 1 << 20
"""Maximum number of characters of a request's guide, times the sequences that it is sent with."""
READ_ONLY = frozenset(("server_info", "iteration_stats", "request_stats"))
"""Operations on the ring that change nothing."""

_decode_map = msgspec.msgpack.Decoder(dict[str, Any]).decode


@dataclass(frozen=True, slots=True)
class Validator:
    """Checks requests against one model and its settings."""

    vocab_size: int
    """Number of ids for which the model has an embedding."""
    context_length: int
    """Maximum number of tokens of a sequence, prompt and output."""
    takes_text: bool = True
    """True if there is a tokenizer."""
    task: Task = "generate"
    """Task that the model is served for."""
    max_prompt_len: int | None = None
    """Maximum number of tokens of a prompt that must be computed in one step; None: prompts may be computed
    in chunks.
    """

    def check_request(self, request: GenerateRequest) -> PromptField:
        """Check what needs no tokenizer. Returns the field that has the prompt. Raises InvalidRequest."""
        check_task(request.task, self.task)
        request.sampling.validate()
        request.sampling.check_vocabulary(self.vocab_size)
        request.sampling.check_truncation(self.context_length)
        self._check_sequences(request)
        if request.retention is not None:
            request.retention.validate()
        if request.guide is not None:
            request.guide.validate()
        if request.processors:
            check_calls(request.processors)
        if request.resume is not None:
            self._check_resume(request.resume)
        self._check_guesses(request)
        if request.adapter is not None and request.task == "embed":
            raise InvalidRequest("lora_request: an embedding has no adapter", param="lora_request")
        if request.prompt_table is not None:
            _check_prompt_table(request, request.prompt_table)
        if request.processors and request.task == "embed":
            raise InvalidRequest(f"{PROCESSORS}: an embedding has no logits", param=PROCESSORS)
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
        if given != ["messages"]:
            _check_no_template_options(request)
        if not self.takes_text:
            _check_ids_only(request, given[0])
        return given[0]

    def check_messages(self, request: GenerateRequest) -> None:
        if not request.messages:
            raise InvalidRequest("messages: at least one is needed", param="messages")

    def template_kwargs(self, request: GenerateRequest) -> dict[str, object]:
        """Return the further variables of the chat template. Raises InvalidRequest."""
        if not request.template_kwargs:
            return {}
        try:
            variables = _decode_map(request.template_kwargs)
        except DECODE_ERRORS as error:
            raise InvalidRequest(
                f"chat_template_kwargs: not a map from names to values: {error}", param="chat_template_kwargs"
            ) from error
        check_template_kwargs(variables)
        return variables

    def tools(self, request: GenerateRequest) -> list[dict[str, Any]]:
        """Return the tool definitions for the chat template. Raises InvalidRequest."""
        return decode_tools(request.tools)

    def input_ids(self, request: GenerateRequest, num_virtual: int = 0) -> IntArray:
        """Return the ids of a prompt given as ids, which may refer to num_virtual virtual tokens. Raises
        InvalidRequest.
        """
        assert request.input_ids is not None
        return self._ids("input_ids", request.input_ids, num_virtual)

    def check_text(self, field: PromptField, text: str, max_token_chars: int | None, max_len: int) -> None:
        """Refuse a text that cannot fit, whatever its tokens are, before it is encoded. max_token_chars: most
        characters that one token stands for; None: unknown.
        """
        limit = self._limit(max_len)
        if max_token_chars is not None and len(text) > (limit - 1) * max_token_chars:
            raise InvalidRequest(
                f"{field}: the prompt has {len(text)} characters, the longest sequence is {limit} tokens of "
                f"at most {max_token_chars} characters, and one of them is needed for the output",
                param=field,
                code="context_length_exceeded",
            )

    def most_kept(self, sampling: SamplingParams, max_len: int) -> int | None:
        """Return how many of a prompt's last ids are kept at most; None if it is not to be truncated.
        max_len: as in `check_prompt`.
        """
        if sampling.truncate_prompt_tokens is None:
            return None
        return sampling.num_kept(MAX_PROMPT_TOKENS, self._limit(max_len), self.max_prompt_len)

    def truncated(self, sampling: SamplingParams, input_ids: IntArray, max_len: int) -> IntArray:
        """Return the last ids of a prompt, as many as the request keeps. max_len: as in `check_prompt`."""
        num_kept = sampling.num_kept(len(input_ids), self._limit(max_len), self.max_prompt_len)
        return input_ids[len(input_ids) - num_kept :]

    def check_prompt(self, field: PromptField, input_ids: IntArray, max_len: int) -> None:
        """Check a prompt's length. max_len: longest sequence that fits the KV cache; 0: unknown."""
        num_tokens = len(input_ids)
        if num_tokens == 0:
            raise InvalidRequest(f"{field}: the prompt is empty; it needs at least one token", param=field)
        limit = self._limit(max_len)
        if num_tokens >= limit:
            raise InvalidRequest(
                f"{field}: the prompt has {num_tokens} tokens, the longest sequence is {limit} tokens, "
                "and one of them is needed for the output",
                param=field,
                code="context_length_exceeded",
            )
        if self.max_prompt_len is not None and num_tokens > self.max_prompt_len:
            raise InvalidRequest(
                f"{field}: the prompt has {num_tokens} tokens; without chunked prefill it is computed in one "
                f"step, which has at most {self.max_prompt_len} (--chunked-prefill-size)",
                param=field,
                code="context_length_exceeded",
            )

    def _limit(self, max_len: int) -> int:
        return min(self.context_length, max_len or self.context_length)

    def _check_sequences(self, request: GenerateRequest) -> None:
        num_sequences = request.sampling.n
        if request.sampling.best_of is not None:
            raise InvalidRequest(
                "best_of is resolved by the client library: ask for n sequences", param="best_of"
            )
        if len(sequence_handles(request)) < num_sequences:
            raise InvalidRequest(
                f"n: there are no indexes for {num_sequences} sequences behind the handle's own", param="n"
            )
        size = 0 if request.guide is None else len(request.guide.text)
        if num_sequences > 1 and num_sequences * size > MAX_GUIDE_COPIES:
            raise InvalidRequest(
                f"n: {num_sequences} sequences with a guide of {size} characters are more than "
                f"{MAX_GUIDE_COPIES} characters together; ask for fewer at a time",
                param="n",
            )
        if request.resume is not None and num_sequences > 1:
            raise InvalidRequest(
                f"resume: only one sequence can be resumed at a time, n is {num_sequences}", param="resume"
            )

    def _check_guesses(self, request: GenerateRequest) -> None:
        if not (request.draft_ids or request.prediction):
            return
        num_drafts = len(self._ids("draft_token_ids", request.draft_ids))
        if num_drafts > MAX_DRAFT_TOKENS:
            raise InvalidRequest(
                f"draft_token_ids: {num_drafts} tokens; at most {MAX_DRAFT_TOKENS} are verified",
                param="draft_token_ids",
            )
        if len(request.prediction) > MAX_PREDICTION_CHARS:
            raise InvalidRequest(
                f"prediction: {len(request.prediction)} characters; at most {MAX_PREDICTION_CHARS} are"
                " looked in",
                param="prediction",
            )
        for name, value in (("draft_token_ids", request.draft_ids), ("prediction", request.prediction)):
            if value and request.task == "embed":
                raise InvalidRequest(f"{name}: an embedding has no output to guess", param=name)

    def _check_resume(self, resume: Resume) -> None:
        num_output = len(self._ids("resume", resume.output_ids))
        if num_output > self.context_length:
            raise InvalidRequest(
                f"resume: {num_output} tokens of output, the longest sequence is {self.context_length}",
                param="resume",
            )
        if not math.isfinite(resume.cumulative_logprob):
            raise InvalidRequest("resume: cumulative_logprob must be finite", param="resume")

    def _ids(self, field: str, packed: bytes, num_virtual: int = 0) -> IntArray:
        if len(packed) % TOKEN_BYTES:
            raise InvalidRequest(f"{field}: {len(packed)} bytes are not whole int32 ids", param=field)
        ids = unpack_ids(packed)
        end = self.vocab_size + num_virtual
        # As an unsigned number, a negative id is above all others.
        if len(ids) and ids.view(np.uint32).max() >= end:
            outside = ids[(ids < 0) | (ids >= end)]
            raise InvalidRequest(
                f"{field}: token id {outside[0]} is not between 0 and {end - 1}", param=field
            )
        return ids


def _check_prompt_table(request: GenerateRequest, table: AdapterRef) -> None:
    param = "prompt_adapter_request" if table.name else "prompt_tuning_config"
    if request.task == "embed":
        raise InvalidRequest(f"{param}: an embedding has no virtual tokens", param=param)
    if request.sampling.prompt_logprobs is not None:
        raise InvalidRequest("prompt_logprobs: virtual tokens have none", param="prompt_logprobs")
    num_ids = len(request.input_ids or b"") // TOKEN_BYTES
    if request.extra_ids and len(request.extra_ids) != EXTRA_ID_BYTES * num_ids:
        raise InvalidRequest(f"{param}: input_token_extra_ids has one for each id of the prompt", param=param)


def check_task(asked: Task, served: Task) -> None:
    """Check a request's task. Raises InvalidRequest if the server was started for the other one."""
    if asked == served:
        return
    if served == "embed":
        raise InvalidRequest(
            "this server was started with --task embed: it has no output to generate; ask for embeddings",
            param="task",
            code="task_not_served",
        )
    raise InvalidRequest(
        "this server generates: it serves embeddings only when it is started with --task embed",
        param="task",
        code="task_not_served",
    )


def check_template_defaults(tokenizer: PromptEncoder, variables: Mapping[str, object]) -> None:
    """Check the chat template variables of a launch, which every conversation would be refused for. Raises
    ConfigError.
    """
    try:
        tokenizer.apply_chat_template([{"role": "user", "content": "."}], template_kwargs=variables)
    except InvalidRequest as error:
        if error.param == "chat_template_kwargs":  # else it may be the message that the template refuses
            raise ConfigError(f"default_{error.message}") from None


def _check_no_template_options(request: GenerateRequest) -> None:
    if request.continue_final_message:
        raise InvalidRequest(
            "continue_final_message: only a prompt of messages has a final one",
            param="continue_final_message",
        )
    if request.template_kwargs:
        raise InvalidRequest(
            "chat_template_kwargs: only a prompt of messages has a template", param="chat_template_kwargs"
        )
    if request.tools:
        raise InvalidRequest("tools: only a prompt of messages has a template", param="tools")


def _check_ids_only(request: GenerateRequest, prompt: PromptField) -> None:
    if prompt != "input_ids":
        raise needs_tokenizer(prompt)
    if request.sampling.stop:
        raise needs_tokenizer("stop")
    if request.sampling.bad_words:
        raise needs_tokenizer("bad_words")
    if request.prediction:
        raise needs_tokenizer("prediction")


def may_ask(tenant: Tenant, question: ControlRequest) -> bool:
    """Return True if this tenant may send this control request."""
    return tenant.may("metrics" if question.op in READ_ONLY else "admin")


@dataclass(frozen=True, slots=True)
class QueueBound:
    """Bound on the sequences that run and wait.

    With one tokenizer and one tenant it is exact, although the scheduler's slot of the status page is a step
    old: the slot says how many requests the scheduler had received by then, so the difference is on the way.
    Rows are always counted as taken, because between two steps those of ended sequences are free while others
    wait.
    """

    max_waiting: int
    max_waiting_of_client: int
    max_running: int

    def check(self, status: ProcessStatus, num_on_way: int, num_new: int = 1, *, tenant: str = OWNER) -> None:
        """Check that `num_new` more sequences of a tenant fit.

        num_on_way: sequences that were admitted and that the scheduler has not received; of everybody or,
        where tenants share the launch, of this tenant. (If another tenant sends too much the scheduler
        refuses it, so it need not count here.) Raises Overloaded if there is no room, RateLimited if the
        tenant itself has taken it, InvalidRequest if so many can never fit.
        """
        num_possible = self.max_running + self.max_waiting_of_client
        if num_new > num_possible:
            raise InvalidRequest(
                f"n: at most {num_possible} sequences of one client may run and wait, got {num_new}",
                param="n",
            )
        num_accepted, limit = status.num_running + status.num_waiting, self.max_running + self.max_waiting
        if num_accepted + num_on_way + num_new <= limit:
            return
        may = (
            f"at most {self.max_running} may run and {self.max_waiting} wait; "
            f"try again in {RETRY_AFTER_S:g} s"
        )
        if tenant == OWNER:
            num_ahead = num_accepted + num_on_way
            raise Overloaded(
                f"{num_ahead} sequences are running or waiting; {may}", retry_after_s=RETRY_AFTER_S
            )
        # The message does not say how much other tenants have.
        if num_accepted + num_new <= limit:
            raise RateLimited(
                f"{num_on_way} sequences of this key have just been sent; of all, {may}",
                retry_after_s=RETRY_AFTER_S,
            )
        raise Overloaded(f"the queue is full; {may}", retry_after_s=RETRY_AFTER_S)


def template_message(message: ChatMessage) -> dict[str, Any]:
    """Return the message in the form that chat templates take. Raises InvalidRequest."""
    fields: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.name:
        fields["name"] = message.name
    if message.further:
        try:
            further = _decode_map(message.further)
        except DECODE_ERRORS as error:
            raise InvalidRequest(f"messages: no map of further fields: {error}", param="messages") from error
        if unknown := sorted(further.keys() - FURTHER_FIELDS):
            raise InvalidRequest(f"messages: unknown key {unknown[0]!r:.100}", param="messages")
        fields |= further
    return fields
