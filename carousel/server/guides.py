"""Guides in bodies: the fields of OpenAI, vLLM and SGLang that constrain the output, as one guide.

`response_format`, `structured_outputs` and `guided_*` are fields of both OpenAI endpoints. SGLang's
`json_schema`, `regex`, `ebnf` and `structural_tag` are fields there, too, and in the `sampling_params` of
/generate.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

import msgspec
from msgspec import Meta, Raw, Struct, field

from carousel.structured_outputs import StructuredOutputsParams
from runtime.base.errors import InvalidRequest

SchemaBody: TypeAlias = Annotated[Raw, Meta(extra_json_schema={"type": ["object", "boolean", "string"]})]
"""A JSON schema, as JSON or as a string that contains it."""
TagBody: TypeAlias = Annotated[Raw, Meta(extra_json_schema={"type": ["object", "string"]})]
"""A structural tag, as JSON or as a string that contains it."""


class JsonSchemaBody(Struct, forbid_unknown_fields=True, kw_only=True):
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    """No effect: output always follows the schema."""
    schema: SchemaBody = field(default_factory=Raw)


class ResponseFormatBody(Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaBody | None = None
    schema: SchemaBody = field(default_factory=Raw)
    """Schema of a json_object or json_schema, at the place where llama.cpp and others have it."""
    format: Annotated[Raw, Meta(extra_json_schema={"type": "object"})] = field(default_factory=Raw)
    """Structural tag in the newer form."""
    structures: Annotated[Raw, Meta(extra_json_schema={"type": "array"})] = field(default_factory=Raw)
    """Tags in the older form."""
    triggers: list[str] | None = None
    """Texts that begin the tags in the older form."""


class StructuredOutputsBody(Struct, forbid_unknown_fields=True, kw_only=True):
    json: SchemaBody = field(default_factory=Raw)
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: TagBody = field(default_factory=Raw)
    disable_any_whitespace: bool | None = None


class GuideFields(Struct, forbid_unknown_fields=True, kw_only=True):
    """Fields of guides in the OpenAI bodies."""

    response_format: ResponseFormatBody | None = None
    structured_outputs: StructuredOutputsBody | None = None
    guided_json: SchemaBody = field(default_factory=Raw)
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None


class AskedGuide(NamedTuple):
    params: StructuredOutputsParams | None
    names: dict[str, str]
    """Names in errors -> names in the body."""


TAG_FIELDS = ("format", "structures", "triggers")
ONE_OF = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
"""Fields of structured_outputs, of which exactly one is the guide."""
KINDS = ("json", "json_schema", "regex", "choice", "ebnf", "lark", "structural_tag", "structured_outputs")


_guides_of = attrgetter(*GuideFields.__struct_fields__)
_NO_GUIDES = _guides_of(GuideFields())


def asked_guide(body: GuideFields) -> AskedGuide:
    """Return the one guide of a body. Raises InvalidRequest if there are two."""
    values = _guides_of(body)
    if values == _NO_GUIDES:
        return AskedGuide(None, {})
    given: dict[str, StructuredOutputsParams] = {}
    for name, value in zip(GuideFields.__struct_fields__, values, strict=True):
        if value is None or _is_absent(value):
            continue
        params = _MAKERS[name](value)
        if params is not None:
            given[name] = params
    return one_guide(given)


def one_guide(given: dict[str, StructuredOutputsParams], where: str = "") -> AskedGuide:
    """Return the one guide among those given by field; `where` comes before the names of fields in errors.
    Raises InvalidRequest.
    """
    if not given:
        return AskedGuide(None, {})
    first, *others = given
    if others:
        raise InvalidRequest(
            f"{where}{others[0]}: an output has one guide, and {where}{first} is given, too",
            param=f"{where}{others[0]}",
        )
    return AskedGuide(given[first], dict.fromkeys(KINDS, where + first))


def _is_absent(value: Any) -> bool:
    return value is None or (isinstance(value, Raw) and bytes(value) in (b"", b"null"))


def _of_response_format(body: ResponseFormatBody) -> StructuredOutputsParams | None:
    name = "response_format"
    tag = {each: getattr(body, each) for each in TAG_FIELDS if not _is_absent(getattr(body, each))}
    if bool(tag) != (body.type == "structural_tag"):
        words = " or ".join(TAG_FIELDS)
        raise InvalidRequest(
            f"{name}: {words} is needed with type structural_tag, and only there", param=name
        )
    if tag:
        return StructuredOutputsParams(structural_tag=msgspec.json.encode(tag).decode())
    if not _is_absent(body.schema):
        if body.type not in ("json_object", "json_schema") or body.json_schema is not None:
            raise InvalidRequest(
                f"{name}.schema is for the types json_object and json_schema, without json_schema beside it",
                param=f"{name}.schema",
            )
        return StructuredOutputsParams(json=_schema_text(body.schema))
    if (body.type == "json_schema") != (body.json_schema is not None):
        raise InvalidRequest(f"{name}: json_schema is needed with its type, and only there", param=name)
    if body.json_schema is not None:
        if _is_absent(body.json_schema.schema):
            raise InvalidRequest(f"{name}.json_schema.schema is needed", param=name)
        return StructuredOutputsParams(json=_schema_text(body.json_schema.schema))
    return None if body.type == "text" else StructuredOutputsParams(json_object=True)


def _of_structured_outputs(body: StructuredOutputsBody) -> StructuredOutputsParams:
    given = [
        name for name in ONE_OF if not _is_absent(getattr(body, name)) and getattr(body, name) is not False
    ]
    if len(given) != 1:
        name = "structured_outputs"
        said = " and ".join(given) or "none"
        raise InvalidRequest(f"{name}: give one of {', '.join(ONE_OF)}; got {said}", param=name)
    return StructuredOutputsParams(
        json=None if _is_absent(body.json) else _schema_text(body.json),
        regex=body.regex,
        choice=body.choice,
        grammar=body.grammar,
        json_object=body.json_object,
        structural_tag=None if _is_absent(body.structural_tag) else _schema_text(body.structural_tag),
        disable_any_whitespace=bool(body.disable_any_whitespace),
    )


def _schema_text(raw: Raw) -> str:
    """Return the text of a schema or a structural tag, which may be a string in the JSON."""
    text = bytes(raw).decode()
    return msgspec.json.decode(text, type=str) if text.startswith('"') else text


_MAKERS: dict[str, Any] = {
    "response_format": _of_response_format,
    "structured_outputs": _of_structured_outputs,
    "guided_json": lambda value: StructuredOutputsParams(json=_schema_text(value)),
    "guided_regex": lambda value: StructuredOutputsParams(regex=value),
    "guided_choice": lambda value: StructuredOutputsParams(choice=value),
    "guided_grammar": lambda value: StructuredOutputsParams(grammar=value),
    "json_schema": lambda value: StructuredOutputsParams(json=value),
    "regex": lambda value: StructuredOutputsParams(regex=value),
    "ebnf": lambda value: StructuredOutputsParams(ebnf=value),
    "structural_tag": lambda value: StructuredOutputsParams(structural_tag=value) if value else None,
}
SGLANG_FIELDS = ("json_schema", "regex", "ebnf", "structural_tag")


def asked_guide_of_sampling(sampling: Any) -> AskedGuide:
    """Return the guide in SGLang's sampling parameters. Raises InvalidRequest if there are two."""
    values = {name: getattr(sampling, name) for name in SGLANG_FIELDS}
    made = {name: _MAKERS[name](value) for name, value in values.items() if value is not None}
    given = {name: params for name, params in made.items() if params is not None}
    return one_guide(given, "sampling_params.")
