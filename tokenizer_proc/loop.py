"""The tokenizer's work loop: requests in, checked token ids out.

Owns prompt text for the length of one call. Everything that one client sends keeps its order, so an abort
never overtakes its request. Nothing is dropped: what the next process has no room for is kept, and while
anything is kept nothing new is read, so the clients feel it.
"""

from __future__ import annotations

import hashlib
import logging
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import msgspec

from runtime.errors import RequestError
from runtime.handle import client_of, describe
from runtime.messages import (
    AbortRequest,
    ChatMessage,
    ErrorInfo,
    GenerateRequest,
    RequestFailed,
    StreamOpen,
    TokenizedRequest,
)
from runtime.status_page import Status
from runtime.transport import Inbox, Outbox
from runtime.wire import IntArray, Message, pack_ids
from text.tokenizer import Tokenizer
from tokenizer_proc.validation import Admission, PromptField, Validator, error_info

logger = logging.getLogger(__name__)

MAX_DRAIN = 256
# About 50 ms of encoding (1.3 M characters a second and core, measured with the demo's tokenizer): longer
# texts are encoded by a thread, so that neither short prompts nor the heartbeat wait for them.
MAX_BATCH_CHARS = 1 << 16
MAX_LONG_TEXTS = 64
PROMPT_TAIL_TOKENS = 8
NAMESPACE_BYTES = 16


@dataclass(slots=True, eq=False)
class _TextPrompt:
    """A request whose text is still to be encoded."""

    request: GenerateRequest
    field: PromptField
    text: str
    add_special_tokens: bool


@dataclass(slots=True, eq=False)
class _LongPrompt:
    """A text prompt that the thread is encoding."""

    prompt: _TextPrompt
    ids: Future[list[IntArray]]
    aborted: bool = False
    """An abort has passed meanwhile; it is repeated behind the request."""


@dataclass(slots=True, eq=False)
class _Exit:
    """One of the two ways out, with what it had no room for."""

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
        detokenizer: Outbox,
        tokenizer: Tokenizer,
        validator: Validator,
        admission: Admission,
        scheduler_status: Callable[[], Status],
        secret: bytes,
    ) -> None:
        """`secret` keys the digest that separates the caches of different salts; it stays in the process."""
        self._inbox = inbox
        self._scheduler = _Exit(scheduler)
        self._detokenizer = _Exit(detokenizer)
        self._tokenizer = tokenizer
        self._validator = validator
        self._admission = admission
        self._scheduler_status = scheduler_status
        self._secret = secret
        self._encode_open = msgspec.msgpack.Encoder().encode
        self._arrived: deque[Message] = deque()
        self._batch: list[_TextPrompt] = []
        self._batch_chars = 0
        self._long: deque[_LongPrompt] = deque()
        self._thread = ThreadPoolExecutor(1, "long-texts")
        self._num_passed_on = 0

    @property
    def is_busy(self) -> bool:
        """Whether something waits that no socket will announce."""
        return bool(self._scheduler.kept or self._detokenizer.kept or self._long or self._arrived)

    def turn(self) -> bool:
        """Send what is left over; when nothing is, take and answer some of what has arrived.

        Returns True when the rest of it can be done at once.
        """
        self._finish_long_texts()
        if not self._has_room():
            return False
        if not self._arrived:
            self._arrived.extend(self._inbox.drain(MAX_DRAIN))
        while self._arrived and self._has_room():
            message = self._arrived.popleft()
            if not isinstance(message, GenerateRequest):
                self._encode_batch()
                self._scheduler.send(message)
                if isinstance(message, AbortRequest):
                    self._mark_aborted(message)
                continue
            self._guard(message, partial(self._take, message))
            if self._batch_chars > MAX_BATCH_CHARS:
                break
        self._encode_batch()
        return bool(self._arrived) and self._has_room()

    def _has_room(self) -> bool:
        """Whether everything before could be passed on."""
        is_flushed = self._scheduler.try_flush() and self._detokenizer.try_flush()
        return is_flushed and len(self._long) < MAX_LONG_TEXTS

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
        self._detokenizer.send(RequestFailed(request.handle, error))

    def _take(self, request: GenerateRequest) -> None:
        field = self._validator.check_request(request)
        num_sent = self._num_passed_on + len(self._batch) + len(self._long)
        self._admission.check(self._scheduler_status(), num_sent)
        if field == "input_ids":
            self._pass_on(request, field, self._validator.input_ids(request))
            return
        if field == "messages":
            self._validator.check_messages(request)
            assert request.messages is not None
            text = self._tokenizer.apply_chat_template(
                [_as_dict(message) for message in request.messages],
                add_generation_prompt=request.add_generation_prompt,
            )
            # The template has written them already.
            add_special_tokens = False
        else:
            assert request.text is not None
            text = request.text
            add_special_tokens = request.add_special_tokens
        self._add_text(_TextPrompt(request, field, text, add_special_tokens))

    def _add_text(self, prompt: _TextPrompt) -> None:
        if len(prompt.text) > MAX_BATCH_CHARS:
            self._long.append(_LongPrompt(prompt, self._thread.submit(self._encode, [prompt])))
            return
        self._batch.append(prompt)
        self._batch_chars += len(prompt.text)

    def _encode_batch(self) -> None:
        """Encode and pass on the texts collected so far."""
        batch, self._batch, self._batch_chars = self._batch, [], 0
        for add_special_tokens in (True, False):
            prompts = [prompt for prompt in batch if prompt.add_special_tokens is add_special_tokens]
            if not prompts:
                continue
            try:
                encoded = self._encode(prompts)
            except Exception:
                # One of them cannot be encoded: alone it fails alone.
                for prompt in prompts:
                    self._guard(prompt.request, partial(self._encode_alone, prompt))
                continue
            for prompt, ids in zip(prompts, encoded, strict=True):
                self._guard(prompt.request, partial(self._pass_on, prompt.request, prompt.field, ids))

    def _encode(self, prompts: Sequence[_TextPrompt]) -> list[IntArray]:
        """The ids of prompts that agree in add_special_tokens."""
        texts = [prompt.text for prompt in prompts]
        return self._tokenizer.encode_batch(texts, add_special_tokens=prompts[0].add_special_tokens)

    def _encode_alone(self, prompt: _TextPrompt) -> None:
        self._pass_on(prompt.request, prompt.field, self._encode([prompt])[0])

    def _finish_long_texts(self) -> None:
        while self._long and self._long[0].ids.done():
            long = self._long.popleft()
            self._guard(long.prompt.request, partial(self._pass_on_long, long))
            if long.aborted:
                self._scheduler.send(AbortRequest((long.prompt.request.handle,)))

    def _pass_on_long(self, long: _LongPrompt) -> None:
        self._pass_on(long.prompt.request, long.prompt.field, long.ids.result()[0])

    def _mark_aborted(self, abort: AbortRequest) -> None:
        for long in self._long:
            handle = long.prompt.request.handle
            if handle in abort.handles or (abort.client and client_of(handle) == abort.client):
                long.aborted = True

    def _pass_on(self, request: GenerateRequest, field: PromptField, ids: IntArray) -> None:
        """Check the prompt's length and send the request to the scheduler. Raises InvalidRequest."""
        self._validator.check_prompt(field, ids, self._scheduler_status().max_len)
        sampling, resume = request.sampling, request.resume
        stream_open = StreamOpen(
            handle=request.handle,
            num_prompt_tokens=len(ids),
            prompt_tail=pack_ids(ids[-PROMPT_TAIL_TOKENS:]),
            label=request.label,
            stream=request.stream,
            stop=sampling.stop,
            include_stop_str_in_output=sampling.include_stop_str_in_output,
            skip_special_tokens=sampling.skip_special_tokens,
            min_tokens=sampling.min_tokens,
            resume=resume,
        )
        self._num_passed_on += 1
        self._scheduler.send(
            TokenizedRequest(
                handle=request.handle,
                input_ids=pack_ids(ids),
                sampling=sampling,
                stream_open=msgspec.Raw(self._encode_open(stream_open)),
                priority=request.priority,
                namespace=namespace(request.cache_salt, self._secret),
                output_ids=b"" if resume is None else resume.output_ids,
                cached_tokens=-1 if resume is None else resume.cached_tokens,
            )
        )


def namespace(cache_salt: str, secret: bytes) -> bytes:
    """Where a request's KV may be shared: keyed, so that nobody can compute a salt of the same namespace."""
    if not cache_salt:
        return b""
    return hashlib.blake2b(cache_salt.encode(), digest_size=NAMESPACE_BYTES, key=secret).digest()


def _as_dict(message: ChatMessage) -> dict[str, str]:
    fields = {"role": message.role, "content": message.content}
    if message.name:
        fields["name"] = message.name
    return fields
