"""The ASGI application: routes, and what stands in front of them."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import Route

from api_server.auth import ApiKeyMiddleware
from api_server.chat import create_chat_completion
from api_server.completions import create_completion
from api_server.errors import HANDLERS
from api_server.models import list_models, retrieve_model
from api_server.probes import live, ready
from api_server.server_state import ServerState


def make_app(server: ServerState) -> Starlette:
    api_key = server.config.api_key
    app = Starlette(
        routes=[
            Route("/live", live),
            Route("/ready", ready),
            Route("/health", ready),
            Route("/v1/models", list_models),
            Route("/v1/models/{name:path}", retrieve_model),
            Route("/v1/completions", create_completion, methods=["POST"]),
            Route("/v1/chat/completions", create_chat_completion, methods=["POST"]),
        ],
        middleware=[Middleware(ApiKeyMiddleware, api_key=api_key)] if api_key else [],
        exception_handlers=HANDLERS,
    )
    # A slash too many is a wrong path; after a redirection some clients send no body.
    app.router.redirect_slashes = False
    app.state.server = server
    return app
