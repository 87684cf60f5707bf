"""On the GPUs that are there; with --pretend, where there is none, on pretended ones, with less to do."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:  # it imports Triton, which reads once whether it interprets
    from tests.harness.pretended_gpu import PretendedGpu

_pretence = ExitStack()
_pretended: list[PretendedGpu] = []


def compiled_so_far() -> list[str]:
    """The variants of kernels that the pretended GPU was given."""
    return [variant for gpu in _pretended for variant in gpu.compiled]


def launched_so_far() -> list[str]:
    """The names of what the pretended GPU launched."""
    return [name for gpu in _pretended for name in gpu.launches]


def new_threads_see_it() -> AbstractContextManager[None]:
    """The pretended GPU, in threads that are started meanwhile."""
    return _pretended[0].seen_by_new_threads()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--pretend",
        action="store_true",
        help="where there is no GPU, run on two pretended ones instead of skipping",
    )
    parser.addoption(
        "--variants",
        type=Path,
        help="of the pretended ones: a file for what Triton would compile",
    )


def pytest_configure(config: pytest.Config) -> None:
    if not config.getoption("--pretend") or torch.cuda.is_available():
        return
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is first imported
    torch.set_num_threads(1)
    from tests.harness.pretended_gpu import pretended_gpu

    gpu = _pretence.enter_context(pretended_gpu(8 << 30, num_devices=2))
    _pretended.append(gpu)
    if (file := config.getoption("--variants")) is not None:
        _pretence.callback(lambda: file.write_text("\n".join(gpu.compiled) + "\n"))


def pytest_unconfigure() -> None:
    _pretence.close()


def pytest_report_header() -> str:
    return f"GPU: {torch.cuda.get_device_name() if torch.cuda.is_available() else 'none'}"
