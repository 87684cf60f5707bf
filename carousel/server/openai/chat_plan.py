"""plan_answer: decides how the answers to a chat request are parsed: for tool calls and for reasoning."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import msgspec

from carousel.client.core.request.submission import RequestOptions
from carousel.client.core.result import respelled
from carousel.server.chat.answer import AnswerPlan
from carousel.server.chat.call_tags import call_tags
from carousel.server.chat.definitions import definitions_of, read_tools
from carousel.server.chat.formats import REASONING_FORMATS, TOOL_FORMATS, ReasoningFormat, Thinking
from carousel.server.chat.output_guide import BUDGET, HeldCalls, output_guide
from carousel.server.chat.reader import Markers
from carousel.server.chat.tools import NO_TOOLS, ToolSet
from carousel.server.guides import AskedGuide
from carousel.server.openai.types import ChatBody, ReasoningEffort, ToolChoiceBody
from carousel.server.request.tokenizer import Vocabulary
from carousel.server.server_state import ServerState
from runtime.base.errors import InvalidRequest
from runtime.wire.sampling_params import SamplingParams

EFFORT = "reasoning_effort"
SWITCHES = ("enable_thinking", "thinking")
"""Variables of chat templates that switch reasoning on and off."""


@dataclass(frozen=True, slots=True)
class PlannedAnswer:
    plan: AnswerPlan | None
    """Plan of the parser; None: the answer is plain text."""
    sampling: SamplingParams
    vocabulary: Vocabulary | None
    """Given if reasoning is separated."""


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Tools of a request that its model sees, and the calls that it must make."""

    mode: Literal["none", "auto", "required", "named"]
    name: str = ""
    """Name of the function that must be called, with mode named."""
    allowed: frozenset[str] | None = None
    """Names of the functions that the model sees; None for all."""

    def shown(self, tools: msgspec.Raw) -> bytes:
        """Return the definitions that the model sees, as they were sent."""
        if self.allowed is None:
            return bytes(tools)
        kept = [each for each in definitions_of(tools) if _name_of(each) in self.allowed]
        return b"[" + b",".join(map(bytes, kept)) + b"]"


class _Function(msgspec.Struct):
    name: str = ""


class _Definition(msgspec.Struct):
    function: _Function


def _tool_choice(body: ChatBody) -> ToolChoice:
    """Return the choice of a body. Raises InvalidRequest that names the field."""
    given = body.tool_choice
    if not isinstance(given, ToolChoiceBody):
        return ToolChoice(given or "auto")
    for kind in ("function", "allowed_tools"):
        if (getattr(given, kind) is not None) != (given.type == kind):
            where = f"tool_choice.{kind}"
            raise InvalidRequest(f"{where} is needed with type {kind}, and only there", param=where)
    if given.function is not None:
        return ToolChoice("named", given.function.name)
    assert given.allowed_tools is not None
    names = frozenset(each.function.name for each in given.allowed_tools.tools)
    return ToolChoice(given.allowed_tools.mode, allowed=names)


def _name_of(definition: msgspec.Raw) -> str:
    return msgspec.json.decode(definition, type=_Definition).function.name


async def plan_answer(
    server: ServerState,
    body: ChatBody,
    sampling: SamplingParams,
    options: RequestOptions,
    guide: AskedGuide,
    tenant: str,
) -> PlannedAnswer:
    """Return how to parse the answers, and add the tools and the guide to the options.
    Raises InvalidRequest.
    """
    config = server.config
    choice = _tool_choice(body)
    tools = _tools(body, choice, config.tool_call_parser)
    if tools.names:
        options["tools"] = choice.shown(body.tools)
    reasoning = REASONING_FORMATS.get(config.reasoning_parser)
    reads_reasoning = reasoning is not None and body.separate_reasoning is not False
    budget = _budget(server, body, reasoning)
    is_held = guide.params is not None or budget is not None
    if not tools.names and not reads_reasoning and (reasoning is None or not is_held):
        return PlannedAnswer(None, sampling, None)
    vocabulary = await server.tokenizer.vocabulary()
    special = vocabulary.special_texts
    calls = _held_calls(body, choice, tools, config.tool_call_parser, special)
    calls.check(config.grammar_backend, has_guide=guide.params is not None)
    thinking: Thinking = "none"
    if reasoning is not None:
        thinking = await _thinking(server, body, reasoning, options, tenant)
    try:
        options["structured_outputs"] = output_guide(guide.params, calls, reasoning, thinking, budget)
    except InvalidRequest as error:
        raise respelled(error, guide.names) from None
    if not reads_reasoning:
        reasoning, thinking = None, "none"
    elif reasoning is not None and options["structured_outputs"] is not None:
        # Guided output begins after the closing tag.
        reasoning = replace(reasoning, ends_at_call=False)
    if not tools.names and reasoning is None:
        return PlannedAnswer(None, sampling, None)
    plan = AnswerPlan(
        TOOL_FORMATS[server.config.tool_call_parser] if tools.names else None,
        tools,
        1 if calls.one else None,
        reasoning,
        thinking,
        shows_reasoning=body.include_reasoning is not False,
        is_calls_alone=calls.is_forced,
    )
    # Special tokens are put into the text only if the parser needs some, and then the parser removes them.
    if sampling.skip_special_tokens and not special.isdisjoint(plan.special):
        sampling = msgspec.structs.replace(sampling, skip_special_tokens=False)
        plan = replace(plan, left_out=_left_out(special, plan.special))
    return PlannedAnswer(plan, sampling, vocabulary if reasoning is not None else None)


def _tools(body: ChatBody, choice: ToolChoice, parser: str) -> ToolSet:
    """Return the tools that the model may call. Raises InvalidRequest."""
    if parser not in TOOL_FORMATS:
        if choice.mode != "none" and _are_tools(body.tools):
            raise InvalidRequest(
                "tools: this server reads no tool calls: its chat template is of no format that it "
                "knows, and the launch named none with --tool-call-parser",
                param="tools",
                code="unsupported_parameter",
            )
        tools = NO_TOOLS
    else:
        tools = read_tools(body.tools) if len(body.tools) else NO_TOOLS
    if choice.mode == "none":
        return NO_TOOLS
    if choice.mode == "auto" and choice.allowed is None:
        return tools
    if not tools.names:
        raise InvalidRequest("tool_choice: there are no tools to choose from", param="tool_choice")
    if choice.mode == "named" and choice.name not in tools.names:
        where = "tool_choice.function.name"
        raise InvalidRequest(f"{where}: {choice.name:.100} is not one of tools", param=where)
    if choice.allowed is None:
        return tools
    if unknown := sorted(choice.allowed - tools.names.keys()):
        where = "tool_choice.allowed_tools.tools"
        raise InvalidRequest(f"{where}: {unknown[0]:.100} is not one of tools", param=where)
    return tools.only(*choice.allowed)


def _held_calls(
    body: ChatBody, choice: ToolChoice, tools: ToolSet, parser: str, special: Collection[str]
) -> HeldCalls:
    """Return what the request demands of calls."""
    one = body.parallel_tool_calls is False
    if not tools.names:
        return HeldCalls(parser)
    family = call_tags(parser, special)
    if choice.mode == "named":
        return HeldCalls(parser, tools.only(choice.name), "named", True, family)
    return HeldCalls(parser, tools, "required" if choice.mode == "required" else "auto", one, family)


def _are_tools(tools: bytes) -> bool:
    """Return False for a field that asks for no tools."""
    try:
        return bool(len(tools) and msgspec.json.decode(tools, type=list[msgspec.Raw] | None))
    except (msgspec.MsgspecError, RecursionError):
        return True


async def add_effort(
    server: ServerState, effort: ReasoningEffort, own: Mapping[str, Any], options: RequestOptions
) -> bool:
    """Add the reasoning effort to the chat template's variables. It goes before the launch's variables, and
    the request's own before it. Returns False if the template knows no efforts.
    """
    variables = await server.tokenizer.template_variables()
    made: dict[str, Any] = {name: effort != "none" for name in SWITCHES if name in variables}
    if EFFORT in variables and (effort != "none" or not made):
        made[EFFORT] = effort
    if made:
        options["chat_template_kwargs"] = {**server.config.template_defaults, **made, **own}
    return bool(made) or effort == "none"


def _budget(server: ServerState, body: ChatBody, reasoning: ReasoningFormat | None) -> int | None:
    """Return the maximum number of reasoning tokens; None for no limit. Raises InvalidRequest."""
    budget = body.thinking_token_budget
    if budget is None:
        return None
    config = server.config
    why = ""
    if reasoning is None:
        why = "this server tells no reasoning apart (--reasoning-parser)"
    elif reasoning.read is not None:
        why = f"it is not supported with --reasoning-parser {config.reasoning_parser}"
    elif config.grammar_backend == "none":
        why = "it needs structured output, which this server has not (--grammar-backend none)"
    if why:
        raise InvalidRequest(f"{BUDGET}: {why}", param=BUDGET, code="unsupported_parameter")
    return budget if budget < config.context_length else None


async def _thinking(
    server: ServerState, body: ChatBody, tags: ReasoningFormat, options: RequestOptions, tenant: str
) -> Thinking:
    """Return how an answer begins, according to the end of the prompt."""
    if body.continue_final_message:
        last = body.messages[-1].content or ""
        text = last if isinstance(last, str) else "\n".join(part.text for part in last)
        return "open" if tags.begin in text and tags.end not in text else "none"
    if body.add_generation_prompt is False:
        return "may begin"
    end = (await server.tokenizer.prompt_end(options, tenant)).rstrip()
    if end.endswith(tags.begin):
        return "open"
    return "none" if end.endswith(tags.end) else "may begin"


@lru_cache(maxsize=8)
def _left_out(special: frozenset[str], needed: tuple[str, ...]) -> Markers:
    return Markers(*sorted(special.difference(needed), key=len, reverse=True))
