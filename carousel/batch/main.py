"""Main program of `carousel-batch`: arguments → server → lines → counts.

Exit code 0 if every line was answered with status 200, 1 if one was not, 64 for wrong arguments, 74 if the
output cannot be written, 75 if the server was gone before all lines had an answer, 130 if interrupted; if the
runtime cannot start, that of the launcher.
"""

from __future__ import annotations

import asyncio
import signal
import stat
import time
from collections.abc import Coroutine, Sequence
from contextlib import ExitStack
from functools import partial
from os import fstat
from os.path import samestat
from pathlib import Path
from typing import Any, BinaryIO

import uvloop

from carousel.batch.arguments import BatchArguments, parse_args
from carousel.batch.output_file import OutputFile
from carousel.batch.pace import Pace
from carousel.batch.run import Batch, BatchCounts, DoneLines, count_lines
from carousel.batch.sender import LineSender
from carousel.client.own_runtime import OwnServer
from carousel.http_client import HttpClient, raise_file_limit
from runtime.base.console import write_error, write_line
from runtime.base.environment import api_key
from runtime.base.errors import EXIT_OK, ConfigError, StartError
from runtime.base.progress import Progress

EXIT_FAILED = 1
EXIT_IO = 74
EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run a batch from its arguments to its exit code."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        arguments = parse_args(argv)
        with ExitStack() as held:
            file = held.enter_context(_open_input(arguments.input_file))
            output = OutputFile(arguments.output_file, resume=arguments.resume)
            held.callback(output.close)
            _check_apart(file, arguments.output_file)
            return _run(arguments, file, output)
    except KeyboardInterrupt:
        write_line("interrupted before the first line was sent")
        return EXIT_INTERRUPTED
    except StartError as error:
        write_error(str(error))
        return error.exit_code
    except OSError as error:
        write_error(f"{error.filename or arguments.output_file}: {error.strerror}")
        return EXIT_IO


def _run(arguments: BatchArguments, file: BinaryIO, output: OutputFile) -> int:
    done = DoneLines(output.read() if arguments.resume else ())
    num_lines = count_lines(file)
    with ExitStack() as held:
        if arguments.url:
            url, key, check_server = arguments.url.rstrip("/").removesuffix("/v1"), api_key(), _trust
        else:
            write_line("starting a runtime (--url names a server that runs already)")
            server = OwnServer(arguments.settings)
            held.callback(server.stop)
            server.wait_ready()
            url, key = server.address(), server.api_key
            check_server = partial(server.check_alive, "the runtime has ended")
        headers = _headers(arguments.header, key)
        http = HttpClient(url, headers, timeout_s=arguments.request_timeout, option="--url")
        pace = Pace(arguments.concurrency, time.monotonic)
        sender = LineSender(
            http, pace, patience_s=arguments.patience, check_server=check_server, say=write_line
        )
        batch = Batch(output, done, sender, Progress("batch", "lines"), num_lines)
        raise_file_limit()
        began = time.monotonic()
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                is_whole = runner.run(_until_signal(batch.run(file, arguments.concurrency)))
        finally:
            write_line(_summary(batch.counts, time.monotonic() - began, arguments.output_file))
    if not is_whole:
        write_line("interrupted: --resume sends the lines that have no answer yet")
        return EXIT_INTERRUPTED
    return EXIT_FAILED if batch.counts.num_failed else EXIT_OK


def _trust() -> None:
    """Expect a server to come back that this process has not started."""


async def _until_signal(work: Coroutine[Any, Any, None]) -> bool:
    """Return True when the work is done, False if SIGINT or SIGTERM has ended it. Raises the first error of
    its tasks.
    """
    task = asyncio.ensure_future(work)
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    try:
        await task
    except asyncio.CancelledError:
        return False
    except ExceptionGroup as group:
        raise group.exceptions[0] from None
    return True


def _summary(counts: BatchCounts, took_s: float, path: Path) -> str:
    num_sent = counts.num_lines - counts.num_skipped
    skipped = f", {counts.num_skipped} of them by an earlier run" if counts.num_skipped else ""
    return (
        f"{counts.num_lines} lines in {path}{skipped}; {counts.num_failed} failed; "
        f"{num_sent / max(took_s, 1e-9):.1f} lines/s"
    )


def _headers(given: Sequence[str], key: str | None) -> dict[str, str]:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    for each in given:
        name, equals, value = each.partition("=")
        if not name or not equals or {"\r", "\n"} & set(each):
            raise ConfigError("--header: each must be Name=Value")
        headers = {other: text for other, text in headers.items() if other.lower() != name.lower()}
        headers[name] = value
    return headers


def _open_input(path: Path) -> BinaryIO:
    try:
        file = path.open("rb")
    except OSError as error:
        raise ConfigError(f"-i: {path}: {error.strerror}") from None
    if not stat.S_ISREG(fstat(file.fileno()).st_mode):
        file.close()
        raise ConfigError(f"-i: {path} is no file; a batch reads its input twice")
    return file


def _check_apart(file: BinaryIO, output: Path) -> None:
    if samestat(fstat(file.fileno()), output.stat()):
        raise ConfigError("-o: it is the input; name another file")
