"""Client: synchronous client for a runtime that is already running. Threads may share one."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, Unpack, overload

from carousel.client.chat_calls import ChatCalls
from carousel.client.connection.connection import make_connector
from carousel.client.core.batch import CompletionBatch
from carousel.client.core.embedding import Embedding, Inputs, embedding_of, embedding_params
from carousel.client.core.mailbox import Mailbox, deadline_after
from carousel.client.core.request.submission import (
    EmbedOptions,
    Prompt,
    Prompts,
    RequestOptions,
    Submission,
    TokenIds,
    is_single_prompt,
    one_per_prompt,
    options_per_prompt,
)
from carousel.client.core.result import Completion
from carousel.client.core.ring_state import CONNECT_TIMEOUT_S, RING_TIMEOUT_S
from carousel.client.core.session import Session
from carousel.client.core.streams import ResultStream, check_stream
from runtime.base.errors import RingClosed
from runtime.wire.sampling_params import SamplingParams

UNUSED = "nobody refers to the client any more"


class Client(ChatCalls):
    """Client of a running runtime, whose calls wait for their results. Threads may share one.

    Use it in a `with` block, or end it with `close`. It ends by itself when nothing refers to it, nor to a
    stream of it that runs.
    """

    def __init__(
        self,
        run_dir: str | Path | None = None,
        *,
        curve_dir: str | Path | None = None,
        connect_timeout: float = CONNECT_TIMEOUT_S,
        ring_timeout: float = RING_TIMEOUT_S,
    ) -> None:
        """Connect to a runtime; the default is the one that CAROUSEL_RUN_DIR names, else the only live one.

        `run_dir` may be an address tcp://HOST:PORT. `curve_dir` then has this client's `client.key_secret`
        and the server's `server.key`; it is needed unless HOST is this machine. When a process of the runtime
        is restarted, calls wait and then continue where they were; after `ring_timeout` seconds without it
        they end with RingClosed.

        Raises RingClosed when there is no runtime or it does not answer within connect_timeout seconds,
        ConfigError when there are several or a key is wrong, ProtocolMismatch when it is another build.
        """
        client = weakref.ref(self)
        self._session: Session[Mailbox] = Session(
            make_connector(run_dir, curve_dir, connect_timeout, ring_timeout),
            Mailbox,
            why_abandoned=lambda is_idle: UNUSED if is_idle and client() is None else "",
        )
        try:
            self._session.connection.opened.result()
        except BaseException:
            self.close()
            raise

    @overload
    def generate(
        self,
        prompt: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        timeout: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[Completion]: ...

    @overload
    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        timeout: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> Completion: ...

    @overload
    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        timeout: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> Completion | list[Completion]: ...

    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        timeout: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> Completion | list[Completion]:
        """Generate from one prompt (returns a Completion) or from several (returns a list in their order).

        A prompt is text, token ids, or chat messages. sampling_params: one for all prompts or one for each.
        timeout: in seconds, for the whole call. Several prompts wait while the server is full; any other
        error ends the call and aborts the rest. Raises RequestError (InvalidRequest, Overloaded ...),
        RingClosed, TimeoutError.
        """
        return self._generate(prompt, sampling_params, timeout, _ignore, **options)

    def _generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        timeout: float | None,
        on_completion: Callable[[Completion], None],
        **options: Unpack[RequestOptions],
    ) -> Completion | list[Completion]:
        """Generate; on_completion is called with each completion as it ends."""
        deadline = deadline_after(timeout, time.monotonic())
        single = is_single_prompt(prompt)
        prompts: Any = [prompt] if single else prompt
        all_sampling = one_per_prompt(sampling_params, len(prompts))
        all_options = options_per_prompt(options, len(prompts))
        submissions = [
            Submission(each, sampling, options=its_options)
            for each, sampling, its_options in zip(prompts, all_sampling, all_options, strict=True)
        ]
        if len(submissions) == 1:
            # Nothing else waits for it, so the caller has to see a refusal.
            completion = ResultStream(self._session, submissions[0], deadline).completion()
            on_completion(completion)
            return completion if single else [completion]
        return CompletionBatch(self._session, submissions, deadline, on_completion).run()

    @overload
    def embed(
        self,
        prompt: Inputs,
        *,
        truncate_prompt_tokens: int | None = None,
        timeout: float | None = None,
        **options: Unpack[EmbedOptions],
    ) -> list[Embedding]: ...

    @overload
    def embed(
        self,
        prompt: list[str | list[int]],
        *,
        truncate_prompt_tokens: int | None = None,
        timeout: float | None = None,
        **options: Unpack[EmbedOptions],
    ) -> list[Embedding]: ...

    @overload
    def embed(
        self,
        prompt: str | TokenIds,
        *,
        truncate_prompt_tokens: int | None = None,
        timeout: float | None = None,
        **options: Unpack[EmbedOptions],
    ) -> Embedding: ...

    @overload
    def embed(
        self,
        prompt: str | TokenIds | Sequence[str | TokenIds],
        *,
        truncate_prompt_tokens: int | None = None,
        timeout: float | None = None,
        **options: Unpack[EmbedOptions],
    ) -> Embedding | list[Embedding]: ...

    def embed(
        self,
        prompt: str | TokenIds | Sequence[str | TokenIds],
        *,
        truncate_prompt_tokens: int | None = None,
        timeout: float | None = None,
        **options: Unpack[EmbedOptions],
    ) -> Embedding | list[Embedding]:
        """Return the vector of one text, or of several in their order, from a server started with --task
        embed. A text may be given as token ids. truncate_prompt_tokens: as in SamplingParams. timeout and
        errors: as in `generate`.
        """
        sampling = embedding_params(truncate_prompt_tokens)
        done = self._generate(prompt, sampling, timeout, _ignore, task="embed", **options)
        return [embedding_of(each) for each in done] if isinstance(done, list) else embedding_of(done)

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        timeout: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> ResultStream:
        """Generate from one prompt and iterate over the output as it arrives. The request is submitted by the
        call. Raises the same errors as `generate`, from the call or from the iteration.
        """
        deadline = deadline_after(timeout, time.monotonic())
        sampling = SamplingParams() if sampling_params is None else sampling_params
        return ResultStream(self._session, Submission(prompt, sampling, True, options), deadline)

    def abort(self, stream: ResultStream) -> None:
        """End a request early. Its iterator still returns the output so far, with finish_reason "abort".
        Raises InvalidRequest if `stream` is not a stream of a client.
        """
        check_stream(stream, ResultStream)
        self._session.abort(stream.state.number)

    def close(self) -> None:
        """Abort requests in flight and disconnect. Callers that wait in other threads get RingClosed. May be
        called again.
        """
        error = RingClosed("the client was closed")
        self._session.end_all(error)
        self._session.connection.close()
        self._session.fail_all(error)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _ignore(_: Completion) -> None:
    """Do nothing with a completion."""
