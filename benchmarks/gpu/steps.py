"""Steps of a first contact with a GPU, in windows of minutes, the most valuable first.

To add a step, add it to its window; `first_contact --plan` says whether it fits, and a test checks that. In a
command {python} is this Python and {out} the folder for results.
"""

from __future__ import annotations

from dataclasses import dataclass

KERNEL_TESTS = ("tests/gpu/test_decode_step_kernels.py", "tests/gpu/test_cuda_kernels.py")
RISKY = "laid_out or sorted or draws or new_tokens"
"""Tests of kernels with atomics or barriers, or whose programs write next to each other."""
XDIST = "xdist"


@dataclass(frozen=True)
class Step:
    """A step. Seconds are estimates. After the limit the step is killed, and what it has written is kept."""

    name: str
    seconds: int
    limit: int
    command: tuple[str, ...]
    programs: tuple[str, ...] = ()
    """Programs without which the step is not run."""
    modules: tuple[str, ...] = ()
    """Modules without which the step is not run."""


def _stages(name: str, seconds: int, limit: int, *arguments: str) -> Step:
    command = ("{python}", "-m", "benchmarks.gpu.stages", "--out", "{out}", "--again", *arguments)
    return Step(name, seconds, limit, command)


def _tests(name: str, seconds: int, limit: int, *arguments: str, parallel: bool = False) -> Step:
    plain = ("{python}", "-m", "pytest", "-q", "-W", "default", "-p", "no:cacheprovider")
    report = ("--junit-xml", f"{{out}}/{name}.xml")
    split = ("-n", "4") if parallel else ()
    modules = ("pytest", XDIST) if parallel else ("pytest",)
    return Step(name, seconds, limit, (*plain, *report, *split, *arguments), modules=modules)


def _sanitizer(tool: str) -> Step:
    program = ("compute-sanitizer", "--tool", tool, "--error-exitcode", "9", "--print-limit", "50")
    tests = ("{python}", "-m", "pytest", "-q", "-W", "default", "-p", "no:cacheprovider", "-k", RISKY)
    command = (*program, *tests, *KERNEL_TESTS)
    return Step(tool, 45, 90, command, programs=program[:1], modules=("pytest",))


def _profile(kernel: str, name: str) -> Step:
    """Return a profiling step. Launches before the fifth are warm-ups; clocks are left as they are."""
    which = ("--kernel-name", kernel, "--launch-skip", "4", "--launch-count", "1")
    program = ("ncu", "--clock-control", "none", "--set", "detailed", *which)
    command = (*program, "{python}", "-m", "benchmarks.gpu.kernels.one_kernel", name)
    return Step(f"ncu-{name}", 25, 60, command, programs=program[:1])


FACTS = Step("facts", 20, 60, ("{python}", "-m", "benchmarks.gpu.facts", "--out", "{out}"))
PREPARE = Step(
    "prepare", 35, 120, ("{python}", "-m", "benchmarks.gpu.prepare", "--out", "{out}/prepare.json")
)
DEVICE = _stages("device", 15, 40, "device")
DECODE = (
    _stages("decode-qwen3-0.6b", 60, 120, "decode", "--graphs-only", "--model", "qwen3-0.6b"),
    _stages("decode-llama-3.1-8b", 90, 150, "decode", "--graphs-only", "--model", "llama-3.1-8b"),
)
KERNELS_TESTED = _tests("test-kernels", 90, 150, "--maxfail", "30", *KERNEL_TESTS, parallel=True)
PATH_TESTED = _tests("test-path", 100, 150, "tests/gpu/test_cuda_path.py")

WINDOWS: dict[str, tuple[int, tuple[Step, ...]]] = {
    "a": (
        7,
        (
            FACTS,
            PREPARE,
            KERNELS_TESTED,
            PATH_TESTED,
            _stages("small-costs", 45, 90, "device", "launch_cost", "graph_gap", "block_copy"),
            _stages("nccl", 15, 60, "nccl"),  # by itself, because it may hang
            _sanitizer("memcheck"),
            _sanitizer("racecheck"),
        ),
    ),
    "b": (
        9,
        (
            DEVICE,
            PREPARE,
            _stages("kernels", 80, 120, "kernels"),
            _stages("attention", 50, 90, "attention"),
            *DECODE,
            _stages("serve", 110, 180, "serve", "--model", "qwen3-0.6b"),
            _stages("tiles", 90, 150, "tiles"),
        ),
    ),
    "c": (
        8,
        (
            PREPARE,
            _tests("test-again", 90, 150, "{failed}", parallel=True),
            *DECODE,
            _stages("serve", 65, 120, "serve", "--overlap-only", "--model", "qwen3-0.6b"),
            _profile("_attend_split", "decode"),
            _profile("_attend_tile", "extend"),
            _stages("baseline", 75, 240, "baseline", "--model", "qwen3-0.6b"),
        ),
    ),
}
"""Windows by name: minutes, and steps in the order of their value. {failed} stands for the failed tests of
`--again`, or all.
"""
TINY = (
    Step("facts", 5, 60, FACTS.command),
    _stages("device", 5, 60, "device", "--tiny"),
    Step("ncu-none", 1, 60, ("no-such-profiler",), programs=("no-such-profiler",)),
)
"""Steps so small that they can be tried without a GPU."""
