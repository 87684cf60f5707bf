"""LabelBook: the names of the requests in flight, which the runtime knows once at a time."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from runtime.base.errors import InvalidRequest
from runtime.wire.format import MAX_LABEL_CHARS

SUFFIX_CHARS = 9


class LabelBook:
    """Labels of different tenants never meet: nobody learns which ones others use."""

    def __init__(self) -> None:
        self._held: set[tuple[str, str]] = set()
        """Pairs of tenant and label."""

    @contextmanager
    def hold(self, tenant: str, labels: Sequence[str], *, are_chosen: bool) -> Iterator[list[str]]:
        """The labels to use for the time of the block.

        One that the caller has chosen is refused while another request of the tenant has it. An X-Request-Id
        is not: a proxy may give one to several requests, of which all but the first get a suffix.
        Raises: InvalidRequest(param="label").
        """
        held: list[str] = []
        try:
            for label in labels:
                if (tenant, label) in self._held:
                    if are_chosen:
                        raise InvalidRequest(
                            f"label: a request called {label!r} is in flight; wait for its end",
                            param="label",
                            code="duplicate_label",
                        )
                    stem = label[: MAX_LABEL_CHARS - SUFFIX_CHARS]
                    label = f"{stem}-{uuid.uuid4().hex[: SUFFIX_CHARS - 1]}"
                self._held.add((tenant, label))
                held.append(label)
            yield held
        finally:
            self._held.difference_update((tenant, label) for label in held)


def request_labels(request_id: str, num_prompts: int) -> list[str]:
    """One for each prompt of a request: its id, of several with their numbers."""
    if num_prompts == 1:
        return [request_id]
    suffixes = [f"_{number}" for number in range(num_prompts)]
    return [request_id[: MAX_LABEL_CHARS - len(suffix)] + suffix for suffix in suffixes]
