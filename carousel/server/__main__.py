"""The HTTP server's process, as the launcher runs it: python -m carousel.server RUN_DIR …"""

from __future__ import annotations

from carousel.server.main import main
from runtime.ring.process import run_process

run_process("api", main)
