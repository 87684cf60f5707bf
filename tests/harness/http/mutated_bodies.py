"""Bodies of a broken or hostile HTTP client: mutations of valid bodies of every endpoint."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

GOOD: tuple[tuple[str, dict[str, Any]], ...] = (
    (
        "/v1/completions",
        {"prompt": ["def f(x):", "y"], "max_tokens": 2, "n": 2, "logprobs": 2, "echo": True, "stop": ["END"]},
    ),
    (
        "/v1/completions",
        {
            "prompt": [1, 2, 3],
            "max_tokens": 2,
            "temperature": 0.5,
            "logit_bias": {"5": 1.5},
            "stream": True,
            "stream_options": {"include_usage": True},
            "bad_words": ["x"],
        },
    ),
    (
        "/v1/chat/completions",
        {
            "messages": [
                {"role": "system", "content": "be brief"},
                {"role": "user", "content": [{"type": "text", "text": "x"}]},
            ],
            "max_tokens": 2,
            "logprobs": True,
            "top_logprobs": 2,
            "seed": 1,
            "tools": [],
            "chat_template_kwargs": {"a": True},
        },
    ),
    (
        "/v1/messages",
        {
            "model": "default",
            "max_tokens": 2,
            "system": [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "x"}]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "y", "signature": "z"},
                        {"type": "tool_use", "id": "a", "name": "f", "input": {"b": 1}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "a",
                            "content": [{"type": "text", "text": "w"}],
                            "is_error": True,
                        }
                    ],
                },
            ],
            "stop_sequences": ["END"],
            "thinking": {"type": "disabled"},
            "tools": [],
            "tool_choice": {"type": "auto"},
            "metadata": {"user_id": "u"},
            "stream": False,
        },
    ),
    (
        "/v1/responses",
        {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
                {"type": "reasoning", "summary": [{"type": "summary_text", "text": "y"}], "status": None},
                {
                    "type": "message",
                    "role": "assistant",
                    "content": [{"type": "output_text", "text": "z", "annotations": []}],
                },
                {"type": "function_call", "call_id": "a", "name": "f", "arguments": '{"b":1}'},
                {"type": "function_call_output", "call_id": "a", "output": "w"},
            ],
            "instructions": "be brief",
            "max_output_tokens": 2,
            "include": ["message.output_text.logprobs"],
            "top_logprobs": 2,
            "text": {"format": {"type": "text"}},
            "tools": [],
            "tool_choice": "none",
            "reasoning": {"summary": "auto"},
            "metadata": {"user": "u"},
            "stream": True,
        },
    ),
    ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "x"}], "system": "be brief"}),
    (
        "/generate",
        {
            "text": "x",
            "sampling_params": {"max_new_tokens": 2, "temperature": 0, "top_k": 5},
            "return_logprob": True,
            "logprob_start_len": 0,
            "stream": False,
        },
    ),
    ("/tokenize", {"prompt": "x", "return_token_strs": True}),
    ("/detokenize", {"tokens": [5, 6]}),
)
VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1,
    1.5,
    1e308,
    -1e-320,
    1 << 31,
    1 << 63,
    10**30,
    "",
    "x",
    "\u0000",
    "\U0001f600\u202e",
    "x" * 10_000,
    [],
    {},
    [[]],
    [None],
    [1, "a"],
    ["x"] * 100,
    {"": None},
    {"x": {"x": []}},
)


def mutated_bodies(count: int, rng: random.Random) -> Iterator[tuple[str, bytes]]:
    """(path, body): half of them other JSON, half of them damaged bytes."""
    for _ in range(count):
        path, body = rng.choice(GOOD)
        data = json.dumps(_other(body, rng) if rng.random() < 0.7 else body).encode()
        yield path, _damaged(data, rng) if rng.random() < 0.5 else data


def _other(body: dict[str, Any], rng: random.Random) -> Any:
    """The body with one to three values changed, fields added or left out, at any depth."""
    changed = copy.deepcopy(body)
    for _ in range(rng.randrange(1, 4)):
        place: Any = changed
        key: Any = rng.choice(list(place))
        while isinstance(place[key], dict | list) and place[key] and rng.random() < 0.6:
            place = place[key]
            key = rng.choice(list(place)) if isinstance(place, dict) else rng.randrange(len(place))
        kind = rng.randrange(4)
        if kind == 0 and isinstance(place, dict) and len(place) > 1:
            del place[key]
        elif kind == 1 and isinstance(place, dict):
            place[rng.choice(["n", "best_of", "x", "prompt", "stream", "rid"])] = copy.deepcopy(
                rng.choice(VALUES)
            )
        else:
            place[key] = copy.deepcopy(rng.choice(VALUES))
    return changed


def _damaged(data: bytes, rng: random.Random) -> bytes:
    damaged = bytearray(data)
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(damaged) + 1)
        kind = rng.randrange(4)
        if kind == 0 and at < len(damaged):
            damaged[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del damaged[at:]
        elif kind == 2:
            damaged[at:at] = rng.choice([b"[", b"{", b"\\u", b"\xff", b"1e999", b'"', b","]) * rng.randrange(
                1, 50
            )
        else:
            damaged[at : at + rng.randrange(8)] = rng.randbytes(rng.randrange(8))
    return bytes(damaged)
