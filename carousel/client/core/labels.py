"""LabelBook: labels of the requests in flight. A tenant may use a label for one request at a time."""

from __future__ import annotations

from runtime.base.errors import InvalidRequest


class LabelBook:
    """Labels in use. Labels of different tenants are independent, so that no tenant learns which ones others
    use. Thread-safe.
    """

    def __init__(self) -> None:
        self._holders: dict[tuple[str, str], object] = {}
        """Holder of each label, by tenant and label."""

    def __len__(self) -> int:
        return len(self._holders)

    def hold(self, tenant: str, label: str, holder: object) -> None:
        """Give a label to one holder until it is released. Raises InvalidRequest while another holder
        has it.
        """
        if self._holders.setdefault((tenant, label), holder) != holder:
            raise InvalidRequest(
                f"label: a request labelled {label!r} is in flight; wait for its end or choose another",
                param="label",
                code="duplicate_label",
            )

    def release(self, tenant: str, label: str, holder: object) -> None:
        """Release a label; no effect unless this holder has it."""
        if self._holders.get((tenant, label)) == holder:
            self._holders.pop((tenant, label), None)  # another thread may have removed it
