"""Guides that explode: small requests whose compilation takes very long or very much memory."""

from __future__ import annotations

import json
from typing import Any


def bomb(number: int) -> bytes:
    """Body of a request. No two are equal, so that none is answered from memory."""
    nested: Any = {"const": number}
    for depth in range(9):
        nested = {"anyOf": [{"type": "object", "properties": {f"p{depth}{k}": nested}} for k in range(2)]}
    letter = chr(ord("a") + number % 26)
    repeated = {"$defs": {f"d{number}": {"items": {"$ref": f"#/$defs/d{number}"}}}}
    guides: list[dict[str, Any]] = [
        {"guided_json": nested},
        {"guided_json": {"type": "object", "properties": {f"k{number}_{i}": {} for i in range(4000)}}},
        {"guided_json": {**repeated, "allOf": [{"$ref": f"#/$defs/d{number}"}] * 50}},
        {"guided_regex": f"({letter}+)+b{{{number + 1}}}"},
        {"guided_regex": f".{{1,{65000 + number}}}"},
        {"guided_regex": f"(.{{1,{65000 + number}}}x){{1,1000}}y{{65535}}"},
        {"guided_choice": [f"{number} " + "x" * 60 + str(i) for i in range(1500)]},
        {"guided_json": {"const": "x" * (1 << 20)}},
    ]
    return json.dumps({"prompt": "x", "max_tokens": 4, "seed": 1, **guides[number % 8]}).encode()
