"""ServerState: what the endpoints share. Made once by main; knows no HTTP."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path

from api_server.logprobs import TokenTexts
from client.async_client import AsyncClient
from runtime.config import RuntimeConfig
from runtime.errors import RequestError, RingClosed
from runtime.model_config import SamplingDefaults
from runtime.status_page import StatusPage


@dataclass(slots=True, eq=False)
class ServerState:
    client: AsyncClient
    config: RuntimeConfig
    defaults: SamplingDefaults
    status: StatusPage
    token_texts: TokenTexts = field(init=False)
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.token_texts = TokenTexts(Path(self.config.tokenizer))

    def check_serving(self) -> None:
        """Raises RequestError (503) or RingClosed while the launch as a whole is not ready, or no longer."""
        if self.client.error is not None:
            raise self.client.error
        state = self.status.read("launcher").state
        if state == "failed":
            raise RingClosed("the runtime has failed")
        if state == "draining":
            raise RequestError("the server is shutting down", code="shutting_down", status=503)
        if state != "ready" or not self.client.is_connected:
            raise RequestError("the server is not ready yet", code="not_ready", status=503)

    def check_model(self, name: str | None) -> None:
        """Raises RequestError (404) for a model that is not served here. None means the one there is."""
        if name is not None and name != self.config.served_model_name:
            raise RequestError(
                f"The model `{name:.100}` does not exist", param="model", code="model_not_found", status=404
            )


def new_id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"
