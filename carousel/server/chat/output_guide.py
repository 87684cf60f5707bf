"""output_guide: the one guide of an answer, made of the guides of its reasoning, its content and
its calls.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, cast

from carousel.server.chat.call_tags import CallTags, calls_alone, calls_in_text
from carousel.server.chat.formats import ReasoningFormat, Thinking
from carousel.server.chat.tools import NO_TOOLS, ToolSet
from carousel.structured_outputs import guide_for_wire
from runtime.base.errors import InvalidRequest
from runtime.guides import structural_tag as tags
from runtime.wire.guide import Guide, GuideKind

KIND: GuideKind = "structural_tag"
BUDGET = "thinking_token_budget"
LINE_BREAKS = r"\n{1,2}"
"""Line breaks between the end of reasoning and the answer."""


@dataclass(frozen=True, slots=True)
class HeldCalls:
    """Calls that an answer must or may have."""

    parser: str
    tools: ToolSet = NO_TOOLS
    """Tools that may be called."""
    choice: Literal["auto", "required", "named"] = "auto"
    one: bool = False
    """True for at most one call."""
    family: CallTags | None = None
    """Tags of the format; None: its calls cannot be held."""

    @property
    def is_forced(self) -> bool:
        return self.choice != "auto"

    def check(self, grammar_backend: str, *, has_guide: bool) -> None:
        """Check that the request's calls can be held. Raises InvalidRequest."""
        if self.is_forced:
            param = "tool_choice"
            what = f"{param}: {'required' if self.choice == 'required' else 'a named function'}"
        elif self.tools.strict:
            param = f"{self.tools.where(min(self.tools.strict))}.strict"
            what = f"{param}: true"
        else:
            return
        why = ""
        if grammar_backend == "none":
            why = "needs structured output, which this server has not (--grammar-backend none)"
        elif self.family is None:
            why = f"is not supported with --tool-call-parser {self.parser}, whose form no grammar holds"
        elif not (self.is_forced or self.family.triggers or (has_guide and self.family.holds_any)):
            why = (
                f"is supported with tool_choice required alone for --tool-call-parser {self.parser}, whose "
                + ("calls may begin like text" if self.family.holds_any else "arguments are no JSON")
            )
        if why:
            raise InvalidRequest(f"{what} {why}", param=param, code="unsupported_parameter")


def output_guide(
    params: Any,
    calls: HeldCalls,
    reasoning: ReasoningFormat | None,
    thinking: Thinking,
    budget: int | None = None,
) -> Guide | None:
    """Return the guide of a whole answer; None for no guide. `params` has the guide of the content. `budget`
    is the maximum number of tokens of reasoning between its tags. Raises InvalidRequest.
    """
    guide = guide_for_wire(params)
    content = _content(guide, calls, "" if reasoning is None else reasoning.content)
    most = None
    if reasoning is not None and thinking != "none" and budget is not None:
        most = tags.MaxTokens(budget, BUDGET)
        content = content or tags.AnyTokens("" if thinking == "open" else reasoning.begin, BUDGET)
    if content is None:
        return guide
    # In a structural tag each nested guide has its own any_whitespace.
    any_whitespace = guide is None or guide.kind != KIND or guide.any_whitespace
    if reasoning is None or (thinking == "none" and reasoning.read is None):
        is_plain = isinstance(content, tags.Nested)
        return guide if is_plain else Guide(KIND, tags.encode(content), any_whitespace)
    if reasoning.read is not None and thinking != "may begin":
        kind = KIND if guide is None else guide.kind
        raise InvalidRequest(
            f"{kind}: guides are not supported where a message goes on whose form has begun "
            "(--reasoning-parser gpt_oss)",
            param=kind,
            code="unsupported_parameter",
        )
    begin = "" if thinking == "open" else reasoning.begin
    between = (
        tags.Optional(tags.Regex(LINE_BREAKS))
        if reasoning.read is None
        else tags.ConstString(reasoning.next_message)
    )
    behind = tags.Sequential([tags.Tag(begin, tags.AnyText(most), reasoning.end), between])
    whole = tags.Sequential([behind if thinking == "open" else tags.Optional(behind), content])
    return Guide(KIND, tags.encode(whole), any_whitespace)


def _content(guide: Guide | None, calls: HeldCalls, begin: str) -> tags.Element | None:
    """Return the answer after reasoning; None if it may be anything. `begin` is the text before content."""
    family, tools = calls.family, calls.tools
    nested: tags.Element | None = None
    if guide is not None and guide.kind == KIND:
        nested = tags.decode(guide.text)
    elif guide is not None:
        kind = cast(tags.NestedKind, guide.kind)
        nested = tags.Nested(kind, guide.text, guide.any_whitespace)
    if nested is not None and begin:
        nested = tags.Sequential([tags.ConstString(begin), nested])
    if family is None or not tools.names:
        return nested
    if calls.is_forced:
        return calls_alone(family, tools, one=calls.one, all_held=True)
    if nested is not None and not family.holds_any:
        return nested
    if nested is not None:
        return tags.Or([nested, calls_alone(family, tools, one=calls.one, all_held=False)])
    return calls_in_text(family, tools, one=calls.one) if tools.strict else None
