"""Declaration of a setting."""

from __future__ import annotations

from typing import Any

from msgspec import Meta


def setting(description: str, *flags: str, **bounds: Any) -> Meta:
    """Return the Meta of a setting. description: help text. flags: other spellings on the command line, those
    of SGLang and vLLM. bounds: as in msgspec.Meta.
    """
    return Meta(description=description, extra={"flags": flags}, **bounds)
