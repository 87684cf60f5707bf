"""Endpoints: every name inside a run directory. Each launch has a private one, so nothing is shared by name.

A run directory has mode 0700 and is held by a lock for as long as its launch lives; one whose lock is free is
a leftover and the next launch removes it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from runtime.errors import ConfigError

# sun_path of a unix socket holds 108 bytes; the longest name below is 15.
MAX_RUN_DIR_BYTES = 90


@dataclass(frozen=True, slots=True)
class Endpoints:
    run_dir: Path

    def __post_init__(self) -> None:
        if len(os.fsencode(self.run_dir)) > MAX_RUN_DIR_BYTES:
            raise ConfigError(
                f"run_dir: {self.run_dir} is longer than {MAX_RUN_DIR_BYTES} bytes, too long for unix sockets"
            )

    def _ipc(self, name: str) -> str:
        return f"ipc://{self.run_dir / name}"

    @property
    def tokenizer_in(self) -> str:
        return self._ipc("tokenizer_in")

    @property
    def scheduler_in(self) -> str:
        return self._ipc("scheduler_in")

    @property
    def detokenizer_in(self) -> str:
        return self._ipc("detokenizer_in")

    @property
    def client_out(self) -> str:
        return self._ipc("client_out")

    @property
    def step_results(self) -> str:
        return self._ipc("step_results")

    @property
    def launcher_in(self) -> str:
        return self._ipc("launcher_in")

    def rank_in(self, rank: int) -> str:
        return self._ipc(f"rank_in{rank}")

    @property
    def config_file(self) -> Path:
        return self.run_dir / "config.json"

    @property
    def state_file(self) -> Path:
        return self.run_dir / "state.json"

    @property
    def status_file(self) -> Path:
        return self.run_dir / "status"

    @property
    def lock_file(self) -> Path:
        return self.run_dir / "lock"
