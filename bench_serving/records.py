"""RequestRecord: one request as the client saw it. Times are seconds of the run's clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

Clock = Callable[[], float]


@dataclass(slots=True, eq=False)
class RequestRecord:
    input_len: int
    """Number of input tokens: the client's own count, until the server has sent its count."""
    asked_output_len: int
    start_s: float = 0.0
    """Time at which the client began to send, before connecting."""
    end_s: float = 0.0
    """Time at which the last output, or the reason of the end, had arrived."""
    chunk_times_s: list[float] = field(default_factory=list)
    """Arrival times of the chunks with output; empty if the answer was not streamed."""
    chunk_tokens: list[int] = field(default_factory=list)
    """Number of new tokens of each of these chunks: the server's count, or one if it sends none."""
    num_chunk_tokens: int = 0
    """Sum of chunk_tokens, kept up to date, because a running usage is compared with it at every chunk."""
    has_token_counts: bool = True
    """True if chunk_tokens are the server's counts."""
    reported_output_len: int | None = None
    """Number of output tokens in the server's usage; None if it sent none."""
    cached_len: int | None = None
    received_bytes: int | None = None
    """Bytes of the answer's body; None with the client library."""
    extra_bytes: int = 0
    """Bytes of logprobs and logits: over HTTP those of their JSON, else those of the values as sent."""
    texts: list[str] = field(default_factory=list)
    error: str | None = None

    def add_chunk(self, now: float, text: str, num_tokens: int | None) -> None:
        """Record a chunk of a stream. `num_tokens` None: the server did not say how many tokens it has."""
        if num_tokens is None or not self.has_token_counts:
            if not text:
                return
            # One chunk without a count makes all the differences between counts meaningless.
            self.has_token_counts = False
            num_tokens = 1
        elif num_tokens == 0 and not text:
            return
        self.chunk_times_s.append(now)
        self.chunk_tokens.append(num_tokens)
        self.num_chunk_tokens += num_tokens
        self.texts.append(text)

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def output_len(self) -> int:
        return self.num_chunk_tokens if self.reported_output_len is None else self.reported_output_len

    @property
    def latency_s(self) -> float:
        return self.end_s - self.start_s

    @property
    def ttft_s(self) -> float | None:
        """Return the time to the first token; None if nothing was streamed."""
        return self.chunk_times_s[0] - self.start_s if self.chunk_times_s else None

    @property
    def tpot_s(self) -> float | None:
        """Return the time per output token after the first; None if the answer was not streamed or has one
        token.
        """
        ttft = self.ttft_s
        if ttft is None or self.output_len < 2:
            return None
        return (self.latency_s - ttft) / (self.output_len - 1)

    def itls_s(self) -> list[float]:
        """Return a value for each token after the first chunk: the gap before its chunk, divided by the
        chunk's tokens.
        """
        gaps: list[float] = []
        for index in range(1, len(self.chunk_times_s)):
            num_tokens = self.chunk_tokens[index]
            if num_tokens:
                gap = self.chunk_times_s[index] - self.chunk_times_s[index - 1]
                gaps += [gap / num_tokens] * num_tokens
        return gaps
