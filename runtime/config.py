"""RuntimeConfig: every setting of a launch, in one frozen struct; the command line is generated from it.

The settings are declared in `runtime.settings`, by subject. `runtime.resolve` fills in what depends on the
model or the machine, once, in the launcher; the other processes read the result.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from runtime.endpoints import TcpEndpoints
from runtime.errors import ConfigError
from runtime.settings.supervision import SupervisionSettings

DEMO_MODEL = Path(__file__).resolve().parent.parent / "demo" / "model"


class RuntimeConfig(SupervisionSettings, frozen=True, forbid_unknown_fields=True):
    """Settings as given; `auto`, None and 0 stand for what `resolve` fills in."""

    @property
    def max_waiting(self) -> int:
        return self.max_queued_requests or 4 * self.max_running_requests

    @property
    def batching(self) -> str:
        """The batching type under its own name."""
        return BATCHING_SPELLINGS.get(self.batching_type, self.batching_type)

    @property
    def capacity_policy(self) -> str:
        """The name of a capacity policy, or the user's own package.module:Class."""
        if self.capacity_scheduler == "auto":
            return "static_batch" if self.batching == "static" else "max_utilization"
        return self.capacity_scheduler if ":" in self.capacity_scheduler else self.capacity_scheduler.lower()

    @property
    def num_processes(self) -> dict[str, int]:
        """Of the roles of which there may be several."""
        return {
            "worker": self.tp_size,
            "tokenizer": self.tokenizer_workers,
            "detokenizer": self.detokenizer_workers,
            "api": self.api_workers,
        }

    @property
    def tcp(self) -> TcpEndpoints | None:
        """Where the client library is served over TCP. Raises ValueError that says what is wrong with it."""
        if not self.zmq_bind:
            return None
        return TcpEndpoints.parse(self.zmq_bind, self.tokenizer_workers, self.detokenizer_workers)


BATCHING_SPELLINGS = {
    "InflightFusedBatching": "inflight_fused",
    "InflightBatching": "inflight",
    "V1": "static",
}


def from_values(values: dict[str, Any]) -> RuntimeConfig:
    """Check settings by name. Raises ConfigError that names the setting."""
    try:
        return msgspec.convert(values, RuntimeConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"setting is not valid: {error}") from None
