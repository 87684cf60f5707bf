"""Records: their ends are found however their bytes come."""

from __future__ import annotations

import random

from carousel.server.http.tls.records import Records
from tests.harness.cases import for_each

LENGTHS = [0, 1, 5, 22, 300, 16_640, 0, 0, 7]
STREAM = b"".join(b"\x17\x03\x03" + length.to_bytes(2, "big") + bytes(length) for length in LENGTHS)


def ends() -> list[int]:
    found = [0]
    for length in LENGTHS:
        found.append(found[-1] + 5 + length)
    return found


@for_each("most", [1, 2, 5, 100])
def test_so_many_whole_records_are_measured(most: int) -> None:
    records, at, cuts = Records(), 0, [0]
    numbers: list[int] = []
    while at < len(STREAM):
        size, number = records.measure(memoryview(STREAM)[at:], most)
        at += size
        cuts.append(at)
        numbers.append(number)
    assert cuts == [*ends()[:-1:most], len(STREAM)]
    assert sum(numbers) == len(LENGTHS)


def test_the_ends_are_the_same_however_the_bytes_come() -> None:
    rng = random.Random(0)
    for _ in range(200):
        records, at, cuts = Records(), 0, [0]
        while at < len(STREAM):
            come = memoryview(STREAM)[at : at + rng.choice([1, 2, 3, 7, 30, 20_000])]
            size, _ = records.measure(come, 1)
            assert 0 < size <= len(come)
            at += size
            if size < len(come):
                cuts.append(at)
        assert set(cuts) <= set(ends())


def test_bytes_of_handshakes_are_counted_from_the_header_on() -> None:
    records = Records()
    hello = b"\x16\x03\x01\x02\x00" + bytes(512)
    for piece in (hello[:3], hello[3:5], hello[5:], STREAM, hello[:5]):
        records.measure(memoryview(piece), 100)
    assert records.num_handshake_bytes == 1024
