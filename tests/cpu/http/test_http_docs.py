"""docs/openai.md speaks of everything that the HTTP server knows."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import Struct
from starlette.routing import Route

from carousel.conversation import MessageBody
from carousel.server.admin.metrics import Metrics
from carousel.server.anthropic.refusals import MESSAGES_REFUSED
from carousel.server.anthropic.types import (
    BlockBody,
    CacheControl,
    CountTokensBody,
    InputTool,
    MessagesBody,
    OutputConfigBody,
    ThinkingBody,
    ToolUseChoiceBody,
)
from carousel.server.app import make_app
from carousel.server.endpoints import ENDPOINTS
from carousel.server.openai.embedding_types import EmbeddingBody
from carousel.server.openai.types import ChatBody, CompletionBody, StreamOptions
from carousel.server.openapi import OWN
from carousel.server.request.field_table import FIELD_TABLES, INPUT_PART_REFUSED
from carousel.server.request.peer_fields import REFUSED, TAKEN
from carousel.server.responses.types import (
    InputItem,
    InputPart,
    ReasoningBody,
    ResponsesBody,
    ResponseStreamOptions,
    TextBody,
    TextFormatBody,
    ToolSelection,
)
from carousel.server.sglang.generate_types import GenerateBody, GenerateSampling
from carousel.server.sglang.tokenize_types import DetokenizeBody, TokenizeBody
from carousel.server.vectors.scoring_types import RerankBody, ScoreBody
from runtime.settings.config import RuntimeConfig
from runtime.wire.status_page import ProcessStatus
from tests.cpu.http.test_http_control import INFO

DOCS = Path(__file__).resolve().parents[3] / "docs"
TEXT, MESSAGES = (DOCS / "openai.md").read_text(), (DOCS / "messages.md").read_text()
RESPONSES = (DOCS / "responses.md").read_text()
OPENAI, _, REST = TEXT.partition("\n## /generate\n")
GENERATE, _, REST = REST.partition("\n## /tokenize and /detokenize\n")
TOKENIZE, _, REST = REST.partition("\n## /v1/embeddings\n")
EMBEDDINGS, _, REST = REST.partition("\n## /score and /rerank\n")
SCORING = REST.partition("\n## ")[0]


def named_in(text: str) -> set[str]:
    """Every name within a code span."""
    return {name for span in re.findall(r"`([^`\n]+)`", text) for name in re.findall(r"\w+", span)}


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (CompletionBody, OPENAI),
        (ChatBody, OPENAI),
        (MessageBody, OPENAI),
        (StreamOptions, OPENAI),
        *(
            (kind, RESPONSES)
            for kind in (ResponsesBody, InputItem, InputPart, TextBody, TextFormatBody, ReasoningBody)
        ),
        (ToolSelection, RESPONSES),
        (ResponseStreamOptions, RESPONSES),
        (GenerateBody, GENERATE),
        (GenerateSampling, GENERATE),
        (TokenizeBody, TOKENIZE),
        (DetokenizeBody, TOKENIZE),
        (EmbeddingBody, EMBEDDINGS),
        (MessagesBody, MESSAGES),
        (CountTokensBody, MESSAGES),
        (BlockBody, MESSAGES),
        (ThinkingBody, MESSAGES),
        (OutputConfigBody, MESSAGES),
        (ToolUseChoiceBody, MESSAGES),
        (InputTool, MESSAGES),
        (CacheControl, MESSAGES),
        (ScoreBody, SCORING),
        (RerankBody, SCORING),
    ],
)
def test_every_field_is_in_the_table(body: type[Struct], text: str) -> None:
    assert not set(body.__struct_fields__) - named_in(text)


def test_every_field_without_effect_is_in_the_table() -> None:
    assert not set(TAKEN) - named_in(OPENAI)
    for kind in (ResponsesBody, InputItem, InputPart, ReasoningBody):
        own = {*FIELD_TABLES[kind].taken, *FIELD_TABLES[kind].refused} - {
            *TAKEN,
            *REFUSED,
            *INPUT_PART_REFUSED,
        }
        assert not own - named_in(RESPONSES), kind


def test_every_field_of_anthropics_that_has_neutral_values_is_in_the_table() -> None:
    assert not {name for name, neutral in MESSAGES_REFUSED.items() if neutral} - named_in(MESSAGES)


def test_every_path_is_in_the_table() -> None:
    server: Any = SimpleNamespace(config=RuntimeConfig())
    paths = {route.path for route in make_app(server).routes if isinstance(route, Route)}
    assert "/generate" in paths
    for path in paths:
        assert path.replace(":path", "") in TEXT


def test_every_path_has_its_role_in_the_table() -> None:
    told = {}
    for row in re.findall(r"^\| (`(?:GET|POST) .*) \|$", OPENAI, re.MULTILINE):
        paths, *_, role = row.split(" | ")
        told.update(dict.fromkeys(re.findall(r"/[\w/{}.]*", paths), role.partition(",")[0]))
    endpoints = (*ENDPOINTS, OWN)
    assert told == {each.path.replace(":path", ""): each.role or "no" for each in endpoints}


def test_every_metric_is_in_the_table(tmp_path: Path) -> None:
    text = Metrics("m", tmp_path).render(ProcessStatus(), INFO).decode()
    names = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    names = {name.partition(":")[2] for name in names if not name.endswith("_created")}
    labels = {"model_name", "position", "finish_reason", "process", "lora_name", "sglang"}
    assert names == named_in(TEXT.partition("\n## Metrics\n")[2].replace("`carousel:", "`")) - labels
