"""Fake model: tokens, logprobs and logits as functions of a context. The fake worker reads the context
through its page table; the simulation's reference knows it.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

from runtime.wire.plan import AdapterRef

VOCAB_SIZE = 96
NAMESPACE_SHIFT = 32
"""A seed carries the number of its namespace above this bit:
the fake model's adapter, part of every KV entry it writes.
"""
ADAPTER_SHIFT = 1 << 40
"""Unit of what an adapter adds to every KV entry."""
NUM_TOP = 4

IdArray = npt.NDArray[np.int64]


def adapter_salt(adapter: AdapterRef | None) -> int:
    """Return what the adapter's weights add to every KV entry that is computed with it; of a version of its
    own.
    """
    if not isinstance(adapter, AdapterRef):
        return 0
    return (1 + zlib.crc32(f"{adapter.name} {adapter.version}".encode()) % 1000) * ADAPTER_SHIFT


def seen(context: IdArray, window: int) -> IdArray:
    """Return what the newest token of a context sees of it: the last `window` tokens; 0: all."""
    return context[-window:] if window else context


def hash_of(context: IdArray, seed: int, history: Sequence[int], top_p_age: int = 0) -> int:
    """`top_p_age`: so far has top_p decayed; 0 also where it does not decay."""
    h = zlib.crc32(context.tobytes(), (seed + 7919 * top_p_age) & 0xFFFFFFFF)
    return zlib.crc32(np.array(history, np.int64).tobytes(), h) if history else h


def choose(h: int, allowed: Sequence[int] | None, forbidden: Collection[int]) -> int:
    """The token that hash h stands for, among the allowed ones; among all of those if all are forbidden."""
    if allowed is None and not forbidden:
        return h % VOCAB_SIZE
    may = range(VOCAB_SIZE) if allowed is None else allowed
    ids = [i for i in may if i not in forbidden] or may
    return ids[h % len(ids)]


BANS, RAISES = "bans", "raises"
"""Logits processors of the launch."""
TAP = "tap"
"""Additional output of the model."""
RAISES_AT = 9
"""Output tokens with which the processor `raises` does."""


def banned_ids(tokens: Sequence[int]) -> set[int]:
    """The ids that the processor `bans` forbids, by all tokens before and their order."""
    rest = sum((at + 1) * token for at, token in enumerate(tokens)) % 4
    return {token for token in range(VOCAB_SIZE) if token % 4 == rest}


def forbidden_ids(tokens: Sequence[int], bad_words: Sequence[Sequence[int]], ngram: int) -> set[int]:
    """Return the ids that may not follow `tokens`: the end of a bad word, or of an n-gram that is in them
    already.
    """
    forbidden = {
        word[-1] for word in bad_words if list(tokens[len(tokens) + 1 - len(word) :]) == [*word[:-1]]
    }
    if 0 < ngram <= len(tokens):
        tail = list(tokens[len(tokens) - ngram + 1 :])
        for at in range(len(tokens) - ngram + 1):
            if list(tokens[at : at + ngram - 1]) == tail:
                forbidden.add(tokens[at + ngram - 1])
    return forbidden


def next_top_p_age(age: int, token: int, reset_ids: Collection[int]) -> int:
    return 0 if token in reset_ids else age + 1


def fake_logprobs(h: int, token: int, num_top: int = NUM_TOP) -> tuple[float, list[int], list[float]]:
    """(chosen, top ids, top logprobs): some numbers that only this token of this sequence has."""
    chosen = -(h % 1000) / 1024
    return (
        chosen,
        [(token + 7 * i) % VOCAB_SIZE for i in range(num_top)],
        [chosen - i for i in range(num_top)],
    )


def fake_rank(chosen: float) -> int:
    """Stands for the place of a token of a prompt, by its logprob."""
    return 1 + round(-chosen * 1024)


def prompt_hash(context: IdArray) -> int:
    """Stands for the logits at the last position of a context; nothing of the request is in it."""
    return zlib.crc32(context.tobytes())


def fake_logits(h: int) -> npt.NDArray[np.float32]:
    """[VOCAB_SIZE] float32: a row that only this hash has."""
    return np.arange(VOCAB_SIZE, dtype=np.float32) + np.float32(h % 65536)


def allowed_ids(mask: bytes | memoryview) -> list[int]:
    bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
    ids: list[int] = np.flatnonzero(bits).tolist()
    return ids
