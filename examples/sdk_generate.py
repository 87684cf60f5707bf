"""Generate with the client library: from a runtime of one's own, or from one that is already running.

python examples/sdk_generate.py                 # starts a runtime with the demo model, and stops it again
python examples/sdk_generate.py --run-dir DIR   # uses the one that launch.py has started there
"""

from __future__ import annotations

import argparse
import asyncio

from carousel import LLM, AsyncClient, Client, SamplingParams

PROMPTS = ["def fibonacci(n):\n", "class Stack:\n", "import os\n"]


async def print_stream(run_dir: str | None) -> None:
    """The same from asyncio, as it comes."""
    async with AsyncClient(run_dir) as client:
        async for delta in client.stream(PROMPTS[0], SamplingParams(max_tokens=32)):
            print(delta.text, end="", flush=True)
    print()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="", help="directory of a model; default: the demo model")
    parser.add_argument("--run-dir", help="run directory of a runtime that is already running")
    args = parser.parse_args()

    with Client(args.run_dir) if args.run_dir else LLM(args.model) as client:
        completions = client.generate(
            PROMPTS, SamplingParams(max_tokens=32, temperature=0.7, top_p=0.9, seed=1)
        )
        for prompt, completion in zip(PROMPTS, completions, strict=True):
            usage = completion.usage
            print(f"--- {usage.prompt_tokens} + {usage.completion_tokens} tokens, {completion.finish_reason}")
            print(prompt + completion.text)
        for delta in client.stream(PROMPTS[0], SamplingParams(max_tokens=32, temperature=0.0)):
            print(delta.text, end="", flush=True)
        print()
    if args.run_dir:
        asyncio.run(print_stream(args.run_dir))


if __name__ == "__main__":
    main()
