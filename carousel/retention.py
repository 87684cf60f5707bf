"""KvCacheRetentionConfig: how firmly, and for how long, the server keeps the KV cache of a request, under
TensorRT-LLM's names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from runtime.base.errors import InvalidRequest
from runtime.wire.retention import (
    DEFAULT_PRIORITY,
    MAX_RANGES,
    MAX_RETENTION_PRIORITY,
    RetainedRange,
    Retention,
)

PARAM = "kv_cache_retention_config"
MAX_COUNT = (1 << 31) - 1


@dataclass(frozen=True)
class KvCacheRetentionConfig:
    """KV of a lower priority is evicted first, whatever the server's eviction policy; pages that no request
    mentions have priority 35. The last request that says something about a token decides.

    token_range_retention_configs: of the prompt, in order, without overlap. KV is kept in pages; a page
        belongs to the range of its first token.
    decode_retention_priority, decode_duration_ms: for the generated tokens.
    max_tokens: the short form: the first so many tokens of the prompt at the highest priority, for ever.

    A wrong value raises InvalidRequest when the request is submitted.
    """

    @dataclass(frozen=True, slots=True)
    class TokenRangeRetentionConfig:
        """Prompt tokens token_start .. token_end - 1 (None: to its end) are kept at `priority`, 0 to 100; for
        duration_ms after their last use (an integer or a timedelta; None: for ever), then at the default, 35.
        """

        token_start: int
        token_end: int | None = None
        priority: int = DEFAULT_PRIORITY
        duration_ms: int | timedelta | None = None

    token_range_retention_configs: Sequence[TokenRangeRetentionConfig] = field(default_factory=tuple)
    decode_retention_priority: int = DEFAULT_PRIORITY
    decode_duration_ms: int | timedelta | None = None
    max_tokens: int | None = None


TokenRangeRetentionConfig = KvCacheRetentionConfig.TokenRangeRetentionConfig


def retention_for_wire(config: Any) -> Retention | None:
    """Return a caller's retention in its form on the wire. Raises InvalidRequest, which names what
    is wrong.
    """
    if config is None:
        return None
    if not isinstance(config, KvCacheRetentionConfig):
        raise _invalid("", f"must be KvCacheRetentionConfig, got {type(config).__name__}")
    ranges = config.token_range_retention_configs
    if not isinstance(ranges, Sequence) or len(ranges) > MAX_RANGES:
        raise _invalid("token_range_retention_configs", f"must be a list of at most {MAX_RANGES}")
    if config.max_tokens is not None:
        if ranges:
            raise _invalid("max_tokens", "is the short form of a range; give one of them")
        ranges = [TokenRangeRetentionConfig(0, config.max_tokens, MAX_RETENTION_PRIORITY)]
    retention = Retention(
        tuple(_range(number, each) for number, each in enumerate(ranges)),
        _integer("decode_retention_priority", config.decode_retention_priority, 0, MAX_RETENTION_PRIORITY),
        _milliseconds("decode_duration_ms", config.decode_duration_ms),
    )
    retention.validate()
    return retention


def _range(number: int, each: Any) -> RetainedRange:
    name = f"token_range_retention_configs[{number}]"
    if not isinstance(each, TokenRangeRetentionConfig):
        raise _invalid(name, f"must be TokenRangeRetentionConfig, got {type(each).__name__}")
    end = each.token_end
    return RetainedRange(
        _integer(f"{name}.token_start", each.token_start, 0, MAX_COUNT),
        None if end is None else _integer(f"{name}.token_end", end, 1, MAX_COUNT),
        _integer(f"{name}.priority", each.priority, 0, MAX_RETENTION_PRIORITY),
        _milliseconds(f"{name}.duration_ms", each.duration_ms),
    )


def _milliseconds(name: str, value: Any) -> int:
    """Return a duration in milliseconds; 0 (without limit) if none is given."""
    if value is None:
        return 0
    if isinstance(value, timedelta):
        value = round(value / timedelta(milliseconds=1))
    return _integer(name, value, 1, MAX_COUNT)


def _integer(name: str, value: Any, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise _invalid(name, f"must be an integer from {low} to {high}, got {value!r}")
    return value


def _invalid(name: str, message: str) -> InvalidRequest:
    return InvalidRequest(f"{PARAM}{'.' * bool(name)}{name} {message}", param=PARAM)
