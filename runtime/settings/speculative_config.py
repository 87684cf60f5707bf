"""vLLM's --speculative-config: a JSON object. Only n-gram speculation is supported."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from runtime.base.errors import ConfigError

LOOKUPS = ("prompt_lookup_min", "prompt_lookup_max")
"""Lengths of n-grams to look for. They have no effect: the longest match of 1 to 8 tokens is always used."""


def ngram_settings(option: str, value: str) -> Mapping[str, Any] | None:
    """Return the settings that the object stands for; None if it asks for another method or is no object.
    Raises ConfigError, which names a key that is not supported.
    """
    try:
        given = json.loads(value)
    except ValueError:
        return None
    if not isinstance(given, dict):
        return None
    model = given.pop("model", None)
    if given.pop("method", "ngram" if model in ("ngram", "[ngram]") else None) != "ngram":
        return None
    settings: dict[str, Any] = {"speculative_algorithm": "NGRAM"}
    for key, wanted in given.items():
        if key not in ("num_speculative_tokens", *LOOKUPS):
            raise ConfigError(f"{option}: {key} is unknown with method ngram; leave it out")
        if isinstance(wanted, bool) or not isinstance(wanted, int) or wanted < 1:
            raise ConfigError(f"{option}: {key}: expected a whole number from 1 on, got {wanted!r}")
    if "num_speculative_tokens" in given:
        settings["speculative_num_draft_tokens"] = given["num_speculative_tokens"]
    return settings
