"""/openapi.json is complete and true: every route, field and status, held against the running server."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)
from starlette.routing import Route

from carousel.server.app import make_app
from carousel.server.openapi import describe
from runtime.settings.config import RuntimeConfig
from runtime.wire.messages import GenerateRequest, SequenceOutput
from tests.cpu.http.test_http_control import INFO
from tests.harness.http.http_front import Front, http_front
from tests.harness.ring.fake_ring import WAIT_S, failure, finish, output

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
]


def answer(request: GenerateRequest) -> list[SequenceOutput]:
    """Every sequence says "abc"; there are no embeddings."""
    if request.task == "embed":
        return [failure(request, "task_not_served", 400, "task")]
    return [output(request, "abc", index=index, finish=finish()) for index in range(request.sampling.n)]


@pytest.fixture(scope="module", params=["warn", "refuse"])
def front(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    run_dir = tmp_path_factory.mktemp("run")
    with http_front(run_dir, answer, unknown_fields=request.param) as front:
        front.ring.info = INFO
        yield front
        assert front.error is None


@pytest.fixture
def document(front: Front) -> Any:
    return front.http.get("/openapi.json").json()


def test_every_route_and_method_is_described(document: Any) -> None:
    class Server:
        config = RuntimeConfig()

    server: Any = Server()
    routes = [route for route in make_app(server).routes if isinstance(route, Route)]
    assert len(routes) == len(document["paths"])
    for route in routes:
        methods = {method.lower() for method in (route.methods or set()) - {"HEAD"}}
        assert methods == set(document["paths"][route.path.replace(":path", "")])


def test_every_field_has_a_type_or_its_values(document: Any) -> None:
    for name, schema in document["components"]["schemas"].items():
        for field, described in schema.get("properties", {}).items():
            rest = described.keys() - {"default", "description", "title"}
            assert rest, f"{name}.{field} says nothing"


@pytest.mark.parametrize(("policy", "further"), [("warn", True), ("refuse", {"type": "null"})])
def test_further_fields_are_described_as_the_setting_has_it(policy: Any, further: Any) -> None:
    schemas = describe(RuntimeConfig(unknown_fields=policy))["components"]["schemas"]
    for name in (
        "CompletionBody",
        "ChatBody",
        "MessageBody",
        "GenerateSampling",
        "EmbeddingBody",
        "TokenizeBody",
        "MessagesBody",
        "BlockBody",
    ):
        assert schemas[name]["additionalProperties"] == further
    assert schemas["PauseBody"]["additionalProperties"] is False
    assert schemas["CompletionBody"]["properties"]["tool_choice"] == {"enum": [None, "none", "auto"]}
    assert schemas["ChatBody"]["properties"]["store"] == {"type": ["boolean", "null"]}


def test_bounds_are_those_that_are_checked(front: Front, document: Any) -> None:
    fields = document["components"]["schemas"]["CompletionBody"]["properties"]
    checked = 0
    for name, schema in fields.items():
        for option in schema.get("anyOf", []):
            for bound, step in (("maximum", 1), ("minimum", -1)):
                if bound in option:
                    value = option[bound] + step
                    response = front.complete(**{name: value})
                    assert response.status_code == 400, f"{name}={value}"
                    assert response.json()["error"]["param"] == name
                    checked += 1
    assert checked > 20


def test_a_key_is_described_where_there_is_one(tmp_path: Any) -> None:
    with http_front(tmp_path, answer, api_key="secret") as front:
        headers = {"Authorization": "Bearer secret"}
        document = front.http.get("/openapi.json", headers=headers).json()
        assert document["security"] == [{"key": []}, {"x-api-key": []}]
        assert all(
            ("401" in operation["responses"]) == (path not in ("/live", "/ready", "/health"))
            for path, operations in document["paths"].items()
            for operation in operations.values()
        )
        assert front.http.get("/openapi.json").status_code == 401


@pytest.mark.parametrize(
    ("front", "mode", "max_examples"),
    [
        # What one policy allows and the other does not is further fields: each has the mode that draws them.
        ("warn", GenerationMode.POSITIVE, 6),
        ("refuse", GenerationMode.NEGATIVE, 6),
        *(
            pytest.param(policy, mode, 50, marks=pytest.mark.full)
            for policy in ("warn", "refuse")
            for mode in GenerationMode
        ),
    ],
    indirect=["front"],
)
def test_generated_requests_find_no_undocumented_answer(
    front: Front, mode: GenerationMode, max_examples: int
) -> None:
    """Requests that the document allows, and others that it does not."""
    schema = schemathesis.openapi.from_url(f"http://127.0.0.1:{front.port}/openapi.json")
    operations = []
    for result in schema.get_all_operations():
        assert isinstance(result, Ok), result.err()
        operations.append(result.ok())
    assert len(operations) > 10
    for operation in operations:

        @given(case=operation.as_strategy(generation_mode=mode))
        @settings(
            max_examples=max_examples,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        def check(case: Any) -> None:
            case.validate_response(case.call(timeout=WAIT_S), checks=CHECKS)

        # Of a path without a body there may be no request that the document does not allow.
        with suppress(Unsatisfiable):
            check()


def test_a_path_that_is_not_described_is_not_there(front: Front, document: Any) -> None:
    for path in ("/docs", "/v1/audio/speech", "/generate/"):
        assert path not in document["paths"]
        response: httpx.Response = front.http.get(path)
        assert response.status_code == 404
        assert re.match("application/json", response.headers["content-type"])
