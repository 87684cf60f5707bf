"""Weights that are replaced while a launch serves: what streams get, what a death and a bad checkpoint do."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from carousel import Client, InvalidRequest, RequestError, SamplingParams
from runtime.settings.config import DEMO_MODEL
from tests.harness.ring.launched import Launched, launched, wait_until

WEIGHTS = "model.safetensors"
NUM_TOKENS = 160
NUM_BEFORE = 12
"""Tokens that each stream has before the weights change."""
TIMEOUT_S = 120.0
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
PROMPTS = [[300 + number, *range(100, 140)] for number in range(8)]


class Served(NamedTuple):
    launch: Launched
    client: Client
    folder: Path
    """The --weights-dir, with the demo model's weights as "old" and others as "new"."""

    def ids(self, prompt: list[int], num_tokens: int = NUM_TOKENS) -> list[int]:
        sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        return list(self.client.generate(prompt, sampling, timeout=TIMEOUT_S).token_ids)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return httpx.post(f"{self.launch.url}{path}", json=body, timeout=TIMEOUT_S)

    def version(self) -> str:
        reply = httpx.get(f"{self.launch.url}/weight_version", timeout=TIMEOUT_S)
        version: str = reply.json()["weight_version"]
        return version


def write_checkpoint(path: Path, seed: int = 0) -> Path:
    """Write a checkpoint of the demo model's shape, with other weights unless the seed is 0."""
    shutil.copytree(DEMO_MODEL, path)
    if seed:
        noise = torch.Generator().manual_seed(seed)
        tensors = {
            name: tensor + (0.05 * torch.randn(tensor.shape, generator=noise)).to(tensor.dtype)
            for name, tensor in load_file(path / WEIGHTS).items()
        }
        save_file(tensors, path / WEIGHTS, metadata={"format": "pt"})
    return path


def spoil(file: Path) -> None:
    """Give a tensor of a file the place of another one of its kind, as far as the header says."""
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    first, other, *_ = [each for name, each in sorted(header.items()) if name.endswith("q_proj.weight")]
    first["data_offsets"] = other["data_offsets"]
    spoiled = json.dumps(header, separators=(",", ":")).encode().ljust(length)
    file.write_bytes(data[:8] + spoiled + data[8 + length :])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    write_checkpoint(folder / "old")
    write_checkpoint(folder / "new", seed=1)
    misfit = write_checkpoint(folder / "misfit") / WEIGHTS
    save_file(dict(list(load_file(misfit).items())[1:]), misfit)
    spoil(write_checkpoint(folder / "broken", seed=3) / WEIGHTS)
    return folder


@pytest.fixture(scope="module")
def of_new(folder: Path) -> Iterator[Client]:
    """A client of a launch that has had the new weights from its start."""
    arguments = ("--model", str(folder / "new"), "--dtype", "float32")
    with launched(*arguments) as launch, Client(launch.run_dir) as client:
        yield client


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.full)])
def served(request: pytest.FixtureRequest, folder: Path) -> Iterator[Served]:
    arguments = ("--model", str(folder / "old"), "--dtype", "float32", "--tp-size", str(request.param))
    with launched(*arguments, "--weights-dir", str(folder)) as launch, Client(launch.run_dir) as client:
        yield Served(launch, client, folder)


class Reader:
    """A stream that is read in a thread."""

    def __init__(self, client: Client, prompt: list[int]) -> None:
        self.ids: list[int] = []
        self.version = self.reason = ""
        self._stream = client.stream(prompt, GREEDY, timeout=TIMEOUT_S)
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        for delta in self._stream:
            self.ids += delta.token_ids
            self.version, self.reason = delta.weight_version, delta.finish_reason or ""

    def join(self) -> None:
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive()


def read_streams(client: Client) -> list[Reader]:
    readers = [Reader(client, prompt) for prompt in PROMPTS]
    wait_until(lambda: all(len(each.ids) >= NUM_BEFORE for each in readers), 20.0, "every stream has begun")
    return readers


def num_shared(ids: list[int], others: list[int]) -> int:
    """Return at how many places from the first on both are the same."""
    pairs = zip(ids, others, strict=True)
    return next((at for at, (one, other) in enumerate(pairs) if one != other), len(ids))


def test_streams_go_on_with_the_new_weights_as_a_fresh_server_would(served: Served, of_new: Client) -> None:
    old = [served.ids(prompt) for prompt in PROMPTS]
    assert (served.version(), served.ids(PROMPTS[0])) == ("default", old[0])
    readers = read_streams(served.client)
    num_before = [len(each.ids) for each in readers]
    done = served.client.update_weights("new", weight_version="second", timeout=TIMEOUT_S)
    assert (done["model_path"], done["weight_version"]) == (str(served.folder / "new"), "second")
    for reader in readers:
        reader.join()
    # What has come of a stream when the weights have changed may lie unread; what is still as it was is told.
    num_same = [num_shared(each.ids, ids) for each, ids in zip(readers, old, strict=True)]
    assert max(num_same) < NUM_TOKENS, "the streams ended before the weights changed"
    for prompt, reader, ids, before, after in zip(PROMPTS, readers, old, num_before, num_same, strict=True):
        assert (reader.version, reader.reason, len(reader.ids)) == ("second", "length", NUM_TOKENS)
        assert reader.ids[:before] == ids[:before]
        rest = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS - after, ignore_eos=True)
        wanted = of_new.generate(prompt + reader.ids[:after], rest, timeout=TIMEOUT_S).token_ids
        assert reader.ids[after:] == list(wanted)


def test_what_the_old_weights_have_cached_is_not_used(served: Served, of_new: Client) -> None:
    """The prompts have been computed with the old weights before the change."""
    for prompt in PROMPTS[:2]:
        sampling = {"temperature": 0, "max_new_tokens": 24}
        body = served.post("/generate", input_ids=prompt, sampling_params=sampling).json()
        assert body["meta_info"]["weight_version"] == "second"
        wanted = SamplingParams(temperature=0.0, max_tokens=24)
        assert body["output_ids"] == list(of_new.generate(prompt, wanted, timeout=TIMEOUT_S).token_ids)
    info = httpx.get(f"{served.launch.url}/model_info", timeout=TIMEOUT_S).json()
    assert (info["model_path"], info["weight_version"]) == (str(served.folder / "new"), "second")


def test_a_death_after_the_change_keeps_the_new_weights(served: Served, of_new: Client) -> None:
    pid = served.launch.pid_of("worker")
    os.kill(pid, signal.SIGKILL)
    wanted = of_new.generate(PROMPTS[3], GREEDY, timeout=TIMEOUT_S).token_ids
    assert served.ids(PROMPTS[3]) == list(wanted)
    assert served.launch.pid_of("worker") != pid
    assert served.version() == "second"


def test_a_checkpoint_that_does_not_fit_stops_nothing(served: Served) -> None:
    pids, readers = served.launch.pids(), read_streams(served.client)
    misfits = {"misfit": "invalid_weights", "../new": "invalid_weights", "new": "weights_are_served"}
    for asked, code in misfits.items():
        with pytest.raises(InvalidRequest) as caught:
            served.client.update_weights(asked, timeout=TIMEOUT_S)
        assert caught.value.code == code
    reply = served.post("/update_weights_from_disk", model_path="misfit")
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "model_path")
    assert "lacks tensors" in reply.json()["error"]["message"]
    for reader in readers:
        reader.join()
        assert (reader.version, reader.reason) == ("second", "length")
    assert served.launch.pids() == pids


def test_weights_that_cannot_be_loaded_leave_the_old_ones(served: Served, of_new: Client) -> None:
    """Two tensors of the file share their bytes, which only loading finds."""
    reader = Reader(served.client, PROMPTS[4])
    with pytest.raises(RequestError) as caught:
        served.client.update_weights("broken", timeout=TIMEOUT_S)
    assert caught.value.code == "weights_not_loaded"
    assert "the old ones (second) serve" in caught.value.message
    reader.join()
    assert (reader.version, reader.ids) == ("second", list(of_new.generate(PROMPTS[4], GREEDY).token_ids))
    assert served.version() == "second"


def test_all_requests_end_where_that_is_asked_for_and_a_pause_stays(served: Served) -> None:
    readers = read_streams(served.client)
    served.post("/pause_generation").raise_for_status()
    path = str(served.folder / "old")
    reply = served.post(
        "/update_weights_from_disk", model_path=path, abort_all_requests=True, flush_cache=True
    )
    assert reply.status_code == 200, reply.text
    assert (reply.json()["success"], reply.json()["weight_version"]) == (True, "old")
    for reader in readers:
        reader.join()
        assert (reader.reason, reader.version) == ("abort", "second")
        assert len(reader.ids) < NUM_TOKENS
    assert served.version() == "old"
    assert served.client.server_info(timeout=TIMEOUT_S)["is_paused"], "the change has ended the pause"
    served.client.continue_generation(timeout=TIMEOUT_S)
    assert served.client.generate(PROMPTS[0], GREEDY, timeout=TIMEOUT_S).outputs[0].weight_version == "old"


def test_a_launch_without_the_flag_replaces_nothing(demo_launch: Launched) -> None:
    asked = {"model_path": str(DEMO_MODEL)}
    reply = httpx.post(f"{demo_launch.url}/update_weights_from_disk", json=asked, timeout=TIMEOUT_S)
    assert (reply.status_code, "--weights-dir" in reply.json()["error"]["message"]) == (403, True)
    with Client(demo_launch.run_dir) as client, pytest.raises(RequestError, match="--weights-dir"):
        client.update_weights(DEMO_MODEL, timeout=TIMEOUT_S)
