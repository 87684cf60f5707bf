"""How a setting is declared."""

from __future__ import annotations

from typing import Any

from msgspec import Meta


def setting(description: str, *flags: str, **bounds: Any) -> Meta:
    """The Meta of a setting. flags: its other spellings on the command line, those of SGLang and vLLM."""
    return Meta(description=description, extra={"flags": flags}, **bounds)
