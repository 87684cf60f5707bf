"""The walk over a schema: what is kept, what is refused and where, and which `oneOf` is `anyOf`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from runtime.guides.json_schema import SchemaRefused, schema_of
from runtime.guides.keywords import KEYWORDS
from tests.harness.cases import for_each

VOCABULARY = """
$schema $id $ref $anchor $dynamicRef $dynamicAnchor $vocabulary $comment $defs prefixItems items contains
additionalProperties properties patternProperties dependentSchemas propertyNames if then else allOf anyOf
oneOf not unevaluatedItems unevaluatedProperties type enum const multipleOf maximum exclusiveMaximum
minimum exclusiveMinimum maxLength minLength pattern maxItems minItems uniqueItems maxContains
minContains maxProperties minProperties required dependentRequired title description default deprecated
readOnly writeOnly examples format contentEncoding contentMediaType contentSchema
"""


def walked(schema: Any) -> Any:
    return schema_of(json.dumps(schema))


def refusal(schema: Any) -> str:
    with pytest.raises(SchemaRefused) as caught:
        walked(schema)
    assert caught.value.param == "json_schema"
    assert caught.value.status == 400
    return caught.value.message


def test_every_keyword_of_the_vocabulary_has_a_row() -> None:
    assert not set(VOCABULARY.split()) - KEYWORDS.keys()


@for_each(
    "schema",
    [
        {"type": "object", "properties": {"a": {"type": "integer", "minimum": 3}}, "required": ["a"]},
        {"type": "array", "prefixItems": [{"const": 1}, True], "items": False, "maxItems": 2},
        {"type": "string", "minLength": 1, "maxLength": 3, "pattern": "^a"},
        {"anyOf": [{"enum": [1, None]}, {"type": "string", "format": "date"}]},
        {"allOf": [{"multipleOf": 2}, {"exclusiveMaximum": 9}]},
        {"patternProperties": {"^a/b~": {}}, "additionalProperties": {"type": "null"}},
        True,
        {},
    ],
)
def test_plain_keywords_stay_as_they_are(schema: Any) -> None:
    assert walked(schema) == schema


@for_each(
    ("schema", "pointer", "word"),
    [
        ({"properties": {"a/b": {"not": {}}}}, "/properties/a~1b/not", "not is not supported"),
        ({"items": {"uniqueItems": True}}, "/items/uniqueItems", "uniqueItems"),
        ({"allOf": [{}, {"if": {}, "then": {}}]}, "/allOf/1/if", "if is not supported"),
        ({"type": "string", "format": "iri"}, "/format", "'iri' is none of"),
        ({"$ref": "https://example.com/x"}, "/$ref", "only references into the schema"),
        ({"$ref": "#/nowhere"}, "/$ref", "refers to no place"),
        ({"type": "text"}, "/type", "one or some of"),
        ({"properties": {"a": 5}}, "/properties/a", "not int"),
        ({"nullable": True}, "/nullable", "nullable is not supported"),
        ({"minProperties": 1}, "/minProperties", "where required names as many"),
        ({"dependentRequired": {"a": ["b"]}}, "/dependentRequired", "not supported"),
        ({"unevaluatedProperties": False}, "/unevaluatedProperties", "not supported"),
        ({"contains": {}}, "/contains", "not supported"),
        ({"$schema": "https://example.com/mine"}, "/$schema", "knows the drafts"),
        ({"properties": {"a": {"$id": "x"}}}, "/properties/a/$id", "at the root only"),
        ({"maxLength": -1}, "/maxLength", "at least 0"),
        ({"multipleOf": 0}, "/multipleOf", "above 0"),
        ({"required": [1]}, "/required", "a list of names"),
        ({"enum": []}, "/enum", "at least one"),
        ({"anyOf": []}, "/anyOf", "at least one schema"),
        (5, "the root", "not int"),
    ],
)
def test_what_is_refused_is_named_with_its_place(schema: Any, pointer: str, word: str) -> None:
    message = refusal(schema)
    assert f"json_schema: {pointer}: " in message
    assert word in message


@for_each("text", ["", "{", '{"minimum": NaN}', '{"minimum": 1e999}', "[" * 100_000, '{"items":' * 5000])
def test_what_is_no_json_is_refused(text: str) -> None:
    with pytest.raises(SchemaRefused):
        schema_of(text)


def test_schemas_nested_too_deeply_are_refused() -> None:
    schema: Any = {}
    for _ in range(200):
        schema = {"items": schema}
    assert "more than 100 deep" in refusal(schema)


def test_annotations_and_unknown_keywords_are_left_out() -> None:
    assert walked({"title": "T", "default": 1, "x-guidance": {"lenient": True}, "type": "null"}) == {
        "type": "null"
    }


def test_targets_of_references_stand_in_defs_once() -> None:
    node = {"type": "object", "properties": {"next": {"$ref": "#/definitions/node"}, "self": {"$ref": "#x"}}}
    got = walked({"definitions": {"node": {"$anchor": "x", **node}}, "$ref": "#/definitions/node"})
    inner = {"type": "object", "properties": {"next": {"$ref": "#/$defs/d0"}, "self": {"$ref": "#/$defs/d0"}}}
    assert got == {"$ref": "#/$defs/d0", "$defs": {"d0": inner}}


def test_the_root_may_be_referred_to() -> None:
    got = walked({"type": "array", "items": {"$ref": "#"}})
    assert got["items"] == {"$ref": "#/$defs/d0"}
    assert got["$defs"]["d0"] == {"type": "array", "items": {"$ref": "#/$defs/d0"}}


def test_before_2019_what_stands_beside_a_reference_is_ignored() -> None:
    schema = {"definitions": {"a": {"type": "integer"}}, "$ref": "#/definitions/a", "minimum": 3}
    assert walked(schema)["minimum"] == 3
    old = walked({"$schema": "http://json-schema.org/draft-07/schema#", **schema})
    assert "minimum" not in old


def test_lists_in_items_are_prefix_items() -> None:
    assert walked({"items": [{"type": "null"}], "additionalItems": False}) == {
        "prefixItems": [{"type": "null"}],
        "items": False,
    }


TAGGED = [
    {
        "type": "object",
        "properties": {"kind": {"const": kind}, "n": {"type": "integer"}},
        "required": ["kind"],
    }
    for kind in ("a", "b", "c")
]


@for_each(
    "branches",
    [
        [{"type": "integer"}, {"type": "string"}, {"type": ["null", "array"]}],
        [{"const": 1}, {"enum": [2, "1", True]}],
        [{"const": "a"}, {"type": "number"}],
        [{"maximum": 3, "type": "number"}, {"minimum": 4, "type": "integer"}],
        [{"type": "string", "maxLength": 3}, {"type": "string", "minLength": 4}],
        TAGGED,
        [
            {"type": "object", "required": ["a"]},
            {"type": "object", "properties": {"b": {}}, "additionalProperties": False},
        ],
        [{"type": "object", "properties": {"t": each}, "required": ["t"]} for each in TAGGED],
    ],
)
def test_one_of_disjoint_branches_is_any_of(branches: list[Any]) -> None:
    assert walked({"oneOf": branches}) == {"anyOf": branches}


@for_each(
    "branches",
    [
        [{"type": "integer"}, {"type": "number"}],
        [{"const": 1}, {"const": 1.0}],
        [{"type": "string", "maxLength": 3}, {"type": "string", "minLength": 3}],
        [{"minimum": 4}, {"maximum": 3}],  # a text matches both
        [{**each, "required": []} for each in TAGGED],
        [{}, {"type": "null"}],
    ],
)
def test_one_of_branches_that_may_overlap_is_refused(branches: list[Any]) -> None:
    assert "json_schema: /oneOf: oneOf is supported where" in refusal({"oneOf": branches})


def test_one_of_branches_are_followed_through_references() -> None:
    names = ("a", "b", "c")
    schema = {
        "$defs": dict(zip(names, TAGGED, strict=True)),
        "oneOf": [{"$ref": f"#/$defs/{name}"} for name in names],
    }
    assert len(walked(schema)["anyOf"]) == 3


def test_any_of_and_one_of_beside_each_other_both_hold() -> None:
    any_of, one_of = [{"minimum": 1}, {"maxLength": 1}], [{"type": "null"}, {"type": "string"}]
    got = walked({"oneOf": one_of, "anyOf": any_of})
    assert got == {"anyOf": any_of, "allOf": [{"anyOf": one_of}]}
