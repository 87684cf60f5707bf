"""StructuredOutputsParams: form of an output, in vLLM's words; and the same in TensorRT-LLM's."""

from __future__ import annotations

import json as json_lib
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from enum import Enum
from typing import Any

from carousel.structural_tag import structural_tag_text
from runtime.base.errors import InvalidRequest
from runtime.wire.guide import Guide, GuideKind

PARAM = "structured_outputs"
EBNF_SIGN = "::="
"""Sign that stands in every rule of EBNF and GBNF, and in none of Lark's."""


@dataclass(frozen=True)
class StructuredOutputsParams:
    """Exactly one guide.

    json: a JSON schema, as a mapping or a text.
    regex: a regular expression that the whole output matches.
    choice: texts, one of which is the output.
    grammar: a grammar: EBNF as GBNF has it (rules with `::=`), or Lark.
    json_object: any JSON object.
    ebnf: a grammar that is EBNF, whatever it looks like.
    structural_tag: fixed texts, free text and values of schemas, as a mapping or a text of JSON
        (docs/structured_output.md).
    disable_any_whitespace: of JSON, no white space between its tokens.

    A wrong value raises InvalidRequest when the request is submitted.
    """

    json: str | Mapping[str, Any] | bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    ebnf: str | None = None
    structural_tag: str | Mapping[str, Any] | None = None
    disable_any_whitespace: bool = False


class GuideType(Enum):
    """TensorRT-LLM's GuidedDecodingParams.GuideType."""

    JSON = "json"
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    EBNF_GRAMMAR = "ebnf"
    STRUCTURAL_TAG = "structural_tag"


@dataclass(frozen=True)
class GuidedDecodingParams:
    """TensorRT-LLM's: the kind of a guide, and its text, which all kinds but JSON need. Or one guide by name,
    as in StructuredOutputsParams: its LLM API and earlier versions of vLLM have that.
    """

    guide_type: GuideType | None = None
    guide: str | None = None
    _: KW_ONLY
    json: str | Mapping[str, Any] | bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | Mapping[str, Any] | None = None

    GuideType = GuideType


_NAMES = tuple(each.name for each in fields(GuidedDecodingParams) if each.kw_only)
"""Guides that GuidedDecodingParams has by name."""


def guide_for_wire(params: Any) -> Guide | None:
    """Return a caller's structured output as the wire carries it. Raises InvalidRequest that names what is
    wrong.
    """
    if params is None:
        return None
    if isinstance(params, Guide):
        guide = params
    elif isinstance(params, GuidedDecodingParams):
        guide = _of_trtllm(params)
    elif isinstance(params, StructuredOutputsParams):
        guide = _of_vllm(params)
    else:
        raise _invalid(f"must be StructuredOutputsParams, got {type(params).__name__}")
    guide.validate()
    return guide


def _of_vllm(params: StructuredOutputsParams) -> Guide:
    given = [name for name in _MAKERS if getattr(params, name) not in (None, False) or name == "json"]
    given = [name for name in given if name != "json" or params.json is not None]
    if len(given) != 1:
        raise _invalid(f"give one of {', '.join(_MAKERS)}; got {' and '.join(given) or 'none'}")
    if not isinstance(params.disable_any_whitespace, bool):
        raise _invalid("disable_any_whitespace must be true or false")
    kind, text = _MAKERS[given[0]](getattr(params, given[0]))
    if not text and kind != "json":
        raise InvalidRequest(f"{kind}: it is empty", param=kind)
    return Guide(kind, text, any_whitespace=not params.disable_any_whitespace)


def _of_trtllm(params: GuidedDecodingParams) -> Guide:
    named = {name: getattr(params, name) for name in _NAMES if getattr(params, name) is not None}
    if named and (params.guide_type is not None or params.guide is not None):
        raise _invalid(f"give guide_type and guide, or {' and '.join(named)}")
    if params.guide_type is None and params.guide is not None:
        raise _invalid("guide_type is missing: it says what guide is")
    if params.guide_type is None:
        return _of_vllm(StructuredOutputsParams(**named))
    name = getattr(params.guide_type, "name", params.guide_type)
    if name not in GuideType.__members__:
        raise _invalid(f"guide_type: {name!r} is not supported; there are {', '.join(GuideType.__members__)}")
    kind: Any = GuideType[str(name)].value
    if params.guide is not None and not isinstance(params.guide, str):
        raise _invalid("guide must be a text")
    text = params.guide or ""
    return Guide(kind, structural_tag_text(text) if kind == "structural_tag" and text else text)


def _schema(value: Any) -> tuple[GuideKind, str]:
    if isinstance(value, str):
        return "json_schema", value
    try:
        return "json_schema", json_lib.dumps(value if isinstance(value, bool) else dict(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise _invalid(f"json must be a schema, as a mapping or a text: {error}") from None


def _text(kind: GuideKind) -> Any:
    def make(value: Any) -> tuple[GuideKind, str]:
        if not isinstance(value, str):
            raise InvalidRequest(f"{kind}: it must be a text, got {type(value).__name__}", param=kind)
        return kind, value

    return make


def _grammar(value: Any) -> tuple[GuideKind, str]:
    kind: GuideKind = "ebnf" if isinstance(value, str) and EBNF_SIGN in value else "lark"
    made: tuple[GuideKind, str] = _text(kind)(value)
    return made


def _choice(value: Any) -> tuple[GuideKind, str]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise InvalidRequest("choice: it must be a list of texts", param="choice")
    if not value or not all(isinstance(each, str) and each for each in value):
        raise InvalidRequest("choice: it must be texts, at least one, and none of them empty", param="choice")
    return "choice", json_lib.dumps(list(value))


def _json_object(value: Any) -> tuple[GuideKind, str]:
    if value is not True:
        raise _invalid("json_object must be true or false")
    return "json", ""


def _structural_tag(value: Any) -> tuple[GuideKind, str]:
    return "structural_tag", structural_tag_text(value)


_MAKERS: dict[str, Any] = {
    "json": _schema,
    "regex": _text("regex"),
    "choice": _choice,
    "grammar": _grammar,
    "json_object": _json_object,
    "ebnf": _text("ebnf"),
    "structural_tag": _structural_tag,
}


def _invalid(message: str) -> InvalidRequest:
    return InvalidRequest(f"{PARAM}: {message}", param=PARAM)
