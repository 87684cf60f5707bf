"""Which adapters that came with requests are kept, by pages and by bytes."""

from __future__ import annotations

import pytest

from runtime.base.errors import AdapterNotResident, InvalidRequest
from runtime.ring.adapters_file import KeptAdapter
from runtime.wire.plan import AdapterRef
from scheduler_proc.capacity.inline_store import InlineStore


class Files:
    """A run directory."""

    def __init__(self) -> None:
        self.there: dict[str, KeptAdapter] = {}

    def add(self, path: str, num_rows: int = 8, num_bytes: int = 10) -> str:
        self.there[path] = KeptAdapter("0" * 64, 1, num_rows, num_bytes)
        return path

    def kept_adapters(self) -> list[tuple[str, KeptAdapter]]:
        return list(self.there.items())

    def kept_adapter(self, path: str) -> KeptAdapter | None:
        return self.there.get(path)

    def is_inline(self, path: str) -> bool:
        return path.startswith("kept")

    def remove_adapter(self, path: str) -> None:
        del self.there[path]


def ref(path: str) -> AdapterRef:
    return AdapterRef("task", 1, "1", path)


@pytest.mark.parametrize("room", [{"max_bytes": 20}, {"max_bytes": 1, "max_rows": 31, "page_rows": 15}])
def test_two_fit_where_two_should_and_the_least_recently_used_goes(room: dict[str, int]) -> None:
    files = Files()
    store = InlineStore(files, lambda: (), **room)
    for path in ("kept1", "kept2"):
        store.put(files.add(path))
    store.use(ref("kept1"))
    store.put(files.add("kept3"))
    assert list(files.there) == ["kept1", "kept3"]
    assert store.num_evicted == 1
    with pytest.raises(AdapterNotResident):
        store.use(ref("kept2"))
    again = InlineStore(files, lambda: (), **room)  # of the next scheduler
    again.use(ref("kept3"))
    assert again.figures()["num_host_adapters"] == 2


def test_a_flood_of_one_tenant_takes_the_place_of_its_own() -> None:
    files = Files()
    store = InlineStore(files, lambda: (), max_bytes=40)
    store.put(files.add("kept/bob-lora-1"))
    for number in range(50):
        store.put(files.add(f"kept/alice-lora-{number}"))
    assert list(files.there) == ["kept/bob-lora-1", *(f"kept/alice-lora-{each}" for each in (47, 48, 49))]
    store.put(files.add("kept/bob-lora-2"))
    store.put(files.add("kept/bob-lora-3"))
    assert [path.partition("-")[0] for path in files.there].count("kept/bob") == 2, "it has the most now"
    assert "kept/bob-lora-1" not in files.there, "the least recently used of its own"


def test_what_a_request_has_stays_and_what_does_not_fit_is_refused() -> None:
    files, in_use = Files(), ["kept1"]
    store = InlineStore(files, lambda: in_use, max_bytes=20)
    store.put(files.add("kept1"))
    store.put(files.add("kept2"))
    store.put(files.add("kept3"))
    assert list(files.there) == ["kept1", "kept3"]
    in_use.append("kept3")
    with pytest.raises(InvalidRequest, match="0 of 20 are not in use") as caught:
        store.put(files.add("kept4"))
    assert caught.value.code == "no_room_for_adapter"
    assert list(files.there) == ["kept1", "kept3"]
    store.put("kept1")


@pytest.mark.parametrize("num_bytes", [21, 15])
def test_nothing_makes_way_for_one_that_does_not_fit_even_then(num_bytes: int) -> None:
    """The adapters of others were gone, and the new one was refused."""
    files = Files()
    store = InlineStore(files, lambda: ["kept/bob-lora-1"], max_bytes=20)
    store.put(files.add("kept/bob-lora-1"))
    store.put(files.add("kept/bob-lora-2"))
    with pytest.raises(InvalidRequest, match=f"the weights take {num_bytes} bytes"):
        store.put(files.add("kept/alice-lora-1", num_bytes=num_bytes))
    assert list(files.there) == ["kept/bob-lora-1", "kept/bob-lora-2"]
    assert store.num_evicted == 0


def test_one_that_the_device_cannot_load_is_forgotten() -> None:
    files = Files()
    store = InlineStore(files, lambda: (), max_bytes=20)
    store.put(files.add("kept1"))
    assert store.note_failure(ref("kept1"), "the adapter in kept1: q_proj") == "lora_config: q_proj"
    assert not files.there
    assert (
        store.note_failure(ref("/elsewhere"), "the adapter in /elsewhere: x")
        == "the adapter in /elsewhere: x"
    )


def test_one_that_a_tokenizer_could_not_announce_is_found() -> None:
    files = Files()
    store = InlineStore(files, lambda: (), max_bytes=20)
    store.use(ref(files.add("kept1")))
    assert store.figures()["num_host_adapters"] == 1
