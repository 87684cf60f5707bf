"""Labels of an HTTP request's prompts, and how they are held while it is answered."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from carousel.client.core.labels import LabelBook
from runtime.base.errors import InvalidRequest
from runtime.wire.format import MAX_LABEL_CHARS

SUFFIX_CHARS = 9


@contextmanager
def held(book: LabelBook, tenant: str, labels: Sequence[str], *, are_chosen: bool) -> Iterator[list[str]]:
    """Hold labels for the time of the block, and give the ones to use.

    A label that the caller has chosen is refused while another request of the tenant has it. An X-Request-Id
    is not refused, because a proxy may give one id to several requests: all but the first get a suffix.

    Raises: InvalidRequest(param="label").
    """
    own: dict[str, object] = {}
    try:
        for label in labels:
            holder = object()
            try:
                book.hold(tenant, label, holder)
            except InvalidRequest:
                if are_chosen:
                    raise
                stem = label[: MAX_LABEL_CHARS - SUFFIX_CHARS]
                label = f"{stem}-{uuid.uuid4().hex[: SUFFIX_CHARS - 1]}"
                book.hold(tenant, label, holder)
            own[label] = holder
        yield list(own)
    finally:
        for label, holder in own.items():
            book.release(tenant, label, holder)


def request_labels(request_id: str, num_prompts: int) -> list[str]:
    """Return a label for each prompt of a request: the request's id, with a number if there are several."""
    if num_prompts == 1:
        return [request_id]
    suffixes = [f"_{number}" for number in range(num_prompts)]
    return [request_id[: MAX_LABEL_CHARS - len(suffix)] + suffix for suffix in suffixes]
