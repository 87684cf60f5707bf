"""Scales between values and their float8 form in the KV cache."""

from __future__ import annotations

from typing import NamedTuple


class KVScale(NamedTuple):
    """Divisors of a layer's keys and values when they are stored as float8, by which they are multiplied when
    read. A KV cache of another dtype stores them unchanged.
    """

    key: float = 1.0
    value: float = 1.0


UNSCALED = KVScale()
