"""PromptEntries: logprobs of a prompt's tokens, as their request's caller receives them."""

from __future__ import annotations

from carousel.client.core.logprobs import NO_LOGPROBS, UNKNOWN_ID, LogprobColumns, TokenLogprob
from runtime.wire.format import TOKEN_BYTES, pack_ids
from runtime.wire.messages import GenerateRequest, SequenceOutput

PACKED_UNKNOWN_ID = pack_ids([UNKNOWN_ID])


class PromptEntries:
    """Logprobs of a prompt's tokens. They come with the outputs of the first sequence."""

    __slots__ = ("_num_received", "_prompt_ids", "_start", "kept")

    def __init__(self, request: GenerateRequest) -> None:
        self.kept: LogprobColumns[TokenLogprob | None] = LogprobColumns()
        self._num_received = 0
        """Number of entries so far."""
        self._start = request.sampling.prompt_logprobs_start
        # The server does not say which ids it has kept.
        is_cut = request.sampling.truncate_prompt_tokens is not None
        self._prompt_ids = None if is_cut else request.input_ids

    def receive(self, output: SequenceOutput, *, keeps: bool) -> LogprobColumns[TokenLogprob | None]:
        """Return the entries that an output adds, with None for each token before those asked for, and at
        least for the first one. The None entries come with the first logprobs, or at the end. keeps: False if
        the reader keeps them itself.
        """
        num_none = 0
        if not self._num_received:
            if output.prompt_logprobs:
                num_none = self._start + 1
            elif output.finish is not None:
                num_prompt = output.finish.usage.prompt_tokens
                num_none = max(1, min(self._start + 1, num_prompt))
        if not (num_none or output.prompt_logprobs):
            return NO_LOGPROBS
        start = self._num_received + num_none
        new: LogprobColumns[TokenLogprob | None] = LogprobColumns(
            self._ids_from(start, len(output.prompt_logprobs)),
            output.prompt_logprobs,
            output.prompt_top_ids,
            output.prompt_top_logprobs,
            output.prompt_ranks,
            num_none=num_none,
        )
        if keeps:
            self.kept.extend(new)
        self._num_received += len(new)
        return new

    def _ids_from(self, start: int, num_bytes: int) -> bytes:
        """Return packed ids of the prompt from its token `start` on."""
        if self._prompt_ids is None:
            return PACKED_UNKNOWN_ID * (num_bytes // TOKEN_BYTES)
        first = TOKEN_BYTES * start
        return self._prompt_ids[first : first + num_bytes]
