"""Count of what is on the way to the scheduler, across deaths of the scheduler and of tokenizers."""

from __future__ import annotations

from runtime.wire.status_page import ProcessStatus
from tokenizer_proc.admission import SentCount


class Ring:
    """The other tokenizers."""

    def __init__(self) -> None:
        self.num_sent = 0
        self.epochs = (1,)

    def count(self) -> SentCount:
        return SentCount(lambda: self.num_sent, lambda: self.epochs)


def on_way(count: SentCount, num_sent: int, scheduler: ProcessStatus) -> int:
    return count.num_on_way(num_sent, scheduler)


def test_what_was_sent_and_not_received_is_on_the_way() -> None:
    ring = Ring()
    count = ring.count()
    assert on_way(count, 0, ProcessStatus(1)) == 0
    ring.num_sent = 4
    assert on_way(count, 3, ProcessStatus(1, num_received=5)) == 2
    assert on_way(count, 3, ProcessStatus(1, num_received=7)) == 0


def test_a_scheduler_that_was_replaced_starts_with_nothing_on_the_way() -> None:
    count = Ring().count()
    assert on_way(count, 500, ProcessStatus(1, num_received=480)) == 20
    assert on_way(count, 500, ProcessStatus(2)) == 0
    assert on_way(count, 503, ProcessStatus(2)) == 3
    assert on_way(count, 503, ProcessStatus(2, num_received=3)) == 0


def test_another_tokenizer_that_was_replaced_takes_what_it_had_sent_along() -> None:
    ring = Ring()
    count = ring.count()
    ring.num_sent = 100
    assert on_way(count, 10, ProcessStatus(1, num_received=90)) == 20
    ring.num_sent, ring.epochs = 0, (2,)
    assert on_way(count, 10, ProcessStatus(1, num_received=90)) == 0
    assert on_way(count, 15, ProcessStatus(1, num_received=92)) == 3


def test_a_tokenizer_that_takes_anothers_place_counts_from_its_own_start() -> None:
    count = Ring().count()
    assert on_way(count, 0, ProcessStatus(1, num_received=1000)) == 0
    assert on_way(count, 2, ProcessStatus(1, num_received=1001)) == 1


def test_a_scheduler_that_has_received_more_than_was_sent_has_nothing_on_the_way() -> None:
    count = Ring().count()
    assert on_way(count, 5, ProcessStatus(1, num_received=5)) == 0
    assert on_way(count, 5, ProcessStatus(1, num_received=100)) == 0
