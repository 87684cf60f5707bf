"""Keys of the server and of the clients that may connect over TCP. Makes and reads the CURVE keys of a server
and of its clients.

    python -m runtime.ring.keys DIR [NAME ...]          makes what is not there yet

    DIR/server.key_secret        stays with the server
    DIR/clients/NAME.key         which clients may connect, and as which tenant (runtime.ring.tenants)
    DIR/NAME/                    to be handed over to the client: its own key and the server's public one

The server reads them when it starts, `launch.py --zmq-bind tcp://ADDRESS:PORT --curve-dir DIR`, and again
when it reads its tenants again. Neither end takes keys that another user may have put there or changed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from zmq.utils import z85

from runtime.base.errors import EXIT_OK, ConfigError
from runtime.base.ownership import fault_of

SERVER = "server"
CLIENT = "client"
CLIENTS = "clients"
KEY_CHARS = 40
"""Length of a CURVE key as text (32 bytes in Z85)."""
KEY_ALPHABET = frozenset(z85.Z85CHARS)
NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,63}")


@dataclass(frozen=True, slots=True)
class ServerKeys:
    public: bytes
    secret: bytes
    clients: Mapping[bytes, str]
    """Name of each public key that may connect, in Z85."""

    @staticmethod
    def read(directory: Path) -> ServerKeys:
        """Read the server's keys and those of its clients. Raises ConfigError that names what is missing,
        unreadable, open to other users, or no name.
        """
        public, secret = _read_secret(directory, SERVER)
        clients = (directory / CLIENTS).absolute()
        _check(clients)
        allowed = sorted(clients.glob("*.key"))
        if not allowed:
            raise ConfigError(
                f"curve_dir: {clients} holds no client's key, so nobody could connect; "
                f"python -m runtime.ring.keys {directory} makes one"
            )
        names: dict[bytes, str] = {}
        for path in allowed:
            if not NAME.fullmatch(path.stem):
                raise ConfigError(
                    f"curve_dir: {path} names no client: a name has at most 64 letters, digits, dots, dashes "
                    "and underscores"
                )
            key, _ = _read(path)
            if key in names:
                raise ConfigError(f"curve_dir: {path.stem} and {names[key]} in {clients} have the same key")
            names[key] = path.stem
        return ServerKeys(public, secret, names)


@dataclass(frozen=True, slots=True)
class ClientKeys:
    public: bytes
    secret: bytes
    server: bytes
    """Public key of the server that the client connects to, in Z85."""

    @staticmethod
    def read(directory: Path) -> ClientKeys:
        """Read the keys that the server's owner has handed over. Raises ConfigError that names what is
        missing, unreadable, or open to other users.
        """
        public, secret = _read_secret(directory, CLIENT)
        server, _ = _read(directory / f"{SERVER}.key")
        return ClientKeys(public, secret, server)


def make_keys(directory: Path, names: Sequence[str] = (CLIENT,)) -> None:
    """Make the server's keys, unless they exist, and those of the clients `names`. Raises ConfigError for a
    name that is taken or is not a file name, and for a directory that others may change; OSError. Existing
    keys are never changed.
    """
    for name in names:
        if not NAME.fullmatch(name) or name in (SERVER, CLIENTS):
            raise ConfigError(f"{name!r} cannot be the name of a client")
        if (directory / name).exists() or (directory / CLIENTS / f"{name}.key").exists():
            raise ConfigError(f"there is a client {name!r} in {directory} already")
    _check(directory)
    _check(directory / CLIENTS)
    # zmq.auth writes with the process's umask, but a secret key must be readable by its owner only.
    mask = os.umask(0o077)
    try:
        (directory / CLIENTS).mkdir(parents=True, exist_ok=True)
        if not (directory / f"{SERVER}.key_secret").exists():
            _create(directory, SERVER)
        for name in names:
            folder = directory / name
            folder.mkdir()
            _create(folder, CLIENT)
            (folder / f"{CLIENT}.key").replace(directory / CLIENTS / f"{name}.key")
            shutil.copyfile(directory / f"{SERVER}.key", folder / f"{SERVER}.key")
    finally:
        os.umask(mask)


def _create(folder: Path, name: str) -> None:
    from zmq.auth import create_certificates

    create_certificates(folder, name)


def _read_secret(directory: Path, name: str) -> tuple[bytes, bytes]:
    """Return (public, secret) of `name`, from a file that only this user can read, in a directory that only
    this user can change. Raises ConfigError.
    """
    path = directory / f"{name}.key_secret"
    _check(directory, others_may_add=True)  # mounted secrets may have such permissions
    public, secret = _read(path)
    if secret is None:
        raise ConfigError(f"curve_dir: {path} has no secret key")
    _check(path, is_secret=True)
    return public, secret


def _check(path: Path, *, is_secret: bool = False, others_may_add: bool = False) -> None:
    """Raise ConfigError if another user may have written or changed the file at `path`, or read a secret.
    Arguments as in `fault_of`.
    """
    try:
        fault = fault_of(path, is_secret=is_secret, others_may_add=others_may_add)
    except FileNotFoundError:
        return  # the reader reports a missing file
    except OSError as error:
        raise ConfigError(f"curve_dir: {error}") from None
    if fault is not None:
        raise ConfigError(f"curve_dir: {fault}")


def _read(path: Path) -> tuple[bytes, bytes | None]:
    """Return (public, secret) of a key file in the format of zmq.auth. Raises ConfigError."""
    # Imported here, because it brings asyncio and most launches have no keys.
    from zmq.auth import load_certificate

    if not path.is_file():
        raise ConfigError(f"curve_dir: there is no file {path}; python -m runtime.ring.keys makes keys")
    _check(path)
    try:
        public, secret = load_certificate(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"curve_dir: {path} cannot be read as a key: {error}") from None
    for key in (public, secret):
        if key is not None and (len(key) != KEY_CHARS or not KEY_ALPHABET.issuperset(key)):
            raise ConfigError(f"curve_dir: {path} holds a key that is not {KEY_CHARS} characters of Z85")
    return public, secret


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("carousel-keys", description="Make the keys of clients over TCP.")
    parser.add_argument("directory", type=Path, help="the launch's --curve-dir; made when it is not there")
    parser.add_argument("clients", nargs="*", default=[CLIENT], help="a name for each client")
    arguments = parser.parse_args(argv)
    try:
        make_keys(arguments.directory, arguments.clients)
    except (ConfigError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return ConfigError.exit_code
    for name in arguments.clients:
        print(f"{arguments.directory / name}: the curve_dir of client {name}; hand it over and keep no copy")
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
