"""Agents that other people have written, unchanged, over a whole launch whose engine is killed half-way.

They come with libraries of their own, so they live in an environment of their own, which needs an index of
packages. CAROUSEL_TEST_AGENTS may name one that has them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.faults.test_tool_loop import written
from tests.harness.ring.launched import ROOT, Launched, launched, wait_until
from tests.harness.ring.scripted_worker import ARGUMENTS, SCRIPT_FILE

pytestmark = [pytest.mark.full, pytest.mark.timeout(2400)]

PACKAGES = ("openai-agents>=0.24,<1", "mini-swe-agent>=2.4,<3")
ENVIRONMENT = "CAROUSEL_TEST_AGENTS"
LONG = "".join(f"def f{number}(x):\n    return 'ü', \"{number}\", '</tool_call>'\n" for number in range(30))
TASK = "Mend it. script: {}"
BASH: list[dict[str, Any]] = [
    {"command": "touch begun"},
    {"command": f"cat > a.py <<'EOF'\n{LONG}EOF"},
    {"command": "python3 -c 'import a; print(len(dir(a)))' && grep -c tool_call a.py"},
    {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; cat a.py"},
]
SCRIPTS = {
    "agent": [
        written(("write", {"path": "begun", "text": ""})),
        "I write it.\n" + written(("write", {"path": "a.py", "text": LONG}), ("read", {"path": "begun"})),
        written(("read", {"path": "a.py"})),
        "Done: <b>",
    ],
    "shell": [
        f"<think>\nStep {number}.\n</think>\n\nI go on.\n{written(('bash', call))}"
        for number, call in enumerate(BASH)
    ],
}


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the programs of an environment with the agents."""
    given = os.environ.get(ENVIRONMENT)
    if given:
        return Path(given) / "bin"
    folder = tmp_path_factory.mktemp("agents")
    venv.create(folder, with_pip=True)
    install = [str(folder / "bin/python"), "-m", "pip", "install", "--quiet", "--no-compile", *PACKAGES]
    subprocess.run(install, check=True, timeout=1800)
    return folder / "bin"


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launched]:
    path = tmp_path_factory.mktemp("script") / "script.json"
    path.write_text(json.dumps(SCRIPTS))
    length = json.dumps({"max_position_embeddings": 32768})
    arguments = (*ARGUMENTS, "--reasoning-parser", "qwen3", "--hf-overrides", length)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SCRIPT_FILE, str(path))
        with launched(*arguments, module="tests.harness.ring.scripted_worker") as launch:
            yield launch.wait_ready()


class Agent:
    """A program that runs in a folder of its own; its second answer is under way when `begun` is there."""

    def __init__(self, folder: Path, launch: Launched, *arguments: str) -> None:
        self._launch = launch
        self._begun = folder / "begun"
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        self._process = subprocess.Popen(
            arguments,
            cwd=folder,
            env={
                **environment,
                "HOME": str(folder),
                "OPENAI_API_KEY": "none",
                "LITELLM_LOCAL_MODEL_COST_MAP": "True",
                "MSWEA_COST_TRACKING": "ignore_errors",
                "MSWEA_CONFIGURED": "1",
                "MSWEA_GLOBAL_CONFIG_DIR": str(folder),
                "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])),
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def kill_engine(self) -> None:
        """Kill it in the middle of the answer."""
        wait_until(lambda: self._begun.exists() or self._process.poll() is not None, 60, "the first call")
        before = self._num_steps()
        wait_until(
            lambda: self._num_steps() > before + 30 or self._process.poll() is not None,
            30,
            "the second answer",
        )
        assert self._process.poll() is None, self._process.stdout and self._process.stdout.read()
        os.kill(self._launch.pid_of("scheduler"), signal.SIGKILL)

    def _num_steps(self) -> int:
        text = httpx.get(f"{self._launch.url}/metrics").text
        (count,) = [line for line in text.splitlines() if line.startswith("sglang:num_iterations_total")]
        return int(float(count.split()[-1]))

    def output(self) -> str:
        output, _ = self._process.communicate(timeout=120)
        assert self._process.returncode == 0, output
        return output


def test_an_agent_of_openai_agents(environment: Path, launch: Launched, tmp_path: Path) -> None:
    before = launch.pid_of("scheduler")
    program = (str(environment / "python"), str(ROOT / "tests/faults/openai_agent.py"))
    agent = Agent(tmp_path, launch, *program, launch.url, str(tmp_path), TASK.format("agent"))
    agent.kill_engine()
    told = json.loads(agent.output().splitlines()[-1])
    assert told == {"calls": ["write", "write", "read", "read"], "said": "Done: <b>"}
    assert (tmp_path / "a.py").read_text() == LONG
    assert launch.pid_of("scheduler") != before


def test_mini_swe_agent(environment: Path, launch: Launched, tmp_path: Path) -> None:
    before = launch.pid_of("scheduler")
    agent = Agent(
        tmp_path,
        launch,
        *(str(environment / "mini"), "--model", "openai/carousel-demo", "--task", TASK.format("shell")),
        *("--yolo", "--exit-immediately", "--output", "trajectory.json", "--config", "mini.yaml"),
        *("--config", f"model.model_kwargs.api_base={launch.url}/v1"),
    )
    agent.kill_engine()
    output = agent.output()
    trajectory = json.loads((tmp_path / "trajectory.json").read_text())
    assert trajectory["info"]["exit_status"] == "Submitted", output
    assert trajectory["info"]["submission"] == LONG
    assert trajectory["info"]["model_stats"]["api_calls"] == len(BASH)
    answers = [message for message in trajectory["messages"] if message["role"] == "assistant"]
    assert [json.loads(each["tool_calls"][0]["function"]["arguments"]) for each in answers] == BASH
    assert [each["content"] for each in answers] == ["I go on.\n"] * len(BASH)
    assert [each["reasoning_content"] for each in answers] == [
        f"Step {number}." for number in range(len(BASH))
    ]
    assert launch.pid_of("scheduler") != before
