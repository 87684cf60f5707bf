"""LabelBook: the names of the requests in flight, which the runtime knows once at a time."""

from __future__ import annotations

from runtime.base.errors import InvalidRequest


class LabelBook:
    """Labels of different tenants never meet: nobody learns which ones others use. For any thread."""

    def __init__(self) -> None:
        self._holders: dict[tuple[str, str], object] = {}
        """By tenant and label."""

    def __len__(self) -> int:
        return len(self._holders)

    def hold(self, tenant: str, label: str, holder: object) -> None:
        """Give a label to one holder until he releases it. Raises InvalidRequest while another one has it."""
        if self._holders.setdefault((tenant, label), holder) != holder:
            raise InvalidRequest(
                f"label: a request labelled {label!r} is in flight; wait for its end or choose another",
                param="label",
                code="duplicate_label",
            )

    def release(self, tenant: str, label: str, holder: object) -> None:
        """Give a label back; without effect unless this holder has it."""
        if self._holders.get((tenant, label)) == holder:
            self._holders.pop((tenant, label), None)  # another thread may have been faster
