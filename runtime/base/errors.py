"""The error tree: what users see, with the HTTP status, the code and the exit code each error becomes.

CarouselError
├── RequestError          one request is refused or failed; everybody else goes on
│   ├── InvalidRequest    400, names the field
│   ├── Unauthorized      401
│   ├── Forbidden         403
│   ├── AdapterNotResident 404, weights that came with a request are not kept any more
│   ├── Overloaded        503, says when to try again
│   │   └── RateLimited   429, a tenant has as much as it may have
│   └── RequestAborted    499, the client or the server ended it
├── StartError            the launch ends; carries the launcher's exit code
│   ├── ConfigError       64, a flag or a setting is wrong
│   ├── AddressInUse      69, the port or the run directory is taken
│   └── ModelError        72, the model is missing or cannot be served
├── ExecutorError         the model worker failed or is gone
├── ProtocolMismatch      the two ends of a socket speak different versions
└── RingClosed            the runtime behind a client is gone
"""

from __future__ import annotations

EXIT_OK = 0
EXIT_CONFIG = 64
EXIT_UNAVAILABLE = 69
EXIT_INTERNAL = 70
EXIT_NO_MODEL = 72
EXIT_DRAIN_CUT = 75


class CarouselError(Exception):
    """Base of everything Carousel raises on purpose."""


class RequestError(CarouselError):
    """One request failed or was refused. `code` is stable and machine-readable; `param` names the field at
    fault.
    """

    status = 500
    code = "internal_error"

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, status: int | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code
        if status is not None:
            self.status = status


class InvalidRequest(RequestError):
    """The request itself is wrong. The same request will be refused again."""

    status = 400
    code = "invalid_value"


class Unauthorized(RequestError):
    """The API key is missing or wrong."""

    status = 401
    code = "invalid_api_key"


class Forbidden(RequestError):
    """The API key does not allow this."""

    status = 403
    code = "permission_denied"


class AdapterNotResident(RequestError):
    """The request names weights that are not kept, or no longer kept: send them again."""

    status = 404
    code = "adapter_not_resident"


class Overloaded(RequestError):
    """There is no room now. `retry_after_s` says when to try again."""

    status = 503
    code = "overloaded"

    def __init__(self, message: str, *, code: str | None = None, retry_after_s: float = 1.0) -> None:
        super().__init__(message, code=code)
        self.retry_after_s = retry_after_s


class RateLimited(Overloaded):
    """The caller has reached a limit of its key. Other callers may still have room."""

    status = 429
    code = "rate_limit_exceeded"


class RequestAborted(RequestError):
    """The request was ended before it was complete."""

    status = 499
    code = "aborted"


class StartError(CarouselError):
    """The runtime cannot start or cannot continue. The launcher ends with `exit_code`."""

    exit_code = EXIT_INTERNAL


class ConfigError(StartError):
    """A flag, an environment variable or a combination of settings is wrong; the message names it."""

    exit_code = EXIT_CONFIG


class AddressInUse(StartError):
    """The HTTP port or the run directory belongs to somebody else."""

    exit_code = EXIT_UNAVAILABLE


class ModelError(StartError):
    """The model is missing, incomplete, or of a kind that Carousel does not serve."""

    exit_code = EXIT_NO_MODEL


class ExecutorError(CarouselError):
    """The model worker raised or died; every request it held has failed."""


class ProtocolMismatch(CarouselError):
    """The peer speaks another protocol version or another message schema."""


class RingClosed(CarouselError):
    """The runtime is gone for good. Open requests will not be answered."""
