"""/v1/models: the one model that this server has, by each of its names."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from carousel.server.openai.responses import ModelCard, ModelList
from carousel.server.server_state import ServerState


async def list_models(request: Request) -> Response:
    return _json(ModelList(_cards(request.app.state.server)))


async def retrieve_model(request: Request) -> Response:
    server: ServerState = request.app.state.server
    name = request.path_params["name"]
    server.check_model(name)
    return _json(next((card for card in _cards(server) if card.id == name), _cards(server)[0]))


def _cards(server: ServerState) -> list[ModelCard]:
    names = server.config.model_names
    return [ModelCard(name, server.created, server.config.context_length, root=names[0]) for name in names]


def _json(body: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
