"""Conversion of a submission to a GenerateRequest, with checks that name the argument.

Checks that need the model (lengths, vocabulary, chat template) are the tokenizer's. The bounds of the wire
are checked here, so that a mistake is an error at the call.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast, get_args

import msgspec
import numpy as np

from carousel.client.core.request.sampling_forms import normalize, params_for_wire
from carousel.client.core.request.submission import OTHERS_OPTIONS, Prompt, RequestOptions, Submission
from carousel.client.tracing.trace_context import trace_for_wire
from carousel.conversation import Conversation, pack_template_kwargs, pack_tools, wire_messages
from carousel.lora import adapter_for_wire, inline_for_wire
from carousel.prompt_tables import table_for_wire
from carousel.retention import retention_for_wire
from carousel.structured_outputs import guide_for_wire
from runtime.base.errors import InvalidRequest
from runtime.sampling.table import MAX_DRAFT_TOKENS
from runtime.wire.format import MAX_LABEL_CHARS, MAX_PRIORITY, MAX_PROMPT_TOKENS, MAX_TEXT_CHARS, pack_ids
from runtime.wire.messages import ChatMessage, GenerateRequest, Task
from runtime.wire.plan import PROCESSORS, AdapterRef, ProcessorCall, ProcessorCalls, check_calls

MAX_ID = (1 << 31) - 1
MAX_TIME_LIMIT_S = 2_000_000
"""Longest time limit in seconds (23 days), because the wire counts milliseconds in 31 bits."""
MAX_ARRIVAL_TIME = 100_000_000_000
"""Latest arrival time in seconds since 1970, in the year 5138. A later one was probably meant in
milliseconds.
"""
_TASKS = get_args(Task)
_FIELD_NAMES = {"text": "prompt", "processors": PROCESSORS}
"""Names under which callers know a request's fields, where they differ."""
_STRUCT_NAMES = {
    "guide": "structured_outputs",
    "adapter": "lora_request",
    "prompt_table": "prompt_adapter_request",
}
"""Arguments from which the structs of a request are made. Callers do not know the structs' own fields."""


def build_request(handle: bytes, submission: Submission) -> GenerateRequest:
    """Return a request in its form on the wire. A request without a seed gets one here, so that a second
    attempt samples the same tokens; `best_of` becomes the number of sequences. Raises InvalidRequest, which
    names the argument, and TypeError for an unknown argument.
    """
    options = submission.options
    if any(value is None for value in options.values()):
        options = _without_none(options)
    unknown = options.keys() - RequestOptions.__annotations__.keys()
    if unknown:
        raise TypeError(f"unexpected keyword argument {min(unknown)!r}")
    cache_salt = _label("cache_salt", options.get("cache_salt", ""))
    label = _label("label", submission.label)
    priority = _priority(options.get("priority", 0))
    add_special_tokens = _bool("add_special_tokens", options.get("add_special_tokens", True))
    continues = _bool("continue_final_message", options.get("continue_final_message", False))
    sampling = normalize(submission.sampling)
    text, input_ids, messages = _prompt_forms(submission.prompt)
    template_kwargs = pack_template_kwargs(options.get("chat_template_kwargs"))
    tools = pack_tools(options.get("tools"))
    if messages is None:
        _refuse_for_other_prompts("continue_final_message", continues)
        _refuse_for_other_prompts("chat_template_kwargs", template_kwargs)
        _refuse_for_other_prompts("tools", tools)
    tuning = options.get("prompt_tuning_config")
    add_generation_prompt = _ends_with_header(options.get("add_generation_prompt"), continues)
    return GenerateRequest(
        handle,
        params_for_wire(sampling, submission),
        text,
        input_ids,
        messages,
        label=label,
        stream=submission.stream,
        priority=priority,
        cache_salt=cache_salt,
        add_special_tokens=add_special_tokens,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continues,
        template_kwargs=template_kwargs,
        arrival_time=_unix_time(options.get("arrival_time")),
        time_limit_ms=_milliseconds(options.get("time_limit")),
        task=_task(options.get("task", "generate")),
        retention=retention_for_wire(options.get("kv_cache_retention_config")),
        guide=guide_for_wire(options.get("structured_outputs")),
        tenant=submission.tenant,
        tools=tools,
        draft_ids=_draft_ids(options.get("draft_token_ids")),
        prediction=_prediction(options.get("prediction", "")),
        trace=trace_for_wire(options.get("traceparent")),
        adapter=_adapter(options),
        processors=_processor_calls(options.get("logits_processors")),
        prompt_table=table_for_wire(options.get("prompt_adapter_request"), tuning),
        extra_ids=b"" if tuning is None else tuning.extra_ids,
    )


_KNOWN = frozenset(RequestOptions.__annotations__.keys() | OTHERS_OPTIONS)


def _without_none(options: RequestOptions) -> RequestOptions:
    """Return the options that have a value. An unknown one stays, to be refused, unless others have it."""
    given = {name: value for name, value in options.items() if value is not None or name not in _KNOWN}
    return cast(RequestOptions, given)


def _adapter(options: RequestOptions) -> AdapterRef | None:
    named, inline = adapter_for_wire(options.get("lora_request")), inline_for_wire(options.get("lora_config"))
    if named is not None and inline is not None:
        raise InvalidRequest("lora_config: give it or lora_request, not both", param="lora_config")
    return named or inline


def _processor_calls(processors: Any) -> ProcessorCalls:
    if processors is None:
        return ()
    if not isinstance(processors, Sequence) or isinstance(processors, str | bytes):
        raise InvalidRequest(f"{PROCESSORS} must be a list", param=PROCESSORS)
    calls = tuple(_processor_call(f"{PROCESSORS}[{n}]", each) for n, each in enumerate(processors))
    check_calls(calls)
    return calls


def _processor_call(where: str, given: Any) -> ProcessorCall:
    if not isinstance(given, Mapping) or not {"name"} <= set(given) <= {"name", "args"}:
        raise InvalidRequest(
            f"{where} must be the name of a processor of the launch, and its arguments, like "
            '{"name": ..., "args": {...}}: code never comes in a request',
            param=where,
        )
    name, args = _label(f"{where}.name", given["name"]), given.get("args")
    if args is not None and not isinstance(args, Mapping):
        raise InvalidRequest(f"{where}.args must be a mapping", param=f"{where}.args")
    try:
        return ProcessorCall(name, msgspec.json.encode(args) if args else b"")
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(
            f"{where}.args cannot be written as JSON: {error}", param=f"{where}.args"
        ) from None


def _draft_ids(ids: Any) -> bytes:
    name = "draft_token_ids"
    if ids is None:
        return b""
    if not isinstance(ids, Sequence | np.ndarray) or isinstance(ids, str | bytes) or len(ids) == 0:
        raise InvalidRequest(f"{name} must be token ids, and not empty", param=name)
    if len(ids) > MAX_DRAFT_TOKENS:
        raise InvalidRequest(
            f"{name}: {len(ids)} tokens; at most {MAX_DRAFT_TOKENS} are verified", param=name
        )
    return pack_token_ids(name, ids)


def _prediction(text: Any) -> str:
    if not isinstance(text, str) or len(text) > MAX_TEXT_CHARS:
        raise InvalidRequest(
            f"prediction must be text of at most {MAX_TEXT_CHARS} characters", param="prediction"
        )
    return text


def _ends_with_header(add_generation_prompt: bool | None, continue_final_message: bool) -> bool:
    """Return True if the prompt ends with the assistant's header. Raises InvalidRequest."""
    if continue_final_message and add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message: the last message cannot be continued with add_generation_prompt",
            param="continue_final_message",
        )
    if add_generation_prompt is None:
        return not continue_final_message
    return _bool("add_generation_prompt", add_generation_prompt)


def _label(name: str, value: Any) -> str:
    if not isinstance(value, str) or len(value) > MAX_LABEL_CHARS:
        raise InvalidRequest(f"{name} must be a string of at most {MAX_LABEL_CHARS} characters", param=name)
    return value


def no_text(message: msgspec.Struct, error: UnicodeEncodeError) -> InvalidRequest:
    """Return the error for a message with an invalid text, which has half of a surrogate pair."""
    name = next(_fields_with(error.object, message), "")
    where = f"{name}: " if name else ""
    return InvalidRequest(
        f"{where}half of a surrogate pair at character {error.start}, {error.object[error.start]!r}",
        param=name or None,
    )


def _fields_with(text: str, value: Any) -> Iterator[str]:
    """Yield the names of fields that hold this text, within structs and tuples."""
    if isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            held, known = getattr(value, name), _FIELD_NAMES.get(name, name)
            if held == text:
                yield known
            elif isinstance(held, msgspec.Struct):
                yield from (_STRUCT_NAMES.get(name, inner) for inner in _fields_with(text, held))
            elif isinstance(held, tuple):
                for number, each in enumerate(held):
                    if each == text:
                        yield f"{known}[{number}]"
                    yield from (f"{known}[{number}].{inner}" for inner in _fields_with(text, each))


def _priority(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) > MAX_PRIORITY:
        raise InvalidRequest(
            f"priority must be an integer from {-MAX_PRIORITY} to {MAX_PRIORITY}", param="priority"
        )
    return value


def _bool(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise InvalidRequest(f"{name} must be true or false, got {type(value).__name__}", param=name)
    return value


def _task(value: Any) -> Task:
    if not isinstance(value, str) or value not in _TASKS:
        raise InvalidRequest(f"task must be one of {', '.join(_TASKS)}", param="task")
    return value  # type: ignore[return-value]


def _refuse_for_other_prompts(name: str, value: object) -> None:
    if value:
        raise InvalidRequest(f"{name} is for a prompt of chat messages", param=name)


def _milliseconds(time_limit: Any) -> int:
    if time_limit is None:
        return 0
    if not _is_number(time_limit) or not 0.0 < time_limit <= MAX_TIME_LIMIT_S:
        raise InvalidRequest(
            f"time_limit must be a number of seconds above 0 and at most {MAX_TIME_LIMIT_S}",
            param="time_limit",
        )
    return math.ceil(float(time_limit) * 1000)


def _unix_time(arrival_time: Any) -> float:
    if arrival_time is None:
        return time.time()
    if not _is_number(arrival_time) or not 0.0 <= arrival_time <= MAX_ARRIVAL_TIME:
        raise InvalidRequest("arrival_time must be a number of seconds since 1970", param="arrival_time")
    return float(arrival_time)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _prompt_forms(prompt: Prompt) -> tuple[str | None, bytes | None, tuple[ChatMessage, ...] | None]:
    """Return (text, packed ids, messages), of which one is set."""
    if isinstance(prompt, str):
        if len(prompt) > MAX_TEXT_CHARS:
            raise InvalidRequest(
                f"prompt: at most {MAX_TEXT_CHARS} characters, got {len(prompt)}", param="prompt"
            )
        return prompt, None, None
    if not isinstance(prompt, Sequence | np.ndarray) or isinstance(prompt, bytes) or len(prompt) == 0:
        raise InvalidRequest("prompt must be text, token ids or chat messages, and not empty", param="prompt")
    if isinstance(prompt[0], Mapping):
        return None, None, wire_messages(cast(Conversation, prompt))
    if len(prompt) > MAX_PROMPT_TOKENS:
        raise InvalidRequest(
            f"prompt: at most {MAX_PROMPT_TOKENS} token ids, got {len(prompt)}", param="prompt"
        )
    return None, pack_token_ids("prompt", prompt), None


def pack_token_ids(name: str, ids: Any) -> bytes:
    """Return the ids of an argument as the wire carries them. Raises InvalidRequest for what is none."""
    # A bool is an int to Python and to numpy; as a token id it is a mistake.
    if isinstance(ids, np.ndarray):
        is_integer = ids.ndim == 1 and ids.dtype.kind in "iu"
    else:
        is_integer = all(kind is int or issubclass(kind, np.integer) for kind in set(map(type, ids)))
    if not is_integer:
        what = "neither token ids (integers) nor chat messages" if name == "prompt" else "no token ids"
        raise InvalidRequest(f"{name}: {what}", param=name)
    # Python's min of an array makes a number of each element: 0.1 s for a million.
    least, most = (ids.min(), ids.max()) if isinstance(ids, np.ndarray) else (min(ids), max(ids))
    if least < 0 or most > MAX_ID:
        raise InvalidRequest(f"{name}: token ids must be from 0 to {MAX_ID}", param=name)
    return pack_ids(ids)
