"""Fields of the Messages API and its betas that are refused, with the values that ask for nothing, and
advice. `field_table` has those of every endpoint.
"""

from __future__ import annotations

from typing import Any

MESSAGES_REFUSED: dict[str, tuple[Any, ...]] = {
    "billing_policy": (),
    "compaction": (),
    "container": (),
    "context_management": (
        {},
        {"edits": []},
        {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    ),
    "diagnostics": ({}, {"previous_message_id": None}),
    "fallback_credit_token": (),
    "fallbacks": ([],),
    "inference_geo": (),
    "mcp_servers": ([],),
    "output_format": (),
    "speed": ("standard",),
    "thread": (),
    "user_profile_id": (),
    "workspace_id": (),
}
BLOCK_REFUSED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("caller",), ({"type": "direct"},)),
    **dict.fromkeys(("citations",), ([], {"enabled": False})),
    **dict.fromkeys(("context", "data", "file_id", "source", "title", "tool_name", "toolset_name"), ()),
}
MESSAGES_HINTS = {
    "container": "no code runs here",
    "context_management": "send the messages that the model is to see",
    "inference_geo": "this server is where it is",
    "mcp_servers": "call them yourself, and send their tools as tools",
    "output_format": "it is called output_config.format here",
    "speed": "there is one speed",
    **dict.fromkeys(("max_completion_tokens", "max_new_tokens"), "it is called max_tokens here"),
    "reasoning_effort": "it is called output_config.effort here",
    **dict.fromkeys(
        ("response_format", "structured_outputs", "guided_json", "json_schema"),
        "output_config.format has a schema",
    ),
    "stop": "it is called stop_sequences here",
    "thinking_token_budget": "it is called thinking.budget_tokens here",
    "parallel_tool_calls": "it is called tool_choice.disable_parallel_tool_use here",
    "n": "an answer is one message",
}
