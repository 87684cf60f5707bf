"""Structural tags of callers: outputs of fixed texts, free text and values of schemas, put together.

    {"type": "structural_tag", "format": {...}}                          xgrammar's words; vLLM, SGLang
    {"structures": [{"begin", "schema", "end"}], "triggers": [...]}      the older form

Free text (`any_text`, `triggered_tags`) ends where its tag ends, or with the output: elsewhere nothing would
say where it does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Set
from types import MappingProxyType
from typing import Any, NoReturn, TypeAlias

from msgspec import Raw

from runtime.base.errors import InvalidRequest
from runtime.guides import structural_tag as tags

KIND = "structural_tag"
MAX_DEPTH = 50
MAX_REPEAT = 1000
FLAGS = ("at_least_one", "stop_after_first")
Fields: TypeAlias = Mapping[str, Any]
NONE: Fields = MappingProxyType({})


def structural_tag_text(value: Any) -> str:
    """Return the text of a guide of the kind `structural_tag`. `value`: the caller's, a mapping or a text.
    Raises InvalidRequest that names the place.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            _refuse("", f"not JSON: {error}")
    if not isinstance(value, Mapping):
        _refuse("", f"an object is needed, not {type(value).__name__}")
    if "structures" in value or "triggers" in value:
        return tags.encode(_older(value))
    _check_fields(value, "", {"format"})
    return tags.encode(_element(value["format"], "/format", 0, is_last=True))


def _older(value: Fields) -> tags.Element:
    _check_fields(value, "", {"structures", "triggers"})
    structures: list[tags.Tag] = []
    for number, each in enumerate(_list(value["structures"], "/structures")):
        at = f"/structures/{number}"
        if not isinstance(each, Mapping):
            _refuse(at, "an object is needed")
        _check_fields(each, at, {"begin", "schema", "end"})
        schema = _schema(each["schema"], f"{at}/schema")
        begin, end = (_text(each[name], f"{at}/{name}") for name in ("begin", "end"))
        structures.append(tags.Tag(begin, schema, end))
    return tags.TriggeredTags(_triggers(value["triggers"], structures, ""), structures, False)


def _element(value: Any, at: str, depth: int, *, is_last: bool = False) -> tags.Element:
    """Return an element of a format. `is_last`: nothing follows it. Raises InvalidRequest."""
    if depth > MAX_DEPTH:
        _refuse(at, f"formats are nested more than {MAX_DEPTH} deep")
    if not isinstance(value, Mapping):
        _refuse(at, "an object with a type is needed")
    kind = value.get("type")
    if kind in _OPEN and not is_last:
        _refuse(at, f"{kind} is supported where nothing follows it{_OPEN[kind]}")
    make = _MAKERS.get(kind) if isinstance(kind, str) else None
    if make is None:
        _refuse(f"{at}/type", f"{str(kind)[:50]!r} is none of {', '.join(_MAKERS)}")
    return make(value, at, depth + 1, is_last)


def _const_string(value: Fields, at: str, depth: int, is_last: bool) -> tags.Element:
    _check_fields(value, at, {"value"})
    return tags.ConstString(_text(value["value"], f"{at}/value"))


def _json_schema(value: Fields, at: str, depth: int, is_last: bool) -> tags.Element:
    _check_fields(value, at, {"json_schema"}, {"style": "json", "any_order": False})
    return _schema(value["json_schema"], f"{at}/json_schema")


def _regex(value: Fields, at: str, depth: int, is_last: bool) -> tags.Element:
    _check_fields(value, at, {"pattern"})
    return tags.Regex(_text(value["pattern"], f"{at}/pattern"))


def _grammar(value: Fields, at: str, depth: int, is_last: bool) -> tags.Element:
    _check_fields(value, at, {"grammar"})
    return tags.Nested("ebnf", _text(value["grammar"], f"{at}/grammar"), any_whitespace=True)


def _any_text(value: Fields, at: str, depth: int, is_last: bool) -> tags.Element:
    _check_fields(value, at, set(), {"excludes": [], "max_tokens": None, "max_chars": None})
    return tags.AnyText()


def _sequence(value: Fields, at: str, depth: int, is_last: bool) -> tags.Element:
    _check_fields(value, at, {"elements"})
    elements = _list(value["elements"], f"{at}/elements")
    last = len(elements) - 1
    return tags.Sequential(
        [
            _element(each, f"{at}/elements/{number}", depth, is_last=is_last and number == last)
            for number, each in enumerate(elements)
        ]
    )


def _or(value: Fields, at: str, depth: int, is_last: bool) -> tags.Element:
    _check_fields(value, at, {"elements"})
    elements = _list(value["elements"], f"{at}/elements")
    return tags.Or(
        [
            _element(each, f"{at}/elements/{number}", depth, is_last=is_last)
            for number, each in enumerate(elements)
        ]
    )


def _optional(value: Fields, at: str, depth: int, is_last: bool) -> tags.Element:
    _check_fields(value, at, {"content"})
    return tags.Optional(_element(value["content"], f"{at}/content", depth, is_last=is_last))


def _plus(value: Fields, at: str, depth: int, is_last: bool) -> tags.Element:
    _check_fields(value, at, {"content"})
    return tags.Repeat(_element(value["content"], f"{at}/content", depth), 1)


def _star(value: Fields, at: str, depth: int, is_last: bool) -> tags.Element:
    _check_fields(value, at, {"content"})
    return tags.Repeat(_element(value["content"], f"{at}/content", depth), 0)


def _repeat(value: Fields, at: str, depth: int, is_last: bool) -> tags.Element:
    _check_fields(value, at, {"content", "min", "max"})
    least, most = (_count(value[name], f"{at}/{name}") for name in ("min", "max"))
    if least < 0 or most < -1 or most == 0 or (most > 0 and least > most):
        _refuse(at, "min of at least 0 and max of at least min and 1 are needed, or a max of -1")
    return tags.Repeat(_element(value["content"], f"{at}/content", depth), least, None if most < 0 else most)


def _tag(value: Fields, at: str, depth: int, is_last: bool) -> tags.Element:
    alternatives: list[tags.Element] = [*_tags_of(value, at, depth)]
    return alternatives[0] if len(alternatives) == 1 else tags.Or(alternatives)


def _triggered_tags(value: Fields, at: str, depth: int, is_last: bool) -> tags.Element:
    _check_fields(value, at, {"triggers", "tags"}, {"excludes": []}, set(FLAGS))
    begun = _all_tags(value, at, depth)
    has_one, is_one = (_flag(value, name, at) for name in FLAGS)
    triggers = _triggers(value["triggers"], begun, at)
    if not has_one:
        return tags.TriggeredTags(triggers, begun, is_one)
    first = tags.Or([*begun])
    return first if is_one else tags.Sequential([first, tags.TriggeredTags(triggers, begun, False)])


def _tags_with_separator(value: Fields, at: str, depth: int, is_last: bool) -> tags.Element:
    _check_fields(value, at, {"tags", "separator"}, further=set(FLAGS))
    has_one, is_one = (_flag(value, name, at) for name in FLAGS)
    separator = _text(value["separator"], f"{at}/separator", may_be_empty=True)
    made = tags.TagsWithSeparator(_all_tags(value, at, depth), separator, is_one)
    return made if has_one else tags.Optional(made)


def _all_tags(value: Fields, at: str, depth: int) -> list[tags.Tag]:
    made: list[tags.Tag] = []
    for number, each in enumerate(_list(value["tags"], f"{at}/tags")):
        if not isinstance(each, Mapping) or each.get("type", "tag") != "tag":
            _refuse(f"{at}/tags/{number}", "a tag is needed")
        made += _tags_of(each, f"{at}/tags/{number}", depth)
    return made


def _tags_of(value: Fields, at: str, depth: int) -> list[tags.Tag]:
    """Return a tag once for each text that may end it."""
    _check_fields(value, at, {"begin", "content", "end"})
    begin = _text(value["begin"], f"{at}/begin", may_be_empty=True)
    content = value["content"]
    is_free = isinstance(content, Mapping) and content.get("type") == "any_text"
    made = _element(content, f"{at}/content", depth, is_last=is_free)
    given = value["end"]
    ends = [
        _text(each, f"{at}/end", may_be_empty=not is_free)
        for each in (given if isinstance(given, list) else [given])
    ]
    if not ends or (is_free and len(ends) > 1):
        _refuse(f"{at}/end", "one text is needed" if is_free else "at least one text is needed")
    return [tags.Tag(begin, made, end) for end in ends]


def _triggers(value: Any, begun: list[tags.Tag], at: str) -> list[str]:
    """Return texts with which tags begin, each tag with one of them and each of them some tag."""
    triggers = [_text(each, f"{at}/triggers") for each in _list(value, f"{at}/triggers")]
    for tag in begun:
        if sum(tag.begin.startswith(trigger) for trigger in triggers) != 1:
            _refuse(f"{at}/triggers", f"a tag begins with one of them; not so {tag.begin[:50]!r}")
    for trigger in triggers:
        if not any(tag.begin.startswith(trigger) for tag in begun):
            _refuse(f"{at}/triggers", f"no tag begins with {trigger[:50]!r}")
    return triggers


def _check_fields(
    value: Fields, at: str, needed: Set[str], neutral: Fields = NONE, further: Set[str] = frozenset()
) -> None:
    """`neutral`: fields that are taken where they ask for nothing, with that value; `further`: others that
    may be there.
    """
    for name in sorted(needed - value.keys()):
        _refuse(f"{at}/{name}", "it is needed")
    for name, given in value.items():
        if name in neutral and given != neutral[name]:
            _refuse(f"{at}/{name}", "it is not supported")
        if name not in needed and name not in neutral and name not in further and name != "type":
            _refuse(f"{at}/{name}", "no such field, or it is not supported")


def _schema(value: Any, at: str) -> tags.JsonSchema:
    try:
        text = value if isinstance(value, str) else json.dumps(value)
        json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        _refuse(at, f"a schema is needed: {error}")
    return tags.JsonSchema(Raw(text.encode()), KIND, at, is_object=False)


def _text(value: Any, at: str, *, may_be_empty: bool = False) -> str:
    if not isinstance(value, str):
        _refuse(at, f"a text is needed, not {type(value).__name__}")
    if not value and not may_be_empty:
        _refuse(at, "it is empty")
    return value


def _list(value: Any, at: str) -> list[Any]:
    if not isinstance(value, list | tuple) or not value:
        _refuse(at, "a list of at least one is needed")
    return list(value)


def _count(value: Any, at: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value > MAX_REPEAT:
        _refuse(at, f"a whole number of at most {MAX_REPEAT} is needed")
    return value


def _flag(value: Fields, name: str, at: str) -> bool:
    given = value.get(name, False)
    if not isinstance(given, bool):
        _refuse(f"{at}/{name}", "true or false is needed")
    return given


def _refuse(at: str, why: str) -> NoReturn:
    raise InvalidRequest(f"{KIND}: {at or 'the root'}: {why}", param=KIND, code="invalid_guide")


_OPEN = {"any_text": ", and as the content of a tag", "triggered_tags": ""}
"""Formats that are free text at their end, and where else they may stand."""
_MAKERS: dict[str, Callable[[Fields, str, int, bool], tags.Element]] = {
    "const_string": _const_string,
    "json_schema": _json_schema,
    "regex": _regex,
    "grammar": _grammar,
    "any_text": _any_text,
    "sequence": _sequence,
    "or": _or,
    "optional": _optional,
    "plus": _plus,
    "star": _star,
    "repeat": _repeat,
    "tag": _tag,
    "triggered_tags": _triggered_tags,
    "tags_with_separator": _tags_with_separator,
}
