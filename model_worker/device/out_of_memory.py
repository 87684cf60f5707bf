"""Recognition of out-of-memory errors, and their messages for users. Knows no setting."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from runtime.base.errors import ConfigError

# Only torch's own allocator raises an exception of its own. CUDA, NCCL and Triton's launcher say "out of
# memory", libraries ALLOC_FAILED, and the CPU's allocator the third text.
WORDS = ("out of memory", "ALLOC_FAILED", "can't allocate memory")


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and any(words in str(error) for words in WORDS)


def first_line(error: BaseException) -> str:
    """Return the first line of an error. The others are advice or a trace of torch."""
    return str(error).partition("\n")[0]


@contextmanager
def when_out_of_memory(doing: str, remedy: str) -> Iterator[None]:
    """Context manager that turns an out-of-memory error into a ConfigError. doing: the activity, for the
    message. remedy: advice.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise ConfigError(f"out of memory while {doing}: {remedy} ({first_line(error)})") from error
