"""Command line, flags of other servers, manifests: no process is started. With processes: cpu/launcher."""
