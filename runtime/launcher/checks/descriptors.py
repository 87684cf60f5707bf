"""File descriptors: ZMQ aborts a process that gets none, so a limit that is too low is refused before."""

from __future__ import annotations

import resource

from runtime.base.errors import ConfigError

MIN_DESCRIPTORS = 128
"""Number of descriptors of one process that a launch of one process of each kind can be sure to need."""


def check_descriptors() -> None:
    """Raise this process's limit to the least that is needed. Raises ConfigError if it may not."""
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY or limit >= MIN_DESCRIPTORS:
        return
    if most != resource.RLIM_INFINITY and most < MIN_DESCRIPTORS:
        raise ConfigError(
            f"only {most} files may be open in a process (ulimit -n), too few for sockets: "
            f"allow {MIN_DESCRIPTORS} at least, and one more for each connection"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (MIN_DESCRIPTORS, most))
