"""Which attention backend a worker gets, and what it says when that is not the one asked for."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest
import torch

from model_worker.attention.cpu_native import CpuNativeAttention
from model_worker.attention.selection import make_attention_backend
from model_worker.attention.torch_native import TorchNativeAttention
from model_worker.attention.triton import TritonAttention
from model_worker.kernels.native.library import load_kernels
from model_worker.loading.loader import load_model
from model_worker.ops.native_ops import NativeOps
from model_worker.ops.torch_ops import TorchOps
from runtime.base.errors import ConfigError
from runtime.checkpoint.model_config import ModelConfig
from tests.harness.models.native import native_kernels, needs_compiler
from tests.harness.models.plans import save_tiny_llama


@pytest.fixture
def no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing compiled before is found, and nothing can be compiled."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(shutil, "which", lambda _: None)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_auto_is_native_on_a_cpu(dtype: torch.dtype) -> None:
    backend = make_attention_backend("auto", device="cpu", dtype=dtype, head_dim=64)
    assert isinstance(backend, CpuNativeAttention)


def test_without_a_compiler_auto_is_torch_and_one_line_says_why(
    no_compiler: None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        backend = make_attention_backend("auto", device="cpu", dtype=torch.float32, head_dim=64)
    assert isinstance(backend, TorchNativeAttention)
    (record,) = caplog.records
    assert "there is no C++ compiler" in record.getMessage()


@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.float64, 64), (torch.float32, 72)])
def test_auto_is_torch_for_what_has_no_kernel(dtype: torch.dtype, head_dim: int) -> None:
    backend = make_attention_backend("auto", device="cpu", dtype=dtype, head_dim=head_dim)
    assert isinstance(backend, TorchNativeAttention)


def test_auto_does_not_look_for_a_compiler_off_the_cpu(
    no_compiler: None, caplog: pytest.LogCaptureFixture
) -> None:
    backend = make_attention_backend("auto", device="cuda", dtype=torch.float32, head_dim=64)
    assert isinstance(backend, TritonAttention)
    assert not caplog.records


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim", "reason"),
    [
        ("cuda", torch.float32, 64, "cuda"),
        ("cpu", torch.float64, 64, "float64"),
        ("cpu", torch.float32, 72, "heads of 72"),
        ("cpu", torch.float32, 64, "compiler"),
    ],
)
def test_asked_for_by_name_native_is_refused_with_the_reason(
    no_compiler: None, device: str, dtype: torch.dtype, head_dim: int, reason: str
) -> None:
    with pytest.raises(ConfigError, match=rf"attention_backend: cpu_native .*{reason}"):
        make_attention_backend("cpu_native", device=device, dtype=dtype, head_dim=head_dim)


def test_a_library_that_cannot_be_loaded_is_compiled_code_of_no_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "kernels.so"
    broken.write_text("not a library")
    monkeypatch.setattr("model_worker.kernels.native.library.build_library", lambda *_, **__: broken)
    monkeypatch.setattr("model_worker.attention.cpu_native.kernel_cache_dir", lambda: tmp_path)
    with pytest.raises(ConfigError, match="cannot be loaded"):
        make_attention_backend("cpu_native", device="cpu", dtype=torch.float32, head_dim=64)
    load_kernels.cache_clear()


def test_triton_needs_a_gpu() -> None:
    with pytest.raises(ConfigError, match=r"attention_backend: triton .*cpu"):
        make_attention_backend("triton", device="cpu", dtype=torch.float32, head_dim=64)


def test_a_gpu_without_triton_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("model_worker.attention.selection.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"carousel\[cuda\]"):
        make_attention_backend("auto", device="cuda", dtype=torch.bfloat16, head_dim=128)


@needs_compiler
def test_a_launch_names_what_has_no_kernel_and_prints_the_choices_at_debug(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A vocabulary of 97 fills no panel and has a kernel all the same; norms of rows of 54 have none."""
    save_tiny_llama(tmp_path, hidden_size=54)
    ops = NativeOps(native_kernels())
    load_model(tmp_path, ModelConfig.from_path(tmp_path), torch.bfloat16, "cpu", ops=ops)
    with caplog.at_level(logging.INFO):
        ops.table.log()
    (said,) = caplog.messages
    assert said == ("computed more slowly than it could be: rms_norm by torch (54 is no multiple of 16)")
    with caplog.at_level(logging.DEBUG):
        ops.table.log()
    chosen = {tuple(line.split(maxsplit=3)[:3]) for line in caplog.messages[-1].splitlines()[1:]}
    assert {("rms_norm", "torch", "5"), ("linear", "C++", "8"), ("head", "C++", "1")} <= chosen


def test_torch_has_nothing_to_explain(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    save_tiny_llama(tmp_path)
    ops = TorchOps()
    load_model(tmp_path, ModelConfig.from_path(tmp_path), torch.float32, "cpu", ops=ops)
    with caplog.at_level(logging.INFO):
        ops.table.log()
    assert not caplog.messages
    assert ("linear", "torch", "") in ops.table.counts
