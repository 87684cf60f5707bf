"""Requests with which one tenant tries to learn of another, or to take from it what is its own."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

KEYS = {"victim": "key-of-the-victim", "attacker": "key-of-the-attacker"}
CONTEXT = 1536
HOT = [7 + number % 61 for number in range(1000)]
"""Prompt that the victim begins all of its requests with."""
VICTIM_RID = "of-the-victim"
NUM_ATTEMPTS = 500
ADMIN_PATHS = (
    *("/stats", "/stats/iterations", "/stats/requests", "/server_info", "/get_server_info", "/metrics"),
    *("/get_load", "/flush_cache", "/pause_generation", "/continue_generation", "/start_profile"),
    *("/stop_profile", "/profiles/profile-20260101-000000-1.json", "/update_weights_from_disk"),
)
PATHS = (*ADMIN_PATHS, "/abort_request", "/v1/models", "/model_info", "/version", "/health_generate", "/none")


def http(path: str, body: Any = None, *, key: str, method: str = "", headers: str = "") -> bytes:
    """Return the bytes of a request, after whose answer the server closes the connection."""
    data = b"" if body is None else json.dumps(body).encode()
    head = (
        f"{method or ('GET' if body is None else 'POST')} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        f"Authorization: Bearer {key}\r\n{headers}"
    )
    if data:
        head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n"
    return head.encode() + b"\r\n" + data


def completion(draw: random.Random, **fields: Any) -> bytes:
    body = {"model": "carousel-demo", "prompt": "x", "max_tokens": 4, **fields}
    return http("/v1/completions", body, key=KEYS["attacker"])


def flood_cache(draw: random.Random) -> bytes:
    return completion(
        draw, prompt=draw.choices(range(7, 2000), k=CONTEXT - 200), max_tokens=100, ignore_eos=True
    )


def flood_queue(draw: random.Random) -> bytes:
    return completion(draw, n=draw.choice((16, 64, 128)), max_tokens=200, ignore_eos=True)


def priority(draw: random.Random) -> bytes:
    return completion(draw, priority=draw.choice((1000, 999, 1, -1, -1000, 10**6)), max_tokens=60)


def salt(draw: random.Random) -> bytes:
    return completion(draw, prompt=HOT, cache_salt=draw.choice(("", "victim", KEYS["victim"], "x" * 256)))


def hot_prompt(draw: random.Random) -> bytes:
    return completion(draw, prompt=[*HOT, draw.randrange(7, 2000)])


def name(draw: random.Random) -> bytes:
    rid = f"{VICTIM_RID}-{draw.randrange(4)}"
    if draw.random() < 0.5:
        body: dict[str, Any] = {"input_ids": [7, 8, 9], "rid": rid, "sampling_params": {"max_new_tokens": 8}}
        return http("/generate", body, key=KEYS["attacker"])
    body = {"model": "carousel-demo", "prompt": "x", "max_tokens": 8}
    return http("/v1/completions", body, key=KEYS["attacker"], headers=f"X-Request-Id: {rid}\r\n")


def route(draw: random.Random) -> bytes:
    path = draw.choice(PATHS)
    body = draw.choice((None, {}, {"mode": "abort"}, {"num_steps": 10000}, {"rid": f"{VICTIM_RID}-0"}))
    return http(path, body, key=KEYS["attacker"], method=draw.choice(("", "", "DELETE", "PUT")))


def credentials(draw: random.Random) -> bytes:
    key = draw.choice(("", "victim", KEYS["victim"][:-1], KEYS["attacker"] + " " + KEYS["victim"]))
    twice = draw.choice(("", f"Authorization: Bearer {KEYS['attacker']}\r\n"))
    return http("/v1/completions", {"model": "carousel-demo", "prompt": "x"}, key=key, headers=twice)


def tokenize(draw: random.Random) -> bytes:
    text = "".join(draw.choices("abc xyz\n", k=draw.choice((10, 10_000, 400_000))))
    return http("/tokenize", {"prompt": text, "return_token_strs": True}, key=KEYS["attacker"])


def logprobs(draw: random.Random) -> bytes:
    body: dict[str, Any] = {
        "input_ids": draw.choices(range(7, 2000), k=1000),
        "sampling_params": {"max_new_tokens": 100, "ignore_eos": True},
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 20,
        "stream": True,
    }
    return http("/generate", body, key=KEYS["attacker"])


def stop_strings(draw: random.Random) -> bytes:
    return completion(draw, stop=["a" + "b" * 250, "a" * 250], max_tokens=100, ignore_eos=True)


def half_body(draw: random.Random) -> bytes:
    head = http("/v1/completions", {"prompt": "x" * (4 << 20)}, key=KEYS["attacker"])
    return head[: draw.randrange(1 << 20, 3 << 20)]


def long_text(draw: random.Random) -> bytes:
    return completion(draw, prompt="ab " * draw.choice((1 << 10, 1 << 15, 1 << 17)))


KINDS: tuple[Callable[[random.Random], bytes], ...] = (
    *(flood_cache, flood_queue, priority, salt, hot_prompt, name, route, route, credentials, tokenize),
    *(logprobs, stop_strings, half_body, long_text),
)


def attempts(seed: int) -> list[tuple[str, bytes]]:
    """Return NUM_ATTEMPTS requests with their kinds: as many of each kind."""
    draw = random.Random(seed)
    made = [(KINDS[number % len(KINDS)].__name__, number) for number in range(NUM_ATTEMPTS)]
    draw.shuffle(made)
    by_name = {kind.__name__: kind for kind in KINDS}
    return [(kind, by_name[kind](random.Random(seed * NUM_ATTEMPTS + number))) for kind, number in made]
