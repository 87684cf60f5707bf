"""Facts that must be equal on all nodes of a launch. They are compared before any weights are loaded. Only
headers and samples of the weights are read, to save time; two checkpoints of one shape differ in the samples
unless they differ in very few places.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
from collections.abc import Mapping
from pathlib import Path

from runtime.checkpoint.weight_files import weight_files
from runtime.launcher.nodes.node_settings import OWN_SETTINGS
from runtime.ring.node_messages import NODE_SCHEMA
from runtime.settings.config import RuntimeConfig
from runtime.settings.engine_settings import SchedulerSettings

NUM_SAMPLES = 64
SAMPLE_BYTES = 4096
DIGEST_BYTES = 16
MAX_SHOWN_CHARS = 200


def facts_of(config: RuntimeConfig) -> dict[str, str]:
    """Return the facts of a node with resolved settings, in the order in which they are compared."""
    settings = {
        name: _shown(str(getattr(config, name)))
        for name in SchedulerSettings.__struct_fields__
        if name not in OWN_SETTINGS
    }
    return {
        "version": _version("carousel"),
        "schema": NODE_SCHEMA,
        "torch": _version("torch"),
        **settings,
        "config.json": _digest((Path(config.model) / "config.json").read_bytes()),
        "weights": "" if config.load_format == "dummy" else weights_digest(Path(config.model)),
    }


def first_difference(own: Mapping[str, str], theirs: Mapping[str, str], name: str) -> str:
    """Return what differs on the other node called `name`, and what to do; empty if nothing does."""
    for fact in (*own, *theirs):
        here, there = own.get(fact, "nothing"), theirs.get(fact, "nothing")
        if here != there:
            shown = "" if fact in ("config.json", "weights", "schema") else f": {there}, and {here} on node 0"
            return f"{fact} of {name} is not that of node 0{shown}; {_advice(fact)}"
    return ""


def weights_digest(model_path: Path) -> str:
    """Return a digest of the weight files' names and lengths, and of samples of their bytes. Raises
    ModelError or OSError.
    """
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for path in weight_files(model_path):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for sample in range(NUM_SAMPLES):
                file.seek(max(0, size - SAMPLE_BYTES) * sample // (NUM_SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def _shown(value: str) -> str:
    return value if len(value) <= MAX_SHOWN_CHARS else _digest(value.encode())


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).hexdigest()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _advice(fact: str) -> str:
    if fact in ("version", "schema", "torch"):
        return "install the same on all nodes"
    if fact in ("config.json", "weights"):
        return "give all nodes the same model"
    return "start all nodes with the same settings"
