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
from runtime.sampling.table import PARAMETERS, Column, Stay

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
_OWN = tuple((8 * _PLACES[c.name], c.value) for p in PARAMETERS if p.is_own for c in p.columns)
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


def pack_row(sampling: Any, stay: Stay) -> tuple[int, bytes]:
    """Return the feature bits that SamplingParams need, and their packed columns of ROW_BYTES bytes."""
    features, columns = _pack_values(_values_of(sampling), stay)
    for start, number in _OWN:
        columns = columns[:start] + _pack_own(number(sampling, stay)) + columns[start + 8 :]
    return features, columns


@lru_cache(KEPT)
def _pack_values(values: tuple[Any, ...], stay: Stay) -> tuple[int, bytes]:
    """Do what pack_row does, without the columns of parameters that differ in nearly every request, so that
    the result can be cached. Only values that are not neutral are looked at, which are few in most requests.
    """
    sampling = SimpleNamespace(**dict(zip(_NAMES, values, strict=True)))
    numbers, features = list(_NEUTRAL_NUMBERS), NOISE
    for i in compress(_INDICES, map(ne, values, _NEUTRAL)):
        feature, neutral_bits, columns = _ROWS[i]
        features = features & ~neutral_bits | feature(values[i])
        for place, number in columns:
            numbers[place] = number(sampling, stay)
    return features if features & NOISE else features & ~OF_DRAW, _pack(*numbers)


def examples(features: int) -> dict[str, Any]:
    """Return a value with an effect for each parameter that needs no features but these."""
    return {
        p.name: p.example
        for p in PARAMETERS
        if p.example is not None and not p.feature(p.example) & ~features
    }
