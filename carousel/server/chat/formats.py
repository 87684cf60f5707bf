"""TOOL_FORMATS and REASONING_FORMATS: how families of models write tool calls and reasoning.

There is a row for each name of `runtime.checkpoint.chat_formats`, which recognises the formats by chat
templates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeAlias

from carousel.server.chat.gemma import (
    CHANNEL,
    GEMMA_MARKERS,
    THOUGHT,
    THOUGHT_END,
    gemma4,
    gemma4_behind_reasoning,
)
from carousel.server.chat.harmony import ANALYSIS, FINAL, HARMONY_MARKERS, NEXT_MESSAGE, harmony
from carousel.server.chat.harmony import END as HARMONY_END
from carousel.server.chat.json_calls import (
    DEEPSEEK_MARKERS,
    KIMI_MARKERS,
    PYTHON_TAG,
    deepseek,
    hermes,
    kimi_k2,
    llama3_json,
    mistral,
)
from carousel.server.chat.pythonic import END, START, pythonic
from carousel.server.chat.reader import NO_MARKERS, Reader, Steps
from carousel.server.chat.tagged_calls import glm, qwen3_coder
from carousel.server.chat.thoughts import read_thoughts

CallReader: TypeAlias = Callable[[Reader], Steps[None]]
Thinking: TypeAlias = Literal["open", "may begin", "none"]
"""Beginning of the answer: inside reasoning, because the prompt ends with its opening tag; perhaps with that
tag; or after all reasoning.
"""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    read: CallReader
    special: tuple[str, ...] = ()
    """Spellings that a tokenizer may have as special tokens, and that would otherwise be left out of the
    text.
    """


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    begin: str
    end: str
    also_end: tuple[str, ...] = ()
    """Markers of calls, which also end reasoning."""
    ends_at_call: bool = False
    """True if a call between <tool_call> tags also ends reasoning."""
    special: tuple[str, ...] = ()
    """Parts of the tags that a tokenizer may have as special tokens."""
    read: CallReader | None = None
    """Reader of a format in which reasoning, text and calls are messages."""
    next_message: str = ""
    """Text that begins a message after another one."""
    content: str = ""
    """Text that begins the message of the content."""
    behind: CallReader | None = None
    """Reader of the text after reasoning, in a format with more reasoning there."""


TOOL_FORMATS: dict[str, ToolFormat] = {
    "hermes": ToolFormat(hermes, ("<tool_call>", "</tool_call>")),
    "llama3_json": ToolFormat(llama3_json, (PYTHON_TAG,)),
    "pythonic": ToolFormat(pythonic, (START, END)),
    "mistral": ToolFormat(mistral, ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")),
    "qwen3_coder": ToolFormat(
        qwen3_coder,
        ("<tool_call>", "</tool_call>", "<parameter=", "</parameter>", "<function=", "</function>"),
    ),
    "deepseek_v3": ToolFormat(deepseek, DEEPSEEK_MARKERS),
    "deepseek_v31": ToolFormat(deepseek, DEEPSEEK_MARKERS),
    "glm45": ToolFormat(
        glm, ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    ),
    "kimi_k2": ToolFormat(kimi_k2, KIMI_MARKERS),
    "gpt_oss": ToolFormat(harmony, HARMONY_MARKERS),
    "gemma4": ToolFormat(gemma4, GEMMA_MARKERS),
}
REASONING_FORMATS: dict[str, ReasoningFormat] = {
    "deepseek_r1": ReasoningFormat("<think>", "</think>"),
    "qwen3": ReasoningFormat("<think>", "</think>", ends_at_call=True),
    "glm45": ReasoningFormat("<think>", "</think>", ends_at_call=True),
    "kimi_k2": ReasoningFormat(
        "<think>", "</think>", ("<|tool_calls_section_begin|>", "<|tool_call_begin|>")
    ),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
    "gemma4": ReasoningFormat(THOUGHT, THOUGHT_END, special=(CHANNEL,), behind=gemma4_behind_reasoning),
    "gpt_oss": ReasoningFormat(
        ANALYSIS,
        HARMONY_END,
        HARMONY_MARKERS,
        read=partial(harmony, has_reasoning=True),
        next_message=NEXT_MESSAGE,
        content=FINAL,
    ),
}


def read_answer(
    r: Reader, tools: ToolFormat | None, reasoning: ReasoningFormat | None, thinking: Thinking
) -> Steps[None]:
    """Parse an answer: reasoning, if there is any, and then text and calls."""
    if reasoning is not None and reasoning.read is not None:
        yield from reasoning.read(r)
        return
    if reasoning is not None and thinking != "none":
        yield from _read_reasoning(r, reasoning, is_open=thinking == "open")
    if reasoning is not None and reasoning.behind is not None and (tools is None or tools.read is gemma4):
        yield from reasoning.behind(r)
    else:
        yield from (r.until(NO_MARKERS) if tools is None else tools.read(r))


def _read_reasoning(r: Reader, tags: ReasoningFormat, *, is_open: bool) -> Steps[None]:
    """Parse reasoning. Line breaks beside its tags belong to the tags, as in chat templates."""
    r.mark()
    yield from r.space()
    if (yield from r.take(tags.begin)):
        r.settle()
    else:
        r.rewind()
        if not is_open:
            return
    yield from read_thoughts(r, tags.end, tags.also_end, ends_at_call=tags.ends_at_call)
