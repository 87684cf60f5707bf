"""Keys of config.json that belong to the text decoder. Multimodal checkpoints keep them under text_config, or
among the keys of their towers. Opens no file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runtime.base.errors import ModelError
from runtime.checkpoint.architectures import TEXT_PARTS, MultimodalArchitecture, row_of

_OF_THE_WHOLE = ("architectures", "model_type", "auto_map", "quantization_config", "dtype", "torch_dtype")
"""Keys whose value outside text_config takes precedence, if there is one."""
_IDS = ("bos_token_id", "eos_token_id")
_TIED = "tie_word_embeddings"


def text_keys(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json in the form of a plain decoder's; unchanged if it is one. Raises ModelError if
    text_config is not a decoder that the architecture's spec computes.
    """
    name = _multimodal(raw)
    nested = raw.get("text_config")
    if nested is None and name is None:
        return dict(raw)
    if not isinstance(nested, dict | None):
        raise ModelError("config.json cannot be read: Expected `object` - at `$.text_config`")
    text: Mapping[str, Any] = raw if nested is None else nested
    keys: dict[str, Any] = {}
    if name is not None:
        row = row_of(name)
        assert row is not None
        _check_kind(TEXT_PARTS[name], text)
        keys.update(row.defaults)
    # Newer versions of the library read it from the whole config, older ones from text_config. A head in the
    # files takes precedence over both.
    asked = [source[_TIED] for source in (raw, text) if source.get(_TIED) is not None]
    if _TIED not in raw and _TIED in keys:
        asked.append(keys[_TIED])
    keys.update(text)
    keys.update((key, raw[key]) for key in _OF_THE_WHOLE if raw.get(key) is not None)
    keys.update((key, raw[key]) for key in _IDS if keys.get(key) is None and key in raw)
    if asked:
        keys[_TIED] = any(asked)
    return keys


def _multimodal(raw: Mapping[str, Any]) -> str | None:
    """Return the architecture of TEXT_PARTS that the file names, or None."""
    names = raw.get("architectures")
    found = [name for name in TEXT_PARTS if isinstance(names, list) and name in names]
    return found[0] if found else None


def _check_kind(part: MultimodalArchitecture, text: Mapping[str, Any]) -> None:
    kind = text.get("model_type", part.model_types[0])
    if kind not in part.model_types:
        raise ModelError(
            f"config.json: text_config.model_type {kind!r} is not supported in this architecture. "
            f"Supported: {', '.join(part.model_types)}."
        )
