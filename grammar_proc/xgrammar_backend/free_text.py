"""Free text with triggers and excluded texts, as rules of a grammar.

xgrammar has such rules itself (`TagDispatch`), but their text is any bytes, which may not be valid UTF-8.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from grammar_proc.xgrammar_backend.nodes import (
    EMPTY,
    FixedText,
    GrammarNode,
    Rule,
    Rules,
    alt,
    chars,
    complement,
    points,
    seq,
)


def free_text(
    rules: Rules,
    triggers: Mapping[str, GrammarNode],
    excluded: Sequence[str] = (),
    *,
    is_endless: bool = False,
) -> GrammarNode:
    """Return free text. After a trigger its node has to follow; then, with `is_endless`, more free text, else
    the end. Texts in `excluded` do not occur.

    Each rule stands for the longest end of the text so far that is the beginning of a trigger or an excluded
    text.
    """
    wanted = [*triggers, *excluded]
    states = {text[:length]: rules.new() for text in wanted for length in range(len(text))}
    first = states.setdefault("", rules.new())
    alphabet = "".join(sorted(set("".join(wanted))))
    for begun, rule in states.items():
        nodes: list[GrammarNode] = [EMPTY, seq(chars(complement(points(alphabet))), first)]
        by_state: dict[Rule, str] = {}
        for char in alphabet:
            ends = [(begun + char)[at:] for at in range(len(begun) + 1)]
            found = next((end for end in ends if end in wanted), None)
            if found is None:
                state = next((states[end] for end in ends if end in states), first)
                by_state[state] = by_state.get(state, "") + char
            elif found in triggers:
                nodes.append(seq(FixedText(char), triggers[found], first if is_endless else EMPTY))
        nodes += [seq(chars(points(each)), state) for state, each in by_state.items()]
        rules.put(rule, alt(nodes))
    return first
