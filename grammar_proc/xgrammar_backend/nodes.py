"""Nodes of a grammar, and the writer of the grammar in xgrammar's EBNF.

NEVER, an empty choice, is a node that no text matches. Nodes that can lead only to NEVER are left out of the
written grammar: otherwise a matcher would allow tokens after which no text can end.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

Ranges: TypeAlias = tuple[tuple[int, int], ...]
"""Characters by their code points: first and last of each range."""
MAX_CODE = 0x10FFFF
QUOTED = re.compile(r'"(?:\\.|[^"\\\n])*"|\[(?:\\.|[^\]\\\n])*\]|#[^\n]*')
"""Parts of EBNF that contain no rule names: strings, character sets and comments."""
NAME = re.compile(r"[A-Za-z_][\w.-]*")
SURROGATES = (0xD800, 0xDFFF)


@dataclass(frozen=True, slots=True)
class FixedText:
    """A fixed text."""

    value: str


@dataclass(frozen=True, slots=True)
class Chars:
    """Character from a set. The set has no surrogates, which texts cannot contain."""

    ranges: Ranges
    is_inline: bool = False
    """Write the set where it stands, because its rule is one character and then the rule itself: see _Writer.
    """


@dataclass(frozen=True, slots=True)
class Concatenation:
    nodes: tuple[GrammarNode, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    nodes: tuple[GrammarNode, ...]


@dataclass(frozen=True, slots=True)
class Repeated:
    node: GrammarNode
    least: int
    most: int | None
    """Largest number of repetitions; None: any number."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Reference to a rule."""

    name: str


@dataclass(frozen=True, slots=True)
class Token:
    """Token with a given id."""

    id: int


@dataclass(frozen=True, slots=True)
class AnyToken:
    """Any token, with or without text."""

    but: tuple[int, ...]
    """Ids that the token may not have; at least one."""


GrammarNode: TypeAlias = FixedText | Chars | Concatenation | Choice | Repeated | Rule | Token | AnyToken
EMPTY = FixedText("")
NEVER = Choice(())


def seq(*nodes: GrammarNode) -> GrammarNode:
    kept = tuple(node for node in nodes if node != EMPTY)
    return kept[0] if len(kept) == 1 else Concatenation(kept) if kept else EMPTY


def alt(nodes: Iterable[GrammarNode]) -> GrammarNode:
    kept = tuple(dict.fromkeys(node for node in nodes if node != NEVER))
    return kept[0] if len(kept) == 1 else Choice(kept)


def maybe(node: GrammarNode) -> GrammarNode:
    return Repeated(node, 0, 1)


def some(node: GrammarNode) -> GrammarNode:
    return Repeated(node, 1, None)


def many(node: GrammarNode) -> GrammarNode:
    return Repeated(node, 0, None)


# -- sets of characters --------------------------------------------------------------------------------------


def chars(ranges: Iterable[tuple[int, int]]) -> GrammarNode:
    """Return one character of the ranges, which may overlap; NEVER if there is none."""
    made = merged(_without_surrogates(ranges))
    return Chars(made) if made else NEVER


def merged(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Return the same characters as sorted ranges that do not touch."""
    made: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if made and first <= made[-1][1] + 1:
            made[-1] = (made[-1][0], max(made[-1][1], last))
        else:
            made.append((first, last))
    return tuple(made)


def complement(ranges: Iterable[tuple[int, int]]) -> Ranges:
    made, start = [], 0
    for first, last in merged(ranges):
        if first > start:
            made.append((start, first - 1))
        start = last + 1
    if start <= MAX_CODE:
        made.append((start, MAX_CODE))
    return tuple(made)


def without(ranges: Iterable[tuple[int, int]], others: Iterable[tuple[int, int]]) -> Ranges:
    return complement([*complement(ranges), *others])


def points(text: str) -> Ranges:
    """Return the characters of a text as ranges."""
    return merged((ord(each), ord(each)) for each in text)


def _without_surrogates(ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    for first, last in ranges:
        if last < SURROGATES[0] or first > SURROGATES[1]:
            yield first, last
            continue
        if first < SURROGATES[0]:
            yield first, SURROGATES[0] - 1
        if last > SURROGATES[1]:
            yield SURROGATES[1] + 1, last


# -- a grammar -----------------------------------------------------------------------------------------------


class Rules:
    """The rules of a grammar under construction."""

    def __init__(self) -> None:
        self._nodes: dict[str, GrammarNode] = {}
        self._shared: dict[GrammarNode, Rule] = {}
        self._foreign: dict[str, str] = {}
        """Grammars that are already text, by the names of their first rules."""

    def new(self, node: GrammarNode | None = None) -> Rule:
        """Return a new rule. Without a node it has to be `put` later, as for a rule that refers to itself."""
        name = f"r{len(self._nodes)}"
        self._nodes[name] = NEVER if node is None else node
        return Rule(name)

    def put(self, rule: Rule, node: GrammarNode) -> None:
        self._nodes[rule.name] = node

    def shared(self, node: GrammarNode) -> GrammarNode:
        """Return a rule for a node, the same one for equal nodes. Small nodes are returned unchanged."""
        if isinstance(node, (FixedText, Chars, Rule, Token, AnyToken)):
            return node
        if node not in self._shared:
            self._shared[node] = self.new(node)
        return self._shared[node]

    def foreign(self, ebnf: str) -> Rule:
        """Add a grammar that is already text, with its rules renamed, and return its first rule."""
        prefix = f"g{len(self._foreign)}-"
        parts, at = [], 0
        for quoted in QUOTED.finditer(ebnf):
            parts += [NAME.sub(rf"{prefix}\g<0>", ebnf[at : quoted.start()]), quoted[0]]
            at = quoted.end()
        parts.append(NAME.sub(rf"{prefix}\g<0>", ebnf[at:]))
        self._foreign[f"{prefix}root"] = "".join(parts)
        return Rule(f"{prefix}root")

    def ebnf(self, root: GrammarNode) -> str | None:
        """Return the grammar that starts at a node as text; None if no text matches it."""
        live = self._live()
        start = _pruned(root, live)
        if start == NEVER:
            return None
        needed: dict[str, GrammarNode] = {}
        to_do = _rules_of(start)
        while to_do:
            name = to_do.pop()
            if name not in needed and name not in self._foreign:
                needed[name] = _pruned(self._nodes[name], live)
                to_do += _rules_of(needed[name])
        writer = _Writer()
        lines = [f"root ::= {writer.write(start)}"]
        lines += [f"{name} ::= {writer.write(node)}" for name, node in needed.items()]
        lines += self._foreign.values()
        lines += [f"{name} ::= {written}" for written, name in writer.sets.items()]
        return "\n".join(lines)

    def _live(self) -> set[str]:
        """Return the names of the rules that some text matches."""
        users: dict[str, list[str]] = {}
        for name, node in self._nodes.items():
            for used in _rules_of(node):
                users.setdefault(used, []).append(name)
        live = set(self._foreign)
        to_do = list(self._nodes)
        while to_do:
            name = to_do.pop()
            if name not in live and _is_live(self._nodes[name], live):
                live.add(name)
                to_do += users.get(name, ())
        return live


def _rules_of(node: GrammarNode) -> list[str]:
    found, to_do = [], [node]
    while to_do:
        match to_do.pop():
            case Rule(name):
                found.append(name)
            case Concatenation(nodes) | Choice(nodes):
                to_do += nodes
            case Repeated(inner, _, _):
                to_do.append(inner)
    return found


def _is_live(node: GrammarNode, live: set[str]) -> bool:
    match node:
        case Rule(name):
            return name in live
        case Concatenation(nodes):
            return all(_is_live(each, live) for each in nodes)
        case Choice(nodes):
            return any(_is_live(each, live) for each in nodes)
        case Repeated(inner, least, most):
            return least == 0 or (most != 0 and _is_live(inner, live))
    return True


def _pruned(node: GrammarNode, live: set[str]) -> GrammarNode:
    if not _is_live(node, live):
        return NEVER
    match node:
        case Concatenation(nodes):
            return seq(*(_pruned(each, live) for each in nodes))
        case Choice(nodes):
            return alt(_pruned(each, live) for each in nodes)
        case Repeated(inner, least, most):
            if most == 0 or not _is_live(inner, live):
                return EMPTY
            return Repeated(_pruned(inner, live), least, most)
    return node


# -- as it is written ----------------------------------------------------------------------------------------


class _Writer:
    """Writes nodes as EBNF. None of them is NEVER.

    A set of characters beyond ASCII becomes a rule of its own. In a sequence after something optional, such a
    set made masks of xgrammar 0.2.8 with tokens that its matcher then rejected. In a rule that is one
    character and then the rule itself, the masks are right, and fast: tokens that end within another rule are
    checked one by one.
    """

    def __init__(self) -> None:
        self.sets: dict[str, str] = {}
        """Names of the rules of such sets, by their text."""

    def write(self, node: GrammarNode) -> str:
        match node:
            case FixedText(value):
                return '"' + "".join(map(_escaped, value)) + '"'
            case Chars(ranges, is_inline):
                written = f"[{''.join(_range(first, last) for first, last in ranges)}]"
                if is_inline or ranges[-1][1] < 0x80:
                    return written
                return self.sets.setdefault(written, f"c{len(self.sets)}")
            case Concatenation(nodes):
                return " ".join(map(self._grouped, nodes))
            case Choice(nodes):
                return " | ".join(map(self.write, nodes))
            case Repeated(inner, least, most):
                return f"{self._grouped(inner)}{_count(least, most)}"
            case Rule(name):
                return name
            case Token(number):
                return f"Token({number})"
            case AnyToken(but):
                return f"ExcludeToken({', '.join(map(str, but))})"

    def _grouped(self, node: GrammarNode) -> str:
        text = self.write(node)
        return f"({text})" if isinstance(node, (Concatenation, Choice, Repeated)) else text


def _count(least: int, most: int | None) -> str:
    signs: dict[tuple[int, int | None], str] = {(0, 1): "?", (0, None): "*", (1, None): "+"}
    return signs.get((least, most)) or f"{{{least},{'' if most is None else most}}}"


def _range(first: int, last: int) -> str:
    return _code(first) if first == last else f"{_code(first)}-{_code(last)}"


def _escaped(char: str) -> str:
    return _code(ord(char)) if not char.isalnum() or ord(char) > 126 else char


def _code(code: int) -> str:
    if chr(code).isalnum() and code < 127:
        return chr(code)
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def literals(texts: Sequence[str], rules: Rules) -> GrammarNode:
    """Return a choice of texts. Common beginnings are written once, because many alternatives would
    be slow.
    """
    return _shared_beginnings(sorted(set(texts)), 0, rules)


def _shared_beginnings(texts: list[str], at: int, rules: Rules) -> GrammarNode:
    """Return a choice of sorted texts that are equal up to the position `at`."""
    if len(texts) == 1:
        return FixedText(texts[0][at:])
    first, last = texts[0], texts[-1]
    end = at
    while end < min(len(first), len(last)) and first[end] == last[end]:
        end += 1
    groups: dict[str, list[str]] = {}
    for text in texts:
        groups.setdefault(text[end : end + 1], []).append(text)
    branches = [
        EMPTY if not begin else _shared_beginnings(each, end, rules) for begin, each in groups.items()
    ]
    return seq(FixedText(first[at:end]), rules.new(alt(branches)))
