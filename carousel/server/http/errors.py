"""Errors in the form that clients expect: a status and OpenAI's {"error": {message, type, param, code}}, or
Anthropic's {"type": "error", "error": {type, message}} for the paths of its API.
"""

from __future__ import annotations

import logging
import math
from http import HTTPStatus

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from carousel.server.request.held_body import release_body
from runtime.base.errors import CarouselError, Overloaded, RequestError, RingClosed

logger = logging.getLogger(__name__)

UNAVAILABLE_RETRY_S = 1.0
TYPES = {403: "permission_error", 429: "rate_limit_error"}
"""Types of errors for these statuses. All others have the general type of client errors or of server errors.
"""
MESSAGES = "/v1/messages"
"""Path of Anthropic's API. Answers to it and to all paths below it have Anthropic's form."""
ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""Types of Anthropic's errors for these statuses. All others have the general type of client errors or of
server errors.
"""
ROUTING = {
    404: "there is no such path; /openapi.json lists those there are",
    405: "the path does not take this method; the Allow header names those it takes",
}
"""Messages for requests to a wrong path or with a wrong method, by status."""
_CHATS = "send conversations to /v1/chat/completions"
_VECTORS = "a server of --task embed has /v1/embeddings, /v1/score and /v1/rerank"
_OPENAI = "this server speaks OpenAI's API below /v1"
_TEXT_ONLY = "this server takes and gives text only"
NOT_BUILT = {
    "/v1/messages/batches": "send the requests themselves to /v1/messages; `carousel-batch` sends a file",
    "/v1/responses/compact": "send fewer items; truncation cuts what does not fit",
    "/v1/responses/input_tokens": "/tokenize gives the tokens of messages",
    "/v1/assistants": _CHATS,
    "/v1/threads": _CHATS,
    "/api": _OPENAI,
    "/openai": _OPENAI,
    "/v1/batches": "`carousel-batch` sends a file; completions take up to 1,024 prompts in one",
    "/v1/files": "send requests themselves, and texts in them",
    "/v1/moderations": _CHATS,
    **dict.fromkeys(("/classify", "/v1/classify", "/pooling", "/v1/pooling"), _VECTORS),
    **dict.fromkeys(
        (
            "/update_weights_from_tensor",
            "/update_weights_from_distributed",
            "/init_weights_update_group",
            "/destroy_weights_update_group",
            "/update_weights_from_ipc",
        ),
        "write a checkpoint, and send POST /update_weights_from_disk",
    ),
    **dict.fromkeys(
        (
            *("/begin_weight_update", "/end_weight_update", "/load_lora_adapter_from_tensors"),
            *("/get_weights_by_name", "/weights_checker", "/update_weight_version", "/start_weight_update"),
        ),
        "a checkpoint is what is served (POST /update_weights_from_disk), and GET /weight_version names it",
    ),
    **dict.fromkeys(
        (
            *("/sleep", "/wake_up", "/is_sleeping"),
            *("/release_memory_occupation", "/resume_memory_occupation", "/release_memory", "/resume_memory"),
        ),
        "the model stays in memory while it is served",
    ),
    **dict.fromkeys(
        ("/open_session", "/close_session"),
        "send the whole conversation: what the cache has of it is not computed again",
    ),
    **dict.fromkeys(("/pause", "/resume", "/is_paused"), "send POST /pause_generation, /continue_generation"),
    **dict.fromkeys(
        ("/parse_function_call", "/separate_reasoning"), "/v1/chat/completions does it to its answers"
    ),
    **dict.fromkeys(
        ("/perf_metrics", "/prometheus", "/kv_cache_events", "/server_load_metrics", "/v1/loads"),
        "ask /metrics, /get_load or /stats/iterations",
    ),
    **dict.fromkeys(
        (
            *("/set_internal_state", "/get_internal_state", "/configure_logging", "/set_trace_level"),
            *("/scale_elastic_ep", "/is_scaling_elastic_ep"),
        ),
        "settings are the launch's, and GET /server_info shows them",
    ),
    "/encode": "send texts to /v1/embeddings, of a server of --task embed",
    "/collective_rpc": "the client library has collective_rpc",
    "/tokenizer_info": "/model_info names the tokenizer, and /tokenize gives tokens",
    "/list_lora_adapters": "ask /v1/models",
    "/hicache": "the cache is in one memory; POST /flush_cache empties it",
    "/docs": "there are no pages of docs",
    "/redoc": "there are no pages of docs",
    **dict.fromkeys(("/invocations", "/vertex_generate", "/v2/models", "/inference/v1"), _OPENAI),
    "/v2/health": "ask /ready or /live",
    "/reset_prefix_cache": "send POST /flush_cache",
    "/ping": "ask /health",
    "/load": "ask /get_load",
    **dict.fromkeys(("/v1/audio", "/v1/images", "/v1/videos", "/v1/realtime"), _TEXT_ONLY),
}
"""Advice for paths, and all below them, that OpenAI, Anthropic, vLLM, SGLang, TensorRT-LLM, KServe or Ollama
has and this server does not.
"""
KEPT_NOWHERE = {
    "/v1/responses": "this server keeps no responses: there is none to read, to delete or to cancel. Closing "
    "the connection ends one that is being made, and its items are sent again with the next request",
}
"""Explanations for paths below those of objects that other servers keep."""


class ErrorDetail(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct):
    error: ErrorDetail


class AnthropicErrorDetail(msgspec.Struct):
    type: str
    message: str


class AnthropicErrorBody(msgspec.Struct, tag_field="type", tag="error"):
    error: AnthropicErrorDetail
    request_id: str | None = None


def as_request_error(error: Exception) -> RequestError:
    """Return the error for the HTTP client. Details of an error that is not the client's fault are only
    logged.
    """
    if isinstance(error, RequestError):
        return error
    if isinstance(error, RingClosed):
        return RequestError("the runtime behind this server is gone", code="runtime_closed", status=503)
    if isinstance(error, HTTPException):
        code = HTTPStatus(error.status_code).name.lower()
        return RequestError(ROUTING.get(error.status_code, error.detail), code=code, status=error.status_code)
    logger.error("a request failed", exc_info=error)
    return RequestError("the server failed on this request", status=500)


def error_body(error: RequestError) -> bytes:
    kind = TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    return msgspec.json.encode(ErrorBody(ErrorDetail(error.message, kind, error.param, error.code)))


def is_anthropic(path: str) -> bool:
    """Return True for a path of Anthropic's API, also with a root path before it."""
    return f"{MESSAGES}/" in f"{path}/"


def anthropic_error_body(error: RequestError, request_id: str | None = None) -> bytes:
    kind = ANTHROPIC_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return msgspec.json.encode(AnthropicErrorBody(AnthropicErrorDetail(kind, error.message), request_id))


def error_headers(error: RequestError) -> dict[str, str]:
    """Return the headers of an error's answer, which tell the client how to go on."""
    headers: dict[str, str] = {}
    if error.status in (429, 503):
        seconds = error.retry_after_s if isinstance(error, Overloaded) else UNAVAILABLE_RETRY_S
        headers["Retry-After"] = str(max(1, math.ceil(seconds)))
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return headers


def error_response(error: RequestError, scope: Scope) -> Response:
    """Return the answer to a request that has failed, in the form of its path."""
    if is_anthropic(scope["path"]):
        body = anthropic_error_body(error, scope.get("state", {}).get("request_id"))
    else:
        body = error_body(error)
    return Response(body, error.status, error_headers(error), media_type="application/json")


def _not_found(path: str, error: RequestError) -> RequestError:
    """Return the error for an unknown path, with advice if other servers have it."""
    for known, advice in NOT_BUILT.items():
        if path == known or path.startswith(f"{known}/"):
            message = f"{known} is not built: {advice}; /openapi.json lists the paths there are"
            return RequestError(message, code=error.code, status=error.status)
    for known, reason in KEPT_NOWHERE.items():
        if path.startswith(f"{known}/"):
            return RequestError(reason, code=error.code, status=error.status)
    return error


async def handle_error(request: Request, error: Exception) -> Response:
    """Answer a request with an error: the application's exception handler."""
    release_body(request.scope["state"])  # nobody waits for it until the caller has read the error
    told = as_request_error(error)
    if isinstance(error, HTTPException) and error.status_code == HTTPStatus.NOT_FOUND:
        told = _not_found(request.scope["path"], told)
    response = error_response(told, request.scope)
    if isinstance(error, HTTPException):
        # The answer to a refused method must name the allowed ones.
        response.headers.update(error.headers or {})
    return response


HANDLERS = dict.fromkeys((HTTPException, CarouselError, Exception), handle_error)
