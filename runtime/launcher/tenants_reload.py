"""TenantsReload: reads the launch's API keys again and writes the new table into the run directory, in a
thread of its own, so that a disk which hangs delays nothing else.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path

from runtime.base.errors import ConfigError
from runtime.ring.tenants import Tenants, TenantsFile, read_tenants
from runtime.settings.config import RuntimeConfig

logger = logging.getLogger(__name__)

MAX_WAIT_S = 2.0
"""Maximum number of seconds that the launcher waits at its end for a table that is being written."""


class TenantsReload:
    """Reader of the API keys, used by the launcher's loop."""

    def __init__(self, config: RuntimeConfig, path: Path) -> None:
        """Read the keys and write the table to `path`. Raises ConfigError, OSError."""
        self._config = config
        self._file = TenantsFile(path)
        self._tenants = read_tenants(config)
        self._file.write(self._tenants)
        if config.cache_salt_per_api_key:
            logger.info("--cache-salt-per-api-key: different keys share no cached prefixes by default now")
        self._is_closed = False
        self._writing = threading.Lock()
        """Held while the table is being written."""
        self._thread: threading.Thread | None = None

    def try_read(self) -> bool:
        """Start to read the keys again. Returns False if they are being read already, perhaps from a disk
        that hangs. Never waits.
        """
        if self._thread is not None and self._thread.is_alive():
            return False
        self._thread = threading.Thread(target=self._read, name="carousel-keys", daemon=True)
        self._thread.start()
        return True

    def close(self) -> None:
        """Stop writing. A write in progress is waited for, at most MAX_WAIT_S."""
        self._is_closed = True
        if self._writing.acquire(timeout=MAX_WAIT_S):
            self._writing.release()

    def _read(self) -> None:
        """Replace the table, or log why it stays as it is. The content of the files is never logged."""
        try:
            _check_no_pipe(self._config)
            tenants = read_tenants(self._config)
            with self._writing:
                if self._is_closed:
                    return
                self._file.write(tenants)
        except (ConfigError, OSError) as error:
            logger.error("the API keys stay as they are: %s", error)
        else:
            logger.info("API keys read again: %s", _difference(self._tenants, tenants))
            self._tenants = tenants


def _check_no_pipe(config: RuntimeConfig) -> None:
    """Raise ConfigError if a file of keys is a pipe. A pipe is read once, when the launch starts; to read it
    again may never end, and would let no later change of the keys take effect.
    """
    for setting, path in (("api_keys", config.api_keys), ("api_key_file", config.api_key_file)):
        if path and Path(path).is_fifo():
            raise ConfigError(f"{setting}: {path} is a pipe, which cannot be read again; put a file there")


def _difference(old: Tenants, new: Tenants) -> str:
    """Return a description, in numbers only, of what a new table changes."""
    before, after = ({each.name: each for each in table.tenants} for table in (old, new))
    num_added, num_gone = len(after.keys() - before.keys()), len(before.keys() - after.keys())
    num_changed = sum(before[name] != after[name] for name in before.keys() & after.keys())
    return f"{len(after)} tenants, {num_added} new, {num_changed} changed, {num_gone} gone"
