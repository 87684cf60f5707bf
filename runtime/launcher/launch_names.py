"""LaunchNames: the resources of a launch that others can see or that only one launch can have: the run
directory with its files, the HTTP port, and the socket that processes report to.
"""

from __future__ import annotations

import errno
import logging
import socket
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import zmq

from runtime.base.environment import child_environment
from runtime.base.errors import AddressInUse, ConfigError, StartError
from runtime.launcher.guardian import Guardian
from runtime.launcher.launch_records import LaunchRecords
from runtime.launcher.nodes.gate import NodeGate
from runtime.launcher.tenants_reload import TenantsReload
from runtime.launcher.weights.updates import WeightUpdates
from runtime.ring.keys import ServerKeys, make_keys
from runtime.ring.process import FIRST_EPOCH
from runtime.ring.run_dir import RunDir
from runtime.settings.config import RuntimeConfig
from runtime.wire.status_page import StatusPage
from runtime.wire.transport import ZmqInbox

logger = logging.getLogger(__name__)

LISTEN_BACKLOG = 2048


class LaunchNames:
    def __init__(self, config: RuntimeConfig) -> None:
        """Take all resources that the settings ask for. Raises AddressInUse, ConfigError or StartError, with
        nothing left behind.
        """
        if config.curve_dir:
            ServerKeys.read(Path(config.curve_dir))  # checked before any process reads them
        self.run_dir = RunDir(config.run_dir)
        self.endpoints = self.run_dir.endpoints
        with ExitStack() as held:
            held.callback(self.run_dir.release)
            self.guardian = _guard(self.run_dir)
            self._disk_hangs = False
            held.callback(self._clear)
            self.http = None if config.no_http else held.enter_context(_listen(config.host, config.port))
            self.port: int = self.http.getsockname()[1] if self.http else 0
            """Port of the HTTP server; 0 if there is none."""
            context = zmq.Context()
            held.callback(context.destroy, linger=0)
            try:
                self.page = StatusPage(self.endpoints.status_file, create=True, counts=config.num_processes)
                held.callback(self.page.close)
                if config.zmq_bind and not config.curve_dir:
                    make_keys(self.endpoints.keys_dir)
                self.tenants = TenantsReload(config, self.endpoints.tenants_file)
                held.callback(self.tenants.close)
                self.records = LaunchRecords(self.endpoints)
                held.callback(self._end_records)
                self.weights = WeightUpdates(config, self.endpoints, context)
                self.inbox = ZmqInbox(context, self.endpoints.launcher_in, "launcher_in", FIRST_EPOCH)
                self.nodes = None
                """Gate for the agents of other nodes; None on those nodes, and with a single node."""
                if config.nnodes > 1 and not config.node_rank:
                    self.nodes = NodeGate(config, self.page, self.records.event)
                    held.callback(self.nodes.close)
            except (OSError, zmq.ZMQError) as error:
                reason = getattr(error, "strerror", None) or error
                raise ConfigError(f"run_dir: {self.run_dir.path}: {reason}") from None
            self._held = held.pop_all()

    def stop_listening(self) -> None:
        """Stop accepting callers."""
        if self.http is not None:
            self.http.close()

    def close(self) -> None:
        """Release everything and remove the run directory. If the disk hangs, so would the removal; the
        guardian then removes the directory once this process has ended.
        """
        self._held.close()

    def _end_records(self) -> None:
        self._disk_hangs = not self.records.close()

    def _clear(self) -> None:
        if self._disk_hangs:
            logger.warning("the disk of %s does not answer: it is removed once it does", self.run_dir.path)
            return
        self.run_dir.clear()
        self.guardian.dismiss()


def _guard(run_dir: RunDir) -> Guardian:
    try:
        return Guardian(run_dir.path, run_dir.lock_fd, child_environment())
    except OSError as error:
        run_dir.clear()
        raise StartError(f"a process that cleans up cannot be started: {error}") from None


def check_address(config: RuntimeConfig) -> None:
    """Tell now whether the HTTP server can have its address, for a launch that takes it later. Raises as
    LaunchNames.
    """
    if not config.no_http:
        _listen(config.host, config.port).close()


def _listen(host: str, port: int) -> socket.socket:
    """Bind and listen before anything is loaded, so that a port in use is noticed at once. Raises ConfigError
    for an address of another machine, AddressInUse for a port that is not available.
    """
    try:
        family, address = _address(host, port)
        listener = socket.socket(family, socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"host: {host} is no address of this machine: {reason}") from None
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(LISTEN_BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRNOTAVAIL:
            raise ConfigError(f"host: {host} is no address of this machine: {error.strerror}") from None
        raise AddressInUse(
            f"port: cannot listen on {host}:{port}: {error.strerror}; choose another --port"
        ) from None
    return listener


def _address(host: str, port: int) -> tuple[socket.AddressFamily, Any]:
    """Return the family and address of a host name or address. A name with both kinds of addresses gets its
    IPv4 address, which clients of that name also try. Raises OSError if it has no address, UnicodeError if it
    cannot be a name.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, address = min(found, key=lambda each: each[0] != socket.AF_INET)
    return family, address
