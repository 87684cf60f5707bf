"""The ASGI application: routes, and what stands in front of them."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route

from carousel.server.endpoints import ENDPOINTS
from carousel.server.http.errors import HANDLERS
from carousel.server.http.request_id import RequestIdMiddleware
from carousel.server.http.web_origin import WebOriginMiddleware, machine_names
from carousel.server.openapi import document_route
from carousel.server.server_state import ServerState
from carousel.server.tenancy.auth import ApiKeyMiddleware
from runtime.settings.config import RuntimeConfig

# A page may read them beside what every page may.
EXPOSED_HEADERS = ("X-Request-Id", "Retry-After")


def make_app(server: ServerState) -> Starlette:
    config = server.config
    routes = [
        Route(each.path, each.handler, methods=list(each.methods_with(has_key=bool(config.api_key))))
        for each in ENDPOINTS
    ]
    app = Starlette(
        routes=[*routes, document_route(config)],
        middleware=_middleware(config),
        exception_handlers=HANDLERS,
    )
    # A slash too many is a wrong path; after a redirection some clients send no body.
    app.router.redirect_slashes = False
    app.state.server = server
    return app


def _middleware(config: RuntimeConfig) -> list[Middleware]:
    """The outermost first."""
    middleware = [Middleware(RequestIdMiddleware)]
    if config.checks_web_origin:
        middleware.append(
            Middleware(
                WebOriginMiddleware,
                own_hosts=machine_names(config.host),
                allowed_hosts=config.host_names,
                origins=config.origins,
            )
        )
    if config.origins:
        # Before the key: a browser's first question has none, and its page may read why it was refused.
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=config.origins,
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
                expose_headers=EXPOSED_HEADERS,
            )
        )
    if config.api_key:
        middleware.append(
            Middleware(
                ApiKeyMiddleware,
                api_keys=config.api_keys,
                metrics_open=config.metrics_open,
                has_tenants=config.cache_salt_per_api_key,
            )
        )
    return middleware
