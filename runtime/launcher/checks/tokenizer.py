"""Check of the tokenizer: its files must be there, and its chat template must compile. Reads JSON and
compiles the template with Jinja as transformers would; does not load the tokenizer.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from runtime.base.errors import ConfigError, ModelError, StartError
from runtime.checkpoint.checkpoint_config import read_json
from runtime.checkpoint.checkpoint_files import refuse_lfs_pointer
from runtime.settings.config import RuntimeConfig

if TYPE_CHECKING:
    from jinja2 import nodes
    from jinja2.parser import Parser

TEMPLATE_FILE = "chat_template.jinja"
TOKENIZER_KEYS = ("added_tokens", "model")
"""Keys that a tokenizer.json must have for transformers to read it."""
DEFAULT_TEMPLATE = "default"


class _NamedTemplate(msgspec.Struct):
    name: str
    template: str


class _TokenizerConfig(msgspec.Struct):
    """The only key of tokenizer_config.json that is read here."""

    chat_template: str | list[_NamedTemplate] | None = None


def check_tokenizer_settings(config: RuntimeConfig) -> None:
    """Check the settings of a tokenizer, whose files are looked at elsewhere. Raises ConfigError."""
    if config.chat_template and not os.path.isfile(config.chat_template):
        raise ConfigError(f"chat_template: there is no file {config.chat_template}")
    if config.tokenizer and not os.path.isdir(config.tokenizer):
        raise ConfigError(f"tokenizer: there is no directory {config.tokenizer}")
    if config.skip_tokenizer_init and (config.tokenizer or config.chat_template):
        name = "tokenizer" if config.tokenizer else "chat_template"
        raise ConfigError(f"{name}: skip_tokenizer_init loads no tokenizer; give only one of them")
    if config.skip_tokenizer_init and config.allow_special_tokens:
        raise ConfigError(
            "allow_special_tokens: skip_tokenizer_init takes no messages; give only one of them"
        )


def check_tokenizer(config: RuntimeConfig) -> str:
    """Check the tokenizer of resolved settings. Returns the chat template; empty if none is used. Raises
    ModelError for the checkpoint's files, ConfigError for the file of --chat-template.
    """
    if config.skip_tokenizer_init:
        return ""
    path = Path(config.tokenizer)
    _check_files(path)
    if config.task != "generate":
        return ""
    template: str | None
    if own := config.chat_template:
        template = _read(Path(own))
        _check_template(template, ConfigError, f"chat_template: {own}")
    elif (template := _own_template(path)) is not None:
        _check_template(
            template, ModelError, f"The chat template in {path}", "; name another with --chat-template"
        )
    return template or ""


def _check_files(path: Path) -> None:
    if not (path / "tokenizer.json").is_file():
        other = next((name for name in ("tokenizer.model", "vocab.json") if (path / name).is_file()), None)
        found = f", only {other}" if other else ""
        raise ModelError(
            f"{path} has no tokenizer.json{found}. Convert the model's tokenizer to that format first, name "
            "the directory of another with --tokenizer, or serve token ids alone with --skip-tokenizer-init."
        )
    keys = read_json(path / "tokenizer.json", dict[str, msgspec.Raw])
    if missing := [key for key in TOKENIZER_KEYS if key not in keys]:
        raise ModelError(
            f"{path / 'tokenizer.json'} is not the file of a tokenizer: it has no "
            f"{' and no '.join(missing)}. "
            "Download it again, or name the directory of another with --tokenizer."
        )


def _own_template(path: Path) -> str | None:
    """Return the template that conversations are rendered with; None if there is none."""
    if (path / TEMPLATE_FILE).is_file():
        return _read(path / TEMPLATE_FILE)
    if not (path / "tokenizer_config.json").is_file():
        return None
    said = read_json(path / "tokenizer_config.json", _TokenizerConfig).chat_template
    if isinstance(said, list):
        return next((each.template for each in said if each.name == DEFAULT_TEMPLATE), None)
    return said


def _read(path: Path) -> str:
    try:
        data = path.read_bytes()
        refuse_lfs_pointer(path, data)
        return data.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"chat_template: {path} cannot be read: {error}") from None


def _check_template(template: str, kind: type[StartError], subject: str, remedy: str = "") -> None:
    """Raise `kind` if Jinja cannot compile the template in the environment that transformers uses."""
    # Imported here: a launch without a tokenizer does without it.
    from jinja2 import Environment, TemplateSyntaxError
    from jinja2.ext import Extension

    class GenerationBlocks(Extension):
        """Jinja extension for the blocks around assistant messages in templates that were written for
        training.
        """

        def __init__(self, environment: Environment) -> None:
            super().__init__(environment)
            self.tags = {"generation"}

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlocks, "jinja2.ext.loopcontrols"]
    )
    try:
        environment.compile(template)
    except TemplateSyntaxError as error:
        raise kind(f"{subject} does not compile: line {error.lineno}: {error.message}{remedy}") from None
    except (RecursionError, SyntaxError, ValueError) as error:
        raise kind(f"{subject} does not compile: {type(error).__name__}: {error}{remedy}") from None
