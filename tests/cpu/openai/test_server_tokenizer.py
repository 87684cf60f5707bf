"""The HTTP server's own tokenizer: how much may wait for it."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from carousel.server.request import tokenizer as tokenizer_module
from carousel.server.request.tokenizer import NUM_THREADS, ServerTokenizer, Vocabulary
from runtime.base.errors import Overloaded
from runtime.settings.config import DEMO_MODEL
from runtime.text.tokenizer import load


def encode_at_once(prompts: Sequence[Any]) -> list[Any]:
    """Return the ids of each, or what was raised."""

    async def encode_all() -> list[Any]:
        tokenizer = ServerTokenizer(str(DEMO_MODEL), "", 1 << 16)
        await tokenizer.vocabulary()
        found = await asyncio.gather(
            *(tokenizer.encode(each, {}) for each in prompts), return_exceptions=True
        )
        return [each[0] if isinstance(each, tuple) else each for each in found]

    return asyncio.run(encode_all())


def test_a_thousand_short_prompts_at_once_are_all_read() -> None:
    chat = [{"role": "user", "content": "hello"}]
    found = encode_at_once(["def f():\n", [1, 2, 3], chat] * 400)
    assert all(isinstance(each, list) and each for each in found)


def test_what_is_too_much_to_wait_for_is_refused_and_a_large_one_alone_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("carousel.server.tenancy.fair_threads.MAX_WAITING_CHARS", 1 << 16)
    large = [1] * ((1 << 16) - 4096)
    first, second, third, short = encode_at_once([large, large, "x" * 4096, "x"])
    assert len(first) == len(large)
    assert isinstance(second, Overloaded)
    assert isinstance(third, Overloaded)
    assert isinstance(short, list), "there is room for it"


@pytest.mark.parametrize("place", [0, 1, 250, 255, 256, 259, 264, 511, 700])
@pytest.mark.parametrize("num_before", [0, 3, 200])
def test_tokens_up_to_a_mark_are_counted_wherever_it_stands(place: int, num_before: int) -> None:
    """Across the pieces that are searched, and where a second mark follows."""
    vocabulary = Vocabulary(load(DEMO_MODEL))
    (mark,) = vocabulary._tokenizer.encode_batch(["</think>"], add_special_tokens=False)
    assert len(mark) > 1
    (other,) = vocabulary._tokenizer.encode_batch([" x"], add_special_tokens=False)
    ids = [*other.tolist()[:1] * place, *mark.tolist(), *other.tolist()[:1] * 300, *mark.tolist()]
    num_up_to = place + len(mark)
    if num_before < num_up_to:
        assert vocabulary.num_up_to("</think>", ids, num_before) == num_up_to


def test_no_collection_comes_while_a_tokenizer_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """There were several of up to 20 ms: what the process has frozen does not count in their thresholds."""
    collections: list[int] = []
    vocabulary = tokenizer_module.Vocabulary

    def make(tokenizer: Any) -> Vocabulary:
        before = gc.get_stats()[0]["collections"]
        kept: list[list[int]] = [[] for _ in range(20_000)]
        collections.append(gc.get_stats()[0]["collections"] - before)
        assert kept
        return vocabulary(tokenizer)

    monkeypatch.setattr(tokenizer_module, "Vocabulary", make)
    gc.freeze()
    try:
        asyncio.run(ServerTokenizer(str(DEMO_MODEL), "", 64).vocabulary())
        assert gc.isenabled()
    finally:
        gc.unfreeze()
    assert collections == [0]


@pytest.mark.parametrize("is_frozen", [True, False])
def test_a_tokenizer_that_is_loaded_is_looked_through_by_no_collection(is_frozen: bool) -> None:
    """Frozen, it is treated as all that was there at the start, in a process that has frozen that."""
    gc.unfreeze()
    gc.collect()
    if is_frozen:
        gc.freeze()
    try:
        vocabulary = asyncio.run(ServerTokenizer(str(DEMO_MODEL), "", 64).vocabulary())
        assert any(each is vocabulary for each in gc.get_objects()) != is_frozen
    finally:
        gc.unfreeze()


def test_a_template_that_another_thread_has_opened_is_not_opened_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each opening freezes all objects of the process, those of requests too."""
    tokenizer = load(DEMO_MODEL, prepared=DEMO_MODEL / "tokenizer.json")
    vocabulary, opened = Vocabulary(tokenizer), []
    assert not tokenizer.is_template_open

    class OtherIsFirst:
        def __enter__(self) -> None:
            assert tokenizer.template_variables

        def __exit__(self, *_: object) -> None:
            pass

    @contextmanager
    def kept() -> Iterator[None]:
        opened.append(1)
        yield

    monkeypatch.setattr(vocabulary, "_opening", OtherIsFirst())
    monkeypatch.setattr(tokenizer_module, "_kept", kept)
    assert vocabulary.render([{"role": "user", "content": "x"}], {})
    assert not opened


def test_the_longest_prompt_that_can_fit_is_known_without_a_thread_once_it_was_found() -> None:
    """Large bodies of all tenants waited for it in one line, each behind work of the busiest tenant."""

    async def main() -> None:
        tokenizer, release = ServerTokenizer(str(DEMO_MODEL), "", 64), threading.Event()
        found = await tokenizer.max_prompt_chars()
        busy = [
            asyncio.create_task(tokenizer._threads.run("alice", release.wait, 1)) for _ in range(NUM_THREADS)
        ]
        try:
            asked = asyncio.create_task(tokenizer.max_prompt_chars())
            for _ in range(10):
                await asyncio.sleep(0)
            assert asked.done()
            assert found == asked.result() is not None
        finally:
            release.set()
            await asyncio.gather(*busy, asked)

    asyncio.run(main())
