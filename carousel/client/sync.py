"""Client: generate from a runtime that is already running, from synchronous code. Threads may share one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, Unpack, overload

from carousel.client.connection.connection import Connection
from carousel.client.connection.target import find_target
from carousel.client.core.batch import CompletionBatch
from carousel.client.core.control import ControlArguments, check_label, check_mode, check_num_steps
from carousel.client.core.embedding import Embedding, Inputs, embedding_of, embedding_params
from carousel.client.core.mailbox import Mailbox
from carousel.client.core.request_builder import (
    EmbedOptions,
    Prompt,
    Prompts,
    RequestOptions,
    Submission,
    TokenIds,
    is_single_prompt,
    one_per_prompt,
)
from carousel.client.core.result import Completion
from carousel.client.core.ring_state import RING_TIMEOUT_S
from carousel.client.core.session import Session, control_result, deadline_after
from carousel.client.core.stats import AskNow, StatsPlace, StatsStream
from carousel.client.core.streams import ResultStream
from runtime.base.errors import RingClosed
from runtime.wire.messages import ControlOp, PauseMode
from runtime.wire.sampling_params import SamplingParams
from runtime.wire.stats import IterationStats, RequestStatsPerIteration

CONNECT_TIMEOUT_S = 10.0
CONTROL_TIMEOUT_S = 10.0


class Client:
    def __init__(
        self,
        run_dir: str | Path | None = None,
        *,
        curve_dir: str | Path | None = None,
        connect_timeout: float = CONNECT_TIMEOUT_S,
        ring_timeout: float = RING_TIMEOUT_S,
    ) -> None:
        """Connect to a runtime; by default to the one that CAROUSEL_RUN_DIR names, else the only one alive.

        `run_dir` may be an address tcp://HOST:PORT; `curve_dir` then holds this client's `client.key_secret`
        and the server's `server.key`, and is needed unless HOST is this machine.
        When a process of the runtime is restarted, calls wait and then go on where they were; after
        `ring_timeout` seconds without it they end with RingClosed.
        Raises: RingClosed when there is none or it does not answer within connect_timeout seconds,
        ConfigError when there are several or a key is wrong, ProtocolMismatch when it is another build.
        """
        self._session: Session[Mailbox] = Session(
            partial(
                Connection,
                find_target(run_dir, curve_dir),
                connect_timeout_s=connect_timeout,
                ring_timeout_s=ring_timeout,
            ),
            Mailbox,
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
        """Generate from one prompt (a Completion) or from several (a list in their order).

        A prompt is text, token ids, or chat messages. `sampling_params` is one for all or one for each.
        `timeout` is in seconds and holds for the whole call. Several prompts wait while the server is full;
        any other error ends the call and aborts the rest.

        Raises: RequestError (InvalidRequest, Overloaded ...), RingClosed, TimeoutError.
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
        """`on_completion` is called with each as it ends."""
        deadline = deadline_after(timeout, time.monotonic())
        single = is_single_prompt(prompt)
        prompts: Any = [prompt] if single else prompt
        all_sampling = one_per_prompt(sampling_params, len(prompts))
        submissions = [
            Submission(each, sampling, options=options)
            for each, sampling in zip(prompts, all_sampling, strict=True)
        ]
        if len(submissions) == 1:
            # Nothing else could wait for it, so a refusal is the caller's to see.
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
        """The vector of one text, or of several in their order, from a server of --task embed.

        A text may be given as token ids. `truncate_prompt_tokens` as in SamplingParams; `timeout` and errors
        as for `generate`.
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
        """Generate from one prompt and iterate over what comes, as it comes. The request is made at the call.

        Raises: as `generate`, from the call or from the iteration.
        """
        deadline = deadline_after(timeout, time.monotonic())
        sampling = SamplingParams() if sampling_params is None else sampling_params
        return ResultStream(self._session, Submission(prompt, sampling, True, options), deadline)

    def abort(self, stream: ResultStream) -> None:
        """End a request early; its iterator still delivers what there is, with finish_reason "abort"."""
        self._session.abort(stream.state.number)

    def server_info(self, *, timeout: float = CONTROL_TIMEOUT_S) -> dict[str, Any]:
        """Return what the scheduler says of itself. Raises RequestError, RingClosed, TimeoutError."""
        return self._control("server_info", timeout)

    def snapshot(self, *, timeout: float = CONTROL_TIMEOUT_S) -> dict[str, Any]:
        """Return what the scheduler holds at this moment: rows, the first 128 that wait and why, pages, and
        the 512 largest nodes of the radix tree. Raises RequestError, RingClosed, TimeoutError.
        """
        return self._control("snapshot", timeout)

    def timeline(self, label: str, *, timeout: float = CONTROL_TIMEOUT_S) -> list[dict[str, Any]]:
        """The moments of each sequence of sampled requests with this label that have ended, if they are among
        the last 1,000. Raises RequestError, RingClosed, TimeoutError.
        """
        deadline, about = deadline_after(timeout, time.monotonic()), {"label": check_label(label)}
        lanes = range(len(self._session.connection.client_ids))
        answers = [_answer(self._session.asking("timeline", lane, **about), deadline) for lane in lanes]
        return [timeline for answer in answers for timeline in answer]

    def flush_cache(self, *, timeout: float = CONTROL_TIMEOUT_S) -> Any:
        """Forget all cached prefixes that no request uses. Raises RequestError, RingClosed, TimeoutError."""
        return self._control("flush_cache", timeout)

    def iteration_stats(self, after: int = 0, *, timeout: float = CONTROL_TIMEOUT_S) -> list[IterationStats]:
        """Statistics of the iterations after number `after` that the scheduler still keeps, the oldest first.

        Raises: RequestError (stats_off when it keeps none), RingClosed, TimeoutError.
        """
        return StatsPlace.of_iterations(after).read(self._ask_stats(timeout))

    def request_stats(
        self, after: int = 0, *, timeout: float = CONTROL_TIMEOUT_S
    ) -> list[RequestStatsPerIteration]:
        """Same as `iteration_stats`, for each live request. Kept with `request_stats_max_iterations` only."""
        return StatsPlace.of_requests(after).read(self._ask_stats(timeout))

    def watch_stats(self, *, timeout: float | None = None) -> StatsStream:
        """The statistics of each iteration as it ends: `for stats in client.watch_stats()`. It ends when none
        has come for `timeout` seconds. Raises: as `iteration_stats`, from the iteration.
        """

        def ask(after: int, timeout: float | None) -> Any:
            deadline = deadline_after(timeout, time.monotonic())
            return _answer(self._session.asking_stats("iteration_stats", after, wait=True), deadline)

        return StatsStream(ask, timeout)

    def _ask_stats(self, timeout: float) -> AskNow:
        deadline = deadline_after(timeout, time.monotonic())
        return lambda op, after: _answer(self._session.asking_stats(op, after), deadline)

    def pause_generation(
        self, mode: PauseMode = "in_place", *, timeout: float = CONTROL_TIMEOUT_S
    ) -> dict[str, Any]:
        """Launch no more steps until `continue_generation`; what comes meanwhile waits, and nothing is lost.
        Deadlines pass. `mode` says what becomes of those that run: "in_place" they keep what they have;
        "retract" they give their pages up, so that the whole cache can be flushed; "abort" they end, and so
        does what waits.

        Returns: is_paused, num_running, num_waiting. Raises RequestError, RingClosed, TimeoutError.
        """
        return self._control("pause_generation", timeout, mode=check_mode(mode))

    def continue_generation(self, *, timeout: float = CONTROL_TIMEOUT_S) -> dict[str, Any]:
        """Go on after `pause_generation`; without effect otherwise. Returns and raises as it does."""
        return self._control("continue_generation", timeout)

    def drop_adapter(self, name: str, *, timeout: float = CONTROL_TIMEOUT_S) -> dict[str, Any]:
        """Free the device's memory of adapters with this name: num_dropped of them, at once or as soon as the
        requests that run with them have ended. Who asks for one later has it loaded again. Raises
        RequestError, RingClosed, TimeoutError.
        """
        return self._control("drop_adapter", timeout, label=check_label(name))

    def start_profile(
        self, num_steps: int | None = None, *, timeout: float = CONTROL_TIMEOUT_S
    ) -> dict[str, Any]:
        """Record what scheduler and worker do in the next `num_steps` steps (default: until `stop_profile`,
        10,000 at most) as a Chrome trace, which ui.perfetto.dev shows.

        Returns: name of the file, written at the end to the launch's `profile_dir`, and num_steps.
        Raises: RequestError (409 while one is taken), RingClosed, TimeoutError.
        """
        return self._control("start_profile", timeout, num_steps=check_num_steps(num_steps))

    def stop_profile(self, *, timeout: float = CONTROL_TIMEOUT_S) -> dict[str, Any]:
        """End the profile: name of the file and num_steps that are in it. Raises: as `start_profile`."""
        return self._control("stop_profile", timeout)

    def _control(self, op: ControlOp, timeout: float, **about: Unpack[ControlArguments]) -> dict[str, Any]:
        deadline = deadline_after(timeout, time.monotonic())
        answer: dict[str, Any] = _answer(self._session.asking(op, **about), deadline)
        return answer

    def close(self) -> None:
        """Abort what is in flight and disconnect; who waits in another thread gets RingClosed. Idempotent."""
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


def _answer(asking: AbstractContextManager[Mailbox], deadline: float | None) -> Any:
    """The body of the one reply. Raises the error it carries, TimeoutError at the deadline."""
    with asking as mailbox:
        return control_result(mailbox.take(deadline)[0])


def _ignore(_: Completion) -> None:
    """Nobody watches."""
