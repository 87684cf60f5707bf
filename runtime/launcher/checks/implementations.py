"""Checks of named implementations: policies, backends, grammars. Each must be known, or a class of the user's
own.
"""

from __future__ import annotations

from importlib.util import find_spec

from runtime.base.errors import ConfigError
from runtime.settings.config import RuntimeConfig

NAMES = {
    "attention_backend": ("cpu_native", "flashinfer", "torch_native", "triton"),
    "capacity_scheduler": ("guaranteed_no_evict", "max_utilization", "static_batch"),
    "micro_batch_scheduler": (),
    "radix_eviction_policy": ("fifo", "filo", "lfu", "lru", "mru", "priority", "slru"),
    "request_scheduler": (),
    "schedule_policy": (
        "dfs-weight",
        "fcfs",
        "lof",
        "longest_prefix",
        "lpm",
        "priority",
        "random",
        "shortest-first",
    ),
}
"""Names of implementations by setting. Users' own, as package.module:Class, are allowed besides."""
GRAMMAR_BACKENDS = ("auto", "llguidance", "xgrammar", "none")


def check_names(config: RuntimeConfig) -> None:
    """Check that every named implementation exists. Otherwise the process that imports it would fail later,
    in one case only after loading the weights.
    """
    default = RuntimeConfig()
    for setting, names in NAMES.items():
        name = config.capacity_policy if setting == "capacity_scheduler" else getattr(config, setting)
        if name not in (getattr(default, setting), *names) and ":" not in name:
            known = f"{', '.join(names)}, or " if names else ""
            flag = setting.replace("_", "-")
            raise ConfigError(
                f"{setting}: --{flag} {name!r} is unknown; {known}your own as package.module:Class"
            )


def chosen_grammar_backend(config: RuntimeConfig) -> str:
    """Return the grammar backend; "none" where no text is guided. Raises ConfigError."""
    backend = config.grammar_backend
    if ":" not in backend and backend not in GRAMMAR_BACKENDS:
        known = ", ".join(GRAMMAR_BACKENDS)
        raise ConfigError(
            f"grammar_backend: unknown {backend!r}; known: {known}, or your own as package.module:Class"
        )
    needed = {"skip_tokenizer_init": config.skip_tokenizer_init, "task embed": config.task == "embed"}
    has_none = [name for name, is_so in needed.items() if is_so]
    if backend not in ("auto", "none") and has_none:
        raise ConfigError(f"grammar_backend: with {has_none[0]} there is no text to guide; leave it out")
    if backend == "xgrammar" and find_spec("xgrammar") is None:
        raise ConfigError("grammar_backend: xgrammar is not installed; pip install 'carousel[xgrammar]'")
    if has_none:
        return "none"
    return "llguidance" if backend == "auto" else backend
