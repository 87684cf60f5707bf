"""/v1/models: the one model that this server has."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from carousel.server.openai.responses import ModelCard, ModelList
from carousel.server.server_state import ServerState


async def list_models(request: Request) -> Response:
    return _json(ModelList([_card(request.app.state.server)]))


async def retrieve_model(request: Request) -> Response:
    server: ServerState = request.app.state.server
    server.check_model(request.path_params["name"])
    return _json(_card(server))


def _card(server: ServerState) -> ModelCard:
    name = server.config.served_model_name
    return ModelCard(name, server.created, server.config.context_length, root=name)


def _json(body: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
