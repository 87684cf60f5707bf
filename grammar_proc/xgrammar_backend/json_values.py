"""JSON and the values of its schemas, as nodes of a grammar."""

from __future__ import annotations

import json
import re
from typing import Any

from grammar_proc.guide_grammar import MAX_WHITESPACE
from grammar_proc.xgrammar_backend.conjunction import (
    ALL_TYPES,
    Plain,
    alternatives,
    both_types,
    types_of,
)
from grammar_proc.xgrammar_backend.expressions import Expression, ExpressionRefused, Length
from grammar_proc.xgrammar_backend.formats import FORMATS
from grammar_proc.xgrammar_backend.nodes import (
    EMPTY,
    NEVER,
    Chars,
    FixedText,
    GrammarNode,
    Ranges,
    Repeated,
    Rule,
    Rules,
    alt,
    chars,
    complement,
    literals,
    many,
    maybe,
    points,
    seq,
    without,
)
from grammar_proc.xgrammar_backend.numbers import (
    MAX_DIVISOR,
    MAX_MULTIPLES,
    NUMBER,
    Bounds,
    exact,
    integers,
    multiples,
    numbers,
)
from runtime.guides.json_schema import Schema, refuse

CONTROLS: Ranges = ((0x00, 0x1F),)
PLAIN_CHARS = without(complement(()), [*CONTROLS, *points('"\\')])
"""Characters that stand for themselves in a JSON string."""
ESCAPES = {"\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t", '"': '"', "\\": "\\"}
HEX = chars([*points("0123456789"), (0x41, 0x46), (0x61, 0x66)])
# No single surrogate, because two of them could form one character.
CODE = alt(
    [
        seq(chars(points("0123456789abcefABCEF")), HEX, HEX, HEX),
        seq(chars(points("dD")), chars(points("01234567")), HEX, HEX),
    ]
)
APPLIES = {
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("multipleOf", "maximum", "exclusiveMaximum", "minimum", "exclusiveMinimum"),
    "array": ("prefixItems", "items", "minItems", "maxItems"),
    "object": ("properties", "patternProperties", "additionalProperties", "required", "maxProperties"),
}
BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")


class JsonValues:
    """Makes the nodes of JSON values in one grammar, with one rule for white space."""

    def __init__(self, rules: Rules, *, any_whitespace: bool) -> None:
        self._rules = rules
        self._space: GrammarNode = EMPTY
        if any_whitespace:
            self._space = rules.new(Repeated(chars(points(" \n\r\t")), 0, MAX_WHITESPACE))
        self._comma = self._around(",")
        self._colon = self._around(":")
        escape = alt([chars(points('"\\/bfnrt')), seq(FixedText("u"), CODE)])
        self._char = rules.new(alt([chars(PLAIN_CHARS), seq(FixedText("\\"), escape)]))
        one, rest = Chars(PLAIN_CHARS, is_inline=True), rules.new()
        rules.put(rest, alt([FixedText('"'), seq(one, rest), seq(FixedText("\\"), escape, rest)]))
        self._string = rules.new(seq(FixedText('"'), rest))
        self._key_char = chars(PLAIN_CHARS)
        self._key_rest = rules.new()
        rules.put(self._key_rest, alt([FixedText('"'), seq(one, self._key_rest)]))
        self._any: Rule | None = None
        self._number = rules.new(NUMBER)
        self._refs: dict[str, Rule] = {}
        self._root: Schema = {}

    def of_schema(self, schema: Schema | bool) -> GrammarNode:
        """Return the values of a schema, which is as `schema_of` returns it. Raises SchemaRefused."""
        self._refs = {}
        self._root = schema if isinstance(schema, dict) else {}
        return self._value(schema)

    def anything(self) -> GrammarNode:
        if self._any is None:
            self._any = self._rules.new()
            node = alt(map(self._any_of_type, ALL_TYPES))
            self._rules.put(self._any, node)
        return self._any

    def _any_of_type(self, type_: str) -> GrammarNode:
        return self._of_type(type_, Plain({}, {}))

    def _around(self, sign: str) -> GrammarNode:
        return seq(self._space, FixedText(sign), self._space)

    # -- schemas --------------------------------------------------------------------------------------------

    def _value(self, schema: Any) -> GrammarNode:
        if isinstance(schema, bool):
            return self.anything() if schema else NEVER
        keywords = schema.keys() - {"$defs"}
        if keywords == {"$ref"}:
            return self._ref(schema["$ref"])
        if keywords == {"anyOf"}:
            return alt(self._rules.shared(self._value(each)) for each in schema["anyOf"])
        if keywords == {"allOf"} and len(schema["allOf"]) == 1:
            return self._value(schema["allOf"][0])
        return alt(map(self._of_plain, alternatives(schema, self._follow)))

    def _follow(self, ref: str) -> Any:
        return self._root["$defs"][ref.rpartition("/")[2]]

    def _ref(self, ref: str) -> GrammarNode:
        if ref not in self._refs:
            self._refs[ref] = self._rules.new()
            self._rules.put(self._refs[ref], self._value(self._follow(ref)))
        return self._refs[ref]

    def _of_plain(self, plain: Plain) -> GrammarNode:
        types = types_of(plain.keywords.get("type", list(ALL_TYPES)))
        if "enum" in plain.keywords:
            return self._enum(plain, types)
        if "number" in types:
            types = [each for each in types if each != "integer"]
        if len(types) == len(ALL_TYPES) and not any(
            name in plain.keywords for names in APPLIES.values() for name in names
        ):
            return self.anything()
        return alt(self._of_type(each, plain) for each in dict.fromkeys(types))

    def _of_type(self, type_: str, plain: Plain) -> GrammarNode:
        match type_:
            case "null":
                return FixedText("null")
            case "boolean":
                return alt([FixedText("true"), FixedText("false")])
            case "string":
                return self._string_of(plain)
            case "array":
                return self._array(plain)
            case "object":
                return self._object(plain)
        return self._number_of(plain, is_integer=type_ == "integer")

    def _enum(self, plain: Plain, types: list[str]) -> GrammarNode:
        texts = []
        for value in plain.keywords["enum"]:
            type_ = _type_of(value)
            if not both_types([type_], types):
                continue
            for name in APPLIES.get("number" if type_ == "integer" else type_, ()):
                if name in plain.keywords:
                    refuse(plain.places.get(name, ""), f"{name} beside enum or const is not supported")
            texts.append(json_text(value))
        return literals(texts, self._rules) if texts else NEVER

    # -- numbers and strings --------------------------------------------------------------------------------

    def _number_of(self, plain: Plain, *, is_integer: bool) -> GrammarNode:
        bounds = Bounds()
        for name in BOUNDS:
            if name in plain.keywords:
                bounds = bounds.narrowed(name, plain.keywords[name])
        if "multipleOf" in plain.keywords:
            of = exact(plain.keywords["multipleOf"])
            node = multiples(of, bounds, self._rules, is_integer=is_integer)
            if node is None:
                refuse(
                    plain.places["multipleOf"],
                    f"multipleOf is supported between two bounds with at most {MAX_MULTIPLES} multiples, and "
                    f"without bounds for multiples of an integer up to {MAX_DIVISOR}",
                )
            return node
        if is_integer:
            return self._rules.shared(integers(bounds))
        return self._number if bounds == Bounds() else self._rules.shared(numbers(bounds))

    def _string_of(self, plain: Plain) -> GrammarNode:
        least, most = plain.keywords.get("minLength", 0), plain.keywords.get("maxLength")
        if "pattern" in plain.keywords:
            if "format" in plain.keywords:
                refuse(plain.places["format"], "format beside pattern is not supported")
            return self._pattern(plain, plain.keywords["pattern"], "pattern")
        if "format" in plain.keywords:
            return self._pattern(plain, FORMATS[plain.keywords["format"]], "format")
        if most is not None and most < least:
            return NEVER
        if not least and most is None:
            return self._string
        return seq(FixedText('"'), Repeated(self._char, least, most) if most != 0 else EMPTY, FixedText('"'))

    def _pattern(self, plain: Plain, pattern: str, keyword: str) -> GrammarNode:
        """Return the strings that contain a match of an expression. If their length is bounded, too, every
        match has to fit the bounds, and the match is the whole string.
        """
        expression = _expression(pattern, plain.places[keyword])
        is_whole = False
        for name in ("minLength", "maxLength"):
            if name not in plain.keywords:
                continue
            is_whole = True
            if not _fits(expression.length, name, plain.keywords[name]):
                refuse(
                    plain.places[name],
                    f"{name} beside {keyword} is supported where the {keyword} matches no other length",
                )
        inner = expression.whole() if is_whole or keyword == "format" else expression.found(many(self._char))
        return self._rules.shared(seq(FixedText('"'), inner, FixedText('"')))

    # -- arrays ---------------------------------------------------------------------------------------------

    def _array(self, plain: Plain) -> GrammarNode:
        first = [self._element(each) for each in plain.keywords.get("prefixItems", ())]
        item = self._element(plain.keywords.get("items", True))
        least, most = plain.keywords.get("minItems", 0), plain.keywords.get("maxItems")
        if most is not None and most < least:
            return NEVER
        opened, closed = seq(FixedText("["), self._space), FixedText("]")
        empty = seq(opened, closed) if least == 0 else NEVER
        if most == 0:
            return empty
        if most is not None:
            first = first[:most]
        num_first = len(first) or 1
        more_least = max(least - num_first, 0)
        more_most = None if most is None else most - num_first
        tail: GrammarNode = (
            EMPTY if more_most == 0 else Repeated(seq(self._comma, item), more_least, more_most)
        )
        for at in range(len(first) - 1, 0, -1):
            more = seq(self._comma, first[at], tail)
            tail = self._rules.new(more if at < least else maybe(more))
        return alt([seq(opened, first[0] if first else item, tail, self._space, closed), empty])

    def _element(self, schema: Any) -> GrammarNode:
        return self._rules.shared(self._value(schema))

    # -- objects --------------------------------------------------------------------------------------------

    def _object(self, plain: Plain) -> GrammarNode:
        keywords = plain.keywords
        properties: dict[str, Any] = dict(keywords.get("properties", {}))
        required = keywords.get("required", [])
        more, patterns = keywords.get("additionalProperties", True), keywords.get("patternProperties", {})
        for name in required:
            if name not in properties:
                if patterns:
                    refuse(plain.places["patternProperties"], "beside required names that are no properties")
                properties[name] = more
        extra = self._by_pattern(plain, properties) if patterns else self._additional(properties, more)
        most = keywords.get("maxProperties")
        most_extra: int | None = None
        if most is not None:
            if most < len(required):
                return NEVER
            if most == len(required):
                properties = {name: each for name, each in properties.items() if name in required}
                extra = NEVER
            elif len(properties) == len(required):
                most_extra = most - len(required)
            elif extra != NEVER or most < len(properties):
                refuse(
                    plain.places["maxProperties"],
                    "maxProperties is supported where all of properties are required",
                )
        return self._members(properties, set(required), extra, most_extra)

    def _members(
        self, properties: dict[str, Any], required: set[str], extra: GrammarNode, most_extra: int | None
    ) -> GrammarNode:
        """Return an object's text. `extra` is a member beyond the properties, and `most_extra` the largest
        number of these; None: any number.
        """
        rules, comma = self._rules, self._comma
        tail: GrammarNode = Repeated(seq(comma, extra), 0, most_extra)
        more = (
            NEVER
            if most_extra == 0
            else Repeated(seq(comma, extra), 0, None if most_extra is None else most_extra - 1)
        )
        head: GrammarNode = NEVER if most_extra == 0 else seq(extra, more)
        for name, schema in reversed(properties.items()):
            member = seq(FixedText(json_text(name)), self._colon, self._element(schema))
            is_required = name in required
            following = seq(comma, member, tail)
            head = rules.new(seq(member, tail) if is_required else alt([seq(member, tail), head]))
            tail = rules.new(following if is_required else alt([following, tail]))
        opened, closed = seq(FixedText("{"), self._space), FixedText("}")
        empty = NEVER if required else seq(opened, closed)
        return alt([seq(opened, head, self._space, closed), empty])

    def _additional(self, properties: dict[str, Any], schema: Any) -> GrammarNode:
        """Return a member whose name is none of the properties."""
        if schema is False:
            return NEVER
        key = seq(FixedText('"'), self._other_names([name for name in properties if _is_plain(name)]))
        return self._rules.new(seq(key, self._colon, self._element(schema)))

    def _other_names(self, names: list[str]) -> GrammarNode:
        """Return the rest of a name that is none of these, with the closing quote."""
        if not names:
            return self._key_rest
        heads: dict[str, list[str]] = {}
        for name in names:
            if name:
                heads.setdefault(name[0], []).append(name[1:])
        others = chars(without(PLAIN_CHARS, points("".join(heads))))
        nodes = [NEVER if "" in names else FixedText('"'), seq(others, self._key_rest)]
        nodes += [seq(FixedText(head), self._other_names(rest)) for head, rest in heads.items()]
        return self._rules.new(alt(nodes))

    def _by_pattern(self, plain: Plain, properties: dict[str, Any]) -> GrammarNode:
        """Return a member whose name matches the pattern."""
        place, patterns = plain.places["patternProperties"], plain.keywords["patternProperties"]
        if plain.keywords.get("additionalProperties", True) is not False:
            refuse(place, "patternProperties is supported where additionalProperties is false")
        if len(patterns) > 1:
            refuse(place, "more than one pattern is not supported")
        ((pattern, schema),) = patterns.items()
        expression = _expression(pattern, place)
        try:
            taken = [name for name in properties if re.search(pattern, name)]
        except re.error as error:
            refuse(place, str(error))
        if taken:
            refuse(place, f"a pattern that matches a property's name, {taken[0]!r:.100}, is not supported")
        key = seq(FixedText('"'), expression.found(many(self._key_char)), FixedText('"'))
        return self._rules.new(seq(key, self._colon, self._element(schema)))


def json_text(value: Any) -> str:
    """Return a value as JSON without white space."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    if any(0xD800 <= ord(char) <= 0xDFFF for char in text):
        return json.dumps(value, separators=(",", ":"))
    return text


def _expression(pattern: str, place: str) -> Expression:
    try:
        return Expression(pattern, _json_chars)
    except ExpressionRefused as error:
        refuse(place, f"{pattern[:100]!r} {error}")


def _json_chars(ranges: Ranges) -> GrammarNode:
    """Return one character of the ranges in the form of a JSON string."""
    escaped = [chr(code) for first, last in ranges for code in range(first, min(last, 0x1F) + 1)]
    escaped += [char for char in '"\\' if any(first <= ord(char) <= last for first, last in ranges)]
    texts = (f"\\{ESCAPES[char]}" if char in ESCAPES else f"\\u{ord(char):04x}" for char in escaped)
    return alt([chars(without(ranges, [*CONTROLS, *points('"\\')])), *map(FixedText, texts)])


def _fits(length: Length, keyword: str, bound: int) -> bool:
    if keyword == "minLength":
        return length[0] >= bound
    return length[1] is not None and length[1] <= bound


def _is_plain(name: str) -> bool:
    return json_text(name) == f'"{name}"'


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, (int, float)):
        return "integer" if float(value).is_integer() else "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"
