"""Large JSON that is decoded in pieces, of a few bytes here, against msgspec, which decodes it at once."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import msgspec
import pytest

from carousel.server.openai.types import ChatBody, CompletionBody
from carousel.server.request import decode, large_fields, large_json
from carousel.server.request.decode import decode_body
from carousel.server.request.large_fields import PromptLimits
from carousel.server.request.large_json import BodyBytes
from carousel.server.request.prompts import prompts_of
from carousel.server.request.unknown_fields import FieldFilter, UnknownFields
from carousel.server.tenancy.entrance import Entrance
from runtime.base.errors import InvalidRequest

PIECE_BYTES = 64
NUMBERS = (300, pytest.param(10_000, marks=(pytest.mark.full, pytest.mark.timeout(3600))))
CHARACTERS = (*'a"\\\né€😀[]{},: \x7f', "x" * 40)
FURTHER: tuple[dict[str, Any], ...] = ({}, {"name": "n"}, {"odd": {"a": [1]}, "cache_control": {}})
MUTATIONS = (
    *(bytes([byte]) for byte in b'"\\[]{},: 0ax\n\xff\xc3'),
    b"\\ud83d",
    b"null",
    b'"a"',
    b"[1]",
    b"",
)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_json, "PIECE_BYTES", PIECE_BYTES)
    monkeypatch.setattr(large_json, "FEW_BYTES", 2)
    monkeypatch.setattr(large_fields, "GROUP_BYTES", PIECE_BYTES // 2)
    monkeypatch.setattr(decode, "SMALL_BODY_BYTES", 100)
    monkeypatch.setattr(large_json, "SEGMENT_BYTES", 100)


def text_of(rng: random.Random) -> str:
    return "".join(rng.choices(CHARACTERS, k=rng.choice((0, 1, 5, 30, 120))))


def body_of(rng: random.Random, *, has_unknown: bool = False) -> tuple[type, dict[str, Any]]:
    others: tuple[dict[str, Any], ...] = ({}, {"model": "m"}, {"user": "x", "stop": ["a", '"']})
    further: tuple[dict[str, Any], ...] = ({}, {"name": "n"})
    if has_unknown:
        others = (*others, {"odd": None, "odder": [1, {}]})
        further = (*further, {"odd": {"a": [1]}, "cache_control": {}})
    other = rng.choice(others)
    if rng.random() < 0.5:
        parts = [{"type": "text", "text": text_of(rng)} for _ in range(rng.choice((0, 1, 9)))]
        contents = (text_of(rng), parts, None)
        messages = [
            {"role": "user", "content": rng.choice(contents), **rng.choice(further)}
            for _ in range(rng.choice((1, 3, 20)))
        ]
        return ChatBody, {**other, "messages": messages}
    ids = [rng.choice((0, 7, 12345, 2**31 - 1)) for _ in range(rng.choice((1, 3, 80)))]
    prompts: tuple[Any, ...] = (
        text_of(rng),
        [text_of(rng) for _ in range(rng.choice((1, 4, 30)))],
        ids,
        [ids[: rng.randint(1, 80)] for _ in range(rng.choice((1, 4, 10)))],
    )
    return CompletionBody, {**other, "prompt": rng.choice(prompts)}


def spelled(rng: random.Random, value: Any) -> bytes:
    """JSON of a value with some spaces, and some characters spelled as escapes."""
    if isinstance(value, dict):
        fields = [spelled(rng, name) + space(rng) + b":" + spelled(rng, each) for name, each in value.items()]
        return space(rng) + b"{" + b",".join(fields) + space(rng) + b"}" + space(rng)
    if isinstance(value, list):
        return space(rng) + b"[" + b",".join(spelled(rng, each) for each in value) + space(rng) + b"]"
    if not isinstance(value, str):
        return space(rng) + msgspec.json.encode(value) + space(rng)
    quoted = [
        spelled_character(rng, each) for each in value.encode("utf-16", "surrogatepass").decode("utf-16")
    ]
    return space(rng) + b'"' + b"".join(quoted) + b'"' + space(rng)


def spelled_character(rng: random.Random, character: str) -> bytes:
    if rng.random() < 0.3:
        units = character.encode("utf-16-be")
        return b"".join(b"\\u" + units[at : at + 2].hex().encode() for at in range(0, len(units), 2))
    return msgspec.json.encode(character)[1:-1]


def space(rng: random.Random) -> bytes:
    return rng.choice((b"", b"", b"", b" ", b"\n\t"))


async def decoded(kind: Any, data: bytes, unknown: UnknownFields = "warn") -> Any:
    """Return what the server makes of it; None where it refuses."""
    fields = FieldFilter(unknown, Entrance().go_on)
    try:
        return checked(
            await decode_body(BodyBytes(data), kind, PromptLimits(1 << 16), Entrance().go_on, fields)
        )
    except InvalidRequest:
        return None


async def no_wait(_: int) -> None:
    pass


def at_once(kind: Any, data: bytes, unknown: UnknownFields = "warn") -> Any:
    try:
        decode._decode(data, kind, FieldFilter(unknown, no_wait)).send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("it waits")


def expected(kind: Any, data: bytes) -> Any:
    try:
        return checked(at_once(kind, data, "refuse"))
    except InvalidRequest:
        return None


def checked(body: Any) -> Any:
    """Prompts of several kinds are refused while they are decoded, or later."""
    if isinstance(body, CompletionBody) and body.prompt not in ("", []):
        prompts_of(body.prompt)
    return body


@pytest.mark.parametrize("num_bodies", NUMBERS)
def test_what_is_right_reads_the_same(num_bodies: int) -> None:
    async def main() -> None:
        rng = random.Random(num_bodies)
        for _ in range(num_bodies):
            kind, body = body_of(rng, has_unknown=True)
            data = spelled(rng, body)
            assert await decoded(kind, data) == at_once(kind, data), data

    asyncio.run(main())


@pytest.mark.parametrize("num_bodies", NUMBERS)
def test_what_is_wrong_is_refused_and_nothing_else(num_bodies: int) -> None:
    async def main() -> int:
        rng, num_refused = random.Random(num_bodies), 0
        for _ in range(num_bodies):
            kind, body = body_of(rng)
            data = bytearray(spelled(rng, body))
            for _ in range(rng.choice((1, 1, 2))):
                at = rng.randrange(len(data))
                data[at : at + rng.choice((0, 1, 1, 5))] = rng.choice(MUTATIONS)
            # Of what may be left out the size has a bound, by which the pieces here are tiny.
            result = await decoded(kind, bytes(data), "refuse")
            assert result == expected(kind, bytes(data)), bytes(data)
            num_refused += result is None
        return num_refused

    assert 0.3 * num_bodies < asyncio.run(main()) < 0.95 * num_bodies


@pytest.mark.parametrize(
    ("messages", "place"),
    [
        ([{"role": "user", "content": "x"}] * 40 + [{"role": ""}], "messages[40].role"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "x"}] * 30 + [{"type": "t"}]}],
            "messages[0].content[30]",
        ),
        ([{"role": "user"}, {"role": "user", "content": ["x" * 200]}], "messages[1].content[0]"),
        ([{"role": "user", "content": "x" * 99, "nobody": "y"}], "messages[0].nobody"),
        ([{"role": "user", "content": "x" * 99, "tool_calls": ["y" * 99]}], "messages[0].tool_calls"),
        ([{"role": "user", "content": {"a": "x" * 99}}], "messages[0].content"),
    ],
)
def test_an_error_names_its_place_in_the_whole(messages: list[Any], place: str) -> None:
    data = msgspec.json.encode({"messages": messages})
    with pytest.raises(InvalidRequest) as caught:
        asyncio.run(
            decode_body(
                BodyBytes(data),
                ChatBody,
                PromptLimits(9),
                Entrance().go_on,
                FieldFilter("refuse", Entrance().go_on),
            )
        )
    assert (caught.value.param or "").startswith(place)


def test_a_value_that_is_missing_is_seen() -> None:
    for data in (b'{"messages":[{"role":"user","name":"%b","content":}]}', b'{"model":"%b","messages":}'):
        assert asyncio.run(decoded(ChatBody, data % (b"x" * 200))) is None


@pytest.mark.parametrize("between", [b",,", b", ,", b","])
def test_an_element_that_is_missing_is_seen_wherever_a_piece_ends(between: bytes) -> None:
    message = b'{"role":"user"}'

    async def main() -> None:
        for number in range(1, 30):
            parts = [b",".join([message] * number), b",".join([message] * (20 if len(between) > 1 else 0))]
            data = b'{"messages":[%b]}' % between.join(parts)
            if len(data) > 100:
                assert await decoded(ChatBody, data) is None, data

    asyncio.run(main())
