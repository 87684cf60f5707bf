"""Walk over a JSON schema: each keyword of it is kept or refused by name, before a grammar is made of it.

    schema_of(text) ──► a schema of plain keywords that a grammar backend keeps in full

It knows no backend, so that what is taken does not depend on which one there is. Annotations are left out,
`oneOf` becomes `anyOf` where that is the same, and every target of a `$ref` stands in `$defs`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, NoReturn, TypeAlias
from urllib.parse import unquote

from runtime.base.errors import InvalidRequest
from runtime.guides.disjoint import are_disjoint
from runtime.guides.keywords import DRAFTS, FOREIGN, FORMATS, KEYWORDS, OLD_DRAFTS

Schema: TypeAlias = dict[str, Any]
TYPES = frozenset(("null", "boolean", "object", "array", "number", "string", "integer"))
MAX_DEPTH = 100
"""Maximum number of levels of nested schemas; nobody writes deeper ones."""


class PlacedSchema(dict[str, Any]):
    """Schema that knows its place in the caller's schema."""

    __slots__ = ("place",)

    def __init__(self, place: str) -> None:
        """place: JSON pointer of the schema."""
        super().__init__()
        self.place = place


def place_of(schema: Any) -> str:
    """Return the JSON pointer of a schema that `schema_of` made; the root's for any other."""
    return schema.place if isinstance(schema, PlacedSchema) else ""


class SchemaRefused(InvalidRequest):
    """A schema that cannot be kept. The message names the keyword and its place."""


def refuse(pointer: str, why: str) -> NoReturn:
    where = pointer or "the root"
    raise SchemaRefused(f"json_schema: {where}: {why}", code="unsupported_schema", param="json_schema")


def schema_of(text: str) -> Schema | bool:
    """Parse a guide's text into a schema of plain keywords that a grammar backend keeps. Raises
    SchemaRefused.
    """
    try:
        parsed = json.loads(text, parse_constant=_not_json, parse_float=_finite)
    except RecursionError:
        refuse("", "it is nested too deeply")
    except ValueError as error:
        refuse("", f"not JSON: {error}")
    try:
        return _Walk(parsed).result()
    except RecursionError:
        refuse("", "it is nested too deeply")


def _not_json(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON number")


def _finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"{number[:50]} is too large")
    return value


def escaped(name: str) -> str:
    """Escape a name for use in a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


class _Walk:
    """Walk over one schema."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._is_old = False
        self._places: dict[str, Any] = {}
        """All subschemas by JSON pointer."""
        self._anchors: dict[str, str] = {}
        """JSON pointers of subschemas by anchor."""
        self._names: dict[str, str] = {}
        """Names in `$defs` of the subschemas that are referred to."""
        self._to_do: list[str] = []

    def result(self) -> Schema | bool:
        root = self._root
        if isinstance(root, bool):
            return root
        if not isinstance(root, dict):
            refuse("", f"a schema is an object or a boolean, not {_kind(root)}")
        self._read_draft(root)
        self._find(root, "", 0)
        made = self._schema(root, "")
        assert isinstance(made, dict)
        defs: dict[str, Any] = {}
        while self._to_do:
            pointer = self._to_do.pop()
            defs[self._names[pointer]] = self._schema(self._places[pointer], pointer)
        if defs:
            made["$defs"] = defs
        return made

    def _read_draft(self, root: Schema) -> None:
        draft = root.get("$schema", DRAFTS[-1])
        if not isinstance(draft, str) or not any(name in draft for name in DRAFTS):
            refuse("/$schema", f"this server knows the drafts {', '.join(DRAFTS)}")
        self._is_old = any(name in draft for name in OLD_DRAFTS)

    # -- where schemas stand --------------------------------------------------------------------------------

    def _find(self, schema: Any, pointer: str, depth: int) -> None:
        """Record every subschema, also those that nothing refers to."""
        if depth > MAX_DEPTH:
            refuse(pointer, f"schemas are nested more than {MAX_DEPTH} deep")
        self._places[pointer] = schema
        if not isinstance(schema, dict):
            return
        anchor = schema.get("$anchor")
        if isinstance(anchor, str):
            self._anchors[anchor] = pointer
        for keyword in schema.keys() & _HOLDERS:
            value, at = schema[keyword], f"{pointer}/{keyword}"
            if keyword in _MAPS and isinstance(value, dict):
                for name, each in value.items():
                    self._find(each, f"{at}/{escaped(name)}", depth + 1)
            elif isinstance(value, list):
                for number, each in enumerate(value):
                    self._find(each, f"{at}/{number}", depth + 1)
            else:
                self._find(value, at, depth + 1)

    def _place_of(self, ref: Any, pointer: str) -> str:
        """Return the JSON pointer that a `$ref` refers to."""
        if not isinstance(ref, str):
            refuse(pointer, f"$ref is a text, not {_kind(ref)}")
        base = self._root.get("$id")
        if isinstance(base, str) and ref.startswith(base.rstrip("#") + "#"):
            ref = ref[len(base.rstrip("#")) :]
        if not ref.startswith("#"):
            refuse(pointer, "only references into the schema itself (#...) are followed")
        target = unquote(ref[1:])
        target = self._anchors.get(target, target)
        if target not in self._places:
            refuse(pointer, f"{ref[:200]} refers to no place where a schema stands")
        return target

    def follow(self, schema: Any) -> Any:
        """Return the schema at the end of a chain of references."""
        for _ in range(MAX_DEPTH):
            if not isinstance(schema, dict) or "$ref" not in schema:
                break
            if not self._is_old and schema.keys() & _CONSTRAINTS - {"$ref", "$defs", "definitions"}:
                break
            schema = self._places[self._place_of(schema["$ref"], "")]
        return schema

    # -- one schema -----------------------------------------------------------------------------------------

    def _schema(self, schema: Any, pointer: str) -> Schema | bool:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            refuse(pointer, f"a schema is an object or a boolean, not {_kind(schema)}")
        if self._is_old and "$ref" in schema:
            schema = {"$ref": schema["$ref"]}
        made: Schema = PlacedSchema(pointer)
        for keyword, value in schema.items():
            at = f"{pointer}/{escaped(keyword)}"
            row = KEYWORDS.get(keyword) or FOREIGN.get(keyword)
            if row is None or row.treatment == "annotation":
                continue
            make = _MAKERS.get(keyword)
            if row.treatment == "refused" or make is None:
                if not _is_neutral(keyword, value, schema):
                    note = f", {row.note}" if row.note else ""
                    refuse(at, f"{keyword} is not supported{note}")
                continue
            make(self, made, schema, value, at)
        return made

    def _ref(self, made: Schema, _: Schema, value: Any, at: str) -> None:
        target = self._place_of(value, at)
        if target not in self._names:
            self._names[target] = f"d{len(self._names)}"
            self._to_do.append(target)
        made["$ref"] = f"#/$defs/{self._names[target]}"

    def _id(self, made: Schema, _: Schema, value: Any, at: str) -> None:
        if at != "/$id":
            refuse(at, "$id is supported at the root only")
        if not isinstance(value, str):
            refuse(at, f"$id is a text, not {_kind(value)}")

    def _nothing(self, made: Schema, _: Schema, value: Any, at: str) -> None:
        """Drop a keyword that was read before, or is read where it is referred to."""

    def _defs(self, made: Schema, _: Schema, value: Any, at: str) -> None:
        if not isinstance(value, dict):
            refuse(at, f"an object of schemas is needed, not {_kind(value)}")

    def _one(self, made: Schema, _: Schema, value: Any, at: str) -> None:
        made[at.rpartition("/")[2]] = self._schema(value, at)

    def _map(self, made: Schema, _: Schema, value: Any, at: str) -> None:
        if not isinstance(value, dict):
            refuse(at, f"an object of schemas is needed, not {_kind(value)}")
        made[at.rpartition("/")[2]] = {
            name: self._schema(each, f"{at}/{escaped(name)}") for name, each in value.items()
        }

    def _list_of(self, value: Any, at: str) -> list[Schema | bool]:
        if not isinstance(value, list) or not value:
            refuse(at, "a list of at least one schema is needed")
        return [self._schema(each, f"{at}/{number}") for number, each in enumerate(value)]

    def _list(self, made: Schema, _: Schema, value: Any, at: str) -> None:
        made[at.rpartition("/")[2]] = self._list_of(value, at)

    def _all_of(self, made: Schema, _: Schema, value: Any, at: str) -> None:
        made["allOf"] = self._list_of(value, at) + made.get("allOf", [])

    def _one_of(self, made: Schema, schema: Schema, value: Any, at: str) -> None:
        branches = self._list_of(value, at)
        for number, branch in enumerate(value):
            for earlier, other in enumerate(value[:number]):
                if not are_disjoint(branch, other, self.follow):
                    refuse(
                        at,
                        "oneOf is supported where no value can match two of its branches: that is not"
                        f" evident of {earlier} and {number}; anyOf takes both",
                    )
        if "anyOf" in schema:
            made["allOf"] = [*made.get("allOf", []), {"anyOf": branches}]
        else:
            made["anyOf"] = branches

    def _items(self, made: Schema, schema: Schema, value: Any, at: str) -> None:
        if not isinstance(value, list):
            made["items"] = self._schema(value, at)
            return
        if "prefixItems" in schema:
            refuse(at, "a list of schemas, beside prefixItems")
        if value:
            made["prefixItems"] = self._list_of(value, at)
        if "additionalItems" in schema:
            above = at.rpartition("/")[0]
            made["items"] = self._schema(schema["additionalItems"], f"{above}/additionalItems")

    def _number(self, made: Schema, schema: Schema, value: Any, at: str) -> None:
        keyword = at.rpartition("/")[2]
        if isinstance(value, bool) and keyword.startswith("exclusive") and self._is_old:
            # Draft 4: a boolean which says that the bound beside it is itself excluded.
            bound = "minimum" if keyword == "exclusiveMinimum" else "maximum"
            if value and bound in schema:
                made[keyword] = schema[bound]
            return
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            refuse(at, f"a number is needed, not {_kind(value)}")
        if keyword == "multipleOf" and value <= 0:
            refuse(at, "a number above 0 is needed")
        made[keyword] = value

    def _count(self, made: Schema, schema: Schema, value: Any, at: str) -> None:
        keyword = at.rpartition("/")[2]
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            refuse(at, "a whole number of at least 0 is needed")
        if keyword == "minProperties":
            # A name that comes twice would count twice.
            if value > len(set(_names_of(schema.get("required")))):
                refuse(at, "minProperties is supported where required names as many")
            return
        made[keyword] = value

    def _pattern(self, made: Schema, _: Schema, value: Any, at: str) -> None:
        if not isinstance(value, str):
            refuse(at, f"a text is needed, not {_kind(value)}")
        made["pattern"] = value

    def _format(self, made: Schema, schema: Schema, value: Any, at: str) -> None:
        if value not in FORMATS if isinstance(value, str) else True:
            if "string" not in _types_of(schema.get("type", "string")):
                return  # says nothing about values of other types
            refuse(at, f"{str(value)[:50]!r} is none of {', '.join(sorted(FORMATS))}")
        made["format"] = value

    def _type(self, made: Schema, _: Schema, value: Any, at: str) -> None:
        types = _types_of(value)
        if not types or not all(isinstance(each, str) and each in TYPES for each in types):
            refuse(at, f"one or some of {', '.join(sorted(TYPES))} are needed")
        made["type"] = value

    def _enum(self, made: Schema, _: Schema, value: Any, at: str) -> None:
        if not isinstance(value, list) or not value:
            refuse(at, "a list of at least one value is needed")
        made["enum"] = value

    def _const(self, made: Schema, _: Schema, value: Any, at: str) -> None:
        made["const"] = value

    def _required(self, made: Schema, _: Schema, value: Any, at: str) -> None:
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            refuse(at, "a list of names is needed")
        made["required"] = list(dict.fromkeys(value))


def _is_neutral(keyword: str, value: Any, schema: Schema) -> bool:
    """Return True if a keyword that is not kept has no effect here."""
    match keyword:
        case "uniqueItems":
            most = schema.get("maxItems")
            is_one = isinstance(most, int) and most <= 1
            return value is False or (value is True and is_one)
        case "nullable" | "$recursiveAnchor":
            return value is False
        case "if":
            return "then" not in schema and "else" not in schema
        case "then" | "else":
            return "if" not in schema
        case "minContains" | "maxContains":
            return "contains" not in schema
        case "contains":
            return value is True and schema.get("minContains") == 0 and "maxContains" not in schema
        case "propertyNames":
            return value is True or value in ({}, {"type": "string"})
        case "unevaluatedItems" | "unevaluatedProperties":
            return value is True
        case "dependentSchemas" | "dependentRequired" | "dependencies":
            return bool(value == {})
    return False


def _types_of(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _names_of(value: Any) -> list[str]:
    return [name for name in value if isinstance(name, str)] if isinstance(value, list) else []


def _kind(value: Any) -> str:
    return "null" if value is None else type(value).__name__


_MAPS = frozenset(("$defs", "definitions", "properties", "patternProperties"))
_HOLDERS = _MAPS | {
    *("items", "additionalItems", "prefixItems", "additionalProperties", "allOf", "anyOf", "oneOf"),
}
Maker: TypeAlias = Callable[[_Walk, Schema, Schema, Any, str], None]
_MAKERS: dict[str, Maker] = {
    "$ref": _Walk._ref,
    "$id": _Walk._id,
    "$defs": _Walk._defs,
    "definitions": _Walk._defs,
    **dict.fromkeys(("$schema", "$anchor", "additionalItems"), _Walk._nothing),
    "additionalProperties": _Walk._one,
    **dict.fromkeys(("properties", "patternProperties"), _Walk._map),
    **dict.fromkeys(("prefixItems", "anyOf"), _Walk._list),
    "allOf": _Walk._all_of,
    "oneOf": _Walk._one_of,
    "items": _Walk._items,
    **dict.fromkeys(
        ("multipleOf", "maximum", "exclusiveMaximum", "minimum", "exclusiveMinimum"), _Walk._number
    ),
    **dict.fromkeys(
        ("maxLength", "minLength", "maxItems", "minItems", "maxProperties", "minProperties"), _Walk._count
    ),
    "pattern": _Walk._pattern,
    "format": _Walk._format,
    "type": _Walk._type,
    "enum": _Walk._enum,
    "const": _Walk._const,
    "required": _Walk._required,
}
_CONSTRAINTS = frozenset(name for name, row in KEYWORDS.items() if row.treatment != "annotation")
