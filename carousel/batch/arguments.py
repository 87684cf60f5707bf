"""BatchArguments: the command line of `carousel-batch`: options of its own, and settings of the launch."""

from __future__ import annotations

import argparse
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os.path import expanduser
from pathlib import Path

from carousel.client.own_runtime import OTHERS_SETTINGS
from runtime.base.errors import ConfigError
from runtime.settings.config import setting_of

CHOSEN_HERE = (*OTHERS_SETTINGS, "host", "port", "run_dir", "no_http", "parent_pid", "drain_timeout")
"""Settings of a launch that are not the caller's here."""
DEFAULT_CONCURRENCY = 256
DEFAULT_TIMEOUT_S = 21600.0
DEFAULT_PATIENCE_S = 600.0
EPILOG = """\
All other options are settings of the launch, as of `carousel`: --model, --served-model-name, --tp-size ...
The output has a line for each line of the input, in the order in which answers come (docs/batch_files.md).
"""


@dataclass(frozen=True, slots=True)
class BatchArguments:
    input_file: Path
    output_file: Path
    resume: bool
    url: str
    """Server to ask; empty: one is started."""
    header: list[str]
    """HTTP headers, each as Name=Value."""
    concurrency: int
    request_timeout: float
    patience: float
    settings: list[str]
    """Command line of the runtime that is started."""


def parse_args(argv: Sequence[str] | None) -> BatchArguments:
    """Parse a command line. Raises ConfigError that names the option; exits for --help."""
    given, settings = _make_parser().parse_known_args(argv)
    arguments = BatchArguments(**vars(given), settings=settings)
    for word in settings:
        name = word.partition("=")[0]
        if arguments.url:
            raise ConfigError(f"{name}: with --url there is no launch that could have it as a setting")
        if name.startswith("--") and setting_of(name[2:].replace("-", "_")) in CHOSEN_HERE:
            raise ConfigError(
                f"{name}: the batch chooses it; to choose it, start a server and name its --url"
            )
    return arguments


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> typing.NoReturn:
        raise ConfigError(message)


def _make_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        "carousel-batch",
        description="Send the requests of a file to a server, and write their answers to another file.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        *("-i", "--input-file"),
        type=_path,
        required=True,
        metavar="FILE",
        help="requests, in the form of OpenAI's batch API",
    )
    add(*("-o", "--output-file"), type=_path, required=True, metavar="FILE", help="where answers go")
    add("--resume", action="store_true", help="go on with an output: skip lines whose custom_id it has")
    add("--url", default="", help="server to ask; default: one is started for this batch")
    add(
        "--header",
        nargs="+",
        default=[],
        metavar="NAME=VALUE",
        help="HTTP headers; default: CAROUSEL_API_KEY, if set, as the key",
    )
    add(
        "--concurrency",
        type=_number(int, 1),
        default=DEFAULT_CONCURRENCY,
        metavar="N",
        help=f"most requests at a time (default: {DEFAULT_CONCURRENCY})",
    )
    add(
        "--request-timeout",
        type=_number(float, 0.001),
        default=DEFAULT_TIMEOUT_S,
        metavar="SECONDS",
        help=f"time for an answer, after which its line has failed (default: {DEFAULT_TIMEOUT_S:g})",
    )
    add(
        "--patience",
        type=_number(float, 0.0),
        default=DEFAULT_PATIENCE_S,
        metavar="SECONDS",
        help=f"end when requests have only failed for so long (default: {DEFAULT_PATIENCE_S:g})",
    )
    return parser


def _path(text: str) -> Path:
    """Return a path with `~` expanded. A shell does not expand it behind an equals sign."""
    return Path(expanduser(text))


def _number(kind: type[int] | type[float], least: float) -> Callable[[str], float]:
    def number(text: str) -> float:
        value = kind(text)
        if not least <= value < float("inf"):
            raise ValueError
        return value

    number.__name__ = f"{kind.__name__} from {least:g} on"  # which argparse says in its error
    return number
