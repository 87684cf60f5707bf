"""Fenced blocks of pages are what they look like: commands that can be typed, code that fits the names it
uses, bodies that the server takes. tests/cpu/launch/test_docs_run.py runs them.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import json
import re
import shlex
import subprocess
import tempfile
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest

import carousel
from bench_serving.arguments import parse_args as parse_bench
from carousel.batch.arguments import parse_args as parse_batch
from carousel.server.endpoints import ENDPOINTS
from runtime.launcher.command_line import parse_command_line
from runtime.ring.tenants import read_tenants
from runtime.settings.config import SETTINGS, RuntimeConfig, setting_of
from tests.harness.doc_blocks import LANGUAGES, RUN, Block, blocks, blocks_of, pages
from tests.harness.sources import ROOT

ADDRESS = f"127.0.0.1:{RuntimeConfig().port}"
PLAIN = {"cat", "openssl", "printf"}
"""Programs that are not ours, with arguments that nobody checks here."""
OURS = ("carousel", "runtime", "scheduler_proc", "model_worker", "bench_serving")
CODE = re.compile(r"^\s*(curl|make|python|carousel|pip|import|from|def|class|with|if|for)\b", re.M)
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))


def faults(block: Block) -> Iterator[str]:
    """Return what is wrong with a block."""
    if block.language not in LANGUAGES:
        yield f"the language {block.language!r} is none of {', '.join(sorted(LANGUAGES))}"
    if block.runner and block.page not in (ROOT / block.runner).read_text():
        yield f"{block.runner} does not name the page"
    if block.reason and not 12 < len(block.reason) < 150:
        yield "that is no reason"
    check = CHECKS.get(block.language)
    try:
        yield from () if check is None else check(block.text)
    except Exception as error:
        yield f"{type(error).__name__}: {error}"


# -- shell ---------------------------------------------------------------------------------------------------


def bash_faults(text: str) -> Iterator[str]:
    parsed = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, check=False)
    if parsed.returncode:
        yield parsed.stderr
        return
    for words in commands(text):
        program, *arguments = words
        if program.endswith("python") and arguments[:1] == ["-m"]:
            program, *arguments = arguments[1:]
        elif program.endswith("python"):
            program, *arguments = arguments
        known = PROGRAMS.get(program)
        if known is not None:
            yield from known(arguments)
        elif program not in PLAIN:
            yield f"{program} is no program that is known here"


def commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each command of a block, without variables and what is piped on."""
    line = ""
    for piece in text.splitlines(keepends=True):
        line += piece
        if line.endswith("\\\n"):
            line = line[:-2] + " "
            continue
        try:
            words = shlex.split(line, comments=True)
        except ValueError:  # a quoted text goes on in the next line
            continue
        line = ""
        if words and not re.match(r"\w+=", words[0]):
            yield words
    assert not line, line


def server_faults(arguments: list[str]) -> Iterator[str]:
    parse_command_line(arguments)
    yield from ()


def batch_faults(arguments: list[str]) -> Iterator[str]:
    parse_command_line(parse_batch(arguments).settings)
    yield from ()


def bench_faults(arguments: list[str]) -> Iterator[str]:
    parse_bench(arguments)
    yield from ()


def keys_faults(arguments: list[str]) -> Iterator[str]:
    if len(arguments) < 2 or any(each.startswith("-") for each in arguments):
        yield f"a directory and names of clients are expected: {arguments}"


def make_faults(arguments: list[str]) -> Iterator[str]:
    for target in arguments:
        if target not in TARGETS:
            yield f"there is no make {target}"


def pytest_faults(arguments: list[str]) -> Iterator[str]:
    for path in arguments:
        if not (ROOT / path).exists():
            yield f"there is no {path}"


def curl_faults(arguments: list[str]) -> Iterator[str]:
    parser = argparse.ArgumentParser("curl", exit_on_error=False)
    parser.add_argument("url")
    parser.add_argument("-H", action="append")
    parser.add_argument("-d")
    given = parser.parse_args(arguments)
    address, path = urlsplit(given.url)[1:3]
    if address != ADDRESS:
        yield f"{address} is not where a launch without --port is"
    method = "GET" if given.d is None else "POST"
    found = [each for each in ENDPOINTS if each.path == path and method in each.methods]
    if not found:
        yield f"there is no {method} {path}"
    elif given.d is not None:
        msgspec.json.decode(given.d, type=found[0].body)


PROGRAMS = {
    "carousel-batch": batch_faults,
    "carousel.batch": batch_faults,
    "bench_serving": bench_faults,
    "carousel": server_faults,
    "curl": curl_faults,
    "launch.py": server_faults,
    "make": make_faults,
    "pytest": pytest_faults,
    "runtime.ring.keys": keys_faults,
}

# -- Python --------------------------------------------------------------------------------------------------


def python_faults(text: str) -> Iterator[str]:
    """Faults of syntax, imports of ours, and keyword arguments and methods of what is ours."""
    tree = ast.parse(text)
    names: dict[str, Any] = {name: getattr(carousel, name) for name in carousel.__all__}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from _import_faults(node, names)
    types = dict(_types(tree, names))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in types:
            kind = types[node.value.id]
            if not hasattr(kind, node.attr):
                yield f"{kind.__name__} has no {node.attr}"
        if isinstance(node, ast.Call):
            yield from _call_faults(node, names, types)


def _import_faults(node: ast.Import | ast.ImportFrom, names: dict[str, Any]) -> Iterator[str]:
    """Enter into `names` what is imported of ours."""
    module = (node.module or "") if isinstance(node, ast.ImportFrom) else node.names[0].name
    try:
        imported = importlib.import_module(module)
    except ImportError as error:
        yield str(error)
        return
    if isinstance(node, ast.ImportFrom):
        for alias in node.names:
            if not hasattr(imported, alias.name):
                yield f"{module} has no {alias.name}"
            elif module.partition(".")[0] in OURS:
                names[alias.asname or alias.name] = getattr(imported, alias.name)


def _types(tree: ast.AST, names: dict[str, Any]) -> Iterator[tuple[str, type]]:
    """Variables that are made by calling a class of ours, or a constructor of its own."""
    for node in ast.walk(tree):
        pairs: list[tuple[ast.expr | None, ast.expr]] = []
        if isinstance(node, ast.Assign):
            pairs = [(node.targets[0], node.value)]
        elif isinstance(node, ast.With):
            pairs = [(item.optional_vars, item.context_expr) for item in node.items]
        for target, value in pairs:
            if not isinstance(target, ast.Name) or not isinstance(value, ast.Call):
                continue
            maker = value.func
            if isinstance(maker, ast.Attribute) and maker.attr == "create":
                maker = maker.value
            kind = names.get(maker.id) if isinstance(maker, ast.Name) else None
            if isinstance(kind, type):
                yield target.id, kind


def _call_faults(node: ast.Call, names: dict[str, Any], types: dict[str, type]) -> Iterator[str]:
    called: Any = None
    if isinstance(node.func, ast.Name):
        called = names.get(node.func.id)
    elif isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
        owner = types.get(node.func.value.id) or names.get(node.func.value.id)
        called = getattr(owner, node.func.attr, None)
    if called is None:
        return
    for keyword in node.keywords:
        if keyword.arg is not None and not _takes(called, keyword.arg):
            yield f"{ast.unparse(node.func)} takes no {keyword.arg}"


def _takes(called: Any, keyword: str) -> bool:
    parameters = inspect.signature(called).parameters
    rest = next((each for each in parameters.values() if each.kind is each.VAR_KEYWORD), None)
    if keyword in parameters or rest is None:
        return keyword in parameters
    if rest.name == "settings":
        return setting_of(keyword) in SETTINGS
    options = typing.get_args(typing.get_type_hints(called)[rest.name])
    return keyword in typing.get_type_hints(options[0])


# -- data ----------------------------------------------------------------------------------------------------


def json_faults(text: str) -> Iterator[str]:
    json.loads(text)
    yield from ()


def toml_faults(text: str) -> Iterator[str]:
    """Pages show one kind of file in it, that of keys."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "keys.toml"
        path.write_text(text)
        path.chmod(0o600)
        read_tenants(RuntimeConfig(api_keys=str(path), zmq_bind="tcp://127.0.0.1:5600"))
    yield from ()


def text_faults(text: str) -> Iterator[str]:
    """Pictures and output: code would be checked under its own name."""
    if found := CODE.search(text):
        yield f"a block of text has a line of code: {found[0]!r}"


CHECKS = {
    "bash": bash_faults,
    "json": json_faults,
    "python": python_faults,
    "text": text_faults,
    "toml": toml_faults,
}

# -- tests ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", blocks(), ids=str)
def test_a_block_is_what_it_looks_like(block: Block) -> None:
    assert not list(faults(block))


def test_every_block_is_found() -> None:
    fences = sum(len(re.findall(r"^ *```", page.read_text(), re.M)) for page in pages())
    assert len(blocks()) * 2 == fences > 70


def test_most_blocks_of_code_are_run() -> None:
    """A reason why a block is not run is for servers that do not end and for fragments."""
    code = [block for block in blocks() if block.language in RUN]
    assert sum(block.is_run or bool(block.runner) for block in code) > len(code) / 2


def block(text: str, language: str = "bash", mark: str = "") -> Block:
    (found,) = blocks_of(f"{mark}\n```{language}\n{text}\n```\n", "README.md")
    return found


@pytest.mark.parametrize(
    ("language", "text", "fault"),
    [
        ("", "make serve", "the language ''"),
        ("sh", "make serve", "the language 'sh'"),
        ("text", "make serve", "line of code"),
        ("text", "  import os", "line of code"),
        ("bash", "make serve; done", "syntax error"),
        ("bash", "make server", "no make server"),
        ("bash", "python launch.py --no-such-flag", "--no-such-flag"),
        ("bash", "carousel --port \\\n  many", "--port"),
        ("bash", "python -m bench_serving --prompts 3", "--prompts"),
        ("bash", "python -m pytest tests/unit/no_such", "there is no tests/unit/no_such"),
        ("bash", "wget http://127.0.0.1", "wget is no program"),
        ("bash", "curl http://127.0.0.1:30000/v1/completion -d '{}'", "no POST /v1/completion"),
        ("bash", "curl http://127.0.0.1:8000/health", "127.0.0.1:8000 is not"),
        ("bash", "curl http://127.0.0.1:30000/v1/completions", "no GET /v1/completions"),
        ("bash", "curl http://127.0.0.1:30000/v1/completions -d '{\n\"prompt\": 1}'", "prompt"),
        ("bash", 'curl http://127.0.0.1:30000/v1/completions -d \'{"prompt": "x", "max": 1}\'', "`max`"),
        ("python", "for x in", "SyntaxError"),
        ("python", "from carousel import Clients", "no Clients"),
        ("python", "import carousels", "No module named"),
        ("python", "SamplingParams(max_token=1)", "takes no max_token"),
        ("python", "llm = LLM()\nllm.generat('x')", "LLM has no generat"),
        ("python", "with LLM() as llm:\n    llm.generate('x', tool=1)", "takes no tool"),
        ("python", "LLM(max_length=3)", "takes no max_length"),
        ("python", "GenerationExecutor.create(engine='x')", "takes no engine"),
        ("json", "{'a': 1}", "JSONDecodeError"),
        ("toml", "[alice]\nmax_run = 3", "max_run"),
        ("toml", "[alice", "not TOML"),
    ],
)
def test_a_fault_is_found(language: str, text: str, fault: str) -> None:
    found = list(faults(block(text, language)))
    assert len(found) == 1
    assert fault in found[0]


@pytest.mark.parametrize(
    ("language", "text"),
    [
        ("bash", "a=$(openssl rand -hex 3)\ncarousel --model X --max-model-len 8k  # eight thousand"),
        ("python", "with LLM('x', max_model_len=5) as llm:\n    llm.generate('x', tools=b'', timeout=3)"),
        ("text", "a ──► b"),
    ],
)
def test_what_is_right_passes(language: str, text: str) -> None:
    assert not list(faults(block(text, language)))


def test_marks_say_what_becomes_of_a_block() -> None:
    assert block("make serve").is_run
    assert not block("{}", "json").is_run
    here = "tests/project/test_docs_blocks.py"
    named = block("make serve", mark=f"<!-- run by {here} -->")
    assert (named.is_run, named.runner, list(faults(named))) == (False, here, [])
    other = block("make serve", mark="<!-- run by tests/ledger.md -->")
    assert list(faults(other)) == ["tests/ledger.md does not name the page"]
    unrun = block("make serve", mark="<!-- not run: a server does not end -->")
    assert (unrun.is_run, unrun.reason, list(faults(unrun))) == (False, "a server does not end", [])
    assert list(faults(block("make serve", mark="<!-- not run: because -->"))) == ["that is no reason"]
    assert list(faults(block("make server", mark="<!-- not run: a server does not end -->")))
    with pytest.raises(AssertionError, match="does not end"):
        list(blocks_of("```bash\n", "README.md"))
