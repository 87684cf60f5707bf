"""ErrorInfo: an error of a request in its form on the wire. The client library turns it into an exception
again.
"""

from __future__ import annotations

from runtime.base.errors import Overloaded, RequestError
from runtime.wire.format import MAX_SHORT_CHARS
from runtime.wire.messages import ErrorInfo


def error_info(error: RequestError) -> ErrorInfo:
    retry_after_s = error.retry_after_s if isinstance(error, Overloaded) else 0.0
    return ErrorInfo(error.message[:MAX_SHORT_CHARS], error.code, error.param, error.status, retry_after_s)
