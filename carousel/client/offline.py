"""LLM: a client with a runtime of its own, a child process that ends with the object."""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Unpack, overload

from carousel.client.core.request.submission import Prompt, Prompts, RequestOptions, is_single_prompt
from carousel.client.core.result import Completion, respelling
from carousel.client.core.ring_state import RING_TIMEOUT_S
from carousel.client.own_runtime import OwnRuntime
from carousel.client.prompt_objects import without_objects
from carousel.client.vllm_calls import VllmCalls
from carousel.conversation import CHAT_NAMES, Conversation, conversations_of
from runtime.base.progress import LINE_S
from runtime.wire.sampling_params import SamplingParams


class LLM(VllmCalls):
    """Client with a runtime of its own, which ends with the object, or with `close` or a `with` block.

    `generate`, `stream`, `chat` and `embed` are those of Client. `score`, `beam_search` and `get_tokenizer`
    have vLLM's arguments.
    """

    def __init__(
        self, model: str | Path = "", *, ring_timeout: float = RING_TIMEOUT_S, **settings: Any
    ) -> None:
        """Start a runtime and wait until it is ready. Keyword arguments are the settings of launch.py.

        If a process of the runtime dies it is replaced, and calls wait meanwhile; after `ring_timeout`
        seconds they end with RingClosed. The log only has warnings, unless `log_level` is set. Raises
        ConfigError for an unknown or wrong setting, StartError with the runtime's last messages.
        """
        runtime = OwnRuntime(model, settings)
        # Also called when this object is garbage-collected, and at exit.
        self._stop_runtime = weakref.finalize(self, runtime.stop)
        try:
            runtime.wait_ready()
            super().__init__(runtime.run_dir, ring_timeout=ring_timeout)
            self._run_dir = runtime.run_dir
        except BaseException:
            self._stop_runtime()
            raise

    @overload
    def generate(
        self,
        prompt: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        timeout: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[Completion]: ...

    @overload
    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        use_tqdm: bool = True,
        timeout: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> Completion: ...

    @overload
    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        timeout: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> Completion | list[Completion]: ...

    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        timeout: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> Completion | list[Completion]:
        """Generate as Client.generate does, and show the progress of several prompts on stderr: as a bar on a
        terminal, otherwise as lines 5 s apart. A prompt may also be one of vLLM's objects, with `prompt` or
        `prompt_token_ids`.
        """
        prompt = without_objects(prompt)
        if not use_tqdm or is_single_prompt(prompt):
            return super().generate(prompt, sampling_params, timeout=timeout, **options)
        with progress_bar(len(prompt)) as on_completion:
            return self._generate(prompt, sampling_params, timeout, on_completion, **options)

    @overload
    def chat(
        self,
        messages: Conversation,
        sampling_params: SamplingParams | None = None,
        *,
        use_tqdm: bool = True,
        timeout: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> Completion: ...

    @overload
    def chat(
        self,
        messages: Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        timeout: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[Completion]: ...

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        timeout: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> Completion | list[Completion]:
        """Generate as Client.chat does, with the progress of several conversations as in `generate`."""
        prompts = conversations_of(messages)
        with respelling(CHAT_NAMES):
            return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, timeout=timeout, **options)

    def close(self) -> None:
        """Stop the runtime, which leaves none of its processes and files. May be called again."""
        super().close()
        self._stop_runtime()


@contextmanager
def progress_bar(num_prompts: int) -> Iterator[Callable[[Completion], None]]:
    """Show the progress of one call's prompts on stderr: a bar on a terminal, otherwise a line every LINE_S.
    Call the result with each completion.
    """
    # Imported here: most uses of the client library show no bar.
    from tqdm import tqdm

    began = time.monotonic()
    num_input = num_output = num_done = 0
    next_line_at = began + LINE_S
    with tqdm(total=num_prompts, desc="prompts", disable=None, dynamic_ncols=True) as bar:

        def add(completion: Completion) -> None:
            nonlocal num_input, num_output, num_done, next_line_at
            num_done += 1
            num_input += completion.usage.prompt_tokens
            num_output += completion.usage.completion_tokens
            now = time.monotonic()
            took = max(now - began, 1e-9)
            rates = f"input {num_input / took:.0f} tok/s, output {num_output / took:.0f} tok/s"
            bar.set_postfix_str(rates, refresh=False)
            bar.update()
            if bar.disable and now >= next_line_at:
                next_line_at = now + LINE_S
                share = 100 * num_done // num_prompts
                line = f"prompts: {num_done} of {num_prompts} ({share} %), {rates}"
                print(line, file=sys.stderr, flush=True)

        yield add
