"""ENDPOINTS: every path of the HTTP server, with its bodies and answers. The routes and the API description
are made from this table.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from carousel.server.admin import control, info, probes
from carousel.server.admin.control_types import EmptyBody, PauseBody, ProfileBody
from carousel.server.admin.lora_updates import (
    LoadAdapterBody,
    UnloadAdapterBody,
    UpdateAnswer,
    load_adapter,
    unload_adapter,
)
from carousel.server.admin.profiles import profile
from carousel.server.admin.weights import (
    UpdateWeightsAnswer,
    UpdateWeightsBody,
    WeightVersion,
    update_weights,
    weight_version,
)
from carousel.server.anthropic.messages import count_tokens, create_message
from carousel.server.anthropic.responses import CountTokensResponse, MessagesResponse
from carousel.server.anthropic.types import CountTokensBody, MessagesBody
from carousel.server.http.errors import MESSAGES, AnthropicErrorBody, ErrorBody
from carousel.server.openai.chat import create_chat_completion
from carousel.server.openai.completions import create_completion
from carousel.server.openai.embedding_types import EmbeddingBody, EmbeddingResponse
from carousel.server.openai.embeddings import create_embedding
from carousel.server.openai.models import list_models, retrieve_model
from carousel.server.openai.response_types import ChatResponse, CompletionResponse, ModelCard, ModelList
from carousel.server.openai.types import ChatBody, CompletionBody
from carousel.server.responses.create import create_response
from carousel.server.responses.types import ResponseBody, ResponsesBody
from carousel.server.sglang.abort import AbortAnswer, AbortBody, abort_request
from carousel.server.sglang.generate import generate
from carousel.server.sglang.generate_types import GenerateBody, GenerateResponse
from carousel.server.sglang.tokenize import detokenize, tokenize
from carousel.server.sglang.tokenize_types import (
    DetokenizeBody,
    DetokenizeResponse,
    TokenizeBody,
    TokenizeResponse,
)
from carousel.server.tenancy.auth import Handler
from carousel.server.vectors.scoring import create_ranking, create_score
from carousel.server.vectors.scoring_types import RerankBody, RerankResponse, ScoreBody, ScoreResponse
from runtime.ring.tenants import Role
from runtime.settings.config import RuntimeConfig

METRICS = "/metrics"
WITH_BODY = (400, 408, 413, 415, 500)
RUNTIME = (500, 503)
STATS = (400, *RUNTIME)
"""Statuses of paths that ask the runtime: it may be gone, not ready, or full."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    path: str
    """Path in Starlette's form."""
    handler: Handler
    summary: str
    response: Any
    """Type of the body of a 200; None for plain text."""
    methods: tuple[str, ...] = ("GET",)
    body: type | None = None
    body_is_optional: bool = False
    streams: bool = False
    """True if `stream: true` is answered with events."""
    statuses: tuple[int, ...] = ()
    """Statuses of its errors, beside those that every path has."""
    error: type = ErrorBody
    """Type of the body of an error."""
    answers_503: Any = None
    """Type of the body of a 503 that is not an error."""
    role: Role | None = "admin"
    """Role of the keys that may ask, beside admins; None: no key is needed."""
    get_needs_key: bool = False
    """True if the GET of this endpoint changes something. Any web page can make a browser send a GET, so
    without keys there is no GET; a browser adds no key by itself.
    """

    def role_with(self, config: RuntimeConfig) -> Role | None:
        """Return the role that a server with these settings requires; None: no key."""
        is_open = not config.has_api_keys or (self.path == METRICS and config.metrics_open)
        return None if is_open else self.role

    def methods_with(self, *, has_key: bool) -> tuple[str, ...]:
        """Return the methods that a server with or without API keys accepts."""
        if self.get_needs_key and not has_key:
            return tuple(method for method in self.methods if method != "GET")
        return self.methods


def _generating(path: str, handler: Any, summary: str, body: type, response: Any) -> Endpoint:
    statuses = (404, *WITH_BODY, 503)
    return Endpoint(
        path, handler, summary, response, ("POST",), body, streams=True, statuses=statuses, role="user"
    )


def _for_users(path: str, handler: Any, summary: str, body: type, response: Any) -> Endpoint:
    statuses = (404, *WITH_BODY, 503)
    return Endpoint(path, handler, summary, response, ("POST",), body, statuses=statuses, role="user")


def _command(path: str, handler: Any, summary: str, body: type) -> Endpoint:
    statuses = (409, *WITH_BODY, 503)
    return Endpoint(
        path, handler, summary, dict[str, Any], ("POST",), body, body_is_optional=True, statuses=statuses
    )


ENDPOINTS = (
    _generating(
        "/v1/completions", create_completion, "OpenAI completions", CompletionBody, CompletionResponse
    ),
    _generating("/v1/chat/completions", create_chat_completion, "OpenAI chat", ChatBody, ChatResponse),
    replace(
        _generating(
            MESSAGES, create_message, "Anthropic's Messages API, text only", MessagesBody, MessagesResponse
        ),
        error=AnthropicErrorBody,
    ),
    replace(
        _for_users(
            f"{MESSAGES}/count_tokens",
            count_tokens,
            "The number of tokens of such a request",
            CountTokensBody,
            CountTokensResponse,
        ),
        error=AnthropicErrorBody,
    ),
    _generating("/v1/responses", create_response, "OpenAI responses", ResponsesBody, ResponseBody),
    _generating(
        "/generate", generate, "SGLang's own request", GenerateBody, GenerateResponse | list[GenerateResponse]
    ),
    Endpoint(
        "/abort_request",
        abort_request,
        "End requests early, by their names",
        AbortAnswer,
        ("POST",),
        AbortBody,
        statuses=(*WITH_BODY, 503),
        role="user",
    ),
    _for_users(
        "/v1/embeddings",
        create_embedding,
        "OpenAI embeddings, of a server of --task embed",
        EmbeddingBody,
        EmbeddingResponse,
    ),
    *(
        _for_users(path, create_score, "How near texts are, of --task embed", ScoreBody, ScoreResponse)
        for path in ("/score", "/v1/score")
    ),
    *(
        _for_users(path, create_ranking, "Texts by relevance, of --task embed", RerankBody, RerankResponse)
        for path in ("/rerank", "/v1/rerank", "/v2/rerank")
    ),
    *(
        endpoint
        for prefix in ("", "/v1")
        for endpoint in (
            _for_users(f"{prefix}/tokenize", tokenize, "The ids of a prompt", TokenizeBody, TokenizeResponse),
            _for_users(
                f"{prefix}/detokenize", detokenize, "The text of ids", DetokenizeBody, DetokenizeResponse
            ),
        )
    ),
    Endpoint("/v1/models", list_models, "The one model that is served", ModelList, role="user"),
    Endpoint(
        "/v1/models/{name:path}",
        retrieve_model,
        "A model by its name",
        ModelCard,
        statuses=(404,),
        role="user",
    ),
    Endpoint("/", info.index, "The names of the server and its models", info.Index, role="user"),
    Endpoint("/live", probes.live, "Whether the HTTP process answers", probes.ProbeAnswer, role=None),
    *(
        Endpoint(
            path,
            probes.ready,
            "Whether a request would be served",
            probes.ProbeAnswer,
            answers_503=probes.ProbeAnswer,
            role=None,
        )
        for path in ("/ready", "/health")
    ),
    Endpoint(
        "/health_generate",
        probes.health_generate,
        "Whether a request is served: one is made up",
        probes.ProbeAnswer,
        answers_503=probes.ProbeAnswer,
        role="user",
    ),
    Endpoint("/version", info.version, "The version of this server", info.Version, role="user"),
    *(
        Endpoint(path, info.model_info, "What is served", info.ModelInfo, role="user")
        for path in ("/model_info", "/get_model_info")
    ),
    *(
        Endpoint(path, weight_version, "Which weights are served", WeightVersion, role="user")
        for path in ("/weight_version", "/get_weight_version")
    ),
    Endpoint("/get_load", info.get_load, "Load, from memory", list[info.Load], role="metrics"),
    Endpoint(METRICS, control.metrics, "Prometheus' text", None, statuses=RUNTIME, role="metrics"),
    Endpoint("/stats", control.stats, "State and load, from memory", dict[str, Any]),
    *(
        Endpoint(f"/stats/{kind}", handler, f"Statistics of {text}", list[dict[str, Any]], statuses=STATS)
        for kind, handler, text in (
            ("iterations", control.iteration_stats, "each iteration, ?after=N: those after number N"),
            ("requests", control.request_stats, "each live request in each iteration"),
        )
    ),
    Endpoint(
        "/snapshot",
        control.snapshot,
        "Rows, who waits and why, pages, the largest nodes of the radix tree",
        dict[str, Any],
        statuses=RUNTIME,
    ),
    Endpoint(
        "/timelines/{request_id:path}",
        control.timeline,
        "The moments of a sampled request, by its X-Request-Id",
        list[dict[str, Any]],
        statuses=(404, *STATS),
    ),
    *(
        Endpoint(path, control.server_info, "Figures and settings", dict[str, Any], statuses=RUNTIME)
        for path in ("/server_info", "/get_server_info")
    ),
    Endpoint(
        "/flush_cache",
        control.flush_cache,
        "Forget cached prefixes that nothing uses",
        dict[str, Any],
        ("GET", "POST"),
        get_needs_key=True,
        statuses=RUNTIME,
    ),
    *(
        Endpoint(
            f"{prefix}/{what}_lora_adapter",
            handler,
            summary,
            UpdateAnswer,
            ("POST",),
            body,
            statuses=(403, *statuses, *WITH_BODY, 503),
        )
        for prefix in ("", "/v1")
        for what, handler, summary, body, statuses in (
            ("load", load_adapter, "Serve an adapter by a name", LoadAdapterBody, ()),
            ("unload", unload_adapter, "Serve an adapter no longer", UnloadAdapterBody, (404,)),
        )
    ),
    Endpoint(
        "/update_weights_from_disk",
        update_weights,
        "Serve other weights from now on",
        UpdateWeightsAnswer,
        ("POST",),
        UpdateWeightsBody,
        statuses=(403, 409, *WITH_BODY, 503),
    ),
    _command("/pause_generation", control.pause_generation, "Launch no more steps", PauseBody),
    _command("/continue_generation", control.continue_generation, "Go on after a pause", EmptyBody),
    _command("/start_profile", control.start_profile, "Record the next steps", ProfileBody),
    _command("/stop_profile", control.stop_profile, "Write what was recorded", EmptyBody),
    Endpoint(
        "/profiles/{file}",
        profile,
        "What was recorded, with the requests meanwhile",
        dict[str, Any],
        statuses=(404, *STATS),
    ),
)
