"""Route /v1/models: lists the one model of this server, by each of its names, and its adapters."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from carousel.server.openai.response_types import ModelCard, ModelList
from carousel.server.server_state import ServerState


async def list_models(request: Request) -> Response:
    return _json(ModelList(_cards(request.app.state.server)))


async def retrieve_model(request: Request) -> Response:
    server: ServerState = request.app.state.server
    name = request.path_params["name"]
    served = server.served_model(name)
    wanted = name if served.adapter is None else served.name
    return _json(next((card for card in _cards(server) if card.id == wanted), _cards(server)[0]))


def _cards(server: ServerState) -> list[ModelCard]:
    """Return the cards of the model and of its adapters."""
    names, length = server.config.model_names, server.config.context_length
    cards = [ModelCard(name, server.created, length, root=names[0]) for name in names]
    adapters = server.adapters.read() if server.config.enable_lora else ()
    return cards + [ModelCard(name, server.created, length, root=name, parent=names[0]) for name in adapters]


def _json(body: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
