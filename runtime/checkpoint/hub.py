"""Models by name from the Hugging Face Hub: from the local cache, or downloaded into it. HF_HOME,
HF_HUB_OFFLINE, HF_ENDPOINT and HF_TOKEN have their usual effect, because huggingface_hub does the work.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import msgspec

from runtime.base.console import is_terminal
from runtime.base.errors import ConfigError, ModelError
from runtime.base.progress import Progress
from runtime.settings.config import RuntimeConfig

logger = logging.getLogger(__name__)

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
MAX_HUB_ID = 96
"""Maximum number of characters of a model's name on the Hub."""
# No pickle files and no code. Files of other programs (onnx/, original/) are not downloaded.
TOKENIZER_FILES = ["*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt"]
MODEL_FILES = [*TOKENIZER_FILES, "*.safetensors"]
_NOT_WANTED = ["onnx/*", "openvino/*", "original/*", "*consolidated*", "coreml/*"]


def localize(config: RuntimeConfig) -> RuntimeConfig:
    """Return the settings with directories in place of Hub names in `model` and `tokenizer`, downloading
    missing files. The name under which the model is served stays the Hub name. Raises ModelError if something
    is not available, ConfigError for a revision of a model that is not from the Hub.
    """
    on_hub = is_hub_id(config.model)
    if config.revision and not on_hub:
        raise ConfigError(
            f"revision: {config.model or 'the demo model'} is not a model on the Hub, so it has no revisions"
        )
    if config.download_dir and not on_hub and not is_hub_id(config.tokenizer):
        raise ConfigError(
            "download_dir: neither model nor tokenizer is a name on the Hub, so nothing is downloaded; leave "
            "it out"
        )
    tokenizer = config.tokenizer
    if is_hub_id(tokenizer):
        tokenizer = str(download(tokenizer, "", TOKENIZER_FILES, config.download_dir))
    if not on_hub:
        return msgspec.structs.replace(config, tokenizer=tokenizer)
    return msgspec.structs.replace(
        config,
        model=str(download(config.model, config.revision, MODEL_FILES, config.download_dir)),
        tokenizer=tokenizer,
        served_model_name=config.served_model_name or config.model,
    )


def is_hub_id(name: str) -> bool:
    """Return True if `name` has the form owner/name and no such file or directory exists here."""
    return len(name) <= MAX_HUB_ID and bool(HUB_ID.fullmatch(name)) and not _is_here(name)


def _is_here(name: str) -> bool:
    """Return True if there is such a file or directory; also if this user may not look at it."""
    try:
        return Path(name).exists()
    except OSError:
        return True


def download(hub_id: str, revision: str, patterns: list[str], cache_dir: str = "") -> Path:
    """Return the directory with the files of `hub_id`, downloading missing ones with a progress bar on
    stderr. revision: branch, tag or commit; empty for the main branch. cache_dir: used instead of the Hub's
    own cache. Raises ModelError, which says what to do.
    """
    # Imported here: a model in a directory does not need it, and importing it takes most of a second.
    from huggingface_hub import errors, snapshot_download

    logger.info("model %s: looking in the local cache and on the Hugging Face Hub", hub_id)
    try:
        folder = snapshot_download(
            hub_id,
            revision=revision or None,
            cache_dir=cache_dir or None,
            allow_patterns=patterns,
            ignore_patterns=_NOT_WANTED,
            tqdm_class=_bar(),
        )
    except errors.GatedRepoError as error:
        raise ModelError(
            f"{hub_id} is behind a form: accept it on its page on the Hub, then log in (hf auth login) or "
            "set HF_TOKEN."
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ModelError(f"{hub_id} has no revision {revision!r} on the Hub.") from error
    except errors.RepositoryNotFoundError as error:
        raise ModelError(
            f"{hub_id} is neither a directory here nor a model on the Hub that can be seen. If it is "
            "private, log in (hf auth login) or set HF_TOKEN."
        ) from error
    # The library raises OSError, its own exceptions, and those of its HTTP library.
    except Exception as error:
        raise ModelError(
            f"{hub_id} is not a directory here, not in the local cache, and cannot be had from the Hub "
            f"({type(error).__name__}: {_first_line(error)}). Where there is a network run "
            f"'hf download {hub_id} --local-dir DIR', and pass DIR; or set HF_HOME to a cache that has it."
        ) from error
    return Path(folder)


def _bar() -> type[Any]:
    """Return the Hub's own progress bar on a terminal, and otherwise one that writes log lines."""
    from huggingface_hub.utils.tqdm import tqdm

    class DownloadBar(tqdm):
        def __init__(self, *about: Any, **more: Any) -> None:
            super().__init__(*about, **{**more, "disable": more.get("disable") or not is_terminal()})  # type: ignore[no-untyped-call]
            unit = "bytes" if more.get("unit") == "B" else "files"
            self._progress = Progress(f"downloading {more.get('desc') or ''}".strip(), unit, say=logger.info)
            self._num_done = 0

        def update(self, n: float | None = 1) -> bool | None:
            if self.disable and self.total:
                self._num_done += int(n or 0)
                self._progress.note(self._num_done, int(self.total))
            shown: bool | None = super().update(n)
            return shown

    return DownloadBar


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]
