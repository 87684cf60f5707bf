"""The tokenizer's work loop: takes requests, and sends on checked token ids.

It holds prompt text for the duration of one call only. The messages of one client keep their order, so an
abort never overtakes its request. Nothing is dropped: messages that the next process has no room for are
kept, and meanwhile nothing new is read, so clients notice the congestion.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from runtime.base.errors import Forbidden, RequestError
from runtime.ring.suspects.in_hand import InHand
from runtime.ring.tenants import THE_OWNER, Tenant
from runtime.text.codec import PromptEncoder
from runtime.wire.format import IntArray
from runtime.wire.messages import AbortRequest, ControlRequest, GenerateRequest
from runtime.wire.transport import Inbox, Outbox
from tokenizer_proc.adapters import AdapterTable
from tokenizer_proc.admission import QueueAdmission
from tokenizer_proc.arrivals import Arrivals, Arrived, message_cost, template_cost
from tokenizer_proc.long_texts import LongPrompt, LongTexts
from tokenizer_proc.receipt import Receipt
from tokenizer_proc.routes import Routes
from tokenizer_proc.sequences import Job, JobMaker, SequenceMaker
from tokenizer_proc.validation import PromptField, Validator, may_ask, template_message

MAX_DRAIN = 256
# Sequences of a turn, which also limits the refusals in it, because the detokenizer reads them at its own
# pace.
MAX_TURN_SEQUENCES = 256
# About 50 ms of encoding (1.3 M characters a second and core, measured with the demo's tokenizer): longer
# texts are encoded by a thread, so that neither short prompts nor the heartbeat wait for them.
MAX_BATCH_CHARS = 1 << 16


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
        in_hand: InHand | None = None,
        clock: Callable[[], Receipt] = Receipt.now,
    ) -> None:
        """detokenizers: in the order of their indexes. secret, shares_prefixes: as in SequenceMaker.
        adapters: None if none are served. in_hand: None if nobody is told what this process works on.
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
        self._turn_chars = 0
        """Work of this turn, in characters to encode."""
        self._long = LongTexts()
        self._in_hand = in_hand or InHand()
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

    def turn(self) -> bool:
        """Send kept messages; if none is left, read messages and handle some. Returns True if there is more
        to do at once.
        """
        self._finish_long_texts()
        if not self._routes.flush():
            return False
        self._read()
        if (self._solitary or self._is_alone) and not self._turn_alone():
            return False
        self._turn_chars, num_sequences = 0, 0
        while self._arrivals and num_sequences < MAX_TURN_SEQUENCES and self._routes.flush():
            arrived = self._arrivals.take()
            message, self._receipt = arrived.message, arrived.receipt
            if not isinstance(message, GenerateRequest):
                num_sequences += 1
                self._turn_chars += message_cost(message)
                self._encode_batch()
                self._forward(message)
                if self._turn_chars > MAX_BATCH_CHARS:
                    break
                continue
            if arrived.refusal is None and self._in_hand.must_be_alone(message):
                self._solitary = arrived
                break
            num_sequences += message.sampling.n
            if arrived.refusal is not None:
                self._routes.refuse(message, arrived.refusal)
                continue
            self._guard(message, partial(self._take, message))
            if self._turn_chars > MAX_BATCH_CHARS:
                break
        self._encode_batch()
        has_more = bool(self._arrivals) if self._solitary is None else not self._long
        return has_more and self._routes.flush()

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
            self._guard(arrived.message, partial(self._take, arrived.message))
            self._encode_batch()
            self._is_alone = bool(self._long)
        return not self._is_alone

    def _read(self) -> None:
        if not self._arrivals.may_read:
            return
        messages, receipt = self._inbox.drain(MAX_DRAIN), self._clock()
        self.num_received += len(messages)
        for message in messages:
            is_again = isinstance(message, GenerateRequest) and not self._admission.is_new(message)
            self._arrivals.add(message, receipt, is_again=is_again)

    def _forward(self, message: AbortRequest | ControlRequest) -> None:
        """Pass on a message that needs no tokenizer."""
        if isinstance(message, AbortRequest):
            self._long.mark_aborted(message)
        elif message.adapter is not None:
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
        try:
            taken = self._adapters.put(message, self._tenant_named(message.tenant))
        except RequestError as error:
            self._routes.refuse_control(message, error)
            return
        if isinstance(taken, ControlRequest):
            self._routes.scheduler.send(taken)
        else:
            self._routes.answer(message, taken)

    def close(self) -> None:
        self._long.close()

    def _guard(self, request: GenerateRequest, work: Callable[[], None]) -> None:
        """Call `work`. An exception in it fails this request only."""
        try:
            work()
        except RequestError as error:
            self._routes.refuse(request, error)
        except Exception as error:
            self._routes.fail(request, error)

    def _take(self, request: GenerateRequest) -> None:
        self._in_hand.take(request)
        field = self._validator.check_request(request)
        is_new = self._admission.is_new(request)
        if is_new:
            self._admission.check(request)
        self._turn_chars += sum(map(len, request.sampling.bad_words)) + len(request.prediction)
        job = self._jobs.make(request, self._receipt, is_again=not is_new)
        if field == "input_ids":
            self._pass_on(job, field, self._validator.input_ids(request, job.num_addressed))
        elif field == "messages":
            self._take_messages(job, field)
        else:
            assert request.text is not None
            self._add_text(_TextPrompt(job, field, request.text, request.add_special_tokens))

    def _take_messages(self, job: Job, field: PromptField) -> None:
        """Encode a conversation. Conversations that arrive before the template is loaded wait for the thread
        that loads it; so do long ones, whose text must be searched for special tokens.
        """
        self._validator.check_messages(job.request)
        num_chars = template_cost(job.request)
        is_long = num_chars > MAX_BATCH_CHARS
        if self._tokenizer.is_template_open and not is_long:
            # Counted before it is rendered, because the template may refuse it.
            self._turn_chars += num_chars
            self._add_text(self._render(job, field))
            return
        if is_long:
            self._long.check_room(job, num_chars)
        self._encode_later(
            job,
            field,
            num_chars,
            partial(self._render_and_encode, job, field),
            opens_template=not self._tokenizer.is_template_open,
        )

    def _encode_later(
        self,
        job: Job,
        field: PromptField,
        num_chars: int,
        encode: Callable[[], IntArray],
        *,
        opens_template: bool = False,
    ) -> None:
        self._admission.on_way.begin(job.request.tenant, len(job.handles))
        encode = self._in_hand.later(job.request, encode)
        self._long.add(job, field, num_chars, encode, opens_template=opens_template)

    def _render_and_encode(self, job: Job, field: PromptField) -> IntArray:
        prompt = self._render(job, field)
        self._check_text(prompt)
        return self._encode_one(prompt)

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
        self._check_text(prompt)
        num_chars = len(prompt.text)
        if num_chars > MAX_BATCH_CHARS:
            self._long.check_room(prompt.job, num_chars)
            self._encode_later(prompt.job, prompt.field, num_chars, partial(self._encode_one, prompt))
            return
        self._admission.on_way.begin(prompt.job.request.tenant, len(prompt.job.handles))
        self._batch.append(prompt)
        self._turn_chars += num_chars

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
                    self._guard(prompt.job.request, partial(self._encode_alone, prompt))
                continue
            for prompt, ids in zip(prompts, encoded, strict=True):
                self._guard(prompt.job.request, partial(self._pass_on, prompt.job, prompt.field, ids))
        self._in_hand.end_turn()

    def _encode(self, prompts: Sequence[_TextPrompt]) -> list[IntArray]:
        """Return the ids of prompts that agree in add_special_tokens."""
        texts = [prompt.text for prompt in prompts]
        return self._tokenizer.encode_batch(texts, add_special_tokens=prompts[0].add_special_tokens)

    def _encode_one(self, prompt: _TextPrompt) -> IntArray:
        return self._encode([prompt])[0]

    def _encode_alone(self, prompt: _TextPrompt) -> None:
        self._pass_on(prompt.job, prompt.field, self._encode_one(prompt))

    def _finish_long_texts(self) -> None:
        for long in self._long.take_done():
            job = long.job
            self._admission.on_way.end(job.request.tenant, len(job.handles))
            self._guard(job.request, partial(self._pass_on_long, long))
            if long.aborted:
                aborted = tuple(handle for handle in job.handles if handle in long.aborted)
                self._routes.scheduler.send(AbortRequest(aborted, tenant=job.request.tenant))

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
        sequences = list(self._sequences.make(job, ids, job.trace_at(self._clock().monotonic_s), first))
        self._admission.on_way.pass_on(job.request.tenant, len(sequences))
        for sequence in sequences:
            self._routes.scheduler.send(sequence)
