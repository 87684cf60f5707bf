"""Scales between numbers and their float8 in the KV cache."""

from __future__ import annotations

from typing import NamedTuple


class KVScale(NamedTuple):
    """Scales by which a layer's keys and values are divided when they are stored as float8, and multiplied by
    when they are read. A KV cache of another dtype keeps them as they are.
    """

    key: float = 1.0
    value: float = 1.0


UNSCALED = KVScale()
