"""Settings of a launch over several machines: fills in what was left open, and refuses contradictions."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct

import msgspec

from runtime.base.errors import ConfigError
from runtime.ring.nodes import NodeKeys
from runtime.settings.config import RuntimeConfig
from runtime.settings.model_settings import NodeSettings

SIOCGIFADDR = 0x8915
IFNAME_BYTES = 15
MAX_DIST_PORT = 65535 - 2 - 64


def with_nodes(config: RuntimeConfig) -> RuntimeConfig:
    """Return resolved settings with the addresses that this node uses. Raises ConfigError."""
    if config.nnodes == 1:
        _refuse_alone(config)
        return config
    if config.executor == "local":
        raise ConfigError("executor: local is one machine; leave it out, or leave out --nnodes")
    if config.node_rank >= config.nnodes:
        raise ConfigError(
            f"node_rank: {config.node_rank} is none of {config.nnodes} nodes, which are 0 to "
            f"{config.nnodes - 1}"
        )
    if config.executor == "ray" and config.node_rank:
        raise ConfigError("node_rank: Ray starts the other nodes; leave it out")
    if config.num_ranks % config.nnodes:
        ranks = f"{config.tp_size} ranks" + (f" in {config.pp_size} stages" if config.pp_size > 1 else "")
        raise ConfigError(
            f"tp_size: {ranks} cannot be shared evenly by {config.nnodes} nodes; make --tp-size or --pp-size "
            "a multiple of --nnodes"
        )
    if config.device != "cpu":
        raise ConfigError("nnodes: several machines compute on their CPUs only so far; add --device cpu")
    if config.deterministic and config.tp_size > 2 and config.ranks_per_node % config.tp_size:
        raise ConfigError(
            "deterministic: more than two ranks on several nodes are added up in an order that depends on "
            "the batch; leave it out, or take --tp-size 2"
        )
    if config.enable_lora:
        raise ConfigError(
            "enable_lora: several nodes serve no adapters yet; merge one, or leave out --nnodes"
        )
    host, port = _dist_addr(config)
    address = _own_address(config, host)
    NodeKeys.read(config.node_key)
    return msgspec.structs.replace(
        config,
        executor="nodes",
        dist_addr=f"{host}:{port}",
        node_addr=address,
        **({"no_http": True} if config.node_rank else {}),
    )


def is_loopback(host: str) -> bool:
    """Return True if an address is a loopback address."""
    return ipaddress.IPv4Address(host).is_loopback


def interface_address(name: str) -> str:
    """Return the IPv4 address of an interface. Raises ConfigError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", name.encode()[:IFNAME_BYTES])
        try:
            answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)
        except OSError as error:
            raise ConfigError(
                f"trusted_network: {name} is no interface of this machine with an IPv4 address: "
                f"{error.strerror}"
            ) from None
    return socket.inet_ntoa(answer[20:24])


def _refuse_alone(config: RuntimeConfig) -> None:
    default = RuntimeConfig()
    for name in ("node_rank", "dist_addr", "dist_port", "node_addr", "node_key", "trusted_network"):
        if getattr(config, name) != getattr(default, name):
            raise ConfigError(f"{name}: there is one node; say how many with --nnodes, or leave it out")
    if config.executor in ("nodes", "ray"):
        raise ConfigError(
            f"executor: {config.executor} needs several nodes, and there is one; say how many with --nnodes, "
            "or leave it out"
        )


def _dist_addr(config: RuntimeConfig) -> tuple[str, int]:
    """Return node 0's IPv4 address and port. Raises ConfigError."""
    given = config.dist_addr
    if not given:
        raise ConfigError("dist_addr: say at which address of node 0 the nodes meet, like 10.0.0.1:29500")
    name, colon, number = given.removeprefix("tcp://").rpartition(":")
    if not colon:
        name, number = number, str(config.dist_port)
    if not (name and number.isascii() and number.isdecimal() and 1 <= int(number) <= MAX_DIST_PORT):
        raise ConfigError(f"dist_addr: {given} is not HOST or HOST:PORT with a port of 1 to {MAX_DIST_PORT}")
    try:
        host = socket.gethostbyname(name)
    except (OSError, UnicodeError) as error:  # UnicodeError: it can be no name, as a..b
        raise ConfigError(f"dist_addr: {name} has no IPv4 address: {error}") from None
    if host == "0.0.0.0":
        raise ConfigError("dist_addr: name one address of node 0; 0.0.0.0 is every network's")
    return host, int(number)


def _own_address(config: RuntimeConfig, host: str) -> str:
    """Return the address by which other nodes reach this one. Raises ConfigError."""
    if is_loopback(host):
        if config.trusted_network:
            raise ConfigError(f"trusted_network: {host} is this machine alone; leave it out")
        address = config.node_addr or host
        if not _is_ipv4(address) or not is_loopback(address):
            raise ConfigError(f"node_addr: {address} is no loopback address, and --dist-addr {host} is one")
    else:
        if not config.trusted_network:
            raise ConfigError(
                f"dist_addr: tensors between nodes are not encrypted, and {host} can be reached by others: "
                "name the interface of a network that you trust with --trusted-network (docs/multi_node.md)"
            )
        address = interface_address(config.trusted_network)
        if config.node_addr not in ("", address):
            raise ConfigError(
                f"node_addr: {config.node_addr} is not the address of {config.trusted_network}, which is "
                f"{address}; leave it out"
            )
        if not config.node_key:
            raise ConfigError(
                "node_key: name the file with the nodes' secret; `openssl rand -hex 32 > FILE; chmod 600 "
                "FILE` makes one, to be copied to every node"
            )
    if not config.node_rank and address != host:
        raise ConfigError(f"dist_addr: {host} is not the address of node 0, which is {address}")
    return address


def _is_ipv4(text: str) -> bool:
    try:
        ipaddress.IPv4Address(text)
    except ValueError:
        return False
    return True


OWN_SETTINGS = frozenset(
    {
        *("model", "revision", "download_dir", "tokenizer", "served_model_name", "chat_template"),
        *("tool_call_parser", "reasoning_parser", "grammar_backend", "cpu_isa", "cpu_threads"),
        *(set(NodeSettings.__annotations__) - {"executor", "nnodes", "dist_addr"}),
    }
)
"""Settings of the engine that nodes may have differently."""
