"""An error of a request as the wire carries it. The client library makes an exception of it again."""

from __future__ import annotations

from runtime.errors import Overloaded, RequestError
from runtime.messages import ErrorInfo
from runtime.wire import MAX_SHORT_CHARS


def error_info(error: RequestError) -> ErrorInfo:
    retry_after_s = error.retry_after_s if isinstance(error, Overloaded) else 0.0
    return ErrorInfo(error.message[:MAX_SHORT_CHARS], error.code, error.param, error.status, retry_after_s)
