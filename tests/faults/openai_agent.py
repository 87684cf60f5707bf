"""An agent of openai-agents, for the Python that has this library: streams its loop, and prints what it did.

`openai_agent.py URL FOLDER TASK`: tools that read and write files of a folder.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

FOLDER = Path(sys.argv[2])


def read(path: str) -> str:
    """Read a file."""
    return (FOLDER / path).read_text()


def write(path: str, text: str) -> str:
    """Write a file."""
    (FOLDER / path).write_text(text)
    return "ok"


async def main() -> None:
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0)
    agent = Agent(
        name="coder",
        instructions="Use the tools.",
        model=OpenAIChatCompletionsModel(model="carousel-demo", openai_client=client),
        tools=[function_tool(read), function_tool(write)],
    )
    result = Runner.run_streamed(agent, sys.argv[3])
    calls = [
        event.item.raw_item.name
        async for event in result.stream_events()
        if event.type == "run_item_stream_event" and event.item.type == "tool_call_item"
    ]
    print(json.dumps({"calls": calls, "said": result.final_output}))


asyncio.run(main())
