"""Tool definitions in a body: their checks, and what the parser of answers needs of them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Raw, Struct, field

from carousel.server.chat.tools import ToolSet
from carousel.server.request.decode import field_error
from runtime.base.errors import InvalidRequest
from runtime.wire.messages import MAX_TOOLS_BYTES
from runtime.wire.transport import DECODE_ERRORS

MAX_TOOLS = 1024
MAX_PARTS = 1 << 16
"""Maximum number of parts in all definitions, counted as brackets and commas in their JSON: 10 ms of work
before an answer, and 15 ms at its first call.
"""

MAX_NAME_CHARS = 256
ToolName = Annotated[str, Meta(pattern=rf"^[a-zA-Z0-9_.:/-]{{1,{MAX_NAME_CHARS}}}$(?!\n)")]


class FunctionDefinition(Struct):
    """Definition of a function. Further fields go to the chat template unchanged."""

    name: ToolName
    description: str | None = None
    parameters: Raw = field(default_factory=Raw)
    strict: bool | None = None


class ToolDefinition(Struct):
    function: FunctionDefinition
    type: Literal["function"]


class _Kind(Struct):
    type: str


class _Schema(Struct):
    """The checked part of a JSON Schema: parts that may be large must be objects."""

    type: Literal["object"] | None = None
    properties: Raw = field(default_factory=Raw)


def definitions_of(tools: bytes | Raw) -> list[Raw]:
    """Return the definitions in a body's field. Raises InvalidRequest if they are too large or too many."""
    if len(tools) > MAX_TOOLS_BYTES:
        raise InvalidRequest(f"tools: at most {MAX_TOOLS_BYTES} bytes, got {len(tools)}", param="tools")
    if sum(map(bytes(tools).count, (b"[", b"{", b","))) > MAX_PARTS:
        raise InvalidRequest(f"tools: at most {MAX_PARTS} brackets and commas together", param="tools")
    definitions: list[Raw] = decode_part(tools, list[Raw] | None, "tools") or []
    if len(definitions) > MAX_TOOLS:
        raise InvalidRequest(f"tools: at most {MAX_TOOLS}, got {len(definitions)}", param="tools")
    return definitions


def check_kind(where: str, kind: str, known: Collection[str] = ("function",)) -> None:
    """Check that tools of this kind exist here. Raises InvalidRequest."""
    if kind in known:
        return
    advice = "this server runs no tools; define a function, and run it yourself"
    if kind == "custom":
        advice = "free text is for /v1/responses; define a function with one string"
    raise InvalidRequest(
        f"{where}.type: {kind:.100} is not supported: {advice}",
        param=f"{where}.type",
        code="unsupported_parameter",
    )


def check_reach(where: str, *, defer_loading: bool | None, allowed_callers: list[str] | None) -> None:
    """Check that the model sees the tool at this place of a body, and is the one who calls it. Raises
    InvalidRequest.
    """
    if defer_loading:
        raise InvalidRequest(
            f"{where}.defer_loading: there is no search of tools here; leave it out",
            param=f"{where}.defer_loading",
            code="unsupported_parameter",
        )
    if allowed_callers is not None and "direct" not in allowed_callers:
        raise InvalidRequest(
            f'{where}.allowed_callers: programs do not call tools here; name "direct"',
            param=f"{where}.allowed_callers",
            code="unsupported_parameter",
        )


def read_tools(tools: bytes) -> ToolSet:
    """Return the tools of a body's field. Raises InvalidRequest that names the fault."""
    parameters: dict[str, bytes] = {}
    strict: list[str] = []
    for number, definition in enumerate(definitions_of(tools)):
        where = f"tools[{number}]"
        check_kind(where, decode_part(definition, _Kind, where).type)
        function = decode_part(definition, ToolDefinition, where).function
        where += ".function"
        if function.name in parameters:
            raise InvalidRequest(f"{where}.name: {function.name} is there twice", param=f"{where}.name")
        if function.strict:
            strict.append(function.name)
        schema = bytes(function.parameters)
        if schema:
            _check_schema(schema, f"{where}.parameters")
        parameters[function.name] = schema
    return ToolSet(parameters, strict)


def _check_schema(schema: bytes, where: str) -> None:
    """Check a schema. Raises InvalidRequest."""
    decoded: _Schema | None = decode_part(schema, _Schema | None, where)
    properties = b"" if decoded is None else bytes(memoryview(decoded.properties)[:1])
    if properties not in (b"", b"{", b"n"):
        raise InvalidRequest(f"{where}.properties: Expected `object`", param=f"{where}.properties")


def decode_part(data: bytes | Raw, kind: Any, where: str) -> Any:
    """Return a decoded part of a body at the place `where`. Raises InvalidRequest that names the fault."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise field_error(str(error), kind, within=where) from None
    except DECODE_ERRORS as error:
        reason = "lists and objects are nested too deeply" if isinstance(error, RecursionError) else error
        raise InvalidRequest(f"{where}: {reason}", param=where) from None
