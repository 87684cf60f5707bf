"""The launcher's command line: an option for every setting of RuntimeConfig in all its spellings, and the
flags of vLLM, SGLang and trtllm-serve that are not settings here (`runtime.settings.peer_flags`).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import re
import sys
import typing
from collections.abc import Sequence
from difflib import get_close_matches
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin

from runtime.base.errors import ConfigError
from runtime.settings.config import (
    LISTS,
    PRESETS,
    REPEATABLE,
    SETTINGS,
    TITLES,
    RuntimeConfig,
    flags_of,
    from_values,
    preset_values,
    refuse_empty,
)
from runtime.settings.keywords import NEAR
from runtime.settings.options_file import OPTION as CONFIG_FILE
from runtime.settings.options_file import options_of, without_files
from runtime.settings.peer_families import family_reason
from runtime.settings.peer_flag import PeerFlag, is_on
from runtime.settings.peer_flags import PEER_FLAGS, peer_flag, value_of

COUNTS_OF_TOKENS = ("context_length", "chunked_prefill_size", "max_total_tokens")
"""Settings that accept 4k and 4K, as in vLLM."""
SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
EPILOG = """\
examples:
  %(prog)s --model OWNER/NAME --port 8000
  %(prog)s --model /path/to/model --max-model-len 8k --max-num-seqs 64 --api-keys keys.toml

A switch can be switched off again with --no- before its name. Flags of vLLM, SGLang and trtllm-serve are
understood, taken with a line that says why nothing changes, or refused with the reason: docs/migrating.md.
"""


class CommandLine(NamedTuple):
    """The settings that a command line asks for, and lines about flags that change nothing."""

    config: RuntimeConfig
    notes: list[str]


def parse_args(argv: Sequence[str] | None = None) -> RuntimeConfig:
    """Return the settings of a command line. Prints help and exits if asked; raises ConfigError."""
    return parse_command_line(argv).config


def parse_command_line(argv: Sequence[str] | None = None) -> CommandLine:
    """Return the settings of a command line, and the notes to be logged about it. Prints help and exits if
    asked; raises ConfigError.
    """
    parser = make_parser()
    given = sys.argv[1:] if argv is None else argv
    _refuse_other_text(given)
    words, files = without_files(given)
    words = [*_options_of_files(files, parser), *_spelled(words, parser)]
    preset = _preset_parser().parse_known_args(words)[0].preset
    namespace, rest = parser.parse_known_args(words, argparse.Namespace(notes={}))
    if preset:
        # As defaults, so that flags of the command line take precedence.
        defaults = preset_values(preset, namespace.batching_type)
        namespace, rest = parser.parse_known_args(words, argparse.Namespace(notes={}, **defaults))
    if rest:
        raise ConfigError(_unknown(rest[0], words, parser))
    values = vars(namespace)
    notes = [f"{given}: nothing changes: {note}" for given, note in values.pop("notes").items()]
    del values["preset"]
    return CommandLine(from_values(values), notes)


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Help formatter that adds the default to a help text that does not mention it, except for switches and
    empty defaults.
    """

    def _get_help_string(self, action: argparse.Action) -> str | None:
        is_plain = action.default in ("", None, False) or "default:" in (action.help or "")
        return action.help if is_plain else super()._get_help_string(action)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> typing.NoReturn:
        raise ConfigError(message)


class _SettingAction(argparse.Action):
    """Stores the value of a setting, in our spelling or that of vLLM or SGLang."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        option = option_string or self.option_strings[0]
        words = values if isinstance(values, list) else [values]
        text = _joined(words) if isinstance(values, list) else values
        for each in (*words, *([] if text.strip(", ") else [""])):
            refuse_empty(option, each)
        if self.dest in REPEATABLE:
            text = ",".join(filter(None, (getattr(namespace, self.dest, None), text)))
        meaning = value_of(self.dest, option, text)
        if meaning.note:
            namespace.notes[f"{option} {text}"] = meaning.note
        kind = SETTINGS[self.dest][0]
        try:
            setattr(namespace, self.dest, _converted(self.dest, kind, meaning.settings[self.dest]))
        except ValueError as error:
            raise argparse.ArgumentError(self, str(error)) from None


class _PeerAction(argparse.Action):
    """Handles a flag of vLLM or SGLang as the table says."""

    def __init__(self, *, flag: PeerFlag, **options: Any) -> None:
        super().__init__(**options)
        self._flag = flag

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        option = option_string or self.option_strings[0]
        value = "false" if self.nargs == 0 else " ".join(values) if isinstance(values, list) else values
        refuse_empty(option, value)
        meaning = self._flag.meaning(option, value)
        if meaning.note:
            namespace.notes[f"{option} {value}" if self._flag.has_value else option] = meaning.note
        for name, setting in meaning.settings.items():
            setattr(namespace, name, setting)


def _options_of_files(files: Sequence[Path], parser: argparse.ArgumentParser) -> list[str]:
    """Return the options from files of options, which come before those of the command line. Raises
    ConfigError, which names the file.
    """
    words: list[str] = []
    for path in files:
        of_file = options_of(path)
        try:
            of_file = _spelled(of_file, parser)
            _, rest = parser.parse_known_args(of_file, argparse.Namespace(notes={}))
            if rest:
                raise ConfigError(_unknown(rest[0], of_file, parser))
        except ConfigError as error:
            raise ConfigError(f"{CONFIG_FILE} {path}: {error}") from None
        words += of_file
    return words


def _refuse_other_text(words: Sequence[str]) -> None:
    """Raise ConfigError for a word that no file of the run directory and no answer could hold."""
    for word in words:
        try:
            word.encode()
        except UnicodeEncodeError:
            raise ConfigError(f"{word!r} is not UTF-8 text; a file of such a name is to be renamed") from None


def _spelled(words: Sequence[str], parser: argparse.ArgumentParser) -> list[str]:
    """Return the words in the spelling that the parser knows."""
    return [_without_value(_with_dashes(word), parser) for word in words]


@cache
def make_parser(prog: str | None = None) -> argparse.ArgumentParser:
    parser = _Parser(
        prog=prog,
        usage="%(prog)s [--model MODEL] [options]",
        description="Serve a language model over HTTP (OpenAI compatible) and over ZMQ.",
        epilog=EPILOG,
        formatter_class=_HelpFormatter,
        allow_abbrev=False,  # an abbreviation of one of our flags may be a flag of another server
    )
    parser.add_argument(
        "--version", action="version", version=f"carousel {_version()}", help="print the version and exit"
    )
    parser.add_argument(
        CONFIG_FILE,
        metavar="FILE",
        default=argparse.SUPPRESS,
        help="file of options in YAML, `port: 8000` for instance; the command line goes before it",
    )
    _add_preset(parser)
    group = parser.add_argument_group()
    for name, default in zip(RuntimeConfig.__struct_fields__, RuntimeConfig.__struct_defaults__, strict=True):
        if name in TITLES:
            group = parser.add_argument_group(TITLES[name])
        _add_setting(group, name, default)
    own = set(option_names(parser))
    for flag in PEER_FLAGS:
        _add_peer_flag(parser, flag, own)
    return parser


def option_names(parser: argparse.ArgumentParser) -> list[str]:
    """Return all spellings of all options."""
    return list(parser._option_string_actions)


def _version() -> str:
    try:
        return importlib.metadata.version("carousel")
    except importlib.metadata.PackageNotFoundError:
        return "unknown (not installed)"


@cache
def _preset_parser() -> argparse.ArgumentParser:
    """Return a parser that only knows --preset, whose settings are the defaults of all others."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    _add_preset(parser)
    return parser


def _add_preset(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--preset", choices=PRESETS, help="defaults of another server; docs/batching.md")


def _add_setting(group: argparse._ArgumentGroup, name: str, default: Any) -> None:
    kind, meta = SETTINGS[name]
    names = ("--" + name.replace("_", "-"), *flags_of(name))
    options: dict[str, Any] = {"dest": name, "default": default}
    if kind is bool:
        group.add_argument(*names, **options, action="store_true", help=meta.description)
        opposites = [_opposite(flag) for flag in names if flag.startswith("--")]
        group.add_argument(*opposites, **options, action="store_false", help=argparse.SUPPRESS)
        return
    if get_origin(kind) is Literal:
        options["metavar"] = "{" + ",".join(get_args(kind)) + "}"
    else:
        options["metavar"] = kind.__name__.upper()
    if name in LISTS:
        options["nargs"] = "+"
    group.add_argument(*names, **options, action=_SettingAction, help=meta.description)


def _add_peer_flag(parser: argparse.ArgumentParser, flag: PeerFlag, own: set[str]) -> None:
    """Add a flag of another server, except for names that are options of our own."""
    options: dict[str, Any] = {"action": _PeerAction, "flag": flag, "dest": argparse.SUPPRESS}
    names = [name for name in flag.names if name not in own]
    if names and flag.has_value:
        # A flag that is refused may have any number of values.
        num_words = None if flag.taken or flag.understood else "+"
        parser.add_argument(*names, **options, nargs=num_words, help=argparse.SUPPRESS)
    elif names:
        parser.add_argument(*names, **options, nargs="?", const="true", help=argparse.SUPPRESS)
        if opposites := {_opposite(name) for name in names if name.startswith("--")} - own:
            parser.add_argument(*sorted(opposites), **options, nargs=0, help=argparse.SUPPRESS)


def _opposite(flag: str) -> str:
    """Return the negated form of a switch, as vLLM spells it."""
    return "--" + flag.removeprefix("--no-") if flag.startswith("--no-") else "--no-" + flag[2:]


def _with_dashes(word: str) -> str:
    """Return an option spelled with underscores, as vLLM allows, with dashes."""
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else word


def _without_value(word: str, parser: argparse.ArgumentParser) -> str:
    """Return a switch that is written as vLLM's --flag=true: itself, or its negation. Raises ConfigError."""
    name, equals, value = word.partition("=")
    action = parser._option_string_actions.get(name)
    if not equals or action is None or action.nargs != 0:
        return word
    refuse_empty(name, value)
    if action.dest in ("help", "version"):
        raise ConfigError(f"{name}: it takes no value, got {value!r}")
    return name if is_on(name, value) else _opposite(name)


def _joined(words: list[str]) -> str:
    """Return a list, which may be given as words, as JSON or with commas, joined by commas."""
    parts: list[str] = []
    for word in words:
        listed = _from_json(word) if word.startswith("[") else None
        parts += map(_part, listed) if isinstance(listed, list) else [_part(word)]
    return ",".join(parts)


def _from_json(text: str) -> Any:
    """Return the decoded JSON; None if it is not JSON."""
    with contextlib.suppress(ValueError):
        return json.loads(text)
    return None


def _part(given: Any) -> str:
    """Return one element of a list as text. An adapter that is written as an object, as in vLLM and SGLang,
    becomes name=path.
    """
    adapter = _from_json(given) if isinstance(given, str) and given.startswith("{") else given
    if isinstance(adapter, dict):
        for names in (("name", "path", "base_model_name"), ("lora_name", "lora_path")):
            if set(names[:2]) <= set(adapter) <= set(names):
                return f"{adapter[names[0]]}={adapter[names[1]]}"
    return str(given)


def _converted(name: str, kind: Any, text: str) -> Any:
    """Convert a text to the setting's type. Raises ValueError, which says what is expected."""
    if get_origin(kind) is Literal:
        if text not in get_args(kind):
            raise ValueError(f"{text!r} is unknown; known: {', '.join(get_args(kind))}")
        return text
    if kind is int and name in COUNTS_OF_TOKENS and text[-1:] in SUFFIXES:
        return _with_suffix(text)
    try:
        return kind(text)
    except ValueError:
        expected = "a whole number" if kind is int else "a number"
        raise ValueError(f"expected {expected}, got {text!r}") from None


def _with_suffix(text: str) -> int:
    """Return a number of tokens that may be written as 8k (8,000), 25.6k or 8K (8,192)."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgKMG])", text)
    if match is None or ("." in match[1] and match[2].isupper()):
        raise ValueError(f"expected a whole number like 8192, 8k (8,000) or 8K (8,192), got {text!r}")
    return int(Fraction(match[1]) * SUFFIXES[match[2]])


def _unknown(word: str, words: list[str], parser: argparse.ArgumentParser) -> str:
    """Return the error for a word that no option accepted."""
    if word.startswith("-"):
        name = word.partition("=")[0]
        flags = [known for known in option_names(parser) if _is_meant(known)]
        near = get_close_matches(name, flags, n=1, cutoff=NEAR)
        if (reason := family_reason(name, near)) is not None:
            return f"{name}: {reason}"
        if name.startswith("--no-") and family_reason(_opposite(name)) is not None:
            return f"{name}: off is what it is anyway; leave it out"
        if near:
            return f"unknown option {name}; did you mean {near[0]}?"
        return f"unknown option {name}; --help lists those there are"
    before = [given for given in words[: words.index(word)] if given.startswith("-")]
    if not before:
        return f"unexpected argument {word!r}; the model is named with --model, and there are no commands"
    option, equals, _ = before[-1].partition("=")
    action = parser._option_string_actions.get(option)
    if action is not None and action.nargs == 0 and not equals:
        return f"unexpected argument {word!r} after {option}, which is a switch: {option}=false is off"
    return f"unexpected argument {word!r} after {option}, which takes one value at most"


def _is_meant(option: str) -> bool:
    """Return False for flags that would only be refused."""
    flag = peer_flag(option)
    return flag is None or bool(flag.understood or flag.taken)
