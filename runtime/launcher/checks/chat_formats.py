"""Choice of the tool call and reasoning formats: those that the settings name, or those that the chat
template uses.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence

import msgspec

from runtime.base.errors import ConfigError
from runtime.checkpoint.chat_formats import AUTO, NONE, REASONING, TOOL_CALLS, ChatFormat, found_in, named
from runtime.settings.config import RuntimeConfig

TOOLS_VARIABLE = re.compile(r"\btools\b")
"""Variable that a chat template must use to show tools."""

logger = logging.getLogger(__name__)


def with_chat_formats(config: RuntimeConfig, template: str) -> RuntimeConfig:
    """Return settings that name both formats, or none, and log the choice. template: the chat template; empty
    if none is used. Raises ConfigError for a format that is unknown, or that cannot be used here.
    """
    tool_calls = _chosen("tool_call_parser", config.tool_call_parser, TOOL_CALLS, template)
    if tool_calls != NONE and not TOOLS_VARIABLE.search(template):
        if config.tool_call_parser != AUTO:
            raise ConfigError(
                "tool_call_parser: the chat template shows the model no tools; name one that does with "
                "--chat-template, or leave --tool-call-parser out"
            )
        tool_calls = NONE
    reasoning = _chosen("reasoning_parser", config.reasoning_parser, REASONING, template)
    if template:
        if tool_calls == NONE:
            logger.info(
                "requests with tools are refused: the chat template is of no known format of calls "
                "(--tool-call-parser)"
                if config.tool_call_parser == AUTO
                else "requests with tools are refused (--tool-call-parser none)"
            )
        else:
            logger.info("tool calls are parsed as %s (--tool-call-parser)", tool_calls)
        if reasoning != NONE:
            logger.info("reasoning is parsed as %s (--reasoning-parser)", reasoning)
    return msgspec.structs.replace(config, tool_call_parser=tool_calls, reasoning_parser=reasoning)


def _chosen(setting: str, wanted: str, formats: Sequence[ChatFormat], template: str) -> str:
    if wanted == AUTO:
        return found_in(formats, template)
    if wanted == NONE:
        return NONE
    name = named(formats, wanted)
    if name is None:
        known = ", ".join(each.name for each in formats)
        raise ConfigError(f"{setting}: {wanted!r} is unknown; known are {known}, auto and none")
    if not template:
        raise ConfigError(f"{setting}: there is no chat template, so there are no conversations to answer")
    return name
