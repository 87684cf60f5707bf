"""Random guides: JSON schemas with supported keywords, Python's regular expressions, grammars."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any, TypeAlias

Maker: TypeAlias = Callable[[int], dict[str, Any]]
FORMATS = ("date", "ipv4", "ipv6", "uuid")
PATTERNS = ("^[a-z]{1,8}$", "[0-9]{2,4}", "^(ab|cd)+[xyz]$", r"^\d{3}-\d{2}$", "a|b")
NAMES = ("id", "name", "größe", "a b", 'q"q', "tags", "x", "y/z", "kind")
WORDS = ("red", "green", "", "ü", "a\nb", "\\", '"')


class RandomSchemas:
    """One schema after the other, from one seed."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._defs: list[str] = []

    def next(self) -> dict[str, Any]:
        rng = self._rng
        self._defs = [f"d{i}" for i in range(rng.randrange(3))]
        schema = self._schema(depth=3)
        if self._defs:
            names, self._defs = self._defs, []
            schema["$defs"] = {name: self._schema(depth=1) for name in names}
        return schema

    def _schema(self, depth: int) -> dict[str, Any]:
        rng = self._rng
        makers: list[Maker] = [
            self._string,
            self._integer,
            self._number,
            self._enum,
            self._const,
            self._plain,
        ]
        if depth:
            makers += [self._object, self._object, self._array, self._tuple, self._any_of, self._all_of]
            makers += [self._one_of]
        if self._defs:
            makers.append(self._ref)
        schema: dict[str, Any] = rng.choice(makers)(depth - 1)
        if rng.random() < 0.2:
            schema["description"] = "says nothing"
        return schema

    def _plain(self, _: int) -> dict[str, Any]:
        return {"type": self._rng.choice(["null", "boolean", ["null", "boolean"]])}

    def _string(self, _: int) -> dict[str, Any]:
        rng = self._rng
        kind = rng.randrange(4)
        if kind == 0:
            return {"type": "string", "format": rng.choice(FORMATS)}
        if kind == 1:
            return {"type": "string", "pattern": rng.choice(PATTERNS), "maxLength": 20}
        least = rng.randrange(4)
        return {"type": "string", "minLength": least, "maxLength": least + rng.randrange(12)}

    def _integer(self, _: int) -> dict[str, Any]:
        rng = self._rng
        least = rng.randrange(-1000, 1000)
        schema: dict[str, Any] = {"type": "integer", "minimum": least, "maximum": least + rng.randrange(500)}
        if rng.random() < 0.3:
            schema = {"type": "integer", "multipleOf": rng.choice([2, 5, 7]), "minimum": 0, "maximum": 10_000}
        return schema

    def _number(self, _: int) -> dict[str, Any]:
        rng = self._rng
        least = rng.randrange(-50, 50)
        # A bound on the digits: the demo model knows no end of them.
        return {"type": "number", "exclusiveMinimum": least, "maximum": least + 10, "multipleOf": 0.25}

    def _enum(self, _: int) -> dict[str, Any]:
        rng = self._rng
        return {"enum": rng.sample([*WORDS, 1, 2.5, None, True, {"a": [1]}, []], rng.randrange(1, 5))}

    def _const(self, _: int) -> dict[str, Any]:
        return {"const": self._rng.choice([*WORDS, 0, -1.5, False, None, {"a": {"b": "c"}}, [1, [2]]])}

    def _ref(self, _: int) -> dict[str, Any]:
        return {"$ref": f"#/$defs/{self._rng.choice(self._defs)}"}

    def _object(self, depth: int) -> dict[str, Any]:
        rng = self._rng
        names = rng.sample(NAMES, rng.randrange(1, 5))
        schema: dict[str, Any] = {
            "type": "object",
            "properties": {name: self._schema(depth) for name in names},
            "required": [name for name in names if rng.random() < 0.7],
            "additionalProperties": False,
        }
        if rng.random() < 0.2:
            schema["additionalProperties"] = {"type": "integer", "minimum": 0, "maximum": 9}
        if rng.random() < 0.15:
            schema["patternProperties"] = {"^p_": {"type": "boolean"}}
        if rng.random() < 0.15:
            schema["required"], schema["maxProperties"] = names, len(names)
        if schema["required"] and rng.random() < 0.2:
            schema["minProperties"] = len(schema["required"])
        return schema

    def _array(self, depth: int) -> dict[str, Any]:
        least = self._rng.randrange(3)
        return {
            "type": "array",
            "items": self._schema(depth),
            "minItems": least,
            "maxItems": least + self._rng.randrange(3),
        }

    def _tuple(self, depth: int) -> dict[str, Any]:
        rng = self._rng
        items = [self._schema(depth) for _ in range(rng.randrange(1, 4))]
        return {
            "type": "array",
            "prefixItems": items,
            "items": False,
            "minItems": rng.randrange(len(items) + 1),
        }

    def _any_of(self, depth: int) -> dict[str, Any]:
        return {"anyOf": [self._schema(depth) for _ in range(self._rng.randrange(1, 4))]}

    def _all_of(self, depth: int) -> dict[str, Any]:
        return {"allOf": [self._object(depth) | {"additionalProperties": True}, {"type": "object"}]}

    def _one_of(self, depth: int) -> dict[str, Any]:
        branches = [
            {
                "type": "object",
                "properties": {"kind": {"const": kind}, "value": self._schema(depth)},
                "required": ["kind", "value"],
                "additionalProperties": False,
            }
            for kind in ("a", "b", "c")
        ]
        return {"oneOf": branches}


class RandomRegexes:
    """Expressions that mean the same to Python and to Rust, whatever text they are matched with."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def next(self) -> str:
        return self._alternatives(3)

    def _alternatives(self, depth: int) -> str:
        count = self._rng.choice([1, 1, 2, 3]) if depth else 1
        return "|".join(self._sequence(depth) for _ in range(count))

    def _sequence(self, depth: int) -> str:
        return "".join(self._piece(depth) for _ in range(self._rng.randrange(1, 5)))

    def _piece(self, depth: int) -> str:
        rng = self._rng
        atoms = [
            "a",
            "Z",
            "7",
            "-",
            " ",
            r"\.",
            r"\+",
            r"\/",
            "é",
            "[a-f]",
            "[^a-z\n]",
            "[0-9_]",
            ".",
            "[xyz]",
        ]
        atom = f"({self._alternatives(depth - 1)})" if depth and rng.random() < 0.35 else rng.choice(atoms)
        low = rng.randrange(3)
        return atom + rng.choice(["", "", "", "?", f"{{{low},{low + 2}}}", "{2}"])


class RandomGrammars:
    """Grammars without recursion, in GBNF and in Lark's form by turns, and expressions that say the same."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._number = 0

    def next(self) -> tuple[str, str]:
        """Return the grammar, and the expression that its texts match."""
        self._number += 1
        is_lark = self._number % 2 == 0
        rules: list[str] = []
        meanings: list[str] = []
        for number in range(self._rng.randrange(1, 5)):
            form, meaning = self._rule(meanings, is_lark=is_lark)
            rules.append(f"r{number}: {form}" if is_lark else f"r{number} ::= {form}")
            meanings.append(meaning)
        start = "start: " if is_lark else "root ::= "
        return "\n".join([f"{start}r{len(rules) - 1}", *rules]), meanings[-1]

    def _rule(self, earlier: list[str], *, is_lark: bool) -> tuple[str, str]:
        made = [self._sequence(earlier, is_lark=is_lark) for _ in range(self._rng.choice([1, 1, 2, 3]))]
        return " | ".join(form for form, _ in made), "|".join(meaning for _, meaning in made)

    def _sequence(self, earlier: list[str], *, is_lark: bool) -> tuple[str, str]:
        made = [self._piece(earlier, is_lark=is_lark) for _ in range(self._rng.randrange(1, 4))]
        return " ".join(form for form, _ in made), "".join(meaning for _, meaning in made)

    def _piece(self, earlier: list[str], *, is_lark: bool) -> tuple[str, str]:
        rng = self._rng
        kind = rng.randrange(4)
        if kind == 0 and earlier:
            number = rng.randrange(len(earlier))
            form, meaning = f"r{number}", f"({earlier[number]})"
        elif kind == 1:
            letters = rng.choice(["a-f", "0-9", "xyz"])
            form, meaning = (f"/[{letters}]/" if is_lark else f"[{letters}]"), f"[{letters}]"
        else:
            word = rng.choice(["if", "(", ")", "+", "größe", "{", " "])
            form, meaning = f'"{word}"', f"({re.escape(word)})"
        return form + (repeat := rng.choice(["", "", "?"])), meaning + repeat
