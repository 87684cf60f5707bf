"""Backend: the seam between the load and a kind of server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias

from bench_serving.records import RequestRecord

ChatTurn: TypeAlias = dict[str, str]
"""One turn of a conversation: role and content."""
BenchPrompt: TypeAlias = str | list[int] | list[ChatTurn]


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """Options that all requests of a run share."""

    stream: bool
    ignore_eos: bool
    add_special_tokens: bool
    """False when the prompts are rendered by the chat template, which has written them already."""
    extra: dict[str, object]
    """Fields of --extra-request-body; they win over all others."""
    counts_tokens: bool = False
    """Ask for a running usage in each chunk: the server knows that extension of OpenAI's API."""
    num_logprobs: int | None = None
    """Ask for the logprobs of the output, and of so many of the likeliest tokens at each position."""
    context_logits: bool = False
    generation_logits: bool = False
    """Ask for raw logits, which only the client library can."""


class Backend(Protocol):
    async def generate(self, prompt: BenchPrompt, output_len: int, record: RequestRecord) -> None:
        """Ask for `output_len` tokens, greedily, and write what comes back into `record`, its end included.

        Raises: RequestFailure.
        """

    async def aclose(self) -> None:
        """Disconnect."""

    async def flush_cache(self) -> None:
        """Let the server forget all cached prefixes. Raises: RequestFailure where it cannot be asked to."""
