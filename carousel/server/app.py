"""The ASGI application: its routes and middleware."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route

from carousel.server.endpoints import ENDPOINTS, Endpoint
from carousel.server.http.errors import HANDLERS
from carousel.server.http.request_id import RequestIdMiddleware
from carousel.server.http.root_path import RootPathMiddleware
from carousel.server.http.web_origin import WebOriginMiddleware, machine_names
from carousel.server.openapi import document_endpoint
from carousel.server.server_state import ServerState
from carousel.server.tenancy.auth import ApiKeyMiddleware, guarded
from carousel.server.web.page import PageMiddleware, page_files
from runtime.settings.config import RuntimeConfig

# Headers that a web page may read besides those that are always readable.
EXPOSED_HEADERS = ("X-Request-Id", "Retry-After", "X-Carousel-Ignored")


def make_app(server: ServerState) -> Starlette:
    config = server.config
    endpoints = (*ENDPOINTS, document_endpoint(config))
    app = Starlette(
        routes=[_route(each, config) for each in endpoints],
        middleware=_middleware(server, endpoints),
        exception_handlers=HANDLERS,
    )
    # A path with a superfluous slash is unknown: after a redirection some clients send no body.
    app.router.redirect_slashes = False
    app.state.server = server
    return app


def _route(endpoint: Endpoint, config: RuntimeConfig) -> Route:
    role = endpoint.role_with(config)
    handler = endpoint.handler if role is None else guarded(role, endpoint.handler)
    return Route(endpoint.path, handler, methods=list(endpoint.methods_with(has_key=config.has_api_keys)))


def _middleware(server: ServerState, endpoints: Sequence[Endpoint]) -> list[Middleware]:
    """Return the middleware, the outermost first."""
    config = server.config
    middleware = [Middleware(RequestIdMiddleware)]
    if config.root_path:
        middleware.append(Middleware(RootPathMiddleware, root_path=config.root_path))
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
        # Before the check of keys: a preflight has no key, and the page may read the reason of a refusal.
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=config.origins,
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
                expose_headers=EXPOSED_HEADERS,
            )
        )
    if not config.no_page:
        middleware.append(Middleware(PageMiddleware, files=page_files(), needs_key=config.has_api_keys))
    if config.has_api_keys:
        middleware.append(
            Middleware(
                ApiKeyMiddleware,
                tenants=server.tenants,
                open_paths=[each.path for each in endpoints if each.role_with(config) is None],
            )
        )
    return middleware
