"""AdapterLoads: combines the answers of ranks about loaded adapters. Knows slots and answers, no socket. No
torch.
"""

from __future__ import annotations

from typing import NamedTuple

from runtime.wire.plan import AdapterAnswer, AdapterFailed, AdapterLoaded, AdapterRef, LoadAdapter


class _Load(NamedTuple):
    number: int
    answers: dict[int, AdapterLoaded]  # by rank


class AdapterLoads:
    """Loads of adapters that ranks were told of. Each gets one answer: when all ranks have the adapter, or
    when the first one has failed.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._num_loads = 0
        self._loads: dict[int, _Load] = {}  # by slot
        self._answers: list[AdapterAnswer] = []

    def begin(self, slot: int, ref: AdapterRef) -> LoadAdapter:
        """Start a load, and return the message for the ranks."""
        self.forget(slot)
        self._num_loads += 1
        self._loads[slot] = _Load(self._num_loads, {})
        return LoadAdapter(slot, ref, self._num_loads)

    def forget(self, slot: int) -> None:
        """Give no answer about the slot, because it is dropped or loaded anew."""
        self._loads.pop(slot, None)
        self._answers = [answer for answer in self._answers if answer.slot != slot]

    def take(self, answer: AdapterAnswer) -> None:
        """Take a rank's answer. Answers about cancelled loads are ignored."""
        load = self._loads.get(answer.slot)
        if load is None or load.number != answer.number:
            return
        if isinstance(answer, AdapterFailed):
            del self._loads[answer.slot]
            self._answers.append(answer)
            return
        load.answers[answer.rank] = answer
        if len(load.answers) == self._num_ranks:
            del self._loads[answer.slot]
            self._answers.append(_of_all(list(load.answers.values())))

    def answers(self) -> list[AdapterAnswer]:
        """Return and clear the combined answers since the last call."""
        answers, self._answers = self._answers, []
        return answers


def _of_all(answers: list[AdapterLoaded]) -> AdapterLoaded:
    """Combine the answers of all ranks: total memory, and the time of the slowest."""
    num_bytes = sum(answer.num_bytes for answer in answers)
    load_s = max(answer.load_s for answer in answers)
    return AdapterLoaded(0, answers[0].slot, answers[0].version, num_bytes, load_s, answers[0].number)
