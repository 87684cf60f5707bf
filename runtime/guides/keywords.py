"""Table of the keywords of JSON Schema 2020-12: whether each is kept, has no effect on output, or is refused.
docs/structured_output.md shows this table. For a keyword that is kept in some forms only, the table says in
which.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

Treatment: TypeAlias = Literal["kept", "annotation", "refused"]


class Keyword(NamedTuple):
    treatment: Treatment
    note: str = ""
    """Exceptions, or how the keyword is kept."""


KEPT = Keyword("kept")
ANNOTATION = Keyword("annotation")
REFUSED = Keyword("refused")

KEYWORDS: dict[str, Keyword] = {
    # core
    "$schema": Keyword("kept", "drafts 4 to 2020-12; before 2019-09 what stands beside `$ref` is ignored"),
    "$id": Keyword("kept", "at the root only"),
    "$ref": Keyword("kept", "into the same schema (`#...`), to a place where a schema may stand"),
    "$anchor": KEPT,
    "$dynamicRef": REFUSED,
    "$dynamicAnchor": REFUSED,
    "$recursiveRef": REFUSED,
    "$recursiveAnchor": REFUSED,
    "$vocabulary": REFUSED,
    "$comment": ANNOTATION,
    "$defs": Keyword("kept", "and `definitions`"),
    "definitions": KEPT,
    # applicators
    "prefixItems": KEPT,
    "items": Keyword("kept", "a list of schemas is read as `prefixItems`, as before 2020-12"),
    "additionalItems": Keyword("kept", "beside a list in `items`, as before 2020-12"),
    "contains": Keyword("refused", "but for `true`, with `minContains` 0"),
    "properties": Keyword("kept", "output has them in the order of the schema"),
    "patternProperties": KEPT,
    "additionalProperties": KEPT,
    "propertyNames": Keyword("refused", 'but for `true`, `{}` and `{"type": "string"}`'),
    "dependentSchemas": Keyword("refused", "but for an empty object"),
    "dependencies": Keyword("refused", "but for an empty object"),
    "if": Keyword("refused", "but for one without `then` and `else`"),
    "then": Keyword("refused", "but for one without `if`"),
    "else": Keyword("refused", "but for one without `if`"),
    "allOf": KEPT,
    "anyOf": KEPT,
    "oneOf": Keyword("kept", "where no value can match two of its branches, which has to be evident"),
    "not": REFUSED,
    "unevaluatedItems": Keyword("refused", "but for `true`"),
    "unevaluatedProperties": Keyword("refused", "but for `true`"),
    # assertions
    "type": KEPT,
    "enum": KEPT,
    "const": KEPT,
    "multipleOf": KEPT,
    "maximum": KEPT,
    "exclusiveMaximum": KEPT,
    "minimum": KEPT,
    "exclusiveMinimum": KEPT,
    "maxLength": KEPT,
    "minLength": KEPT,
    "pattern": Keyword("kept", "no look-around, no back-references"),
    "maxItems": KEPT,
    "minItems": KEPT,
    "uniqueItems": Keyword("refused", "but for `false`, and where `maxItems` is 1 or less"),
    "maxContains": Keyword("refused", "but for one without `contains`"),
    "minContains": Keyword("refused", "but for one without `contains`"),
    "maxProperties": Keyword("kept", "where all of `properties` are required"),
    "minProperties": Keyword("kept", "where `required` names as many"),
    "required": KEPT,
    "dependentRequired": Keyword("refused", "but for an empty object"),
    # format and content
    "format": Keyword(
        "kept",
        "date-time, time, date, duration, email, hostname, ipv4, ipv6, uri, uuid; others are refused",
    ),
    "contentEncoding": ANNOTATION,
    "contentMediaType": ANNOTATION,
    "contentSchema": ANNOTATION,
    # annotations
    "title": ANNOTATION,
    "description": ANNOTATION,
    "default": ANNOTATION,
    "deprecated": ANNOTATION,
    "readOnly": ANNOTATION,
    "writeOnly": ANNOTATION,
    "examples": ANNOTATION,
}
"""Every keyword of the vocabulary, and those of earlier drafts that still have a meaning."""

FOREIGN: dict[str, Keyword] = {
    "nullable": Keyword("refused", "but for `false`; a type of `null` says the same"),
    "divisibleBy": REFUSED,
    "extends": REFUSED,
    "disallow": REFUSED,
}
"""Keywords of other dialects that would change which values are valid. All other unknown keywords are
annotations, as JSON Schema says.
"""

XGRAMMAR: dict[str, str] = {
    "$ref": "beside other keywords where it does not lead to itself",
    "anyOf": "beside other keywords up to 1,000 combinations",
    "allOf": "up to 1,000 combinations; two patterns or formats of one value are refused",
    "oneOf": "as `anyOf`",
    "enum": "beside `type`, `allOf` and their kind; refused beside what else says something of its values",
    "const": "as `enum`",
    "multipleOf": "between two bounds up to 10,000 multiples; else of an integer up to 100, without bounds "
    "or from 0",
    "minimum": "without an exponent, as beside each bound",
    "maxLength": "beside `pattern` or `format` where no match is longer; a match is then the whole string",
    "minLength": "beside `pattern` or `format` where no match is shorter; a match is then the whole string",
    "pattern": "no anchors within; `\\d`, `\\w` and `\\s` are of ASCII, and so is what they leave",
    "format": "values that any validator takes, which are not all; refused beside `pattern`",
    "patternProperties": "one pattern beside `additionalProperties` false, if it matches no property's name",
    "maxProperties": "also where it is the number of the required ones",
}
"""Notes on keywords that --grammar-backend xgrammar keeps in another way than llguidance."""

FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid")
)
OLD_DRAFTS = ("draft-04", "draft-06", "draft-07")
DRAFTS = (*OLD_DRAFTS, "2019-09", "2020-12")
