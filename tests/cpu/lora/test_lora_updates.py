"""Adapters that are loaded and unloaded over HTTP while a launch runs."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from carousel import Client, InvalidRequest, LoRARequest, SamplingParams
from tests.harness.adapters import write_adapter
from tests.harness.http.http_front import Front, http_front
from tests.harness.ring.launched import Launched, launched

SHAPES = {f"model.layers.{layer}.self_attn.q_proj": (256, 256) for layer in range(6)}
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
PROMPT = list(range(100, 160))


class Server(NamedTuple):
    launch: Launched
    client: Client
    folder: Path

    def post(self, path: str, **body: Any) -> httpx.Response:
        return httpx.post(f"{self.launch.url}{path}", json=body, timeout=60)

    def write(self, name: str, seed: int) -> None:
        write_adapter(self.folder / name, SHAPES, seed=seed, size=3.0)

    def ids(self, name: str) -> tuple[list[int], int]:
        """Return the output, and how much of the prompt was cached."""
        asked = LoRARequest(name, 1) if name else None
        completion = self.client.generate(PROMPT, GREEDY, lora_request=asked)
        return completion.outputs[0].token_ids, completion.usage.cached_tokens

    def names(self) -> list[str]:
        models = httpx.get(f"{self.launch.url}/v1/models", timeout=30).json()["data"]
        return [card["id"] for card in models if card["parent"]]

    def info(self) -> dict[str, Any]:
        info: dict[str, Any] = httpx.get(f"{self.launch.url}/server_info", timeout=30).json()
        return info


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("allowed")
    write_adapter(folder / "first", SHAPES, seed=1, size=3.0)
    arguments = (
        *("--dtype", "float32", "--lora-modules", f"first={folder / 'first'}"),
        *("--allow-lora-updates", "--lora-dir", str(folder), "--api-workers", "2", "--max-loras", "5"),
    )
    with launched(*arguments) as launch, Client(launch.run_dir) as client:
        yield Server(launch, client, folder)


@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_an_adapter_comes_and_goes(server: Server, prefix: str) -> None:
    name = f"mine{len(prefix)}"
    server.write(name, 5)
    assert server.post("/generate", input_ids=PROMPT, lora_path=name).status_code == 400
    reply = server.post(f"{prefix}/load_lora_adapter", lora_name=name, lora_path=name)
    assert reply.status_code == 200, reply.text
    assert reply.json()["loaded_adapters"][name] == str(server.folder / name)
    assert server.names() == ["first", name]
    ids, _ = server.ids(name)
    assert ids not in (server.ids("")[0], server.ids("first")[0])
    held = server.info()["num_adapters"]
    reply = server.post(f"{prefix}/unload_lora_adapter", lora_name=name)
    assert reply.status_code == 200
    assert server.names() == ["first"]
    assert server.info()["num_adapters"] == held - 1
    with pytest.raises(InvalidRequest, match="there is no adapter"):
        server.ids(name)
    assert server.post(f"{prefix}/unload_lora_adapter", lora_name=name).status_code == 404


def test_other_weights_under_the_name_have_no_prefix_of_the_ones_before(server: Server) -> None:
    server.write("again", 11)
    load = {"lora_name": "again", "lora_path": str(server.folder / "again")}
    assert server.post("/load_lora_adapter", **load).status_code == 200
    first, _ = server.ids("again")
    assert server.ids("again")[1] > 0
    server.write("again", 12)
    os.utime(server.folder / "again" / "adapter_model.safetensors", ns=(12, 12))
    reply = server.post("/load_lora_adapter", **load)
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "adapter_exists")
    assert server.post("/load_lora_adapter", **load, load_inplace=True).status_code == 200
    second, cached = server.ids("again")
    assert (second != first, cached) == (True, 0)
    assert server.post("/unload_lora_adapter", lora_name="again").status_code == 200


def test_an_adapter_that_is_unloaded_stays_for_who_runs_with_it(server: Server) -> None:
    server.write("busy", 21)
    assert server.post("/load_lora_adapter", lora_name="busy", lora_path="busy").status_code == 200
    sampling = SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True)
    asked = LoRARequest("busy", 1)
    wanted = server.client.generate(PROMPT, sampling, lora_request=asked).outputs[0].token_ids
    deltas = iter(server.client.stream(PROMPT, sampling, lora_request=asked))
    ids = list(next(deltas).token_ids)
    assert server.post("/unload_lora_adapter", lora_name="busy").status_code == 200
    for delta in deltas:
        ids += delta.token_ids
    assert ids == wanted


def test_loads_of_one_adapter_at_once_are_one_load(server: Server) -> None:
    server.write("once", 31)
    before = server.info()["num_adapter_loads"]
    with ThreadPoolExecutor(4) as threads:
        replies = list(
            threads.map(
                lambda _: server.post("/load_lora_adapter", lora_name="once", lora_path="once"), range(4)
            )
        )
    assert sorted(reply.status_code for reply in replies) == [200, 400, 400, 400]
    server.ids("once")
    assert server.info()["num_adapter_loads"] == before + 1
    assert server.post("/unload_lora_adapter", lora_name="once").status_code == 200


def test_a_pinned_adapter_stays_on_the_device(server: Server) -> None:
    """Four of five slots; the others take turns in the fifth. A pin ends with an unload or another load."""
    names = [f"kept{number}" for number in range(4)]
    for number, name in enumerate(names):
        server.write(name, 60 + number)
        reply = server.post("/load_lora_adapter", lora_name=name, lora_path=name, pinned=True)
        assert reply.status_code == 200, reply.text
    wanted = [server.ids(name)[0] for name in names]
    reply = server.post("/load_lora_adapter", lora_name="one_more", lora_path="kept0", pinned=True)
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "too_many_pinned")
    assert server.post("/load_lora_adapter", lora_name="guest", lora_path="kept0").status_code == 200

    def loads_of(*asked: str) -> int:
        before = server.info()["num_adapter_loads"]
        for name in asked:
            server.ids(name)
        return int(server.info()["num_adapter_loads"] - before)

    assert loads_of("first", "guest", "first", "guest") == 4
    assert loads_of(*names) == 0
    assert [server.ids(name)[0] for name in names] == wanted
    again = {"lora_name": "kept0", "lora_path": "kept0", "load_inplace": True}
    assert server.post("/load_lora_adapter", **again).status_code == 200
    assert server.post("/unload_lora_adapter", lora_name="kept1").status_code == 200
    assert loads_of("first", "guest", "first", "guest") <= 2
    for name in ("guest", "kept0", "kept2", "kept3"):
        assert server.post("/unload_lora_adapter", lora_name=name).status_code == 200


@pytest.mark.parametrize("num_turns", [10, pytest.param(100, marks=pytest.mark.full)])
def test_many_loads_and_unloads_under_traffic_mix_nothing_up(server: Server, num_turns: int) -> None:
    """Three directories in turn under two names, while others ask all the time; what each makes is known."""
    wanted = {}
    for seed in range(3):
        server.write(f"turn{seed}", 40 + seed)
        asked = LoRARequest("any", 100 + seed, str(server.folder / f"turn{seed}"))
        wanted[f"turn{seed}"] = (
            server.client.generate(PROMPT, GREEDY, lora_request=asked).outputs[0].token_ids
        )
    assert len({tuple(ids) for ids in wanted.values()}) == 3
    base, first = server.ids("")[0], server.ids("first")[0]
    held = server.info()["num_adapters"]
    is_over = threading.Event()

    def others() -> int:
        count = 0
        while not is_over.is_set():
            assert (server.ids("")[0], server.ids("first")[0]) == (base, first)
            count += 1
        return count

    with ThreadPoolExecutor(3) as threads:
        traffic = threads.submit(others)
        try:
            for turn in range(num_turns):
                name, alias = f"turn{turn % 3}", f"alias{turn % 2}"
                reply = server.post("/load_lora_adapter", lora_name=alias, lora_path=name)
                assert reply.status_code == 200, reply.text
                calls = list(threads.map(server.ids, (alias, alias)))
                assert [ids for ids, _ in calls] == [wanted[name]] * 2
                assert server.post("/unload_lora_adapter", lora_name=alias).status_code == 200
        finally:
            is_over.set()
        assert traffic.result() > num_turns // 2
    info = server.info()
    assert info["num_adapters"] == held
    assert info["num_adapters_in_use"] == 0
    for name in ("any", "first"):
        server.client.drop_adapter(name)
    info = server.info()
    assert (info["num_adapters"], info["adapter_bytes"]) == (0, 0)


def test_bad_input_is_refused_and_changes_nothing(server: Server, tmp_path: Path) -> None:
    folder = server.folder
    write_adapter(tmp_path / "outside", SHAPES)
    (folder / "link").symlink_to(tmp_path / "outside")
    shutil.copytree(tmp_path / "outside", folder / "half")
    (folder / "half" / "adapter_model.safetensors").unlink()
    (folder / "half" / "adapter_model.safetensors").symlink_to(
        tmp_path / "outside" / "adapter_model.safetensors"
    )
    write_adapter(folder / "wide", {"model.layers.0.self_attn.q_proj": (99, 256)})
    write_adapter(folder / "cut", SHAPES)
    with (folder / "cut" / "adapter_model.safetensors").open("r+b") as file:
        file.truncate(1000)
    write_adapter(folder / "large", SHAPES, rank=65)
    write_adapter(folder / "nojson", SHAPES)
    (folder / "nojson" / "adapter_config.json").write_text("{")
    for path, reason in (
        ("none", "no such directory"),
        (str(tmp_path / "outside"), "out of --lora-dir"),
        ("../outside", "out of --lora-dir"),
        ("link", "out of --lora-dir"),
        ("half", "out of --lora-dir"),
        ("nul\0", "no path"),
        ("wide", "q_proj"),
        ("cut", "cut short"),
        ("large", "rank 65 is above"),
        ("nojson", "adapter_config.json"),
    ):
        reply = server.post("/v1/load_lora_adapter", lora_name="bad", lora_path=path)
        assert reply.status_code == 400, (path, reply.text)
        assert reason in reply.json()["error"]["message"], path
        assert server.names() == ["first"]
    for name in ("a/b", "first", server.info()["model"], "", "x" * 300):
        reply = server.post("/v1/load_lora_adapter", lora_name=name, lora_path="first")
        assert reply.status_code == 400, name
    assert server.ids("first")[0] != server.ids("")[0]


def test_without_permission_nothing_is_loaded(tmp_path: Path) -> None:
    body = {"lora_name": "x", "lora_path": "x"}
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()

    def refusal(front: Front) -> tuple[int, str]:
        reply = front.post("/v1/load_lora_adapter", **body)
        return reply.status_code, reply.json()["error"]["message"]

    with http_front(tmp_path / "a") as front:
        assert refusal(front)[0] == 400
        assert "--enable-lora" in refusal(front)[1]
    with http_front(tmp_path / "b", enable_lora=True) as front:
        assert refusal(front)[0] == 403
        assert "--allow-lora-updates" in refusal(front)[1]
