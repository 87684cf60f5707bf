"""FieldFilter: removes fields from a body that its type does not declare, or refuses them by name, and
replaces 16.0 by 16 in fields of integers and of lists of them.

A body passes through it only if msgspec has found an undeclared field or such a number.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import inspect

from carousel.server.request.field_table import FIELD_TABLES, FieldTable, check_refused, check_taken
from carousel.server.request.large_json import PIECE_BYTES, Wait
from runtime.base.errors import InvalidRequest

MAX_FIELDS = 256
"""Maximum number of fields of one object, repeated ones included."""
MAX_OBJECTS = 8192
"""Maximum number of objects of one body that are searched: 20 ms of work."""
OBJECTS_AT_ONCE = 1024
"""Number of objects that are searched before other tasks of the event loop run: 2 to 4 ms."""
MAX_UNKNOWN = 64
"""Maximum number of names in one body that are in no table."""
MAX_NAMES, MAX_NAME_CHARS = 16, 64
"""Maximum number of names of unknown fields in a header and the log, and of characters of each."""
MAX_LOGGED = 1024
EMPTY_NAME = '""'
"""Spelling of a field name without characters."""
SHORT_CHARS = 6
MAX_NUMBER_BYTES = 32
"""More bytes than any integer in a body has."""
MAX_LISTS = 1 + 2048
EXACT_BELOW = float(1 << 53)
"""Floats from here on cannot be told from neighbouring integers."""
NULL = b"null"
LIST, OBJECT = b"[{"

UnknownFields: TypeAlias = Literal["warn", "refuse", "ignore"]

_INDEX = re.compile(r"\[\d+\]")
_BEGINNING = re.compile(rb"[ \t\n\r]*\{")
"""Beginning of an object."""
_FLOAT_FOR_INT = re.compile(r"Expected `[^`]*\bint\b[^`]*`, got `float`")
_NUMBER = re.compile(rb"(-?\d+)(?:\.(\d+))?(?:[eE][+-]?\d+)?")
_PLAIN = re.compile(r"[\w.:/$@+-]", re.ASCII)

_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_items = msgspec.json.Decoder(list[msgspec.Raw]).decode

logger = logging.getLogger(__name__)


class FieldFilter:
    """Removes unknown fields of one body, and corrects whole numbers."""

    def __init__(self, policy: UnknownFields, wait: Wait) -> None:
        """`wait` is called before each OBJECTS_AT_ONCE of many objects."""
        self._policy = policy
        self._wait = wait
        self._ignored: dict[str, None] = {}
        self._num_objects = 0
        self._decided: set[tuple[type, str]] = set()
        """Unknown names that were handled."""

    @property
    def ignored(self) -> list[str]:
        """Return the names of ignored fields for the answer: escaped, and only the first few."""
        return [_escaped(name) for name in list(self._ignored)[:MAX_NAMES]]

    async def clean(self, data: bytes | bytearray, kind: type, where: str = "") -> bytes:
        """Return the JSON of an object without undeclared fields of its type and of objects in it, and with
        16 for 16.0 where integers are expected. Anything but an object stays unchanged. `where` comes before
        names in errors.

        Raises: msgspec's errors, InvalidRequest.
        """
        if _BEGINNING.match(data) is None:
            return bytes(data)
        self._num_objects += 1
        if self._num_objects > MAX_OBJECTS:
            raise InvalidRequest(
                f"{where.removesuffix('.')}: the body has fields that are unknown or not supported, which "
                f"are looked for in {MAX_OBJECTS} objects at most; leave them out",
                param=where.removesuffix("."),
            )
        if not self._num_objects % OBJECTS_AT_ONCE:
            await self._wait(PIECE_BYTES)
        given = _decode_fields(data)
        if len(given) > MAX_FIELDS:
            raise InvalidRequest(f"{where or 'the body '}has more than {MAX_FIELDS} fields")
        nested = FIELD_TABLES[kind].nested
        integers, lists = integer_fields(kind), integer_list_fields(kind)
        kept = {}
        for name, raw in given.items():
            value = bytes(raw)
            if not self.keeps(kind, name, value, where):
                continue
            if name in nested:
                kept[name] = await self._clean_inside(value, nested[name], f"{where}{name}")
            else:
                value = whole(value) if name in integers else value
                kept[name] = whole_list(value) if name in lists else value
        return joined(kept)

    async def clean_list(self, data: bytes, kind: type, where: str, number: int = 0) -> bytes:
        """Return the same for each object of a list, the first of which is number `number` of the list
        `where`.
        """
        cleaned = [
            await self.clean(bytes(each), kind, f"{where}[{index}].")
            for index, each in enumerate(_decode_items(data), number)
        ]
        return b"[" + b",".join(cleaned) + b"]"

    def keeps(self, kind: type, name: str, value: bytes, where: str) -> bool:
        """Return True for a field that the type declares, and False for one that is to be left out.

        Raises: InvalidRequest that names the field.
        """
        if name in kind.__struct_fields__:  # type: ignore[attr-defined]
            return True
        table = FIELD_TABLES.get(kind)
        if table is None:
            raise unknown_field(f"{where}{name:.100}")
        if value == NULL:
            return False
        if (taken := table.taken.get(name)) is not None:
            check_taken(name, value, taken, where)
        elif (neutral := table.refused.get(name)) is not None:
            check_refused(name, value, neutral, table.hints.get(name, ""), where)
        elif name in table.elsewhere:
            check_refused(name, value, (), table.hints.get(name, "it is no field of this endpoint"), where)
        elif (kind, name) not in self._decided:
            self._take_unknown(kind, table, name, where)
        return False

    def check_large(self, kind: type, name: str, where: str) -> None:
        """Refuse a field that must not be here, whatever its size. Raises InvalidRequest."""
        table = FIELD_TABLES.get(kind)
        if table is None or name not in table.taken:
            self.keeps(kind, name, b"0", where)

    def _take_unknown(self, kind: type, table: FieldTable, name: str, where: str) -> None:
        """Accept an unknown field, or raise InvalidRequest."""
        if self._policy == "ignore":
            return
        if len(self._decided) >= MAX_UNKNOWN:
            raise InvalidRequest(f"{where or 'the body '}has more than {MAX_UNKNOWN} unknown fields")
        self._decided.add((kind, name))
        declared: tuple[str, ...] = kind.__struct_fields__  # type: ignore[attr-defined]
        meant = nearest(name, (*declared, *table.refused, *sorted(table.elsewhere)))
        name = name or EMPTY_NAME
        if meant is not None or self._policy == "refuse":
            raise unknown_field(f"{where}{name:.100}", meant)
        self._ignored[_INDEX.sub("", where) + name] = None

    async def _clean_inside(self, value: bytes, kind: type, where: str) -> bytes:
        if value[0] == LIST:
            return await self.clean_list(value, kind, where)
        return await self.clean(value, kind, f"{where}.")


class IgnoredLog:
    """Log of ignored unknown fields, in which each name occurs once."""

    def __init__(self) -> None:
        self._told: set[tuple[str, str]] = set()
        self._is_full = False

    def note(self, path: str, names: Iterable[str], kind: str = "unknown fields") -> None:
        new = [name for name in names if (path, name) not in self._told]
        if not new or self._is_full:
            return
        self._told.update((path, name) for name in new)
        logger.warning(
            "%s: %s are ignored: %s (each is told once; --unknown-fields refuse answers them with 400)",
            path,
            kind,
            ", ".join(new),
        )
        if len(self._told) >= MAX_LOGGED:
            self._is_full = True
            logger.warning("%d unknown fields have been told; further ones are not", len(self._told))


def has_unknown_field(error: msgspec.ValidationError) -> bool:
    """Return True if the error of a body is an unknown field."""
    return str(error).startswith("Object contains unknown field")


def has_float_for_integer(error: msgspec.ValidationError) -> bool:
    """Return True if the error of a body is a float for an integer."""
    return _FLOAT_FOR_INT.match(str(error)) is not None


def whole(value: bytes) -> bytes:
    """Return the JSON of a value; of a whole number without point and exponent."""
    if len(value) > MAX_NUMBER_BYTES or (number := _NUMBER.fullmatch(value)) is None:
        return value
    digits, behind_point = number.groups()
    if number.end(2) == len(value) and not behind_point.strip(b"0"):
        return digits
    read = float(value)
    return b"%d" % int(read) if read.is_integer() and abs(read) < EXACT_BELOW else value


def whole_list(value: bytes) -> bytes:
    """Return the JSON of a value; of a list, and of lists in it, with 16 for 16.0."""
    # A body may not have more lists of ids, and many small lists take long to make.
    if value[:1] != b"[" or value.count(b"[") > MAX_LISTS:
        return value
    try:
        return msgspec.json.encode(_whole_items(msgspec.json.decode(value)))
    except (ValueError, RecursionError, OverflowError):  # decoding it to the wanted type reports the error
        return value


def _whole_items(items: list[Any]) -> list[Any]:
    return [
        int(item)
        if type(item) is float and item.is_integer() and abs(item) < EXACT_BELOW
        else _whole_items(item)
        if type(item) is list
        else item
        for item in items
    ]


@cache
def type_info(kind: Hashable) -> inspect.Type:
    """Return what msgspec knows of a type. It takes up to 8 ms to find out, and is found out once."""
    return inspect.type_info(kind)


@cache
def integer_list_fields(kind: type) -> frozenset[str]:
    """Return the fields of a type of objects that accept lists of integers, or lists of such lists, but of no
    other numbers.
    """
    info = type_info(kind)
    assert isinstance(info, inspect.StructType)
    return frozenset(field.encode_name for field in info.fields if _has_integers(field.type))


def _has_integers(kind: inspect.Type) -> bool:
    return any(
        isinstance(each, inspect.ListType) and (_is_integer(each.item_type) or _has_integers(each.item_type))
        for each in _members(kind)
    )


@cache
def integer_fields(kind: type) -> frozenset[str]:
    """Return the fields of a type of objects that accept integers but no other numbers."""
    info = type_info(kind)
    assert isinstance(info, inspect.StructType)
    return frozenset(field.encode_name for field in info.fields if _is_integer(field.type))


def _is_integer(kind: inspect.Type) -> bool:
    members = {type(each) for each in _members(kind)}
    return inspect.IntType in members and inspect.FloatType not in members


def _members(kind: inspect.Type) -> Iterator[inspect.Type]:
    if isinstance(kind, inspect.Metadata):
        yield from _members(kind.type)
    elif isinstance(kind, inspect.UnionType):
        for each in kind.types:
            yield from _members(each)
    else:
        yield kind


def unknown_field(name: str, meant: str | None = None) -> InvalidRequest:
    hint = "" if meant is None else f"; did you mean {meant}?"
    return InvalidRequest(
        f"{name} is not a parameter of this endpoint{hint}", param=name, code="unknown_parameter"
    )


def joined(fields: Mapping[str, bytes]) -> bytes:
    """Return an object with these fields, whose values are JSON."""
    return b"{" + b",".join(b'"%b":%b' % (name.encode(), value) for name, value in fields.items()) + b"}"


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that `name` probably misspells: with one character added, left out, exchanged or
    changed, or with another case or separator. Short names that differ in one character are different names
    (`top_a`, `top_k`).
    """
    if len(name) > MAX_NAME_CHARS:
        return None
    plain = _plain(name)
    shorter = set(_shorter(name))
    for each in known:
        if _plain(each) == plain:
            return each
        if abs(len(each) - len(name)) > 1 or min(len(each), len(name)) < SHORT_CHARS - 2:
            continue
        if name in _shorter(each) or each in shorter:
            return each
        is_swapped = sorted(each) == sorted(name)
        may_differ = len(each) == len(name) and (len(name) >= SHORT_CHARS or is_swapped)
        if may_differ and not shorter.isdisjoint(_shorter(each)):
            return each
    return None


def _shorter(name: str) -> Iterator[str]:
    return (name[:at] + name[at + 1 :] for at in range(len(name)))


def _plain(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


def _escaped(name: str) -> str:
    """Return a name in the form for a header and the log."""
    shown = ""
    for char in name:
        part = char if _PLAIN.match(char) else _escape(char)
        if len(shown) + len(part) > MAX_NAME_CHARS:
            break
        shown += part
    return shown


def _escape(char: str) -> str:
    """Return a character escaped as in JSON: as two halves if one does not suffice."""
    data = char.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{data[at : at + 2].hex()}" for at in range(0, len(data), 2))
