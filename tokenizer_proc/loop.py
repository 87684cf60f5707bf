"""The tokenizer's work loop: takes requests, and sends on checked token ids.

It holds prompt text for the duration of one call only. Texts that would take it long are left to threads
(tokenizer_proc.long_texts) and may be overtaken by shorter ones, but an abort never overtakes its request.
Nothing is dropped: messages that the next process has no room for are kept, and meanwhile nothing new is
read, so clients notice the congestion.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVarTuple

import numpy as np

from runtime.base.errors import Forbidden, InvalidRequest, RequestError
from runtime.ring.suspects.in_hand import TextsInHand
from runtime.ring.tenants import OWNER, THE_OWNER, Tenant
from runtime.text.codec import PromptEncoder
from runtime.wire.format import IntArray
from runtime.wire.messages import AbortRequest, ControlRequest, GenerateRequest
from runtime.wire.transport import Inbox, Outbox
from tokenizer_proc.adapters import AdapterTable
from tokenizer_proc.admission import QueueAdmission
from tokenizer_proc.arrivals import (
    BYTES_PER_CHAR,
    CHARS_PER_SEQUENCE,
    MAX_PIECE_CHARS,
    PRICE_OF_BAD_UPLOAD,
    Arrivals,
    Arrived,
    encoding_cost,
    prompt_cost,
)
from tokenizer_proc.long_texts import MAX_MEDIUM_CHARS, LongPrompt, LongTexts
from tokenizer_proc.receipt import Receipt
from tokenizer_proc.routes import Routes
from tokenizer_proc.sequences import Job, JobMaker, SequenceMaker
from tokenizer_proc.validation import PromptField, Validator, may_ask, template_message

Ts = TypeVarTuple("Ts")

MAX_DRAIN = 256
# Decoding takes 1 to 2 ms. A single message may have more.
MAX_DRAIN_BYTES = 1 << 20
MUCH_CHARS = 1 << 20
"""Cost of a message, in characters, above which it is not handled in the turn in which it was read: 8 MiB
take up to 18 ms to decode, and 10 to hash (`TextsInHand.take`).
"""


@dataclass(slots=True, eq=False)
class _TextPrompt:
    """A request whose text is still to be encoded."""

    job: Job
    field: PromptField
    text: str
    add_special_tokens: bool


class TokenizerLoop:
    """Work loop of the process. Each `turn` does a bounded amount of work."""

    def __init__(
        self,
        *,
        inbox: Inbox,
        scheduler: Outbox,
        detokenizers: Sequence[Outbox],
        tokenizer: PromptEncoder,
        validator: Validator,
        admission: QueueAdmission,
        secret: bytes,
        shares_prefixes: bool = False,
        tenant_named: Callable[[str], Tenant] = lambda _: THE_OWNER,
        adapters: AdapterTable | None = None,
        in_hand: TextsInHand | None = None,
        clock: Callable[[], Receipt] = Receipt.now,
        on_encoded: Callable[[], None] = lambda: None,
    ) -> None:
        """detokenizers: in the order of their indexes. secret, shares_prefixes: as in SequenceMaker.
        adapters: None if none are served. in_hand: None if nobody is told what this process works on.
        on_encoded: called in a thread when it has encoded a text, which the next turn takes.
        """
        self._inbox = inbox
        self._routes = Routes(scheduler, detokenizers)
        self._tokenizer = tokenizer
        self._max_token_chars = tokenizer.max_token_chars()
        self._validator = validator
        self._admission = admission
        self._tenant_named = tenant_named
        self._sequences = SequenceMaker(secret, shares_prefixes=shares_prefixes)
        self._adapters = adapters or AdapterTable()
        self._jobs = JobMaker(tokenizer, validator.vocab_size, self._adapters)
        self._clock = clock
        self._receipt = clock()
        """Receipt of the message that is being handled."""
        self._arrivals = Arrivals()
        self._batch: list[_TextPrompt] = []
        self._turn_cost = 0
        """Work of this turn, in characters to encode."""
        self._has_read_much = False
        """True if messages that the last turn has read wait to be handled."""
        self._long = LongTexts(on_encoded)
        self._in_hand = in_hand or TextsInHand()
        self._solitary: Arrived | None = None
        """Message whose text is to be read while nothing else is in hand; no other is taken before."""
        self._is_alone = False
        """True while a thread may work on such a message."""
        self.num_received = 0
        """Number of clients' messages received since the start."""

    @property
    def num_encoding(self) -> int:
        """Number of sequences whose prompts are being encoded."""
        return self._admission.on_way.num_encoding

    @property
    def num_sent(self) -> int:
        """Number of sequences admitted since the start: sent to the scheduler, or being encoded."""
        return self._admission.num_sent

    @property
    def is_busy(self) -> bool:
        """True if there is work that no socket will signal."""
        return bool(self._routes.is_keeping or self._long or self._arrivals or self._solitary)

    @property
    def is_blocked(self) -> bool:
        """True if messages are kept, or no more are read: the inbox may be readable all the time."""
        return self._routes.is_keeping or not self._arrivals.may_read

    def turn(self) -> bool:
        """Send kept messages; if none is left, read messages and handle some. Returns True if there is more
        to do at once.

        The turn ends before a message that would make it long; only its first message may be any.
        """
        self._routes.begin_turn()
        self._turn_cost = 0
        has_all = self._finish_encoded()
        if not self._routes.flush():
            return self._routes.is_paused
        if self._read():
            return True
        is_first = self._solitary is None
        if (self._solitary or self._is_alone) and not self._turn_alone():
            return not has_all
        while self._solitary is None and self._arrivals.is_ready and self._routes.flush():
            self._turn_cost += self._arrivals.next_cost
            if self._turn_cost > MAX_PIECE_CHARS and not is_first:
                break
            is_first = False
            self._handle_next()
        self._encode_batch()
        if not self._routes.flush():
            return self._routes.is_paused
        has_more = self._arrivals.is_ready if self._solitary is None else not self._long
        return has_more or not has_all

    def _handle_next(self) -> None:
        arrived = self._arrivals.take()
        message, self._receipt = arrived.message, arrived.receipt
        if not isinstance(message, GenerateRequest):
            self._encode_batch()
            if arrived.refusal is not None and isinstance(message, ControlRequest):
                self._routes.refuse_control(message, arrived.refusal)
            else:
                self._forward(message)
        elif arrived.refusal is not None:
            self._routes.refuse(message, arrived.refusal)
        elif self._in_hand.is_for_alone(message):
            self._solitary = arrived
        else:
            self._guard(message, self._take, message)

    def _turn_alone(self) -> bool:
        """Take the message that is to be alone once no thread has another. Returns True if others may be
        taken now.
        """
        if self._long:
            return False
        arrived, self._solitary = self._solitary, None
        self._is_alone = False
        if arrived is not None and isinstance(arrived.message, GenerateRequest):
            self._receipt = arrived.receipt
            self._turn_cost += arrived.cost
            self._guard(arrived.message, self._take, arrived.message)
            self._encode_batch()
            self._is_alone = bool(self._long)
        return not self._is_alone

    def _read(self) -> bool:
        """Read messages, unless those of the last turn have yet to be handled. Returns True if they were so
        large that they are left to the next turn: it takes long enough to decode them.
        """
        if self._has_read_much or not self._arrivals.may_read:
            self._has_read_much = False
            return False
        messages, receipt = self._inbox.drain(MAX_DRAIN, MAX_DRAIN_BYTES), self._clock()
        self.num_received += len(messages)
        for message in messages:
            is_again = isinstance(message, GenerateRequest) and not self._admission.is_new(message)
            cost = self._arrivals.add(message, receipt, is_again=is_again)
            self._has_read_much |= cost > MUCH_CHARS
        return self._has_read_much

    def _forward(self, message: AbortRequest | ControlRequest) -> None:
        """Pass on a message that needs no tokenizer."""
        if isinstance(message, AbortRequest):
            self._long.mark_aborted(message)
        elif message.op == "put_adapter" and message.adapter is not None:
            self._put_adapter(message)
            return
        elif not may_ask(self._tenant_named(message.tenant), message):
            if not self._arrivals.try_spend(message.tenant):
                return
            error = Forbidden(f"{message.op}: this key may not ask for it")
            self._routes.refuse_control(message, error)
            return
        elif message.op == "timeline":
            self._routes.to_client(message.client).send(message)
            return
        self._routes.scheduler.send(message)

    def _put_adapter(self, message: ControlRequest) -> None:
        """Handle a part of an adapter's weights. When all parts are there the scheduler answers, else this
        process.
        """
        tenant = message.tenant
        try:
            if tenant != OWNER:
                self._arrivals.check_credit(tenant, PRICE_OF_BAD_UPLOAD)
            taken = self._adapters.put(message, self._tenant_named(tenant))
        except RequestError as error:
            if tenant != OWNER and isinstance(error, InvalidRequest):
                self._arrivals.try_spend(tenant, PRICE_OF_BAD_UPLOAD)
            self._routes.refuse_control(message, error)
            return
        except Exception as error:
            self._routes.fail_control(message, error)
            return
        if isinstance(taken, ControlRequest):
            self._routes.scheduler.send(taken)
        else:
            self._routes.answer(message, taken)

    def close(self) -> None:
        self._long.close()

    def _guard(self, request: GenerateRequest, work: Callable[[*Ts], None], *args: *Ts) -> None:
        """Call work(*args). An exception in it fails this request only."""
        try:
            work(*args)
        except RequestError as error:
            self._routes.refuse(request, error)
        except Exception as error:
            self._routes.fail(request, error)

    def _take(self, request: GenerateRequest) -> None:
        suspect = self._in_hand.take(request)
        try:
            self._begin(request, suspect)
        except Exception:
            self._in_hand.drop(suspect)
            raise

    def _begin(self, request: GenerateRequest, suspect: bytes) -> None:
        if not self._tenant_named(request.tenant).may("user"):
            raise Forbidden("this key may not generate")
        field = self._validator.check_request(request)
        is_new = self._admission.is_new(request)
        if is_new:
            self._admission.check(request)
        job = self._jobs.make(request, self._receipt, is_again=not is_new, suspect=suspect)
        prompt = None
        if field == "input_ids":
            self._validator.input_ids(request, job.num_addressed)
        elif field == "messages":
            self._validator.check_messages(request)
        else:
            prompt = self._text_prompt(job, field)
        if not self._leave_to_thread(job, field):
            self._jobs.complete(job)
            if field == "input_ids":
                self._pass_on(job, field, self._ids_of(job))
                self._in_hand.finish(suspect)
            else:
                self._add_text(prompt or self._text_prompt(job, field))

    def _leave_to_thread(self, job: Job, field: PromptField) -> bool:
        """Let a thread encode a request whose texts take long. Conversations that arrive before the template
        is loaded wait for the thread that loads it. Returns False if the request is left to the loop.
        """
        cost = encoding_cost(job.request)
        opens_template = field == "messages" and not self._tokenizer.is_template_open
        if cost <= MAX_PIECE_CHARS and not opens_template:
            return False
        encode = partial(self._encode_all, job, field)
        num_chars = prompt_cost(job.request)
        is_medium = num_chars <= MAX_MEDIUM_CHARS
        size = cost if is_medium else num_chars
        self._encode_in_thread(job, field, size, encode, is_medium=is_medium, opens_template=opens_template)
        return True

    def _encode_in_thread(
        self,
        job: Job,
        field: PromptField,
        num_chars: int,
        encode: Callable[[], IntArray],
        *,
        is_medium: bool,
        opens_template: bool = False,
    ) -> None:
        """Let a thread encode a text. When many medium ones of the tenant wait for that, its next messages
        wait, too; a long one is refused when too much of the tenant waits. is_medium, opens_template: as in
        LongTexts.
        """
        tenant = job.request.tenant
        if not is_medium:
            self._long.check_room(job, num_chars)
        encode = self._in_hand.later(job.suspect, tenant, encode)
        self._long.add(job, field, num_chars, encode, is_medium=is_medium, opens_template=opens_template)
        # Only now, because the system may have no thread for it.
        self._admission.on_way.begin(tenant, len(job.handles))
        if is_medium:
            self._arrivals.begin_encoding(tenant, num_chars)

    def _encode_all(self, job: Job, field: PromptField) -> IntArray:
        """Convert all texts of a request to ids, and return those of its prompt. Called in a thread."""
        self._jobs.complete(job)
        if field == "input_ids":
            return self._ids_of(job)
        return self._encode_one(self._text_prompt(job, field))

    def _ids_of(self, job: Job) -> IntArray:
        return self._validator.input_ids(job.request, job.num_addressed)

    def _text_prompt(self, job: Job, field: PromptField) -> _TextPrompt:
        """Return the prompt's text, which is rendered if it is a conversation. Raises InvalidRequest, also if
        the text cannot fit.
        """
        if field == "messages":
            prompt = self._render(job, field)
        else:
            assert job.request.text is not None
            prompt = _TextPrompt(job, field, job.request.text, job.request.add_special_tokens)
        self._check_text(prompt)
        return prompt

    def _render(self, job: Job, field: PromptField) -> _TextPrompt:
        request = job.request
        assert request.messages is not None
        text = self._tokenizer.apply_chat_template(
            [template_message(message) for message in request.messages],
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            template_kwargs=self._validator.template_kwargs(request),
            tools=self._validator.tools(request),
        )
        # The template has written the special tokens already.
        return _TextPrompt(job, field, text, add_special_tokens=False)

    def _check_text(self, prompt: _TextPrompt) -> None:
        if prompt.job.sampling.truncate_prompt_tokens is not None:
            return  # how much of the text is left is known only after encoding
        max_len = self._admission.max_len
        self._validator.check_text(prompt.field, prompt.text, self._max_token_chars, max_len)

    def _add_text(self, prompt: _TextPrompt) -> None:
        """Add a text to those that are encoded at the end of the turn. One that a template has made long is
        left to a thread.
        """
        num_chars = len(prompt.text)
        if num_chars > MAX_PIECE_CHARS:
            encode = partial(self._encode_one, prompt)
            is_medium = num_chars <= MAX_MEDIUM_CHARS
            self._encode_in_thread(prompt.job, prompt.field, num_chars, encode, is_medium=is_medium)
        else:
            self._admission.on_way.begin(prompt.job.request.tenant, len(prompt.job.handles))
            self._batch.append(prompt)
            self._turn_cost += max(0, num_chars - prompt_cost(prompt.job.request))

    def _encode_batch(self) -> None:
        """Encode the texts collected so far and pass them on."""
        batch, self._batch = self._batch, []
        for prompt in batch:
            self._admission.on_way.end(prompt.job.request.tenant, len(prompt.job.handles))
        for add_special_tokens in (True, False):
            prompts = [prompt for prompt in batch if prompt.add_special_tokens is add_special_tokens]
            if not prompts:
                continue
            try:
                encoded = self._encode(prompts)
            except Exception:
                # One of them cannot be encoded. Encoded alone, only that one fails.
                for prompt in prompts:
                    self._guard(prompt.job.request, self._encode_alone, prompt)
                continue
            for prompt, ids in zip(prompts, encoded, strict=True):
                self._guard(prompt.job.request, self._pass_on, prompt.job, prompt.field, ids)
        self._in_hand.end_turn()

    def _encode(self, prompts: Sequence[_TextPrompt]) -> list[IntArray]:
        """Return the ids of prompts that agree in add_special_tokens."""
        texts = [prompt.text for prompt in prompts]
        return self._tokenizer.encode_batch(texts, add_special_tokens=prompts[0].add_special_tokens)

    def _encode_one(self, prompt: _TextPrompt) -> IntArray:
        """Return the ids of a prompt; of one that is to be truncated, those that may be left."""
        text, adds = prompt.text, prompt.add_special_tokens
        num_last = self._validator.most_kept(prompt.job.sampling, self._admission.max_len)
        if num_last is None or len(text) <= MAX_MEDIUM_CHARS:
            return self._encode([prompt])[0]
        return self._tokenizer.encode_end(text, num_last, add_special_tokens=adds)[0]

    def _encode_alone(self, prompt: _TextPrompt) -> None:
        self._pass_on(prompt.job, prompt.field, self._encode_one(prompt))

    def _finish_encoded(self) -> bool:
        """Pass on what threads have encoded. Returns False if more is left, so that the turn also has time
        for other messages.
        """
        for long in self._long.take_done():
            job, tenant = long.job, long.job.request.tenant
            self._admission.on_way.end(tenant, len(job.handles))
            if long.is_medium:
                self._arrivals.end_encoding(tenant, long.num_chars)
            self._turn_cost += CHARS_PER_SEQUENCE * len(job.handles) + long.num_chars // BYTES_PER_CHAR
            self._guard(job.request, self._pass_on_long, long)
            if long.aborted:
                aborted = tuple(handle for handle in job.handles if handle in long.aborted)
                self._routes.scheduler.send(AbortRequest(aborted, tenant=tenant))
            if self._turn_cost > MAX_PIECE_CHARS // 4:
                return False
        return True

    def _pass_on_long(self, long: LongPrompt) -> None:
        self._pass_on(long.job, long.prompt_field, long.ids.result())

    def _pass_on(self, job: Job, field: PromptField, ids: IntArray) -> None:
        """Truncate the prompt if asked, check its length, and send its sequences to the scheduler. Raises
        InvalidRequest.
        """
        max_len = self._admission.max_len
        ids = self._validator.truncated(job.sampling, ids, max_len)
        if job.num_in_front:
            first = self._validator.vocab_size
            ids = np.concatenate([np.arange(first, first + job.num_in_front, dtype=np.int32), ids])
        self._validator.check_prompt(field, ids, max_len)
        # All are made before the first is sent, so that a request is refused as a whole or not at all.
        first = self._validator.vocab_size
        sequences = self._sequences.make(job, ids, job.trace_at(self._clock().monotonic_s), first)
        self._admission.on_way.pass_on(job.request.tenant, len(sequences))
        for sequence in sequences:
            self._routes.scheduler.send(sequence)
