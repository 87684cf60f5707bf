"""Arrivals: messages that were read and wait for their turn, bounded for each tenant.

Reading continues while one tenant has more than can be handled, because otherwise the messages of other
tenants would not be seen. So its surplus is refused. Only the owner's surplus stays in the sockets instead,
because the other tenants are the owner's guests.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import msgspec

from runtime.base.errors import RateLimited
from runtime.ring.tenants import OWNER
from runtime.wire.format import TOKEN_BYTES
from runtime.wire.handle import MAX_ABORT_HANDLES, attempt_key, client_of
from runtime.wire.messages import AbortRequest, ControlRequest, GenerateRequest
from runtime.wire.sampling_params import SamplingParams
from runtime.wire.transport import BadFrames
from tokenizer_proc.receipt import Receipt
from tokenizer_proc.sequences import sequence_handles
from tokenizer_proc.turns import Turns

MAX_TENANT_CHARS = 1 << 24
"""Maximum number of characters of one tenant's waiting texts, about ten seconds of work. A single text may
always wait.
"""
MAX_ALL_CHARS = 1 << 26
"""Maximum number of characters of all tenants' waiting texts. Each tenant may have at most as much as is
free, so that the next one finds room.
"""
MAX_TENANT_MESSAGES = 8192
"""Maximum number of waiting messages of one tenant. A further request is refused."""
MAX_TENANT_PARTS, MAX_ALL_PARTS = 64, 256
"""Maximum numbers of waiting parts of adapters, and calls of ranks, of one tenant and of all: some MiB each.
A tenant that has none waiting may always have one.
"""
MAX_ENCODING_CHARS = 1 << 18
"""Number of characters of one tenant that threads encode before its next messages may follow: 0.1 to 0.3 s of
work.
"""
# Number beyond which refusals are not even sent: a tenant with so many does not wait for answers.
MAX_TENANT_REFUSALS = 1 << 16
MAX_PIECE_CHARS = 1 << 13
"""Maximum cost of a turn of the loop, 10 ms. A request that takes more is encoded by a thread. A character
takes 1.2 us at most (an emoji that becomes four tokens, with the demo's tokenizer), and one of a common word
0.3.
"""
# Cost of a message in a chat template, in characters to encode: 12 us, or 19 if it spells special tokens
# (measured with the demo's).
CHARS_PER_MESSAGE = 24
# Cost of a byte of a chat template's variables: 2.5 us for empty lists, which are a byte each.
CHARS_PER_VARIABLE_BYTE = 4
# Cost of a bad word in addition to its text: 30 us for its two spellings.
CHARS_PER_BAD_WORD = 24
# Cost of a sequence, or of a message that is only passed on, in characters: some 75 us.
CHARS_PER_SEQUENCE = 64
# Cost of a part of an adapter's weights, in characters: 3 ms to write a MiB, or to look for room for it.
CHARS_PER_PIECE = 4096
# Ids and handles for which the loop needs as long as for a character.
BYTES_PER_CHAR = 1024
HANDLES_PER_CHAR = 4
LONG_RETRY_S = 5.0
# One abort message may name thousands of sequences, and the scheduler, which all tenants share, looks for
# each. So a tenant gets credit to abort each sequence that it has asked for, twice.
MAX_CREDIT = 1 << 16
CREDIT_OF_SEQUENCE = 2
# Price of aborting all sequences of a client, which takes the scheduler up to 0.3 ms.
PRICE_OF_ALL = 256
PRICE_OF_REFUSAL = 64
PRICE_OF_BAD_UPLOAD = 1024
"""Price of an adapter that is refused by its caller's fault. Reading it may have taken 0.1 s."""


class Arrived(NamedTuple):
    """A message that waits."""

    message: GenerateRequest | AbortRequest | ControlRequest
    receipt: Receipt
    cost: int
    """Cost in the loop."""
    refusal: RateLimited | None = None
    """Error with which the request or call is refused; nothing else of it is kept. None: it is served."""


class Arrivals:
    def __init__(self) -> None:
        self._turns: Turns[Arrived] = Turns()
        self._tenant_of: dict[bytes, str] = {}
        """Tenant of each waiting request that is not the owner's, by the key of its attempt: two attempts of
        one may wait.
        """
        self._encoding: Counter[str] = Counter()
        """Number of characters of each tenant that threads encode."""
        self._num_encoding = 0
        self._spent: Counter[str] = Counter()
        """Credit that each tenant has used, out of MAX_CREDIT."""
        self._parts: Counter[str] = Counter()
        """Number of each tenant's waiting messages that count as parts of adapters."""
        self._dropped = BadFrames("tokenizer_in")

    def __len__(self) -> int:
        return len(self._turns)

    @property
    def may_read(self) -> bool:
        """Return True if more messages should be read."""
        if self._parts[OWNER] >= MAX_TENANT_PARTS:
            return False
        return self._turns.num_of(OWNER) < MAX_TENANT_MESSAGES and self._num_chars(OWNER) < MAX_TENANT_CHARS

    @property
    def is_ready(self) -> bool:
        """True if there is a next message: not all that wait are of tenants whose texts threads encode."""
        return self._turns.is_ready

    @property
    def next_cost(self) -> int:
        """Cost of the next message in the loop. Raises IndexError if none is ready."""
        return self._turns.peek().cost

    def begin_encoding(self, tenant: str, num_chars: int) -> None:
        """Count a text of the tenant that a thread encodes. Its next messages wait while these are many."""
        self._encoding[tenant] += num_chars
        self._num_encoding += num_chars
        if self._encoding[tenant] >= MAX_ENCODING_CHARS:
            self._turns.hold(tenant)

    def end_encoding(self, tenant: str, num_chars: int) -> None:
        """Uncount a text that is encoded, or cannot be."""
        self._encoding[tenant] -= num_chars
        self._num_encoding -= num_chars
        if self._encoding[tenant] < MAX_ENCODING_CHARS:
            self._turns.release(tenant)

    def _num_chars(self, tenant: str) -> int:
        """Return the number of characters of a tenant that wait or are encoded."""
        return self._turns.cost_of(tenant) + self._encoding[tenant]

    def take(self) -> Arrived:
        """Remove and return the next message. Raises IndexError if none is ready."""
        arrived = self._turns.pop()
        message = arrived.message
        if isinstance(message, GenerateRequest):
            if message.tenant != OWNER:
                self._tenant_of.pop(attempt_key(message.handle), None)
        elif _is_part(message):
            self._parts[message.tenant] -= 1
        return arrived

    def try_spend(self, tenant: str, price: int = PRICE_OF_REFUSAL) -> bool:
        """Use some of the tenant's credit, for a message that is not a request but costs others time. Returns
        False if it has none left.
        """
        if self._spent[tenant] + price > MAX_CREDIT:
            return False
        self._spent[tenant] += price
        return True

    def check_credit(self, tenant: str, price: int) -> None:
        """Raise RateLimited if the tenant has not so much credit left."""
        if self._spent[tenant] + price > MAX_CREDIT:
            raise RateLimited(
                "this key had far more adapters refused, and requests aborted, than it has asked for; make "
                "other requests first",
                retry_after_s=LONG_RETRY_S,
            )

    def add(
        self,
        message: GenerateRequest | AbortRequest | ControlRequest,
        receipt: Receipt,
        *,
        is_again: bool = False,
    ) -> int:
        """Queue a message, or its refusal if too many of its tenant wait. Returns the cost of the message.
        is_again: True for a request that was accepted before, for which there is more room.
        """
        tenant, cost_of_all = message.tenant, message_cost(message)
        if tenant != OWNER:
            fault = self._fault_of(message)
            if fault is not None:
                self._dropped.add(ValueError(fault))
                return cost_of_all
        arrived, cost = Arrived(message, receipt, loop_cost(message)), cost_of_all
        if isinstance(message, GenerateRequest):
            if tenant != OWNER:
                self._tenant_of[attempt_key(message.handle)] = tenant
                refusal = self._refusal(tenant, cost, is_again=is_again)
                if refusal is not None:
                    arrived, cost = _without_text(message, receipt, refusal)
        elif isinstance(message, AbortRequest) and tenant == OWNER:
            self._let_follow(message, receipt)
        elif isinstance(message, ControlRequest) and _is_part(message):
            if self._has_room_for_part(tenant):
                self._parts[tenant] += 1
            else:
                arrived, cost = _without_part(message, receipt, self._parts[tenant])
        self._turns.push(tenant, arrived, cost)
        return cost_of_all

    def _fault_of(self, message: GenerateRequest | AbortRequest | ControlRequest) -> str | None:
        """Return why a tenant's message is dropped silently; None if it is not."""
        tenant = message.tenant
        most = MAX_TENANT_REFUSALS if isinstance(message, GenerateRequest) else MAX_TENANT_MESSAGES
        if self._turns.num_of(tenant) >= most:
            return f"{tenant} has {most} messages waiting"
        if isinstance(message, GenerateRequest):
            self._spent[tenant] = max(0, self._spent[tenant] - CREDIT_OF_SEQUENCE * message.sampling.n)
            return None
        if isinstance(message, AbortRequest):
            price = len(message.handles) + (PRICE_OF_ALL if message.client else 0)
            if not self.try_spend(tenant, price):
                return f"{tenant} aborts far more than it has asked for"
        return None

    def _refusal(self, tenant: str, cost: int, *, is_again: bool) -> RateLimited | None:
        own, total = self._num_chars(tenant), self._turns.total_cost + self._num_encoding
        is_full = self._turns.num_of(tenant) >= MAX_TENANT_MESSAGES and not is_again
        fits = not own or own + cost <= share_of_chars(own, total, is_again=is_again)
        return None if fits and not is_full else rate_limited(own)

    def _has_room_for_part(self, tenant: str) -> bool:
        own = self._parts[tenant]
        most = min(MAX_TENANT_PARTS, MAX_ALL_PARTS - self._parts.total() + own)
        return tenant == OWNER or not own or own < most

    def _let_follow(self, abort: AbortRequest, receipt: Receipt) -> None:
        """Repeat the owner's abort, which may concern requests of every tenant, behind those that wait."""
        behind: dict[str, list[bytes]] = {}
        for handle in abort.handles:
            tenant = self._tenant_of.get(attempt_key(handle), OWNER)
            if tenant != OWNER:
                behind.setdefault(tenant, []).append(handle)
        if abort.client:
            for tenant, items in self._turns.items():
                for message in (item.message for item in items) if tenant != OWNER else ():
                    if isinstance(message, GenerateRequest) and client_of(message.handle) == abort.client:
                        behind.setdefault(tenant, []).extend(sequence_handles(message))
        for tenant, handles in behind.items():
            for start in range(0, len(handles), MAX_ABORT_HANDLES):
                part = tuple(handles[start : start + MAX_ABORT_HANDLES])
                follower = AbortRequest(part, tenant=tenant)
                self._turns.push(tenant, Arrived(follower, receipt, loop_cost(follower)), CHARS_PER_SEQUENCE)


def share_of_chars(own: int, total: int, *, is_again: bool = False) -> int:
    """Return how many characters a tenant may have waiting, if it has `own` of `total`. is_again: True for a
    request that was accepted before; all that a tenant had running is submitted again at once.
    """
    return MAX_ALL_CHARS if is_again else min(MAX_TENANT_CHARS, MAX_ALL_CHARS - (total - own))


def rate_limited(own: int) -> RateLimited:
    """Return the error for a tenant that has its full share of characters waiting."""
    return RateLimited(
        f"texts of {own} characters wait to be encoded for this key; try again later",
        retry_after_s=LONG_RETRY_S,
    )


def _is_last_piece(message: ControlRequest) -> bool:
    piece = message.adapter
    return piece is not None and piece.offset + len(piece.data) >= piece.size


def _is_part(message: GenerateRequest | AbortRequest | ControlRequest) -> bool:
    """Return True for a message that may have MiB and takes little work."""
    return isinstance(message, ControlRequest) and (message.adapter is not None or message.call is not None)


def message_cost(message: GenerateRequest | AbortRequest | ControlRequest) -> int:
    """Return the cost of a message in characters."""
    if isinstance(message, GenerateRequest):
        return cost_of(message)
    if isinstance(message, ControlRequest) and message.adapter is not None:
        return CHARS_PER_PIECE
    return CHARS_PER_SEQUENCE


def cost_of(request: GenerateRequest) -> int:
    """Return the cost of a request in characters: its work, or the memory that it takes if that is more."""
    sampling = request.sampling
    num_chars = CHARS_PER_SEQUENCE * sampling.n
    num_chars += sum(map(len, sampling.bad_words)) + sum(map(len, sampling.stop))
    if request.text is not None:
        num_chars += len(request.text)
    if request.input_ids is not None:
        num_chars += len(request.input_ids) // TOKEN_BYTES
    if request.messages is not None:
        num_chars += template_cost(request)
    if request.resume is not None:
        num_chars += len(request.resume.output_ids) // TOKEN_BYTES
    return num_chars


def template_cost(request: GenerateRequest) -> int:
    """Return the cost of a conversation's chat template, in characters: of all that it may read, whatever it
    shows.
    """
    messages = request.messages or ()
    num_chars = len(request.tools) + CHARS_PER_VARIABLE_BYTE * len(request.template_kwargs)
    num_chars += CHARS_PER_MESSAGE * len(messages)
    return num_chars + sum(len(each.content) + len(each.further) + len(each.name) for each in messages)


def prompt_cost(request: GenerateRequest) -> int:
    """Return the cost of encoding a request's prompt; 0 for ids."""
    if request.messages is not None:
        return template_cost(request)
    return 0 if request.text is None else len(request.text)


def encoding_cost(request: GenerateRequest) -> int:
    """Return the cost of all texts of a request that become ids."""
    words = request.sampling.bad_words
    cost = prompt_cost(request) + len(request.prediction)
    return cost + CHARS_PER_BAD_WORD * len(words) + sum(map(len, words))


def loop_cost(message: GenerateRequest | AbortRequest | ControlRequest) -> int:
    """Return the cost of a message in the loop, which encodes only what is not left to a thread."""
    if isinstance(message, AbortRequest):
        return CHARS_PER_SEQUENCE + len(message.handles) // HANDLES_PER_CHAR
    if isinstance(message, ControlRequest):
        # With its last piece an adapter is read.
        return MAX_PIECE_CHARS if _is_last_piece(message) else message_cost(message)
    encoding = encoding_cost(message)
    num_bytes = len(message.input_ids or b"")
    if message.resume is not None:
        num_bytes += len(message.resume.output_ids)
    cost = CHARS_PER_SEQUENCE * message.sampling.n + num_bytes // BYTES_PER_CHAR
    return cost + (encoding if encoding <= MAX_PIECE_CHARS else 0)


def _without_text(request: GenerateRequest, receipt: Receipt, refusal: RateLimited) -> tuple[Arrived, int]:
    num_sequences = request.sampling.n
    rest = GenerateRequest(request.handle, SamplingParams(n=num_sequences), tenant=request.tenant)
    return Arrived(rest, receipt, loop_cost(rest), refusal), CHARS_PER_SEQUENCE * num_sequences


def _without_part(call: ControlRequest, receipt: Receipt, own: int) -> tuple[Arrived, int]:
    rest = msgspec.structs.replace(call, adapter=None, call=None)
    refusal = RateLimited(
        f"{call.op}: {own} parts of adapters or calls wait for this key; try again later",
        retry_after_s=LONG_RETRY_S,
    )
    return Arrived(rest, receipt, loop_cost(rest), refusal), message_cost(rest)
