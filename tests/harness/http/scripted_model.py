"""Script: the answers of a model that calls tools and reasons, and an HTTP server in front of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runtime.wire.format import pack_ids
from runtime.wire.messages import GenerateRequest, SequenceOutput
from tests.harness.http.http_front import Front, http_front
from tests.harness.ring.fake_ring import finish, output

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln", "days": 2}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


@dataclass
class Script:
    """Answers of the model, one after another; the last one for ever."""

    texts: list[str] = field(default_factory=list)
    reason: str = "stop"
    requests: list[GenerateRequest] = field(default_factory=list)

    def __call__(self, request: GenerateRequest) -> list[SequenceOutput]:
        self.requests.append(request)
        text = self.texts.pop(0) if len(self.texts) > 1 else self.texts[0]
        pieces = list(text) if request.stream else [text]
        answer = []
        for index in range(request.sampling.n):
            answer += [output(request, piece, index=index) for piece in pieces]
            end = finish(self.reason, len(text))
            answer.append(output(request, "", index=index, token_ids=pack_ids([]), finish=end))
        return answer

    def say(self, *texts: str, reason: str = "stop") -> None:
        """Set the answers that come next, and forget the requests."""
        self.texts, self.reason = list(texts), reason
        self.requests.clear()


@contextmanager
def scripted_front(run_dir: Path, script: Script, **settings: Any) -> Iterator[Front]:
    """Yield an HTTP server with parsers of tools and reasoning, whose model says what the script has."""
    parsers = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
    with http_front(run_dir, script, context_length=2048, **parsers, **settings) as front:
        yield front
