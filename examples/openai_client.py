"""Talk to the HTTP server with OpenAI's own client library (pip install openai).

python launch.py &
python examples/openai_client.py --base-url http://127.0.0.1:30000/v1
"""

from __future__ import annotations

import argparse

from openai import OpenAI


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base-url", default="http://127.0.0.1:30000/v1")
    parser.add_argument("--api-key", default="none", help="the server's --api-key, if it has one")
    args = parser.parse_args()

    client = OpenAI(base_url=args.base_url, api_key=args.api_key)
    model = client.models.list().data[0].id

    completion = client.completions.create(model=model, prompt="def fibonacci(n):\n", max_tokens=32, seed=1)
    print(completion.choices[0].text)
    print(completion.usage)

    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "import os\nimport sys\n"}],
        max_tokens=32,
        stream=True,
        # What OpenAI's own API does not have goes into extra_body.
        extra_body={"top_k": 20, "min_p": 0.05},
    )
    for chunk in stream:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()


if __name__ == "__main__":
    main()
