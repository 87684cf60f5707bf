"""Progress bar over the prompts of one call: how many are done, and how many tokens a second that was."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from carousel.client.core.result import Completion


@contextmanager
def progress_bar(num_prompts: int) -> Iterator[Callable[[Completion], None]]:
    """Shows a bar on stderr unless that is no terminal; call what it gives with each completion."""
    # Imported here: most uses of the client library show no bar.
    from tqdm import tqdm

    began = time.monotonic()
    num_input = num_output = 0
    with tqdm(total=num_prompts, desc="prompts", disable=None, dynamic_ncols=True) as bar:

        def add(completion: Completion) -> None:
            nonlocal num_input, num_output
            num_input += completion.usage.prompt_tokens
            num_output += completion.usage.completion_tokens
            took = max(time.monotonic() - began, 1e-9)
            bar.set_postfix_str(
                f"input {num_input / took:.0f} tok/s, output {num_output / took:.0f} tok/s", refresh=False
            )
            bar.update()

        yield add
