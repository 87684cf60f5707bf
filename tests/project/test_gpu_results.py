"""Files of a stage's results: as they come, and whatever fails."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.gpu.results import Results, is_complete


def test_each_result_is_in_the_file_before_the_next_is_measured(tmp_path: Path) -> None:
    path, seen = tmp_path / "stage.json", []

    def entries() -> Iterator[dict[str, Any]]:
        for n in range(3):
            seen.append([each["n"] for each in json.loads(path.read_text()).get("ms", ())])
            yield {"n": n}

    results = Results(path, lambda: None)
    results.put(name="a GPU")
    results.add_each("ms", entries(), batch=8)
    assert seen == [[], [0], [0, 1]]
    assert not is_complete(path)
    results.end()
    assert is_complete(path)
    assert json.loads(path.read_text())["ms"][2] == {"batch": 8, "n": 2}


def test_what_fails_is_an_error_in_its_place_and_its_memory_is_given_back(tmp_path: Path) -> None:
    path, released = tmp_path / "stage.json", []

    def fails() -> dict[str, Any]:
        raise MemoryError("no memory for batch 256")

    def fails_later() -> Iterator[dict[str, Any]]:
        yield {"overlap": True}
        fails()

    results = Results(path, lambda: released.append(True))
    results.add("draw", fails, batch=256)
    results.add("draw", lambda: {"us": 3.0}, batch=1)
    results.add_each("ms", fails_later(), batch=64)
    results.measure("prompt", fails)
    results.end()
    error = {"error": "MemoryError: no memory for batch 256"}
    found = json.loads(path.read_text())
    assert found["draw"] == [{"batch": 256, **error}, {"batch": 1, "us": 3.0}]
    assert found["ms"] == [{"batch": 64, "overlap": True}, {"batch": 64, **error}]
    assert found["prompt"] == error
    assert results.num_errors == 3
    assert len(released) == 4


def test_a_stage_that_did_not_come_to_its_end_is_run_again(tmp_path: Path) -> None:
    path = tmp_path / "stage.json"
    assert not is_complete(path)
    results = Results(path, lambda: None)
    results.put(name="a GPU")
    results.end(RuntimeError("the device is lost"))
    assert not is_complete(path)
    assert json.loads(path.read_text()) == {"name": "a GPU", "error": "RuntimeError: the device is lost"}
