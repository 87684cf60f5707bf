"""Errors for requests that are not run because a process has died of them, or of others of their tenant."""

from __future__ import annotations

from runtime.base.errors import InvalidRequest, RateLimited


def quarantined(process: str) -> InvalidRequest:
    """Return the error for a request under which a process died while it had nothing else. Its status is 400,
    so that clients do not retry. process: what died, such as "the engine".
    """
    return InvalidRequest(
        f"{process} has died several times with this request, the last time while it ran alone; it is not "
        "tried again",
        code="quarantined",
    )


def suspended(process: str, seconds: float) -> RateLimited:
    """Return the error for all requests of a tenant whose requests have ended a process several times."""
    return RateLimited(
        f"requests of this key have ended {process} several times; none of this key is served for"
        f" {seconds:.0f} s",
        code="key_suspended",
        retry_after_s=seconds,
    )
