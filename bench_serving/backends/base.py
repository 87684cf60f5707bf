"""Backend: the interface between the load and a kind of server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias

from bench_serving.records import RequestRecord

ChatTurn: TypeAlias = dict[str, str]
"""Turn of a conversation: role and content."""
BenchPrompt: TypeAlias = str | list[int] | list[ChatTurn]


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """Options that all requests of a run share."""

    stream: bool
    ignore_eos: bool
    add_special_tokens: bool
    """False if the prompts are rendered by the chat template, which has written the special tokens already.
    """
    extra: dict[str, object]
    """Fields of --extra-request-body, which take precedence over all others."""
    counts_tokens: bool = False
    """True to ask for a running usage in each chunk: the server knows that extension of OpenAI's API."""
    num_logprobs: int | None = None
    """Number of most likely tokens to ask logprobs for, in addition to the output's own; None: no logprobs.
    """
    context_logits: bool = False
    generation_logits: bool = False
    """True to ask for raw logits, which only the client library can do."""


class Backend(Protocol):
    async def generate(self, prompt: BenchPrompt, output_len: int, record: RequestRecord) -> None:
        """Generate `output_len` tokens, greedily, and record the output and its end in `record`.

        Raises: RequestFailure.
        """

    async def aclose(self) -> None:
        """Disconnect."""

    async def flush_cache(self) -> None:
        """Make the server forget all cached prefixes. Raises: RequestFailure if it cannot be asked to."""
