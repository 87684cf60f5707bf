"""The tokenizer's work loop: requests in, checked token ids out.

Owns prompt text for the length of one call. Everything that one client sends keeps its order, so an abort
never overtakes its request. Nothing is dropped: what the next process has no room for is kept, and while
anything is kept nothing new is read, so the clients feel it.
"""

from __future__ import annotations

import logging
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

from runtime.base.errors import Overloaded, RequestError
from runtime.text.codec import PromptEncoder
from runtime.wire.error_info import error_info
from runtime.wire.format import IntArray, Message
from runtime.wire.handle import attempt_of, client_of, describe
from runtime.wire.messages import AbortRequest, ChatMessage, ErrorInfo, GenerateRequest, RequestFailed
from runtime.wire.status_page import Status
from runtime.wire.transport import Inbox, Outbox
from tokenizer_proc.bad_words import with_bad_words_as_ids
from tokenizer_proc.receipt import Receipt
from tokenizer_proc.sent_count import SentCount
from tokenizer_proc.sequences import Job, SequenceMaker, sequence_handles
from tokenizer_proc.validation import Admission, PromptField, Validator

logger = logging.getLogger(__name__)

MAX_DRAIN = 256
# About 50 ms of encoding (1.3 M characters a second and core, measured with the demo's tokenizer): longer
# texts are encoded by a thread, so that neither short prompts nor the heartbeat wait for them.
MAX_BATCH_CHARS = 1 << 16
# What a message costs in a chat template, as characters to encode: 3 us (measured with the demo's).
CHARS_PER_MESSAGE = 4
MAX_LONG_CHARS = 1 << 24
"""Of long texts that wait for the thread, some ten seconds of its work: a further one is refused, so that no
caller waits for what others have sent.
"""
LONG_RETRY_S = 5.0
DRAIN_RETRY_S = 5.0
"""When to ask again a server that is shutting down: whatever takes its place has to start."""


@dataclass(slots=True, eq=False)
class _TextPrompt:
    """A request whose text is still to be encoded."""

    job: Job
    field: PromptField
    text: str
    add_special_tokens: bool


@dataclass(slots=True, eq=False)
class _LongPrompt:
    """A text prompt that the thread is encoding, or a conversation that it is writing first."""

    job: Job
    prompt_field: PromptField
    num_chars: int
    """Characters of its text; of a conversation, without those that its template writes."""
    ids: Future[IntArray]
    aborted: set[bytes] = field(default_factory=set)
    """Its sequences whose abort has passed meanwhile; it is repeated behind the request."""


@dataclass(slots=True, eq=False)
class _Exit:
    """One of the ways out, with what it had no room for."""

    outbox: Outbox
    kept: deque[Message] = field(default_factory=deque)

    def send(self, message: Message) -> None:
        self.kept.append(message)
        self.try_flush()

    def try_flush(self) -> bool:
        while self.kept:
            if not self.outbox.send(self.kept[0]):
                return False
            self.kept.popleft()
        return True


class TokenizerLoop:
    """Does the work of the process, one `turn` at a time."""

    def __init__(
        self,
        *,
        inbox: Inbox,
        scheduler: Outbox,
        detokenizers: Sequence[Outbox],
        tokenizer: PromptEncoder,
        validator: Validator,
        admission: Admission,
        scheduler_status: Callable[[], Status],
        secret: bytes,
        num_sent_elsewhere: Callable[[], int] = lambda: 0,
        epochs_elsewhere: Callable[[], tuple[int, ...]] = tuple,
        is_draining: Callable[[], bool] = lambda: False,
        is_recovering: Callable[[], bool] = lambda: False,
        clock: Callable[[], Receipt] = Receipt.now,
    ) -> None:
        """`detokenizers` in the order of their indexes. `secret` keys the digest that separates the caches of
        different salts; it stays in the ring. `num_sent_elsewhere`: the sum of the other tokenizers'
        `num_sent`; `epochs_elsewhere`: their epochs. `is_draining`: whether new requests are refused because
        the launch ends; one that is submitted again is not new. `is_recovering`: whether a process was
        replaced, or a client came back, so recently that what they had may be submitted again; at any other
        time nobody is believed who says so.
        """
        self._inbox = inbox
        self._scheduler = _Exit(scheduler)
        self._detokenizers = [_Exit(outbox) for outbox in detokenizers]
        self._tokenizer = tokenizer
        self._max_token_chars = tokenizer.max_token_chars()
        self._validator = validator
        self._admission = admission
        self._scheduler_status = scheduler_status
        self._sent_count = SentCount(num_sent_elsewhere, epochs_elsewhere)
        self._is_draining = is_draining
        self._is_recovering = is_recovering
        self._sequences = SequenceMaker(secret)
        self._clock = clock
        self._receipt = clock()
        """Of what is in `_arrived`."""
        self._arrived: deque[Message] = deque()
        self._batch: list[_TextPrompt] = []
        self._turn_chars = 0
        """Work of this turn, as characters to encode."""
        self._long: deque[_LongPrompt] = deque()
        self._thread = ThreadPoolExecutor(1, "long-texts")
        self._num_passed_on = 0
        self.num_encoding = 0
        """Sequences whose prompts are being encoded."""

    @property
    def num_sent(self) -> int:
        """Sequences let through since the start: on the way to the scheduler, or being encoded."""
        return self._num_passed_on + self.num_encoding

    @property
    def is_busy(self) -> bool:
        """Whether something waits that no socket will announce."""
        has_kept = self._scheduler.kept or any(way.kept for way in self._detokenizers)
        return bool(has_kept or self._long or self._arrived)

    def turn(self) -> bool:
        """Send what is left over; when nothing is, take and answer some of what has arrived.

        Returns True when the rest of it can be done at once.
        """
        self._finish_long_texts()
        if not self._has_room():
            return False
        if not self._arrived:
            self._arrived.extend(self._inbox.drain(MAX_DRAIN))
            self._receipt = self._clock()
        self._turn_chars = 0
        while self._arrived and self._has_room():
            message = self._arrived.popleft()
            if not isinstance(message, GenerateRequest):
                self._encode_batch()
                self._scheduler.send(message)
                if isinstance(message, AbortRequest):
                    self._mark_aborted(message)
                continue
            self._guard(message, partial(self._take, message))
            if self._turn_chars > MAX_BATCH_CHARS:
                break
        self._encode_batch()
        return bool(self._arrived) and self._has_room()

    def _has_room(self) -> bool:
        """Whether everything before could be passed on."""
        blocked = [way for way in (self._scheduler, *self._detokenizers) if not way.try_flush()]
        return not blocked

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _guard(self, request: GenerateRequest, work: Callable[[], None]) -> None:
        """Do `work`; whatever it raises fails this request alone."""
        try:
            work()
        except RequestError as error:
            self._refuse(request, error_info(error))
        except Exception as error:
            # An exception's text may quote the prompt, so only its kind and its place are logged.
            place = traceback.extract_tb(error.__traceback__)[-1]
            name = type(error).__name__
            logger.error(
                "%s failed: %s at %s:%s", describe(request.handle), name, place.filename, place.lineno
            )
            self._refuse(request, ErrorInfo("the tokenizer failed on this request"))

    def _refuse(self, request: GenerateRequest, error: ErrorInfo) -> None:
        way = self._detokenizers[client_of(request.handle) % len(self._detokenizers)]
        for handle in sequence_handles(request):
            way.send(RequestFailed(handle, error))

    def _take(self, request: GenerateRequest) -> None:
        field = self._validator.check_request(request)
        if self._is_new(request):
            self._admit(request)
        self._turn_chars += sum(map(len, request.sampling.bad_words))
        job = Job(
            request,
            sequence_handles(request),
            with_bad_words_as_ids(request.sampling, self._tokenizer, self._validator.vocab_size),
            self._receipt.arrived_s(request.arrival_time),
            self._receipt.deadline_s(request.time_limit_ms),
        )
        if field == "input_ids":
            self._pass_on(job, field, self._validator.input_ids(request))
        elif field == "messages":
            self._take_messages(job, field)
        else:
            assert request.text is not None
            self._add_text(_TextPrompt(job, field, request.text, request.add_special_tokens))

    def _is_new(self, request: GenerateRequest) -> bool:
        """False: it is made again after a restart, was let in once and is not refused now."""
        return not (attempt_of(request.handle) and self._is_recovering())

    def _take_messages(self, job: Job, field: PromptField) -> None:
        """Conversations that come before the template is open wait for the thread, which opens it; so do long
        ones, whose text is looked through for special tokens.
        """
        self._validator.check_messages(job.request)
        assert job.request.messages is not None
        num_chars = sum(len(message.content) for message in job.request.messages)
        is_long = num_chars > MAX_BATCH_CHARS
        if self._tokenizer.is_template_open and not is_long:
            self._turn_chars += CHARS_PER_MESSAGE * len(job.request.messages)
            self._add_text(self._render(job, field))
            return
        if is_long and self._is_new(job.request):
            self._check_long(num_chars)
        self.num_encoding += len(job.handles)
        ids = self._thread.submit(self._render_and_encode, job, field)
        self._long.append(_LongPrompt(job, field, num_chars, ids))

    def _render_and_encode(self, job: Job, field: PromptField) -> IntArray:
        prompt = self._render(job, field)
        self._check_text(prompt)
        return self._encode_one(prompt)

    def _admit(self, request: GenerateRequest) -> None:
        """Raises Overloaded when there is no room, or will be none."""
        if self._is_draining():
            raise Overloaded("the server is shutting down", code="shutting_down", retry_after_s=DRAIN_RETRY_S)
        status = self._scheduler_status()
        num_sent = self._sent_count.total(self.num_sent, status)
        self._admission.check(status, num_sent, request.sampling.n)

    def _render(self, job: Job, field: PromptField) -> _TextPrompt:
        request = job.request
        assert request.messages is not None
        text = self._tokenizer.apply_chat_template(
            [_as_dict(message) for message in request.messages],
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            template_kwargs=self._validator.template_kwargs(request),
        )
        # The template has written the special tokens already.
        return _TextPrompt(job, field, text, add_special_tokens=False)

    def _check_text(self, prompt: _TextPrompt) -> None:
        max_len = self._scheduler_status().max_len
        self._validator.check_text(prompt.field, prompt.text, self._max_token_chars, max_len)

    def _add_text(self, prompt: _TextPrompt) -> None:
        self._check_text(prompt)
        is_long = len(prompt.text) > MAX_BATCH_CHARS
        if is_long and self._is_new(prompt.job.request):
            self._check_long(len(prompt.text))
        self.num_encoding += len(prompt.job.handles)
        if is_long:
            ids = self._thread.submit(self._encode_one, prompt)
            self._long.append(_LongPrompt(prompt.job, prompt.field, len(prompt.text), ids))
            return
        self._batch.append(prompt)
        self._turn_chars += len(prompt.text)

    def _check_long(self, num_chars: int) -> None:
        """Raises Overloaded when too much waits for the thread; one text may always."""
        num_waiting = sum(long.num_chars for long in self._long)
        if num_waiting and num_waiting + num_chars > MAX_LONG_CHARS:
            raise Overloaded(
                f"texts of {num_waiting} characters wait to be encoded; try a long one again later",
                retry_after_s=LONG_RETRY_S,
            )

    def _encode_batch(self) -> None:
        """Encode and pass on the texts collected so far."""
        batch, self._batch = self._batch, []
        self.num_encoding -= sum(len(prompt.job.handles) for prompt in batch)
        for add_special_tokens in (True, False):
            prompts = [prompt for prompt in batch if prompt.add_special_tokens is add_special_tokens]
            if not prompts:
                continue
            try:
                encoded = self._encode(prompts)
            except Exception:
                # One of them cannot be encoded: alone it fails alone.
                for prompt in prompts:
                    self._guard(prompt.job.request, partial(self._encode_alone, prompt))
                continue
            for prompt, ids in zip(prompts, encoded, strict=True):
                self._guard(prompt.job.request, partial(self._pass_on, prompt.job, prompt.field, ids))

    def _encode(self, prompts: Sequence[_TextPrompt]) -> list[IntArray]:
        """The ids of prompts that agree in add_special_tokens."""
        texts = [prompt.text for prompt in prompts]
        return self._tokenizer.encode_batch(texts, add_special_tokens=prompts[0].add_special_tokens)

    def _encode_one(self, prompt: _TextPrompt) -> IntArray:
        return self._encode([prompt])[0]

    def _encode_alone(self, prompt: _TextPrompt) -> None:
        self._pass_on(prompt.job, prompt.field, self._encode_one(prompt))

    def _finish_long_texts(self) -> None:
        while self._long and self._long[0].ids.done():
            long = self._long.popleft()
            job = long.job
            self.num_encoding -= len(job.handles)
            self._guard(job.request, partial(self._pass_on_long, long))
            if long.aborted:
                self._scheduler.send(
                    AbortRequest(tuple(handle for handle in job.handles if handle in long.aborted))
                )

    def _pass_on_long(self, long: _LongPrompt) -> None:
        self._pass_on(long.job, long.prompt_field, long.ids.result())

    def _mark_aborted(self, abort: AbortRequest) -> None:
        for long in self._long:
            handles = long.job.handles
            if abort.client and client_of(handles[0]) == abort.client:
                long.aborted.update(handles)
            else:
                long.aborted.update(set(handles).intersection(abort.handles))

    def _pass_on(self, job: Job, field: PromptField, ids: IntArray) -> None:
        """Check the prompt's length and send its sequences to the scheduler. Raises InvalidRequest."""
        self._validator.check_prompt(field, ids, self._scheduler_status().max_len)
        # All are made before the first is sent: a request is refused as a whole or not at all.
        sequences = list(self._sequences.make(job, ids))
        self._num_passed_on += len(sequences)
        for sequence in sequences:
            self._scheduler.send(sequence)


def _as_dict(message: ChatMessage) -> dict[str, str]:
    fields = {"role": message.role, "content": message.content}
    if message.name:
        fields["name"] = message.name
    return fields
