"""ServerTokenizer: the model's tokenizer in the API process, for answers that show tokens.

The runtime encodes every prompt itself. This tokenizer computes what the wire does not carry back: ids and
texts of a prompt's tokens, and single tokens of logprobs. It is loaded when the first request needs it.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

import msgspec

from carousel.client.core.request.request_builder import pack_token_ids
from carousel.client.core.request.submission import Prompt, RequestOptions
from carousel.conversation import pack_template_kwargs, pack_tools, wire_messages
from carousel.server.http.body_pool import MAX_BODY_BYTES
from carousel.server.spelling.token_table import TokenTables
from carousel.server.tenancy.fair_threads import FairThreads
from carousel.server.tenancy.fair_turns import FairTurns
from runtime.base.errors import InvalidRequest
from runtime.ring.tenants import OWNER
from runtime.text.codec import decode_tools
from runtime.text.no_tokenizer import needs_tokenizer
from runtime.text.selection import open_decoders, open_tokenizer
from runtime.wire.format import IntArray, unpack_ids
from runtime.wire.messages import ChatMessage

if TYPE_CHECKING:
    from runtime.text.codec import Codec

T = TypeVar("T")
TokenText: TypeAlias = Callable[[int], str]

NUM_THREADS = 2
CUT_THREADS = "truncate", "truncate-long"
MAX_SHORTER = 1 << 20
"""Maximum number of bytes of a body, or characters of its prompts, for the first of these threads."""
MAX_CONVERSATION_BYTES = MAX_BODY_BYTES
"""Maximum number of bytes of memory for the text that a template makes of the contents of a conversation, if
it is to be cut. The contents take no more.
"""
CHARS_AT_ONCE = 1 << 16
"""Number of characters of a text whose width is looked for in one piece."""
ESCAPED_WIDE = r"\\ud"
"""Spelling, in JSON within JSON, of a character above U+FFFF. A template may read the arguments of calls."""
PROBE = [{"role": "user", "content": "x"}]
END_CHARS = 256
NUM_SEARCHED = 256
"""Number of tokens whose text is searched at once. Searching a whole answer takes ten times as long."""
MAX_KEY_BYTES, MAX_ENDS = 1 << 10, 256


class Vocabulary:
    """Texts of single tokens, and prompts encoded as the runtime's tokenizer process encodes them."""

    def __init__(self, tokenizer: Codec) -> None:
        self._tokenizer = tokenizer
        self._decoders = open_decoders(tokenizer)
        self._texts: dict[int, str] = {}
        self._special: dict[int, bool] = {}
        self.tables = TokenTables()
        """Tokens as answers spell them."""
        self._opening = threading.Lock()
        self._max_token_chars: int | None = 0
        """Largest number of characters of a token; 0: not computed yet, because it takes a walk over the
        vocabulary.
        """

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.vocab_size

    def token_text(self, token_id: int) -> str:
        """Return the text of a token by itself. Part of a character reads as replacement characters."""
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self._decoders.text_of((token_id,))
        return text

    def is_special(self, token_id: int) -> bool:
        """Return True for a token that `skip_special_tokens` leaves out of text."""
        is_special = self._special.get(token_id)
        if is_special is None:
            try:
                texts = {self.decode([token_id], skip_special_tokens=skips) for skips in (True, False)}
            except InvalidRequest:  # there is no tokenizer, so there is no text
                texts = set()
            is_special = self._special[token_id] = len(texts) > 1
        return is_special

    def token_bytes(self, token_id: int) -> bytes | None:
        """Return the bytes of a token; None if they depend on the tokens beside it."""
        return self._tokenizer.token_bytes(token_id)

    def token_strings(self, ids: Sequence[int]) -> list[str]:
        """Return the tokens as the vocabulary spells them."""
        return self._tokenizer.token_strings(ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    @cached_property
    def special_texts(self) -> frozenset[str]:
        """Return the spellings of tokens that `skip_special_tokens` leaves out of text."""
        return self._tokenizer.special_texts

    def num_up_to(self, mark: str, ids: Sequence[int], num_before: int = 0) -> int:
        """Return how many of these tokens form the text up to and including its first `mark`, which ends
        after the first `num_before` tokens.
        """
        overlap = len(mark.encode())
        start = max(0, num_before - overlap)
        fewest, most = num_before, len(ids)
        for begin in range(start, most, NUM_SEARCHED):
            end = begin + NUM_SEARCHED + overlap
            if mark in self.decode(ids[begin:end], skip_special_tokens=False):
                start, fewest, most = begin, max(fewest, begin), min(most, end)
                break
        while fewest < most:
            middle = (fewest + most) // 2
            if mark in self.decode(ids[start:middle], skip_special_tokens=False):
                most = middle
            else:
                fewest = middle + 1
        return most

    def encode(self, prompt: Any, options: RequestOptions, max_chars: int | None = None) -> list[int]:
        """Return the ids of a prompt in any of its forms. `max_chars` limits its text, including that of the
        template.

        Raises: InvalidRequest.
        """
        return self.encode_end(prompt, options, max_chars=max_chars)[0]

    def encode_end(
        self,
        prompt: Any,
        options: RequestOptions,
        num_last: int | None = None,
        max_chars: int | None = None,
    ) -> tuple[list[int], bool]:
        """Return the last ids of a prompt in any of its forms, and True if there are more. num_last: how many
        at most; None: all. max_chars: as for `encode`.

        Raises: InvalidRequest.
        """
        if _is_ids(prompt):
            start = 0 if num_last is None else max(0, len(prompt) - num_last)
            return list(prompt[start:]), start > 0
        text, adds = self._text_of(prompt, options)
        if max_chars is not None and len(text) > max_chars:
            raise InvalidRequest(
                f"prompt: {len(text)} characters, at most {max_chars} are taken",
                param="prompt",
                code="context_length_exceeded",
            )
        if num_last is None:
            return self._tokenizer.encode_batch([text], add_special_tokens=adds)[0].tolist(), False
        ids, num_all = self._tokenizer.encode_end(text, num_last, add_special_tokens=adds)
        return ids.tolist(), len(ids) < num_all

    def last_ids(self, prompt: Any, options: RequestOptions, num_last: int, num_ids: int) -> IntArray | None:
        """Return the last ids of a prompt in any form; None if it cannot be encoded, or not in parts, or has
        an id from `num_ids` on, which the ring refuses also among those that are cut off.

        Raises: InvalidRequest for a conversation that takes more than MAX_CONVERSATION_BYTES.
        """
        if not _is_ids(prompt):
            return self._last_ids_of_text(prompt, options, num_last)
        try:
            all_ids = unpack_ids(pack_token_ids("prompt", prompt))
        except InvalidRequest:
            return None
        return None if all_ids.max() >= num_ids else all_ids[-num_last:].copy()

    def _last_ids_of_text(
        self, prompt: str | Sequence[dict[str, Any]], options: RequestOptions, num_last: int
    ) -> IntArray | None:
        if not self._tokenizer.encodes_in_parts:
            return None
        try:
            num_bytes = 0 if isinstance(prompt, str) else _num_bytes(wire_messages(prompt), options)
        except (InvalidRequest, RecursionError):  # the ring refuses it, or its tools are nested too deeply
            return None
        if num_bytes > MAX_CONVERSATION_BYTES:
            raise InvalidRequest(
                f"messages: the texts of a conversation that is truncated may take {MAX_CONVERSATION_BYTES} "
                f"bytes of memory, these take {num_bytes}: shorten them, or send no characters above U+FFFF, "
                "such as emojis, one of which makes each character of a conversation take four bytes",
                param="messages",
                code="context_length_exceeded",
            )
        try:
            text, adds = self._text_of(prompt, options)
            ids = self._tokenizer.encode_end(text, num_last, add_special_tokens=adds)[0]
        except InvalidRequest:
            return None
        # Not a view of all ids.
        return ids.copy() if len(ids) else None

    def _text_of(self, prompt: Any, options: RequestOptions) -> tuple[str, bool]:
        """Return the text of a prompt, and True if special tokens are added to it."""
        if isinstance(prompt, str):
            return prompt, options.get("add_special_tokens", True)
        return self.render(prompt, options), options.get("add_special_tokens", False)

    @property
    def knows_longest_token(self) -> bool:
        """True once `max_chars_of` takes no time."""
        return self._max_token_chars != 0

    def max_chars_of(self, num_tokens: int) -> int | None:
        """Return the largest number of characters of a text with so many tokens; None for no limit."""
        if self._max_token_chars == 0:
            self._max_token_chars = self._tokenizer.max_token_chars()
        return None if self._max_token_chars is None else num_tokens * self._max_token_chars

    @property
    def template_variables(self) -> frozenset[str]:
        self._open_template()
        return self._tokenizer.template_variables

    def _open_template(self) -> None:
        """Read the chat template, if that has not been done. Other threads wait meanwhile."""
        if self._tokenizer.is_template_open:
            return
        with self._opening:
            if not self._tokenizer.is_template_open:
                with _kept():
                    self._tokenizer.template_variables  # noqa: B018

    def render(self, messages: Sequence[dict[str, Any]], options: RequestOptions) -> str:
        """Return the text of a conversation, rendered by the chat template. Raises InvalidRequest."""
        self._open_template()
        continues = options.get("continue_final_message", False)
        add_generation_prompt = options.get("add_generation_prompt")
        return self._tokenizer.apply_chat_template(
            messages,
            add_generation_prompt=not continues if add_generation_prompt is None else add_generation_prompt,
            continue_final_message=continues,
            template_kwargs=options.get("chat_template_kwargs"),
            tools=decode_tools(pack_tools(options.get("tools"))),
        )


class Cuts(NamedTuple):
    """Turns of requests whose prompts are encoded to be cut, and the thread that does it."""

    turns: FairTurns
    thread: FairThreads


class ServerTokenizer:
    """Tokenizer for the event loop. Slow work runs in threads of its own."""

    def __init__(
        self,
        tokenizer_dir: str,
        chat_template: str,
        context_length: int,
        *,
        allow_special_tokens: bool = False,
        has_tenants: bool = False,
        is_divided: Callable[[], bool] = lambda: False,
    ) -> None:
        """Take settings of a resolved configuration; the first two may be empty. has_tenants: as in
        open_tokenizer. `is_divided` returns True if there are several tenants.
        """
        self._tokenizer_dir = tokenizer_dir
        self._chat_template = chat_template
        self._allow_special_tokens = allow_special_tokens
        self._has_tenants = has_tenants
        self._context_length = context_length
        self._threads = FairThreads(NUM_THREADS, "tokenizer", is_divided)
        self._tool_thread = FairThreads(1, "tokenize", is_divided)
        self._cuts = tuple(Cuts(FairTurns(1), FairThreads(1, name, is_divided)) for name in CUT_THREADS)
        self.prepared: Path | None = None
        """File with the tokenizer as another process has prepared it. It is read without transformers, which
        takes 25 MB; a conversation's first rendering still imports that.
        """
        self._lock = asyncio.Lock()
        self._vocabulary: Vocabulary | None = None
        self._prompt_ends: dict[bytes, str] = {}
        """Ends of prompts by the template's variables, as JSON."""
        self._variables: frozenset[str] | None = None

    @property
    def is_there(self) -> bool:
        """Return False if the server has no tokenizer."""
        return bool(self._tokenizer_dir)

    def require(self, field: str) -> None:
        """Refuse a request that needs a tokenizer if there is none. Raises InvalidRequest that
        names `field`.
        """
        if not self.is_there:
            raise needs_tokenizer(field)

    async def vocabulary(self) -> Vocabulary:
        """Return the vocabulary. The first call loads it."""
        if self._vocabulary is None:
            async with self._lock:
                if self._vocabulary is None:
                    self._vocabulary = await self._threads.run(OWNER, self._load, 0)
        return self._vocabulary

    async def encode(
        self,
        prompt: Prompt,
        options: RequestOptions,
        tenant: str = OWNER,
        *,
        num_last: int | None = None,
    ) -> tuple[list[int], bool]:
        """Return the last ids of a tenant's prompt, and True if there are more, as `Vocabulary.encode_end`
        does. If all are to be kept, a text that cannot fit is refused before it is encoded.

        Raises: InvalidRequest by the names of the client library, Overloaded.
        """
        vocabulary = await self.vocabulary()

        def encode() -> tuple[list[int], bool]:
            max_chars = vocabulary.max_chars_of(self._context_length) if num_last is None else None
            return vocabulary.encode_end(prompt, options, num_last, max_chars)

        return await self._threads.run(tenant, encode, num_chars(prompt) + len(options.get("tools") or b""))

    def cut_turns(self, num_bytes: int) -> FairTurns:
        """Return the turns of which a request takes one before it decodes the prompts for `last_ids` from a
        body of so many bytes. So they are decoded one after another. Shorter ones do not wait for long ones.
        """
        return self._cuts[num_bytes > MAX_SHORTER].turns

    async def last_ids(
        self,
        prompts: Sequence[tuple[Prompt, RequestOptions]],
        num_last: int,
        num_ids: int,
        tenant: str = OWNER,
    ) -> list[IntArray | None]:
        """Return the last ids of each of a tenant's prompts as `Vocabulary.last_ids` does. They are encoded
        in one go in a thread for such prompts alone.
        """
        if not prompts:
            return []
        vocabulary = await self.vocabulary()

        def encode() -> list[IntArray | None]:
            return [vocabulary.last_ids(*prompt, num_last, num_ids) for prompt in prompts]

        size = sum(num_chars(prompt) for prompt, _ in prompts)
        return await self._cuts[size > MAX_SHORTER].thread.run(tenant, encode, size)

    async def max_prompt_chars(self) -> int | None:
        """Return the largest number of characters of a text that may fit into the context; None for
        no limit.
        """
        if not self.is_there:
            return None
        vocabulary = await self.vocabulary()
        if vocabulary.knows_longest_token:
            return vocabulary.max_chars_of(self._context_length)
        return await self._threads.run(OWNER, partial(vocabulary.max_chars_of, self._context_length), 0)

    async def prompt_end(self, options: RequestOptions, tenant: str = OWNER) -> str:
        """Return the end of a conversation's prompt with these variables of the chat template; "" if the
        template refuses them, which the request itself reports.
        """
        variables = options.get("chat_template_kwargs") or {}
        key = msgspec.json.encode(variables)
        if (known := self._prompt_ends.get(key)) is not None:
            return known
        vocabulary = await self.vocabulary()

        def render() -> str:
            try:
                return vocabulary.render(PROBE, RequestOptions(chat_template_kwargs=variables))[-END_CHARS:]
            except InvalidRequest:
                return ""

        end = await self._threads.run(tenant, render, len(key))
        if len(key) <= MAX_KEY_BYTES and len(self._prompt_ends) < MAX_ENDS:
            self._prompt_ends[key] = end
        return end

    async def template_variables(self) -> frozenset[str]:
        """Return the names of the variables that the chat template reads."""
        if self._variables is None:
            vocabulary = await self.vocabulary()
            self._variables = await self._threads.run(OWNER, lambda: vocabulary.template_variables, 0)
        return self._variables

    async def decode(self, ids: Sequence[int], *, skip_special_tokens: bool, tenant: str = OWNER) -> str:
        """Return the text of a tenant's ids. Raises Overloaded."""
        vocabulary = await self.vocabulary()
        decode = partial(vocabulary.decode, ids, skip_special_tokens=skip_special_tokens)
        return await self._threads.run(tenant, decode, len(ids))

    async def run_tool(self, work: Callable[[Vocabulary], T], num_chars: int, tenant: str = OWNER) -> T:
        """Run a tenant's work for /tokenize or /detokenize in a thread on which no generation waits. Raises
        Overloaded.
        """
        vocabulary = await self.vocabulary()
        return await self._tool_thread.run(tenant, partial(work, vocabulary), num_chars)

    def _load(self) -> Vocabulary:
        with _kept():
            return Vocabulary(
                open_tokenizer(
                    self._tokenizer_dir,
                    self._chat_template,
                    self.prepared,
                    allow_special_tokens=self._allow_special_tokens,
                    has_tenants=self._has_tenants,
                )
            )


@contextmanager
def _kept() -> Iterator[None]:
    """Exclude objects that are imported and made in the block from garbage collections, if the process has
    frozen its objects. Checking these 40,000 objects took each full collection 20 ms of the event loop,
    several times while they were made.
    """
    if not gc.get_freeze_count():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def num_chars(prompt: Any) -> int:
    """Return the number of characters of a text or a conversation, or the number of ids."""
    if not _is_ids(prompt) and not isinstance(prompt, str):
        return sum(map(_message_chars, prompt))
    return len(prompt)


def _num_bytes(messages: Sequence[ChatMessage], options: RequestOptions) -> int:
    """Return how many bytes the contents of messages take in memory when they are one text. All characters of
    a text are as wide as its widest one, which may come from what the template writes beside them.
    """
    contents = [message.content for message in messages]
    variables = pack_template_kwargs(options.get("chat_template_kwargs"))
    packed = filter(None, [variables, *(message.further for message in messages)])
    tools = decode_tools(pack_tools(options.get("tools")))
    beside = [[message.name for message in messages], tools, *map(msgspec.msgpack.decode, packed)]
    spelled = msgspec.json.encode(beside).decode()
    widest = 4 if ESCAPED_WIDE in spelled.lower() else max(map(_char_bytes, [*contents, spelled]))
    return widest * sum(map(len, contents))


def _char_bytes(text: str) -> int:
    """Return how many bytes each character of a text takes in memory: 1, 2 or 4."""
    if text.isascii():
        return 1
    # The size of the text itself may include a copy in UTF-8. Pieces have none, and are as wide as they must.
    pieces = (text[at : at + CHARS_AT_ONCE] for at in range(0, len(text), CHARS_AT_ONCE))
    return max((sys.getsizeof(piece * 2) - sys.getsizeof(piece)) // len(piece) for piece in pieces)


def _is_ids(prompt: Any) -> bool:
    return not isinstance(prompt, str) and not (len(prompt) and isinstance(prompt[0], Mapping))


def _message_chars(message: Mapping[str, Any]) -> int:
    further = len(message.get("reasoning_content") or "")
    for call in message.get("tool_calls") or ():
        arguments = call["function"]["arguments"]
        further += len(arguments) if isinstance(arguments, str) else len(msgspec.json.encode(arguments))
    return len(message.get("content") or "") + further
