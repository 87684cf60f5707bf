"""Prompts as vLLM's objects: {"prompt": text} and {"prompt_token_ids": ids}."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from runtime.base.errors import InvalidRequest

TEXT_ONLY = ("multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs", "prompt_embeds")
"""Keys for what is not served."""


def without_objects(prompt: Any) -> Any:
    """Return the prompt or prompts with text or token ids in the place of each object. All else, such as a
    conversation, stays as it is. Raises InvalidRequest for an object with other keys.
    """
    if _is_object(prompt):
        return _plain(prompt)
    if isinstance(prompt, Sequence) and not isinstance(prompt, str) and any(map(_is_object, prompt)):
        return [_plain(each) if _is_object(each) else each for each in prompt]
    return prompt


def _is_object(prompt: Any) -> bool:
    """Return True for a mapping that is no message of a conversation."""
    return isinstance(prompt, Mapping) and "role" not in prompt and "content" not in prompt


def _plain(prompt: Mapping[str, Any]) -> Any:
    given = {key: value for key, value in prompt.items() if value is not None}
    text = given.pop("prompt", None)
    ids = given.pop("prompt_token_ids", None)
    for key, value in given.items():
        if key in TEXT_ONLY and not value:
            continue
        reason = (
            "models are served for text only"
            if key in TEXT_ONLY
            else "give it to generate"
            if key == "cache_salt"
            else "the keys of a prompt are prompt and prompt_token_ids"
        )
        raise InvalidRequest(f"prompt: {key} is not supported: {reason}", param="prompt")
    if text is None and ids is None:
        raise InvalidRequest("prompt: an object has prompt, or prompt_token_ids", param="prompt")
    return text if ids is None else ids
