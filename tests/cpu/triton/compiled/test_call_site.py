"""Call sites launch what Triton would launch: the same compiled code, with the same arguments."""

from __future__ import annotations

import gc
import logging
import random
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import triton.language as tl
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from benchmarks.gpu.fake_driver import FakeDriver
from model_worker.kernels.triton import call_site
from model_worker.kernels.triton.call_site import CallSite, launches_by_triton_alone


class Driver(FakeDriver):
    """Keeps what would be launched: the stand-in for a variant's compiled launcher, and its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[tuple[object, tuple[Any, ...]]] = []
        self.device = self.stream = 0
        launches = self.launches

        class Launcher:
            def __init__(self, src: Any, metadata: Any) -> None:
                pass

            def __call__(self, *args: Any) -> None:
                launches.append((self, args))

        self.launcher_cls = Launcher

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return self.stream


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # without it Triton 3.9 warns
    fake = Driver()
    with mock.patch.object(driver, "_active", fake):
        yield fake


def _scaled(x, out, n, added, scale, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.arange(0, BLOCK)
    y = tl.load(x + i, mask=i < n) * scale
    if added is not None:
        y += added
    tl.store(out + i, y, mask=i < count)


@pytest.fixture
def kernel(fake: Driver) -> Iterator[Any]:
    """Compiled, not interpreted: it uses nothing of the language that is itself written in it."""
    kernel = JITFunction(_scaled, do_not_specialize=["count"], do_not_specialize_on_alignment=["out"])
    yield kernel
    kernel.device_caches.clear()
    gc.collect()  # code is unloaded through the driver that loaded it


MEMORY = torch.zeros(128)
USUAL: dict[str, Any] = {"x": MEMORY, "out": MEMORY, "n": 7, "added": 3, "scale": 0.5, "count": 5}
CHANGES: list[dict[str, Any]] = [
    {},
    {"x": MEMORY[1:]},
    {"x": MEMORY[2:]},
    {"x": MEMORY[4:]},
    {"out": MEMORY[1:]},
    {"x": MEMORY[1:], "out": MEMORY[3:]},
    {"x": MEMORY.half()},
    {"out": MEMORY.bfloat16()},
    {"x": torch.nn.Parameter(MEMORY, requires_grad=False)},
    *({"n": n} for n in (0, 1, True, 2, 16, 17, -16, (1 << 31) - 1, 1 << 31)),
    *({"added": added} for added in (None, 0, 1, True, 1.0, 2)),
    *({"scale": scale} for scale in (0.0, 1.0, 1, 0, 2, True)),
    *({"count": count} for count in (0, 1, 2, 16, 17, (1 << 31) - 1, 1 << 31, -(1 << 31), -(1 << 31) - 1)),
    {"n": 16, "x": MEMORY[1:]},
    {"n": 1, "added": 1, "scale": 1.0, "count": 1},
]


def test_what_is_launched_is_what_triton_would_launch(fake: Driver, kernel: Any) -> None:
    """In any order: the first launch of a call site decides how it looks at the later ones."""
    cases = [
        (device, block, tuple({**USUAL, **change}.values()))
        for device, block, changes in ((0, 16, CHANGES), (1, 16, CHANGES[:3]), (0, 32, CHANGES[:3]))
        for change in changes
    ]

    def launch(case: tuple[int, int, tuple[Any, ...]], site: Any) -> tuple[object, tuple[Any, ...]]:
        fake.device, block, arguments = case
        site(block)((2, 3, 1), *arguments)
        return fake.launches.pop()

    def by_triton(block: int) -> Any:
        return lambda grid, *arguments: kernel[grid](*arguments, BLOCK=block, num_warps=1)

    expected = [launch(case, by_triton) for case in cases]
    assert len({variant for variant, _ in expected}) > 20
    run = mock.Mock(side_effect=kernel.run)
    for seed in range(8):
        order = random.Random(seed).sample(range(len(cases)), len(cases))
        sites = {block: CallSite(kernel, BLOCK=block, num_warps=1) for block in (16, 32)}
        for _ in range(3):
            run.reset_mock()
            with mock.patch.object(kernel, "run", run):
                for i in order:
                    variant, args = launch(cases[i], lambda block: sites[block].launch)  # noqa: B023
                    assert variant is expected[i][0], (seed, cases[i])
                    assert _without_hooks(args) == _without_hooks(expected[i][1])
        # Every kind has been seen: no launch of the last round was Triton's own.
        assert run.call_count == 0


def _without_hooks(args: tuple[Any, ...]) -> list[Any]:
    """Without launch metadata and the two hooks; tensors by address, since == compares elements."""
    return [
        (type(each), each.data_ptr() if isinstance(each, torch.Tensor) else each)
        for each in (*args[:6], *args[9:])
    ]


def launch_often(site: CallSite, times: int = 3) -> None:
    for _ in range(times):
        site.launch((1, 1, 1), *USUAL.values())


def test_each_launch_goes_to_the_stream_that_is_current(fake: Driver, kernel: Any) -> None:
    site = CallSite(kernel, BLOCK=16)
    launch_often(site)
    fake.stream = 7
    launch_often(site)
    assert [args[3] for _, args in fake.launches] == [0, 0, 0, 7, 7, 7]


def test_hooks_see_every_launch_while_they_are_there(fake: Driver, kernel: Any) -> None:
    site = CallSite(kernel, BLOCK=16)
    launch_often(site)
    enter, leave, before = mock.Mock(), mock.Mock(), mock.Mock()
    for hooks, hook, place in (
        (knobs.runtime.launch_enter_hook, enter, 7),
        (knobs.runtime.launch_exit_hook, leave, 8),
    ):
        fake.launches.clear()
        hooks.add(hook)
        try:
            launch_often(site)
        finally:
            hooks.remove(hook)
        # The compiled launcher calls what it is given here.
        assert [args[place] for _, args in fake.launches] == [hooks] * 3
        launch_often(site, 1)
        assert fake.launches[-1][1][place] is None
    kernel.add_pre_run_hook(before)
    launch_often(site)
    assert before.call_count == 3


def test_launches_by_triton_alone_can_be_asked_for(fake: Driver, kernel: Any) -> None:
    site = CallSite(kernel, BLOCK=16)
    launch_often(site)
    with mock.patch.object(kernel, "run", wraps=kernel.run) as run:
        with launches_by_triton_alone():
            launch_often(site)
        assert run.call_count == 3
        launch_often(site)
    assert run.call_count == 3
    assert len({variant for variant, _ in fake.launches}) == 1


@pytest.mark.parametrize("changed", ["launch", "addresses", "no source"])
def test_a_triton_with_other_internals_launches_by_itself(
    fake: Driver, kernel: Any, changed: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    call_site._is_as_expected.cache_clear()
    match changed:
        case "launch":
            monkeypatch.setattr(call_site, "TRITON_LAUNCHES", "kernel.run(grid, stream)")
        case "addresses":  # as if pointers were specialised by multiples of 32
            monkeypatch.setattr(
                call_site, "native_specialize_impl", lambda _, tensor, *flags: tensor.data_ptr() % 32 == 0
            )
        case "no source":
            monkeypatch.setattr("inspect.getsource", mock.Mock(side_effect=OSError))
    run = mock.Mock(side_effect=kernel.run)
    with mock.patch.object(kernel, "run", run), caplog.at_level(logging.WARNING):
        for _ in range(2):
            launch_often(CallSite(kernel, BLOCK=16))
    call_site._is_as_expected.cache_clear()
    assert run.call_count == len(fake.launches) == 6
    assert ["launched by Triton alone" in record.message for record in caplog.records] == [True]
