"""The command line of the launcher: an option for every setting of RuntimeConfig, under all its spellings."""

from __future__ import annotations

import argparse
import typing
from collections.abc import Sequence
from typing import Any, Literal, get_args, get_origin

import msgspec

from runtime.base.errors import ConfigError
from runtime.settings.config import SETTINGS, RuntimeConfig, flags_of, from_values

PRESETS: dict[str, dict[str, Any]] = {
    "trtllm": {
        "capacity_scheduler": "guaranteed_no_evict",
        "disable_radix_cache": True,
        "mem_fraction_static": 0.9,
    },
}
"""Settings by preset: what the server of that name does when nothing is said."""


def parse_args(argv: Sequence[str] | None = None, *, prog: str | None = None) -> RuntimeConfig:
    """The settings a command line asks for. Prints help or a
    usage error and exits like argparse, with code 64 for errors.
    """
    parser = make_parser(prog)
    preset = parser.parse_args(argv).preset
    if preset:
        parser.set_defaults(**PRESETS[preset])  # so that what is said on the command line wins
    values = vars(parser.parse_args(argv))
    del values["preset"]
    return from_values(values)


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Adds the default to a help text that does not say it itself, except those of flags and of nothing."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        is_plain = action.default in ("", None, False) or "default:" in (action.help or "")
        return action.help if is_plain else super()._get_help_string(action)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> typing.NoReturn:
        raise ConfigError(message)


def make_parser(prog: str | None = None) -> argparse.ArgumentParser:
    parser = _Parser(
        prog=prog,
        description="Serve a language model over HTTP (OpenAI compatible) and over ZMQ.",
        formatter_class=_HelpFormatter,
    )
    parser.add_argument("--preset", choices=PRESETS, help="defaults of another server; docs/batching.md")
    for field in msgspec.structs.fields(RuntimeConfig):
        kind, meta = SETTINGS[field.name]
        options: dict[str, Any] = {"dest": field.name, "default": field.default, "help": meta.description}
        if kind is bool:
            options["action"] = "store_true"
        elif get_origin(kind) is Literal:
            options["choices"] = get_args(kind)
        else:
            options["type"] = kind
            options["metavar"] = kind.__name__.upper()
        parser.add_argument("--" + field.name.replace("_", "-"), *flags_of(field.name), **options)
    return parser
