"""Limits: checks that a single request can run. It reads the request and changes nothing; it knows no queue
and no page.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np

from runtime.base.errors import InvalidRequest
from runtime.sampling.additional_outputs import check_asked
from runtime.sampling.table import MAX_DRAFT_TOKENS
from runtime.settings.config import RuntimeConfig
from runtime.wire.format import TOKEN_BYTES
from runtime.wire.messages import TokenizedRequest
from runtime.wire.plan import WorkerReady

UNSIGNED = np.dtype(np.uint32)
LOGIT_BYTES = 4
"""Bytes of one raw logit, a float32."""


@dataclass(slots=True, frozen=True)
class QueueShare:
    """Maximum number of sequences that one client (or tenant) may have, so that one which floods leaves room
    for the others.

    While the others have none, it may have `max_of_one` of the `max_live` places. Sequences of others lower
    this: it may then have max_of_one / (max_live - max_of_one) times the number of free places. So the next
    client always finds some left.
    """

    max_of_one: int
    max_live: int
    most: int
    """Maximum number of sequences that one client can ever have at a time; no more are accepted as submitted
    again after a restart.
    """
    is_lifted: Callable[[], bool] = lambda: False
    """Returns True if a client that has used up its share may have more all the same. Called only then,
    because it takes time.
    """
    is_set: bool = False
    """True if the operator has set the share. It then also limits the requests that a tenant makes through
    one client.
    """

    def is_used_up(self, num_own: int, num_live: int) -> bool:
        """Return True if the share is used up. num_own: the client's running and waiting sequences; num_live:
        number of live sequences of all clients.
        """
        num_free, num_reserved = self.max_live - num_live, self.max_live - self.max_of_one
        return num_own * num_reserved >= self.max_of_one * num_free and not self.is_lifted()


@dataclass(slots=True, frozen=True)
class Limits:
    """Limits of the model, and of the server's settings."""

    vocab_size: int
    max_len: int
    """Maximum number of tokens of one sequence, prompt and output: the context length or the whole page pool,
    whichever is less.
    """
    eos_ids: frozenset[int]
    max_live: int
    """Maximum number of sequences that run or wait at the same time. Further ones are refused."""
    gather_context_logits: bool = False
    gather_generation_logits: bool = False
    max_logits_bytes: int = 0
    """Maximum number of bytes of raw logits and additional outputs of one sequence, prompt and output
    together.
    """
    client_share: QueueShare | None = None
    """Share of one client; None: a client may fill the queue."""
    tenant_share: QueueShare | None = None
    """Share of one tenant other than the owner, over all its clients; None: a tenant may fill the queue."""
    max_prompt_len: int | None = None
    """Maximum number of tokens of a prompt that must be computed in one step; None: prompts may be computed
    in chunks.
    """
    additional_outputs: tuple[str, ...] = ()
    output_width: int = 0
    """Number of values in a row of an additional output."""

    def check(self, message: TokenizedRequest) -> int:
        """Return the number of a request's prompt tokens. Raises InvalidRequest if it can never run, or is
        not allowed.
        """
        num_virtual = 0 if message.prompt_table is None else message.prompt_table.num_virtual
        check_ids("input_ids", message.input_ids, self.vocab_size + num_virtual)
        num_prompt = len(message.input_ids) // TOKEN_BYTES
        if not num_prompt:
            raise InvalidRequest("the prompt is empty", param="input_ids")
        if num_prompt >= self.max_len:
            raise InvalidRequest(
                f"the prompt has {num_prompt} tokens; with at least one token of output, at most"
                f" {self.max_len} fit",
                param="input_ids",
                code="context_length_exceeded",
            )
        if self.max_prompt_len is not None and num_prompt > self.max_prompt_len:
            raise InvalidRequest(
                f"the prompt has {num_prompt} tokens; computed whole, at most {self.max_prompt_len} fit",
                param="input_ids",
                code="context_length_exceeded",
            )
        sampling = message.sampling
        if sampling.seed is None:
            raise InvalidRequest("seed must be set before a request reaches the scheduler", param="seed")
        if message.output_ids:
            check_ids("output_ids", message.output_ids, self.vocab_size)
        if message.draft_ids:
            check_ids("draft_ids", message.draft_ids, self.vocab_size)
            if len(message.draft_ids) > MAX_DRAFT_TOKENS * TOKEN_BYTES:
                raise InvalidRequest(f"draft_ids: at most {MAX_DRAFT_TOKENS} are verified", param="draft_ids")
        if message.prediction_ids:
            check_ids("prediction", message.prediction_ids, self.vocab_size)
        if message.output_ids or message.num_prompt_logprobs:
            self._check_resumed(message, num_prompt)
        if sampling.return_context_logits or sampling.return_generation_logits or sampling.additional_outputs:
            self._check_logits(message, num_prompt)
        return num_prompt

    def _check_resumed(self, message: TokenizedRequest, num_prompt: int) -> None:
        """Check that an earlier attempt can have delivered what the request says it did."""
        num_output = len(message.output_ids) // TOKEN_BYTES
        max_output = self.last_len(num_prompt, message.sampling.max_tokens) - num_prompt
        max_logprobs = max(0, num_prompt - 1 - message.sampling.prompt_logprobs_start)
        for what, count, limit in (
            ("tokens of output", num_output, max_output),
            ("logprobs of the prompt", message.num_prompt_logprobs, max_logprobs),
        ):
            if count > limit:
                raise InvalidRequest(f"resume: {count} {what}, there are at most {limit}", param="resume")

    def last_len(self, num_prompt: int, max_tokens: int | None) -> int:
        """Return the number of tokens, prompt and output, at which a sequence ends."""
        return self.max_len if max_tokens is None else min(num_prompt + max_tokens, self.max_len)

    def _check_logits(self, message: TokenizedRequest, num_prompt: int) -> None:
        sampling, num_positions = message.sampling, 0
        if sampling.return_context_logits:
            self._check_allowed("context", self.gather_context_logits)
            num_positions = num_prompt
            self._check_logits_bytes("return_context_logits", num_positions)
        if sampling.return_generation_logits:
            self._check_allowed("generation", self.gather_generation_logits)
            num_positions += self.last_len(num_prompt, sampling.max_tokens) - num_prompt
            self._check_logits_bytes("return_generation_logits", num_positions)
        if sampling.additional_outputs:
            check_asked(sampling.additional_outputs, self.additional_outputs)
            num_rows = self.last_len(num_prompt, sampling.max_tokens) - num_prompt - 1
            num_rows += num_prompt if sampling.gather_context else 0
            row_bytes = len(sampling.additional_outputs) * self.output_width * LOGIT_BYTES
            num_bytes = num_positions * self.vocab_size * LOGIT_BYTES + num_rows * row_bytes
            self._check_bytes("additional_outputs", f"{num_rows} rows of each are", num_bytes)

    def _check_allowed(self, which: str, is_allowed: bool) -> None:
        if not is_allowed:
            raise InvalidRequest(
                f"return_{which}_logits: the server was started without --gather-{which}-logits",
                param=f"return_{which}_logits",
            )

    def _check_logits_bytes(self, field: str, num_positions: int) -> None:
        num_bytes = num_positions * self.vocab_size * LOGIT_BYTES
        self._check_bytes(field, f"the raw logits of {num_positions} positions are", num_bytes)

    def _check_bytes(self, field: str, what: str, num_bytes: int) -> None:
        if num_bytes > self.max_logits_bytes:
            raise InvalidRequest(
                f"{field}: {what} {num_bytes} bytes; the server allows {self.max_logits_bytes} a sequence"
                " (--max-logits-bytes)",
                param=field,
            )


def check_ids(name: str, packed: bytes, vocab_size: int) -> None:
    """Check packed token ids. Raises InvalidRequest if an id is not in the vocabulary."""
    if len(packed) % TOKEN_BYTES:
        raise InvalidRequest(f"{name}: {len(packed)} bytes are not packed int32", param=name)
    if not packed:
        return
    ids = np.frombuffer(packed, UNSIGNED)  # unsigned, so that a negative id is a large one
    if ids.item(ids.argmax()) >= vocab_size:  # max() would take four times as long as argmax()
        raise InvalidRequest(f"{name}: an id is not below the vocabulary size {vocab_size}", param=name)


def make_limits(
    config: RuntimeConfig,
    eos_ids: frozenset[int],
    worker: WorkerReady,
    max_len: int,
    is_client_alone: Callable[[], bool],
    has_tenants: Callable[[], bool],
) -> Limits:
    """Make the limits of a launch. is_client_alone: returns True if exactly one client is connected.
    has_tenants: returns True if there may be several tenants.
    """
    most_live = max_live(config, worker)
    is_set = config.max_queued_requests_per_client > 0
    max_of_client = worker.max_rows + config.max_waiting_of_client
    of_client = QueueShare(
        max_of_client,
        most_live,
        # A client that is alone may have the whole queue, unless a limit was set.
        most=max_of_client if is_set else most_live,
        is_lifted=lambda: not is_set and is_client_alone(),
        is_set=is_set,
    )
    unset = msgspec.structs.replace(config, max_queued_requests_per_client=0)
    of_tenant = QueueShare(
        worker.max_rows + unset.max_waiting_of_client,
        most_live,
        most=most_live,
        is_lifted=lambda: not has_tenants() and is_client_alone(),
    )
    return Limits(
        worker.vocab_size,
        max_len,
        eos_ids,
        most_live,
        config.gather_context_logits,
        config.gather_generation_logits,
        config.max_logits_bytes,
        of_client,
        of_tenant,
        max_prompt_len=config.max_prompt_len,
        additional_outputs=config.additional_outputs,
        output_width=worker.output_width,
    )


def max_live(config: RuntimeConfig, worker: WorkerReady) -> int:
    """Return how many sequences may run or wait at the same time, not counting those submitted again after a
    restart.
    """
    return worker.max_rows + config.max_waiting
