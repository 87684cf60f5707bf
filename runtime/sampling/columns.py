"""Packed sampling parameters of a row: floats first, then integers, in the order of the table. The worker
uploads them without knowing any parameter; kernels know the layout from sampling_columns.h.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from itertools import compress
from operator import attrgetter, ne
from types import SimpleNamespace
from typing import Any

import numpy as np

from runtime.sampling.features import NOISE, OF_DRAW
from runtime.sampling.table import NEW_STAY, PARAMETERS, Column, Stay

FLOATS: tuple[Column, ...] = tuple(c for p in PARAMETERS for c in p.columns if c.type == "float32")
INTEGERS: tuple[Column, ...] = tuple(c for p in PARAMETERS for c in p.columns if c.type == "int64")
ROW_DTYPE = np.dtype([("floats", np.float64, (len(FLOATS),)), ("integers", np.int64, (len(INTEGERS),))])
"""NumPy type of one packed row. Floats are float64 here, because only the device decides about values that
are not finite in float32.
"""
ROW_BYTES = ROW_DTYPE.itemsize

KEPT = 64
"""Number of combinations of values whose packed form is cached."""
_pack_own = struct.Struct("=q").pack
_pack = struct.Struct(f"={len(FLOATS)}d{len(INTEGERS)}q").pack
_PLACES = {c.name: i for i, c in enumerate((*FLOATS, *INTEGERS))}
_OF_DEVICE = tuple(p for p in PARAMETERS if (p.columns or p.example is not None) and not p.is_own)
# Place and value of the one column that differs in nearly every request.
((_OWN_AT, _own_number),) = (
    (8 * _PLACES[c.name], c.value) for p in PARAMETERS if p.is_own for c in p.columns
)
_NAMES = tuple(p.name for p in _OF_DEVICE)
_values_of = attrgetter(*_NAMES)
_NEUTRAL = tuple(p.neutral for p in _OF_DEVICE)
_INDICES = range(len(_OF_DEVICE))
_NEUTRAL_PARAMS = SimpleNamespace(**{p.name: p.neutral for p in PARAMETERS})
_NEUTRAL_NUMBERS = tuple(c.value(_NEUTRAL_PARAMS, Stay()) for c in (*FLOATS, *INTEGERS))
# For each parameter: its feature function, the features of its neutral value, and (place, value function) of
# its columns.
_ROWS = tuple(
    (p.feature, p.feature(p.neutral), tuple((_PLACES[c.name], c.value) for c in p.columns))
    for p in _OF_DEVICE
)


class RowPacker:
    """Packer of rows that keeps the last result. Most requests have the same parameters as the one before,
    except for the one that differs in nearly every request.
    """

    def __init__(self) -> None:
        """Begin without a last result."""
        self._last: tuple[tuple[Any, ...], Stay, int, bytes, bytes] = ((), NEW_STAY, 0, b"", b"")

    def pack(self, sampling: Any, stay: Stay) -> tuple[int, bytes]:
        """Return the feature bits that SamplingParams need, and their packed columns of ROW_BYTES bytes."""
        values, last = _values_of(sampling), self._last
        if values != last[0] or stay is not last[1]:
            last = self._last = (values, stay, *_pack_values(values, stay))
        _, _, features, before, behind = last
        return features, before + _pack_own(_own_number(sampling, stay)) + behind


pack_row = RowPacker().pack


@lru_cache(KEPT)
def _pack_values(values: tuple[Any, ...], stay: Stay) -> tuple[int, bytes, bytes]:
    """Return the feature bits, and the packed columns before and behind the one of the parameter that differs
    in nearly every request, so that the result can be cached. Only values that are not neutral are looked at,
    which are few in most requests.
    """
    sampling = SimpleNamespace(**dict(zip(_NAMES, values, strict=True)))
    numbers, features = list(_NEUTRAL_NUMBERS), NOISE
    for i in compress(_INDICES, map(ne, values, _NEUTRAL)):
        feature, neutral_bits, columns = _ROWS[i]
        features = features & ~neutral_bits | feature(values[i])
        for place, number in columns:
            numbers[place] = number(sampling, stay)
    row = _pack(*numbers)
    features = features if features & NOISE else features & ~OF_DRAW
    return features, row[:_OWN_AT], row[_OWN_AT + 8 :]


def examples(features: int) -> dict[str, Any]:
    """Return a value with an effect for each parameter that needs no features but these."""
    return {
        p.name: p.example
        for p in PARAMETERS
        if p.example is not None and not p.feature(p.example) & ~features
    }
