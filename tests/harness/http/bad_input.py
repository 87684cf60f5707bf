"""Table of bad input over HTTP: the bytes that are sent, and the expected answer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

CONTEXT = 256
VOCABULARY = 4096
"""More ids than the demo model has."""
SERVED = "demo"
COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/generate"
JSON = {"content-type": "application/json"}
USER = {"role": "user", "content": "x"}


@dataclass(frozen=True)
class HttpCase:
    id: str
    path: str
    body: Any
    """JSON, or the bytes themselves."""
    status: int = 400
    code: str = "invalid_value"
    param: str | None = None
    part: str = ""
    """Part of the message that must be there."""
    headers: Mapping[str, str] = field(default_factory=lambda: JSON)
    method: str = "POST"

    def content(self) -> bytes:
        return self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()


def completion(
    case_id: str, param: str | None, *, part: str = "", code: str = "invalid_value", **body: Any
) -> HttpCase:
    """A completion with one thing wrong."""
    body = {"prompt": "x", "max_tokens": 1, **body}
    return HttpCase(case_id, COMPLETIONS, body, 400, code, param, part or (param or ""))


def chat(
    case_id: str, param: str | None, *, part: str = "", code: str = "invalid_value", **body: Any
) -> HttpCase:
    body = {"messages": [USER], "max_tokens": 1, **body}
    return HttpCase(case_id, CHAT, body, 400, code, param, part or (param or ""))


def generate(case_id: str, param: str, *, code: str = "invalid_value", **body: Any) -> HttpCase:
    body = {"text": "x", **body} if "input_ids" not in body else body
    return HttpCase(case_id, GENERATE, body, 400, code, param, param)


def raw(case_id: str, body: bytes, status: int = 400, code: str = "invalid_json", **more: Any) -> HttpCase:
    return HttpCase(case_id, COMPLETIONS, body, status, code, **more)


TOO_LONG = "context_length_exceeded"
MISSING = "missing_required_parameter"
GUIDE = "invalid_guide"
UNKNOWN = "unknown_parameter"
UNSUPPORTED = "unsupported_parameter"

HTTP_CASES = (
    # prompts
    completion("empty text", "prompt", prompt="", part="empty"),
    completion("no prompts", "prompt", prompt=[], part="empty"),
    completion("no ids in a prompt", "prompt[0]", prompt=[[]]),
    completion("null prompt", "prompt", prompt=None),
    completion("number as prompt", "prompt", prompt=7),
    completion("id beyond the vocabulary", "prompt", prompt=[1, VOCABULARY * 16], part="token id"),
    completion("id beyond 31 bits", "prompt[0]", prompt=[1 << 31]),
    completion("id beyond 64 bits", "prompt[0]", prompt=[1 << 70]),
    completion("negative id", "prompt[1]", prompt=[1, -1]),
    completion("bool as id", "prompt[0]", prompt=[True]),
    completion("float as id", "prompt[0]", prompt=[1.5]),
    completion("ids mixed with text", "prompt", prompt=[1, "a"], part="all"),
    completion("too many prompts", "prompt", prompt=["x"] * 1025, part="1024"),
    completion("ids too long by one", "prompt", prompt=[7] * CONTEXT, code=TOO_LONG, part=str(CONTEXT)),
    completion("text too long", "prompt", prompt="word " * 5000, code=TOO_LONG),
    completion(
        "echo of a text too long", "prompt", prompt="word " * 5000, echo=True, logprobs=1, code=TOO_LONG
    ),
    HttpCase("no prompt at all", COMPLETIONS, {}, 400, MISSING, "prompt", "missing"),
    # numbers
    completion("temperature below zero", "temperature", temperature=-0.1),
    completion("temperature too high", "temperature", temperature=1e308),
    completion("temperature as text", "temperature", temperature="hot"),
    completion("bool as temperature", "temperature", temperature=True),
    completion("top_p zero", "top_p", top_p=0),
    completion("top_p above one", "top_p", top_p=1.001),
    completion("top_k below -1", "top_k", top_k=-2),
    completion("min_p above one", "min_p", min_p=1.5),
    completion("top_n_sigma below zero", "top_n_sigma", top_n_sigma=-1),
    completion("repetition_penalty zero", "repetition_penalty", repetition_penalty=0),
    completion("presence_penalty out of range", "presence_penalty", presence_penalty=2.1),
    completion("frequency_penalty out of range", "frequency_penalty", frequency_penalty=-2.1),
    completion("no tokens without echo", "max_tokens", max_tokens=0),
    completion("negative max_tokens", "max_tokens", max_tokens=-1),
    completion("bool as max_tokens", "max_tokens", max_tokens=True),
    completion("half a token", "max_tokens", max_tokens=1.5),
    completion("max_tokens beyond 64 bits", "max_tokens", max_tokens=1 << 70),
    completion("min_tokens above max_tokens", "min_tokens", min_tokens=2),
    completion("seed below 64 bits", "seed", seed=-(1 << 63) - 1),
    completion("seed beyond 63 bits", "seed", seed=1 << 63),
    completion("priority out of range", "priority", priority=1001),
    completion("time_limit zero", "time_limit", time_limit=0),
    raw("NaN", b'{"prompt": "x", "temperature": NaN}'),
    raw("infinity", b'{"prompt": "x", "temperature": Infinity}'),
    raw(
        "a float beyond all floats",
        b'{"prompt": "x", "temperature": 1e999}',
        code="invalid_value",
        param="temperature",
        part="temperature",
    ),
    # how much
    completion("n zero", "n", n=0),
    completion("huge n", "n", n=1 << 20),
    completion("bool as n", "n", n=True),
    completion("n of many prompts", "n", prompt=["x"] * 64, n=17),
    completion("best_of below n", "best_of", n=2, best_of=1),
    completion("best_of in a stream", "best_of", best_of=2, stream=True),
    chat("best_of in a streamed chat", "best_of", best_of=2, stream=True),
    completion("no tokens of the prompt kept", "truncate_prompt_tokens", truncate_prompt_tokens=0),
    completion("more kept than the context", "truncate_prompt_tokens", truncate_prompt_tokens=CONTEXT + 1),
    chat("more kept of a chat", "truncate_prompt_tokens", truncate_prompt_tokens=1 << 24),
    completion("huge n-grams", "no_repeat_ngram_size", no_repeat_ngram_size=1 << 20),
    completion("no decay", "top_p_decay", top_p_decay=0),
    completion("reset id beyond the vocabulary", "top_p_reset_ids", top_p_reset_ids=[VOCABULARY * 16]),
    completion(
        "raw logits of a completion", "return_context_logits", code=UNSUPPORTED, return_context_logits=True
    ),
    completion(
        "retention of nothing",
        "kv_cache_retention_config",
        kv_cache_retention_config={"token_range_retention_configs": [{"token_start": 5, "token_end": 5}]},
    ),
    completion("huge logprobs", "logprobs", logprobs=1 << 20),
    completion("bool as logprobs", "logprobs", logprobs=True),
    completion("huge prompt_logprobs", "prompt_logprobs", prompt_logprobs=21),
    completion("prompt_logprobs in a stream", "prompt_logprobs", prompt_logprobs=1, stream=True),
    completion("10,000 stop strings", "stop", stop=["x"] * 10_000),
    completion("an empty stop string", "stop", stop=""),
    completion("a long stop string", "stop[0]", stop=["x" * 257]),
    completion("stop ids beyond the vocabulary", "stop_token_ids", stop_token_ids=[VOCABULARY * 16]),
    completion("too many stop ids", "stop_token_ids", stop_token_ids=list(range(2000))),
    completion("too many bad words", "bad_words", bad_words=["x"] * 65),
    completion("nothing is allowed", "allowed_token_ids", allowed_token_ids=[]),
    completion("allowed beyond the vocabulary", "allowed_token_ids", allowed_token_ids=[VOCABULARY * 16]),
    completion("a bias of text", "logit_bias", logit_bias={"a": 1}),
    completion("a bias out of range", "logit_bias", logit_bias={"1": 101}),
    completion("a bias beyond the vocabulary", "logit_bias", logit_bias={str(VOCABULARY * 16): 1}),
    completion("5,000 biases", "logit_bias", logit_bias={str(i): 1 for i in range(5000)}),
    # fields
    completion("an empty tag", "structural_tag", structural_tag="{}", code=GUIDE, part="/format"),
    completion("two guides", "guided_regex", guided_json={}, guided_regex="a", part="guided_json"),
    completion("an empty guide", "guided_regex", guided_regex="", part="empty"),
    completion("nothing to choose from", "guided_choice", guided_choice=[], part="at least one"),
    completion("a lora", "lora_path", lora_path="x", code=UNSUPPORTED),
    completion("a misspelling", "max_token", max_token=5, code=UNKNOWN, part="max_tokens"),
    completion("another misspelling", "temprature", temprature=0, code=UNKNOWN, part="temperature"),
    completion(
        "a misspelling inside",
        "stream_options.include_usages",
        stream=True,
        stream_options={"include_usages": True},
        code=UNKNOWN,
        part="include_usage?",
    ),
    HttpCase("300 unknown fields", COMPLETIONS, {f"x{number}": 1 for number in range(300)}, part="256"),
    completion("another dialect", "max_new_tokens", max_new_tokens=1, code=UNSUPPORTED, part="max_tokens"),
    completion("an empty salt", "cache_salt", cache_salt=""),
    completion("suffix", "suffix", suffix="x", code=UNSUPPORTED),
    completion("stream as text", "stream", stream="yes"),
    completion("usage without a stream", "stream_options", stream_options={"include_usage": True}),
    completion("a long salt", "cache_salt", cache_salt="x" * 257),
    HttpCase(
        "another model", COMPLETIONS, {"prompt": "x", "model": "other"}, 404, "model_not_found", "model"
    ),
    # chat
    chat("no messages", "messages", messages=[]),
    chat("messages as text", "messages", messages="hi"),
    chat("5,000 messages", "messages", messages=[USER] * 5000),
    chat("a message without a role", "messages[0].role", messages=[{"content": "x"}], code=MISSING),
    chat("a message without content", "messages[0].content", messages=[{"role": "user"}], code=MISSING),
    chat("an empty role", "messages[0].role", messages=[{"role": "", "content": "x"}]),
    chat("a long role", "messages[0].role", messages=[{"role": "x" * 65, "content": "x"}]),
    chat(
        "a misspelling in a message",
        "messages[0].contents",
        messages=[{"role": "user", "contents": "x"}],
        code=UNKNOWN,
        part="content?",
    ),
    chat(
        "arguments of a tool that are none",
        "messages[0].tool_calls[0].function.arguments",
        messages=[{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 7}}]}],
    ),
    chat(
        "an image before its type",
        "messages[0].content[0].image_url",
        messages=[{"role": "user", "content": [{"image_url": "x", "type": "image_url"}]}],
        code=UNSUPPORTED,
        part="text only",
    ),
    chat(
        "an image",
        "messages[0].content[0].type",
        messages=[{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}],
        part="text only",
    ),
    chat("tools", "tools[0].function", tools=[{"type": "function"}], code=MISSING),
    chat(
        "a structural tag",
        "response_format",
        response_format={"type": "structural_tag"},
        part="format or structures or triggers is needed",
    ),
    chat("a response format without a schema", "response_format", response_format={"type": "json_schema"}),
    chat("top_logprobs alone", "top_logprobs", top_logprobs=2),
    chat("two limits", "max_completion_tokens", max_completion_tokens=2),
    chat(
        "two kinds of end", "continue_final_message", continue_final_message=True, add_generation_prompt=True
    ),
    chat("a template's own variable", "chat_template_kwargs", chat_template_kwargs={"messages": []}),
    chat(
        "a conversation too long",
        "messages",
        messages=[{"role": "user", "content": "word " * 5000}],
        code=TOO_LONG,
    ),
    # SGLang's dialect
    generate("text and ids", "text", text="x", input_ids=[1]),
    HttpCase("neither text nor ids", GENERATE, {}, 400, "invalid_value", "text", "text"),
    generate("max_new_tokens zero", "sampling_params.max_new_tokens", sampling_params={"max_new_tokens": 0}),
    generate("a temperature below zero", "sampling_params.temperature", sampling_params={"temperature": -1}),
    generate("logprobs without asking", "top_logprobs_num", top_logprobs_num=2),
    generate("one rid twice", "rid", text=["x", "y"], rid=["a", "a"], code="duplicate_label"),
    generate("ids out of range", "input_ids", input_ids=[VOCABULARY * 16]),
    HttpCase(
        "a tokenizer's id out of range",
        "/detokenize",
        {"tokens": [1 << 30]},
        400,
        "invalid_value",
        "tokens",
        "tokens",
    ),
    HttpCase(
        "two prompts in one",
        "/tokenize",
        {"prompt": "x", "messages": [USER]},
        400,
        "invalid_value",
        "prompt",
        "prompt",
    ),
    # bodies
    raw("empty body", b""),
    raw("half a body", b'{"prompt": "x"'),
    raw("two bodies", b'{"prompt": "x"}{"prompt": "x"}'),
    raw("a list as body", b"[]", code="invalid_value"),
    raw("bad UTF-8", b'{"prompt": "\xff\xfe"}'),
    raw("half a surrogate pair", b'{"prompt": "\\ud800"}'),
    HttpCase(
        "deep JSON",
        CHAT,
        b'{"messages": [], "chat_template_kwargs": ' + b'{"x": ' * 20_000,
        400,
        "invalid_json",
    ),
    HttpCase(
        "deep JSON of megabytes",
        CHAT,
        b'{"messages": [], "chat_template_kwargs": ' + b'{"x": ' * 100_000,
        400,
        "invalid_value",
        "chat_template_kwargs",
    ),
    completion("a deep prompt", "prompt[0][0]", prompt=[[[[]]]]),
    raw("deep JSON in a free field", b'{"metadata": ' + b"[" * 50_000 + b"]" * 50_000 + b"}"),
    raw("10 MB", b'{"prompt": "' + b"x" * 10_000_000 + b'"}', 413, "request_too_large"),
    raw("no type", b"{}", 415, "unsupported_media_type", headers={}),
    raw(
        "a form",
        b"a=b",
        415,
        "unsupported_media_type",
        headers={"content-type": "application/x-www-form-urlencoded"},
    ),
    raw("zipped", b"{}", 415, "unsupported_encoding", headers={**JSON, "content-encoding": "gzip"}),
    raw(
        "an id with a space",
        b"{}",
        400,
        "invalid_value",
        headers={**JSON, "x-request-id": "a b"},
        param="X-Request-Id",
    ),
    HttpCase("no such path", "/v1/nothing", {}, 404, "not_found"),
    HttpCase("a path of others", "/v1/batches", {"input": "hi"}, 404, "not_found"),
    HttpCase("a response that nobody keeps", "/v1/responses/resp_1/cancel", {}, 404, "not_found"),
    HttpCase("no such method", COMPLETIONS, b"", 405, "method_not_allowed", method="GET", headers={}),
)
