"""SequenceState: all output of one sequence. It has two readers: the session records what arrives
(ArrivedOutput), and the caller receives it from its mailbox, in its own thread.
"""

from __future__ import annotations

from typing import Literal

from carousel.client.core.logprobs import NO_LOGPROBS, LogprobColumns, TokenLogprob
from carousel.client.core.mailbox import TensorPart
from carousel.client.core.result import CompletionOutput, Delta, FinishReason
from carousel.client.core.state.arrived import ArrivedOutput
from carousel.client.core.state.joined import unpack_ids
from carousel.client.core.state.prompt_logprobs import PromptEntries
from carousel.client.core.state.tensor_rows import TensorRows
from runtime.wire.format import FloatArray
from runtime.wire.messages import Finish, GenerateRequest, SequenceOutput, Usage
from runtime.wire.perf_metrics import Stamp


class SequenceState(ArrivedOutput):
    """All output of one sequence, as its caller has received it."""

    __slots__ = (
        "_outputs",
        "_pieces",
        "_prompt",
        "_tensors",
        "_wants_logprobs",
        "finish",
        "keeps_logprobs",
        "logprobs",
        "num_chars",
        "num_shown",
        "shown_ids",
        "token_ids",
    )

    def __init__(self, request: GenerateRequest, index: int, *, wants_logprobs: bool) -> None:
        super().__init__(request, index, wants_logprobs=wants_logprobs)
        self.token_ids: list[int] = []
        self._wants_logprobs = wants_logprobs
        self.logprobs: LogprobColumns[TokenLogprob] = LogprobColumns() if wants_logprobs else NO_LOGPROBS
        wants_prompt_logprobs = index == 0 and request.sampling.prompt_logprobs is not None
        self._prompt = PromptEntries(request) if wants_prompt_logprobs else None
        self.keeps_logprobs = True
        """False if its reader forgets the logprobs of each delta: its output has none then."""
        self.finish: Finish | None = None
        self.num_chars = 0
        """Number of characters of its text."""
        self.shown_ids: list[int] = []
        """Ids that it would have if its beam search ended now."""
        self.num_shown = 0
        """Number of times that its hypothesis was shown."""
        self._pieces: list[str] = []
        self._outputs = request.sampling.additional_outputs
        self._tensors: dict[str, TensorRows] = {}

    @property
    def text(self) -> str:
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    def text_from(self, start: int) -> str:
        """Return its text from character `start` on. The cost only depends on the length of the result."""
        num_missing = self.num_chars - start
        parts: list[str] = []
        for piece in reversed(self._pieces):
            if num_missing <= 0:
                break
            parts.append(piece[-num_missing:])
            num_missing -= len(piece)
        return "".join(reversed(parts))

    @property
    def prompt_logprobs(self) -> LogprobColumns[TokenLogprob | None]:
        """Logprobs of the prompt that were received and are kept."""
        return NO_LOGPROBS if self._prompt is None else self._prompt.kept

    @property
    def trace_stamps(self) -> tuple[Stamp, ...]:
        """Stamps of the sequence; empty before its end, and for a request that is not sampled."""
        return () if self.finish is None or self.finish.trace is None else self.finish.trace.stamps

    @property
    def finish_reason(self) -> FinishReason | None:
        """Reason why it ended; None while it runs, and if it has failed."""
        reason = None if self.finish is None else self.finish.reason
        return None if reason == "error" else reason

    @property
    def usage(self) -> Usage | None:
        return None if self.finish is None else self.finish.usage

    def receive(self, output: SequenceOutput) -> Delta:
        """Receive the next output. The delta of a failure has no finish reason."""
        text, ids = output.text, unpack_ids(output.token_ids)
        if text:
            self._pieces.append(text)
            self.num_chars += len(text)
        self.token_ids += ids
        if output.hypothesis:
            self.shown_ids = unpack_ids(output.hypothesis)
            self.num_shown += 1
        logprobs: LogprobColumns[TokenLogprob] = NO_LOGPROBS
        if output.logprobs and self._wants_logprobs:
            logprobs = LogprobColumns(output.token_ids, output.logprobs, output.top_ids, output.top_logprobs)
            if self.keeps_logprobs:
                self.logprobs.extend(logprobs)
        prompt_logprobs: LogprobColumns[TokenLogprob | None] = NO_LOGPROBS
        if self._prompt is not None:
            prompt_logprobs = self._prompt.receive(output, keeps=self.keeps_logprobs)
        finish, num_prompt = output.finish, output.num_prompt_tokens
        if finish is None:
            return Delta(text, ids, logprobs, None, None, None, self.index, prompt_logprobs, num_prompt)
        self.finish = finish
        reason, matched, usage = self.finish_reason, finish.matched, finish.usage
        return Delta(
            text,
            ids,
            logprobs,
            reason,
            matched,
            usage,
            self.index,
            prompt_logprobs,
            num_prompt,
            finish.weight_version,
        )

    def receive_rows(self, part: TensorPart) -> None:
        """Receive the next rows of a tensor. Raises RequestError if they are not the next ones."""
        rows = self._tensors.setdefault(part.entry.name, TensorRows())
        rows.add(part)

    def tensor(self, name: str) -> FloatArray | None:
        """Return a tensor [positions, vocabulary] as far as it has arrived; None if nothing has."""
        rows = self._tensors.get(name)
        return None if rows is None else rows.array()

    def num_rows(self, name: str) -> int:
        """Return the number of positions of a tensor that have come."""
        rows = self._tensors.get(name)
        return 0 if rows is None else rows.num_rows

    @property
    def num_output_rows(self) -> int:
        """Return the number of rows of the output's additional outputs that have arrived."""
        return min((self.num_rows(f"generation_{name}") for name in self._outputs), default=0)

    def additional_outputs(self, part: Literal["context", "generation"]) -> dict[str, FloatArray]:
        """Return the rows of the prompt or of the output by name, as far as they have arrived."""
        rows = {name: self.tensor(f"{part}_{name}") for name in self._outputs}
        return {name: each for name, each in rows.items() if each is not None}

    def output(self, index: int) -> CompletionOutput:
        """Return the sequence so far, under its own index or another."""
        text, token_ids, finish = self.text, list(self.token_ids), self.finish
        return CompletionOutput(
            index=index,
            text=text,
            token_ids=token_ids,
            text_diff=text,
            token_ids_diff=list(token_ids),
            # It grows no more once the sequence has ended.
            logprobs=self.logprobs if finish is not None else self.logprobs[:],
            finish_reason=self.finish_reason,
            matched_stop=None if finish is None else finish.matched,
            cumulative_logprob=None if finish is None else finish.cumulative_logprob,
            score=None if finish is None else finish.score,
            usage=self.usage,
            generation_logits=self.tensor("generation_logits"),
            additional_generation_outputs=self.additional_outputs("generation"),
            request_perf_metrics=None if finish is None else finish.perf_metrics,
            trace_stamps=self.trace_stamps,
            weight_version="" if finish is None else finish.weight_version,
        )
