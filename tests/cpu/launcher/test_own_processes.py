"""One process of its own for each test: its imports, its signals, its standard streams, what it leaves.

What the same modules do inside a test's process: tests/unit.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from carousel import LLM, StartError
from runtime.base.environment import child_environment
from runtime.wire.status_page import ProcessStatus, StatusPage
from tests.harness.sources import ROOT

# -- launches that do not start ------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_launch_that_waits_for_a_download_ends_by_a_signal(number: signal.Signals) -> None:
    """It was stopped on request; the first process of a container has no default action for a signal."""
    program = (
        "import os, signal, sys, time\n"
        # A shell starts what it runs in the background with SIGINT ignored.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from runtime.launcher import main\n"
        "main.is_hub_id = lambda name: False\n"
        f"main.localize = lambda config: (os.kill(os.getpid(), {int(number)}), time.sleep(60))\n"
        "sys.exit(main.main([]))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, b"")


def test_the_launcher_looks_in_the_working_directory(tmp_path: Path) -> None:
    """Started as `python launch.py` is, so that Python itself would not look there."""
    (tmp_path / "config.json").write_text('{"model_type": "own", "architectures": ["OwnForCausalLM"]}')
    (tmp_path / "own_models.py").write_text("SPEC = None")
    environment = {key: value for key, value in child_environment().items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [
            sys.executable,
            str(ROOT / "launch.py"),
            "--model",
            str(tmp_path),
            "--model-spec",
            "own_models:GONE",
        ],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 64
    (line,) = done.stderr.splitlines()
    assert "module 'own_models' has no 'GONE'" in line


def test_llm_that_cannot_start_relays_why_and_leaves_no_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(StartError, match="nowhere") as caught:
        LLM(model=str(tmp_path / "nowhere"))
    assert caught.value.exit_code == 72
    assert list(tmp_path.iterdir()) == []


# -- imports -------------------------------------------------------------------------------------------------


def test_a_ring_without_a_tokenizer_loads_no_library_of_tokenizers() -> None:
    code = (
        "import sys\n"
        "import tokenizer_proc.main, detokenizer_proc.main, carousel.server.request.tokenizer\n"
        "from runtime.text.selection import open_decoders, open_tokenizer\n"
        "carousel.server.request.tokenizer.Vocabulary(open_tokenizer('')).token_text(5)\n"
        "assert not {'transformers', 'tokenizers', 'jinja2'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_model_config_and_the_tables_of_the_worker_import_no_torch() -> None:
    code = (
        "import sys, runtime.checkpoint.model_config, model_worker, model_worker.attention\n"
        "import model_worker.models\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# -- standard streams ----------------------------------------------------------------------------------------


def test_closed_standard_streams_are_not_given_to_the_next_file() -> None:
    code = (
        "import os; from runtime.base.console import hold_standard_streams; hold_standard_streams()\n"
        "fds = [os.open(os.devnull, os.O_RDONLY) for _ in range(2)]\n"
        "links = {os.readlink(f'/proc/self/fd/{fd}') for fd in range(3)}\n"
        "os._exit(0 if min(fds) > 2 and links == {os.devnull} else 1)"
    )
    command = f'exec {sys.executable} -c "$CODE" <&- >&- 2>&-'
    assert subprocess.run(["sh", "-c", command], env={**os.environ, "CODE": code}, cwd=ROOT).returncode == 0


JSON_SCRIPT = """
import logging, sys, threading, warnings
from runtime.base.console import configure_logging, log_context, write_error, write_line
configure_logging("scheduler:1", "info", "json")
log_context.set({"request_id": "mine"})
logging.getLogger("a").info("%s and\\nmore \\u2028 caf\\xe9 \\udc80", "one")
log_context.set({})
try:
    raise ValueError("wrong")
except ValueError:
    logging.getLogger("a").exception("failed")
write_line("ready: m")
write_error("line one\\n  line two")
warnings.warn("old")
thread = threading.Thread(target=lambda: 1 / 0)
thread.start()
thread.join()
raise RuntimeError("the end")
"""


def test_every_line_in_json_is_an_object() -> None:
    process = subprocess.run(
        [sys.executable, "-c", JSON_SCRIPT], capture_output=True, text=True, cwd=ROOT, check=False
    )
    lines = [json.loads(line) for line in process.stderr.splitlines()]
    assert [line["message"].split("\n")[0][:16] for line in lines] == [
        *("one and", "failed", "ready: m", "line one line tw"),
        lines[4]["message"].split("\n")[0][:16],
        *("a thread has end", "ended"),
    ]
    assert {line["process"] for line in lines} == {"scheduler:1"}
    assert [line["level"] for line in lines] == [
        *("info", "error", "info", "error", "warning", "error", "critical")
    ]
    assert [line.get("request_id") for line in lines] == ["mine", *[None] * 6]
    assert "ValueError: wrong" in lines[1]["exception"]
    assert "old" in lines[4]["message"]
    assert "ZeroDivisionError" in lines[5]["exception"]
    assert "RuntimeError: the end" in lines[6]["exception"]
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["time"]) for line in lines)


# -- the status page -----------------------------------------------------------------------------------------


def test_a_slot_that_is_written_all_the_time_is_never_read_half(tmp_path: Path) -> None:
    """A reader that took a torn slot would see two numbers that differ. Both may have to share one core."""
    page = StatusPage(tmp_path / "status", create=True)
    code = (
        "import sys; from pathlib import Path; from runtime.wire.status_page import *\n"
        "page, n = StatusPage(Path(sys.argv[1])), 0\n"
        "while page.read('launcher').state != 'failed':\n"
        "    n += 1; page.write('worker', ProcessStatus(n, 1, 'ready', *[n] * 15, n.to_bytes(16, 'big')))"
    )
    writer = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "status")], cwd=ROOT)
    try:
        while page.read("worker").epoch == 0:
            assert writer.poll() is None
        at_solitary = ProcessStatus._fields.index("solitary")
        seen: set[int] = set()
        num_reads = 0
        while len(seen) < 3 or (len(seen) < 300 and num_reads < 20_000):
            num_reads += 1
            status = page.read("worker")
            seen.add(status.epoch)
            numbers = {*status[3:at_solitary], status.epoch, int.from_bytes(status.solitary, "big")}
            assert len(numbers) == 1, status
    finally:
        page.write("launcher", ProcessStatus(state="failed"))
        writer.wait(10)
        page.close()
