"""Route /openapi.json: the description of the HTTP API, made from the table of endpoints and the types of
bodies.
"""

from __future__ import annotations

import gzip
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from carousel.conversation import FunctionBody
from carousel.server.endpoints import ENDPOINTS, Endpoint
from carousel.server.http.errors import AnthropicErrorBody, ErrorBody
from carousel.server.openai.types import ChatBody
from carousel.server.request.field_table import FIELD_TABLES, described_fields
from carousel.server.responses.types import ResponsesBody
from runtime.settings.config import RuntimeConfig
from runtime.wire.format import MAX_LABEL_CHARS

PATH = "/openapi.json"
REF_TEMPLATE = "#/components/schemas/{name}"
JSON_TYPE = "application/json"
REQUEST_ID = {
    "name": "X-Request-Id",
    "in": "header",
    "description": "Comes back in the answer.",
    "schema": {"type": "string", "minLength": 1, "maxLength": MAX_LABEL_CHARS, "pattern": "^[!-~]+$"},
}


def document_endpoint(config: RuntimeConfig) -> Endpoint:
    """Return the endpoint that serves the document. The document is made once."""
    document = msgspec.json.encode(describe(config))
    packed = gzip.compress(document, mtime=0)  # a fifteenth of the size

    async def openapi(request: Request) -> Response:
        headers = {"Vary": "Accept-Encoding"}
        if "gzip" in request.headers.get("accept-encoding", ""):
            return Response(packed, headers={**headers, "Content-Encoding": "gzip"}, media_type=JSON_TYPE)
        return Response(document, headers=headers, media_type=JSON_TYPE)

    return replace(OWN, handler=openapi)


def describe(config: RuntimeConfig) -> dict[str, Any]:
    """Return the OpenAPI document. Its components are JSON Schemas of exactly the types that are decoded and
    encoded.
    """
    types = _types()
    schemas, components = msgspec.json.schema_components(types, ref_template=REF_TEMPLATE)
    components[FunctionBody.__name__]["properties"]["arguments"] = {"type": ["string", "object", "null"]}
    for body in (ChatBody, ResponsesBody):
        tools = {"type": ["array", "null"], "items": {"type": "object"}}
        components[body.__name__]["properties"]["tools"] = tools
    for kind in FIELD_TABLES:
        schema = components[kind.__name__]
        schema["properties"] |= described_fields(kind)
        # A null is accepted for unknown fields, too.
        schema["additionalProperties"] = {"type": "null"} if config.unknown_fields == "refuse" else True
    schema_of = {repr(kind): schema for kind, schema in zip(types, schemas, strict=True)}
    paths = {
        endpoint.path.replace(":path", ""): {
            method.lower(): _operation(endpoint, method, config, schema_of)
            for method in endpoint.methods_with(has_key=config.has_api_keys)
        }
        for endpoint in (*ENDPOINTS, OWN)
    }
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "Carousel", "version": "1", "description": "See docs/openai.md."},
        "paths": paths,
        "components": {"schemas": components},
    }
    if config.root_path:
        document["servers"] = [{"url": config.root_path}]
    if config.has_api_keys:
        document["components"]["securitySchemes"] = {
            "key": {"type": "http", "scheme": "bearer"},
            "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
        document["security"] = [{"key": []}, {"x-api-key": []}]
    return document


def _types() -> list[Any]:
    found: dict[str, Any] = {repr(kind): kind for kind in (ErrorBody, AnthropicErrorBody, dict[str, Any])}
    for endpoint in ENDPOINTS:
        for kind in (endpoint.body, endpoint.response, endpoint.answers_503):
            if kind is not None:
                found[repr(kind)] = kind
    return list(found.values())


def _operation(
    endpoint: Endpoint, method: str, config: RuntimeConfig, schema_of: dict[str, Any]
) -> dict[str, Any]:
    # Every route refuses a malformed X-Request-Id, also without a key, and pages of other sites.
    statuses = {400, 500, *endpoint.statuses} | ({403} if config.checks_web_origin else set())
    role = endpoint.role_with(config)
    if role is not None:
        # A request with a body takes a share of a limited resource.
        statuses |= {401, 403} | ({429} if endpoint.body is not None else set())
    answer = partial(_answer, schema_of=schema_of)
    responses = {str(status): answer(status, endpoint.error) for status in sorted(statuses)}
    responses["200"] = answer(200, endpoint.response, streams=endpoint.streams)
    if endpoint.answers_503 is not None:
        responses["503"] = answer(503, endpoint.answers_503)
    operation: dict[str, Any] = {
        "operationId": f"{method.lower()}{endpoint.path.replace(':path', '')}",
        "summary": endpoint.summary,
        "parameters": [REQUEST_ID, *_path_parameters(endpoint.path)],
        "responses": responses,
    }
    if endpoint.body is not None:
        content = {JSON_TYPE: {"schema": schema_of[repr(endpoint.body)]}}
        operation["requestBody"] = {"required": not endpoint.body_is_optional, "content": content}
    if config.has_api_keys:
        operation["security"] = [] if role is None else [{"key": [role]}, {"x-api-key": [role]}]
    return operation


def _path_parameters(path: str) -> list[dict[str, Any]]:
    if "{name" not in path:
        return []
    return [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]


def _answer(status: int, kind: Any, *, schema_of: dict[str, Any], streams: bool = False) -> dict[str, Any]:
    if kind is None:
        content: dict[str, Any] = {"text/plain": {"schema": {"type": "string"}}}
    else:
        content = {JSON_TYPE: {"schema": schema_of[repr(kind)]}}
    if streams:
        # No schema: some tools read it as that of one event, others as that of the whole stream.
        content["text/event-stream"] = {}
    return {"description": HTTPStatus(status).phrase, "content": content}


async def _nobody(_: Request) -> Response:
    raise AssertionError("the document's own handler is made with it")


OWN = Endpoint(PATH, _nobody, "This document", dict[str, Any], role="user")
