"""Formats of tool calls and reasoning: their names, and how they are recognized in chat templates. The HTTP
server parses answers by these names (`carousel/server/chat/formats.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

NONE = "none"
AUTO = "auto"


@dataclass(frozen=True, slots=True)
class ChatFormat:
    name: str
    peers: tuple[str, ...]
    """Names of the format in vLLM and SGLang, where they differ."""
    marks: tuple[str, ...]
    """Texts that all occur in a chat template of this format."""
    not_marks: tuple[str, ...] = ()
    """Texts that do not occur in one."""

    def is_in(self, template: str) -> bool:
        return all(mark in template for mark in self.marks) and not any(
            mark in template for mark in self.not_marks
        )


_DEEPSEEK = "<｜tool▁calls▁begin｜>"
TOOL_CALLS = (
    ChatFormat(
        "hermes",
        ("qwen25", "qwen"),
        ("<tool_call>", "arguments"),
        ("<function=", "<arg_key>", "~ '<tool_call>'", "yaml objects"),
    ),
    ChatFormat("llama3_json", ("llama3", "llama4_json"), ('"parameters": dictionary',), ("[func_name1(",)),
    ChatFormat(
        "pythonic",
        ("llama4_pythonic",),
        ("[func_name1(",),
        ("<TOOLCALL>", "<|tool_call_start|>", "<tool>"),
    ),
    ChatFormat("mistral", (), ("[TOOL_CALLS]",)),
    ChatFormat(
        "qwen3_coder", ("qwen3_xml", "step3p5", "nemotron3"), ("<function=", "<parameter="), ("<seed:",)
    ),
    ChatFormat("deepseek_v3", ("deepseekv3",), (_DEEPSEEK, "```json")),
    ChatFormat("deepseek_v31", ("deepseekv31",), (_DEEPSEEK,), ("```json",)),
    ChatFormat("glm45", ("glm", "glm47"), ("<tool_call>", "<arg_key>")),
    ChatFormat("kimi_k2", (), ("<|tool_calls_section_begin|>",)),
    ChatFormat("gpt_oss", ("gpt-oss", "openai", "openai_gptoss"), ("<|channel|>commentary", "functions.")),
    ChatFormat("gemma4", (), ("<|tool_call>",)),
)
REASONING = (
    ChatFormat("gemma4", (), ("<|channel>thought",)),
    ChatFormat("gpt_oss", ("gpt-oss", "openai_gptoss"), ("<|channel|>analysis",)),
    ChatFormat("mistral", ("magistral",), ("[THINK]",)),
    ChatFormat("kimi_k2", (), ("</think>", "<|tool_calls_section_begin|>")),
    ChatFormat("glm45", ("glm", "glm47"), ("</think>", "<|assistant|>")),
    ChatFormat("deepseek_r1", ("deepseek-r1", "deepseek_v3", "deepseek-v3"), ("</think>", "<｜Assistant｜>")),
    ChatFormat("qwen3", ("qwen3-thinking", "holo2"), ("</think>",)),
)


def named(formats: Sequence[ChatFormat], name: str) -> str | None:
    """Return the name of the format that has this name or alias; None if there is none."""
    return next((each.name for each in formats if name in (each.name, *each.peers)), None)


def found_in(formats: Sequence[ChatFormat], template: str) -> str:
    """Return the name of the format that a chat template uses; NONE if it uses none of them."""
    return next((each.name for each in formats if each.is_in(template)), NONE)
