"""Which of the CPU's instruction sets may be used, and who is told."""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from runtime.base import cpu_isa
from runtime.base.errors import EXIT_CONFIG, ConfigError
from runtime.launcher import main as launcher
from runtime.launcher.resolved_config import resolve_config
from runtime.settings.config import RuntimeConfig

AVX2 = "fpu sse4_2 avx avx2 fma f16c bmi1 bmi2 abm movbe"
AVX512 = f"{AVX2} avx512f avx512bw avx512cd avx512dq avx512vl avx512_vnni"
MACHINES = {
    "portable": "fpu sse4_2 avx",
    "avx2": AVX2,
    "avx512": AVX512,
    "avx512_bf16": f"{AVX512} avx512_bf16",
    "amx": f"{AVX512} avx512_bf16 amx_tile amx_bf16 amx_int8",
}


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], None]]:
    """A machine with these features, on which CAROUSEL_CPU_ISA is set to `wanted`."""

    def machine(features: str, wanted: str) -> None:
        monkeypatch.setattr(platform, "machine", lambda: "x86_64")
        monkeypatch.setattr(cpu_isa, "_cpu_features", lambda: set(features.split()))
        monkeypatch.setattr(os, "environ", {"CAROUSEL_CPU_ISA": wanted})
        cpu_isa._machine_isas.cache_clear()

    yield machine
    cpu_isa._machine_isas.cache_clear()


@pytest.mark.parametrize(("most", "features"), MACHINES.items())
def test_unset_is_all_that_the_machine_has(
    pretend: Callable[[str, str], None], most: cpu_isa.CpuIsa, features: str
) -> None:
    pretend(features, "")
    assert cpu_isa.cpu_isa() == cpu_isa.machine_isa() == most
    cpu_isa.hold_back_libraries()
    assert os.environ == {"CAROUSEL_CPU_ISA": ""}


@pytest.mark.parametrize(("isa", "aten"), [("portable", "default"), ("avx2", "avx2"), ("avx512", None)])
def test_held_back_the_libraries_are_told_in_names_of_their_own(
    pretend: Callable[[str, str], None], isa: cpu_isa.CpuIsa, aten: str | None
) -> None:
    pretend(MACHINES["amx"], isa)
    assert cpu_isa.usable_isas() == cpu_isa.CPU_ISAS[: cpu_isa.CPU_ISAS.index(isa) + 1]
    cpu_isa.hold_back_libraries()
    assert os.environ.get("ATEN_CPU_CAPABILITY") == aten
    assert "AMX" not in os.environ["ONEDNN_MAX_CPU_ISA"]


def test_another_architecture_has_one_set(
    pretend: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend("", "portable")
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert cpu_isa.usable_isas() == ("portable",)


@pytest.mark.parametrize(
    ("variable", "flag", "taken"),
    [("avx2", "auto", "avx2"), ("avx2", "avx512", "avx512"), ("nonsense", "portable", "portable")],
)
def test_the_flag_counts_and_without_it_the_variable(
    pretend: Callable[[str, str], None], variable: str, flag: cpu_isa.CpuIsa, taken: cpu_isa.CpuIsa
) -> None:
    pretend(MACHINES["amx"], variable)
    cpu_isa.choose_cpu_isa(flag)
    assert os.environ["CAROUSEL_CPU_ISA"] == cpu_isa.cpu_isa() == taken
    assert "AMX" not in os.environ["ONEDNN_MAX_CPU_ISA"]


def test_a_flag_above_what_the_machine_has_is_refused_by_its_name(
    pretend: Callable[[str, str], None],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    pretend(AVX512, "avx2")
    for name in ("hold_standard_streams", "end_by_signal", "set_title", "configure_logging"):
        monkeypatch.setattr(launcher, name, lambda *_: None)
    assert launcher.main(["--cpu-isa", "amx"]) == EXIT_CONFIG
    says = "cpu_isa: this CPU has not all of amx; --cpu-isa may be portable, avx2, avx512, or auto for all"
    assert says in capfd.readouterr().err


@pytest.mark.parametrize(
    ("wanted", "says"), [("", "up to amx"), ("avx2", "up to avx2, of the amx that this CPU has")]
)
def test_a_launch_on_a_cpu_says_which_it_took(
    pretend: Callable[[str, str], None],
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    wanted: str,
    says: str,
) -> None:
    pretend(MACHINES["amx"], wanted)
    caplog.set_level(logging.INFO)
    settings = RuntimeConfig(device="cpu")
    resolved = resolve_config(settings, context_length=8, dtype="bfloat16", model_path=tmp_path)
    assert resolved.cpu_isa == (wanted or "amx")
    assert caplog.messages[-1] == f"CPU kernels use instruction sets {says}"


@pytest.mark.parametrize(
    ("wanted", "reason"), [("avx3", "'avx3' is unknown"), ("avx512", "this CPU has not all of avx512")]
)
def test_what_cannot_be_is_refused_with_what_can(
    pretend: Callable[[str, str], None],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    wanted: str,
    reason: str,
) -> None:
    pretend(AVX2, wanted)
    expected = f"CAROUSEL_CPU_ISA: {reason}; here it may be portable, avx2, or unset for all"
    with pytest.raises(ConfigError, match=expected):
        cpu_isa.cpu_isa()
    for name in (
        "hold_standard_streams",
        "end_by_signal",
        "set_title",
        "configure_logging",
    ):  # of this process, all of them
        monkeypatch.setattr(launcher, name, lambda *_: None)
    assert launcher.main([]) == EXIT_CONFIG
    assert expected in capfd.readouterr().err
