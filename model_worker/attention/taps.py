"""StepTaps: collects the rows of additional outputs during a forward. Knows names and positions, no plan."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


class StepTaps:
    """Collector of rows from a forward's intermediate results, on the stream that computes them."""

    def __init__(
        self, names: frozenset[str], places: Tensor, tokens: Tensor, download: Callable[[Tensor], Tensor]
    ) -> None:
        """places [m]: indices among the batch's outputs. tokens [m]: indices among its tokens."""
        self.names = names
        self._places = places
        self._tokens = tokens
        self._download = download
        self.values: dict[str, Tensor] = {}

    def pick(self, hidden: Tensor) -> Tensor:
        """Return the wanted rows [m, width] of an intermediate result [T, width]."""
        return hidden.index_select(0, self._tokens)

    def take(self, name: str, rows: Tensor) -> None:
        """Keep rows [m, width] that were picked."""
        # Downloaded at once, because all outputs of a long chunk may not fit the device together.
        self.values[name] = self._download(rows.float())

    def take_outputs(self, name: str, hidden: Tensor) -> None:
        """Keep the wanted rows of final hidden states [W, hidden_size]."""
        self.take(name, hidden.index_select(0, self._places))
