"""Requests with which one tenant tries to learn of another, or to take from it what is its own."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from typing import Any

from carousel.server.endpoints import ENDPOINTS

KEYS = {"victim": "key-of-the-victim", "attacker": "key-of-the-attacker"}
CONTEXT = 1536
HOT = [7 + number % 61 for number in range(1000)]
"""Prompt that the victim begins all of its requests with."""
VICTIM_RID = "of-the-victim"
NUM_ATTEMPTS = 500
FILLED = {"{request_id:path}": f"{VICTIM_RID}-0", "{file}": "profile-20260101-000000-1.json"}


def _filled(path: str) -> str:
    for name, value in FILLED.items():
        path = path.replace(name, value)
    return path.replace("{name:path}", "carousel-demo")


ADMIN_PATHS = tuple(_filled(each.path) for each in ENDPOINTS if each.role not in ("user", None))
"""Paths whose answers tell of all callers, or which change something for them."""
PATHS = (*(_filled(each.path) for each in ENDPOINTS), "/none", "/v1/files", "/v1/batches")
BODIES: tuple[Any, ...] = (
    *(None, {}, {"mode": "abort"}, {"num_steps": 10000}, {"rid": f"{VICTIM_RID}-0"}, {"abort_all": True}),
    *({"model_path": "other"}, {"lora_name": "carousel-demo", "lora_path": "/tmp"}),
)


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


def retain(draw: random.Random) -> bytes:
    """Return a request that asks to keep its pages longer than all others, or for outputs that fill the
    cache.
    """
    if draw.random() < 0.5:
        return completion(draw, n=4, max_tokens=CONTEXT - 10, ignore_eos=True)
    ranges = [{"token_start": 0, "token_end": CONTEXT - 200, "priority": 100, "duration_ms": 10**9}]
    return completion(
        draw,
        prompt=draw.choices(range(7, 2000), k=CONTEXT - 200),
        kv_cache_retention_config={"token_range_retention_configs": ranges, "decode_retention_priority": 100},
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


def route(draw: random.Random, path: str = "/none") -> bytes:
    method = draw.choice(("", "", "DELETE", "PUT"))
    return http(path, draw.choice(BODIES), key=KEYS["attacker"], method=method)


def credentials(draw: random.Random) -> bytes:
    key = draw.choice(("", "victim", KEYS["victim"][:-1], KEYS["attacker"] + " " + KEYS["victim"]))
    twice = draw.choice(("", f"Authorization: Bearer {KEYS['attacker']}\r\n"))
    return http("/v1/completions", {"model": "carousel-demo", "prompt": "x"}, key=key, headers=twice)


def tokenize(draw: random.Random) -> bytes:
    text = "".join(draw.choices("abc xyz\n", k=draw.choice((10, 10_000, 400_000))))
    return http("/tokenize", {"prompt": text, "return_token_strs": True}, key=KEYS["attacker"])


def message(draw: random.Random) -> bytes:
    text = "".join(draw.choices("abc xyz\n", k=draw.choice((10, 3000))))
    body: dict[str, Any] = {"model": "carousel-demo", "messages": [{"role": "user", "content": text}]}
    if draw.random() < 0.5:
        return http("/v1/messages/count_tokens", body, key=KEYS["attacker"])
    more = {"max_tokens": draw.choice((1, 100)), "priority": draw.choice((0, 9)), "cache_salt": "victim"}
    headers = f"X-Request-Id: {VICTIM_RID}-{draw.randrange(4)}\r\n"
    return http("/v1/messages", {**body, **more}, key=KEYS["attacker"], headers=headers)


def response(draw: random.Random) -> bytes:
    more: dict[str, Any] = draw.choice(
        (
            {"previous_response_id": f"resp_{VICTIM_RID}-0"},
            {"priority": 9},
            {"service_tier": "priority", "prompt_cache_key": KEYS["victim"]},
            {"input": [{"role": "user", "content": "x" * 100}] * draw.choice((10, 1000))},
        )
    )
    body = {"model": "carousel-demo", "input": "x", "max_output_tokens": 60, **more}
    if draw.random() < 0.25:
        return http(f"/v1/responses/{VICTIM_RID}-0", key=KEYS["attacker"], method=draw.choice(("", "DELETE")))
    return http("/v1/responses", body, key=KEYS["attacker"])


def guide(draw: random.Random) -> bytes:
    """Return a request with a guide that nobody has used, and that may take long to compile."""
    start, count = draw.randrange(10**9), draw.choice((3, 60, 4000))
    fields: dict[str, Any] = {f"k{start + each}": {} for each in range(count)}
    schema = {"name": "x", "schema": {"type": "object", "properties": fields}}
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 8, "model": "carousel-demo"}
    asked = {**body, "response_format": {"type": "json_schema", "json_schema": schema}}
    return http("/v1/chat/completions", asked, key=KEYS["attacker"])


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
    *(logprobs, stop_strings, half_body, long_text, message, response, guide, retain),
)


def attempts(seed: int) -> list[tuple[str, bytes]]:
    """Return NUM_ATTEMPTS requests with their kinds: as many of each kind."""
    made = [(KINDS[number % len(KINDS)].__name__, number) for number in range(NUM_ATTEMPTS)]
    random.Random(seed).shuffle(made)
    by_name = {kind.__name__: kind for kind in KINDS}
    paths = itertools.cycle(PATHS)

    def make(kind: str, number: int) -> bytes:
        draw = random.Random(seed * NUM_ATTEMPTS + number)
        return route(draw, next(paths)) if kind == "route" else by_name[kind](draw)

    return [(kind, make(kind, number)) for kind, number in made]
