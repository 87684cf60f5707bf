"""The ASGI application: routes, and what stands in front of them."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import Route

from api_server.auth import ApiKeyMiddleware
from api_server.chat import create_chat_completion
from api_server.completions import create_completion
from api_server.control import flush_cache, metrics, server_info, stats
from api_server.errors import HANDLERS
from api_server.generate import generate
from api_server.models import list_models, retrieve_model
from api_server.probes import live, ready
from api_server.request_id import RequestIdMiddleware
from api_server.server_state import ServerState


def make_app(server: ServerState) -> Starlette:
    config = server.config
    middleware = [Middleware(RequestIdMiddleware)]
    if config.api_key:
        middleware.append(
            Middleware(ApiKeyMiddleware, api_key=config.api_key, metrics_open=config.metrics_open)
        )
    app = Starlette(
        routes=[
            Route("/live", live),
            Route("/ready", ready),
            Route("/health", ready),
            Route("/metrics", metrics),
            Route("/stats", stats),
            Route("/server_info", server_info),
            Route("/flush_cache", flush_cache, methods=["GET", "POST"]),
            Route("/generate", generate, methods=["POST"]),
            Route("/v1/models", list_models),
            Route("/v1/models/{name:path}", retrieve_model),
            Route("/v1/completions", create_completion, methods=["POST"]),
            Route("/v1/chat/completions", create_chat_completion, methods=["POST"]),
        ],
        middleware=middleware,
        exception_handlers=HANDLERS,
    )
    # A slash too many is a wrong path; after a redirection some clients send no body.
    app.router.redirect_slashes = False
    app.state.server = server
    return app
