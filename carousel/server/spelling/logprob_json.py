"""JSON of log-probabilities, made from their packed form: for each token what stands around its number is
made once, and the numbers are encoded together. No object is made for an entry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import msgspec
import numpy as np

from carousel.client.core.logprobs import LogprobColumns, PromptLogprobs, TokenLogprob, packed_logprobs
from carousel.server.spelling.token_table import TokenTable
from runtime.wire.format import FloatArray

PIECE_ENTRIES = 2048
"""Number of log-probabilities that are spelled in one turn of the event loop."""
LOWEST = -9999.0
"""Value for minus infinity, which JSON cannot express."""

TokenJson: TypeAlias = Callable[[int], bytes]
NumberFrame: TypeAlias = tuple[bytes, bytes]
"""JSON of an entry before its number, and after it."""

_encode = msgspec.json.Encoder().encode


def in_pieces(entries: Sequence[Any], num_top: int) -> Iterator[Sequence[Any]]:
    """Yield slices of entries about many tokens, with `num_top` others of each: each slice is a few
    milliseconds' work.
    """
    if isinstance(entries, LogprobColumns):  # whole entries are unpacked, however much is shown
        num_top = max(num_top, entries.num_top)
    size = max(1, PIECE_ENTRIES // (num_top + 1))
    for start in range(0, len(entries), size):
        yield entries[start : start + size]


def numbers_json(values: FloatArray) -> list[bytes]:
    """Return the JSON of each value."""
    if not len(values):
        return []
    return _encode(np.maximum(values, np.float32(LOWEST)).tolist())[1:-1].split(b",")


def entries_json(entries: Sequence[TokenLogprob], frames: TokenTable[NumberFrame]) -> bytes:
    """Return entries with lists of their most likely tokens as JSON, without brackets around all."""
    ids, values, top_ids, top_values, _ = packed_logprobs(entries).arrays()
    num_top = len(top_ids) // max(len(ids), 1)
    tops = framed(top_ids.tolist(), numbers_json(top_values), frames)
    found, at = [], 0
    for token_id, number in zip(ids.tolist(), numbers_json(values), strict=True):
        head, tail = frames[token_id]
        shown = b",".join(tops[at : at + num_top])
        found.append(b'%b%b%b,"top_logprobs":[%b]}' % (head, number, tail[:-1], shown))
        at += num_top
    return b",".join(found)


def values_json(entries: PromptLogprobs, ids: Sequence[int], frames: TokenTable[NumberFrame]) -> bytes:
    """Return entries alone, of the tokens with the ids given, without their most likely tokens."""
    columns = packed_logprobs(entries)
    numbers = [b"null"] * columns.num_none + numbers_json(columns.arrays().values)
    return b",".join(framed(ids, numbers, frames))


def top_json(entries: PromptLogprobs, frames: TokenTable[NumberFrame], num_top: int) -> bytes:
    """Return a list of the most likely tokens of each entry."""
    columns = packed_logprobs(entries)
    arrays = columns.arrays()
    own = framed(arrays.top_ids.tolist(), numbers_json(arrays.top_values), frames)
    most, num_rows = columns.num_top, len(arrays.ids)
    shown = min(num_top, most)
    lists = [b"[%b]" % b",".join(own[row * most : row * most + shown]) for row in range(num_rows)]
    return b",".join([b"null"] * columns.num_none + lists)


def text_objects_json(
    entries: PromptLogprobs, ids: Sequence[int], names: TokenTable[bytes], num_top: int
) -> bytes:
    """Return an object for each entry, of the token with the id given, in which tokens are named by their
    texts. Parts of characters may have equal texts: the last one stays, the most likely, or the drawn one.
    """
    columns = packed_logprobs(entries)
    arrays = columns.arrays()
    most, num_none = columns.num_top, columns.num_none
    shown = min(num_top, most)
    keys = list(map(names.__getitem__, arrays.top_ids.tolist()))
    numbers = numbers_json(arrays.top_values)
    found, at = [b"null"] * num_none, 0
    for token_id, number in zip(ids[num_none:], numbers_json(arrays.values), strict=True):
        tops = zip(reversed(keys[at : at + shown]), reversed(numbers[at : at + shown]), strict=True)
        fields = dict(tops)
        fields[names[token_id]] = number
        found.append(b"{%b}" % b",".join([b"%b:%b" % each for each in fields.items()]))
        at += most
    return b",".join(found)


def ranked_json(entries: PromptLogprobs, frames: TokenTable[NumberFrame], num_top: int) -> bytes:
    """Return an object for each entry, in which its token and the most likely ones are named by their ids and
    have their ranks.
    """
    columns = packed_logprobs(entries)
    ids, values, top_ids, top_values, ranks = columns.arrays()
    most = columns.num_top
    shown = min(num_top, most)
    tops, numbers = top_ids.tolist(), numbers_json(top_values)
    places = range(1, shown + 1)
    found, at = [b"null"] * columns.num_none, 0
    for token_id, number, rank in zip(ids.tolist(), numbers_json(values), ranks.tolist(), strict=True):
        placed = zip(numbers[at : at + shown], places, strict=True)
        ranked = dict(zip(tops[at : at + shown], placed, strict=True))
        ranked[token_id] = number, rank
        fields = []
        for each, (value, place) in ranked.items():
            head, tail = frames[each]
            fields.append(b'%b%b,"rank":%d%b' % (head, value, place, tail))
        found.append(b"{%b}" % b",".join(fields))
        at += most
    return b",".join(found)


def framed(ids: Sequence[int], numbers: list[bytes], frames: TokenTable[NumberFrame]) -> list[bytes]:
    """Return the JSON of a number of each token."""
    around = map(frames.__getitem__, ids)
    return [head + number + tail for (head, tail), number in zip(around, numbers, strict=True)]
