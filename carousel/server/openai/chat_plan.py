"""plan_answer: how the answers to a chat request are read: its tools, and what of it may be reasoning."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import msgspec

from carousel.client.core.request_builder import RequestOptions
from carousel.server.chat.answer import AnswerPlan
from carousel.server.chat.definitions import NEEDS_GRAMMAR, read_tools
from carousel.server.chat.formats import REASONING_FORMATS, TOOL_FORMATS, ReasoningFormat, Thinking
from carousel.server.chat.reader import Markers
from carousel.server.chat.tools import NO_TOOLS, ToolSet
from carousel.server.openai.types import ChatBody
from carousel.server.request.tokenizer import Vocabulary
from carousel.server.server_state import ServerState
from runtime.base.errors import InvalidRequest
from runtime.wire.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class PlannedAnswer:
    plan: AnswerPlan | None
    """None: it is text."""
    sampling: SamplingParams
    vocabulary: Vocabulary | None
    """Given where reasoning is told apart."""


async def plan_answer(
    server: ServerState, body: ChatBody, sampling: SamplingParams, options: RequestOptions, tenant: str
) -> PlannedAnswer:
    """Return how to read the answers, and add the tools to the options. Raises InvalidRequest."""
    tools = _tools(body, server.config.tool_call_parser)
    if tools.names:
        options["tools"] = bytes(body.tools)
    reasoning = REASONING_FORMATS.get(server.config.reasoning_parser)
    if body.separate_reasoning is False:
        reasoning = None
    if not tools.names and reasoning is None:
        return PlannedAnswer(None, sampling, None)
    vocabulary = await server.tokenizer.vocabulary()
    thinking: Thinking = "none"
    if reasoning is not None:
        thinking = await _thinking(server, body, reasoning, options, tenant)
    plan = AnswerPlan(
        TOOL_FORMATS[server.config.tool_call_parser] if tools.names else None,
        tools,
        1 if body.parallel_tool_calls is False else None,
        reasoning,
        thinking,
        shows_reasoning=body.include_reasoning is not False,
    )
    # Special tokens are in the text only where some of them are needed, and then for the parser alone.
    special = vocabulary.special_texts
    if sampling.skip_special_tokens and not special.isdisjoint(plan.special):
        sampling = msgspec.structs.replace(sampling, skip_special_tokens=False)
        plan = replace(plan, left_out=_left_out(special, plan.special))
    return PlannedAnswer(plan, sampling, vocabulary if reasoning is not None else None)


def _tools(body: ChatBody, parser: str) -> ToolSet:
    """Return the tools that the model may call. Raises InvalidRequest."""
    choice = body.tool_choice
    if parser not in TOOL_FORMATS:
        if choice != "none" and _are_tools(body.tools):
            raise InvalidRequest(
                "tools: this server reads no calls of tools: its chat template is of no format that it "
                "knows, and the launch named none with --tool-call-parser",
                param="tools",
                code="unsupported_parameter",
            )
        tools = NO_TOOLS
    else:
        tools = read_tools(body.tools) if len(body.tools) else NO_TOOLS
    if choice in (None, "auto"):
        return tools
    if choice == "none":
        return NO_TOOLS
    name = None if isinstance(choice, str) else choice.function.name
    if not tools.names:
        raise InvalidRequest("tool_choice: there are no tools to choose from", param="tool_choice")
    if name is not None and name not in tools.names:
        raise InvalidRequest(
            f"tool_choice.function.name: {name:.100} is not one of tools", param="tool_choice.function.name"
        )
    what = "required" if name is None else "a named function"
    raise InvalidRequest(
        f"tool_choice: {what} {NEEDS_GRAMMAR}; auto and none work",
        param="tool_choice",
        code="unsupported_parameter",
    )


def _are_tools(tools: bytes) -> bool:
    """Return False for what asks for none."""
    try:
        return bool(len(tools) and msgspec.json.decode(tools, type=list[msgspec.Raw] | None))
    except (msgspec.MsgspecError, RecursionError):
        return True


async def _thinking(
    server: ServerState, body: ChatBody, tags: ReasoningFormat, options: RequestOptions, tenant: str
) -> Thinking:
    """Return how an answer begins, which the end of the prompt tells."""
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
