"""Tenants: holders of keys, with the roles and limits of each.

A tenant is the holder of an API key, or of a key over TCP (`runtime.ring.keys`), by name. The launcher reads
their table from the settings, at start and again on SIGHUP, and leaves it in the run directory, with digests
in the place of keys; the other processes read it there. Whoever can open the run directory is the OWNER, who
has all roles and no limits, and so is the holder of the only key of `--api-key`.

    [alice]                       # api_keys FILE; each section is a tenant
    key = "..."                   # or sha256 = "..."; neither where it comes over TCP only
    # key = ["...", "..."]        # several, while one takes the place of another
    role = "user"                 # user, metrics or admin
    max_running = 8               # requests; all that there are by default
    max_waiting = 32
    tokens_per_minute = 100000    # prompts and output together
    max_priority = 0              # a higher one is refused
    cache_share = 0.25            # of the KV cache; the rest is divided equally
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from runtime.base.errors import ConfigError
from runtime.base.ownership import fault_of
from runtime.ring.keys import NAME
from runtime.ring.launch_state import write_atomically
from runtime.settings.config import RuntimeConfig
from runtime.wire.format import Priority

logger = logging.getLogger(__name__)

OWNER = ""
"""Name of the tenant of all callers that can open the run directory."""
Role: TypeAlias = Literal["user", "metrics", "admin"]
Key: TypeAlias = Annotated[str, Meta(min_length=1)]
SHA256 = re.compile(r"[0-9a-f]{64}")
MAX_SHARES = 1.0 + 1e-9
"""Largest sum of all cache shares, with a margin for rounding."""


class TenantLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of one tenant over all processes. None: the launch's general limit."""

    max_running: Annotated[int, Meta(ge=1)] | None = None
    """Maximum number of sequences that run at a time; a beam search counts as many as it has rows. Further
    ones wait.
    """
    max_waiting: Annotated[int, Meta(ge=1)] | None = None
    """Maximum number of sequences that wait at a time; a beam search counts as many as it has rows. Further
    ones are refused.
    """
    tokens_per_minute: Annotated[int, Meta(ge=1)] | None = None
    """Maximum number of tokens of prompts and output in a minute."""
    max_priority: Priority = 0
    """Highest priority that a request may ask for. A higher one is refused."""
    cache_share: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    """Part of the KV cache that others do not take. None: an equal part of what explicit shares leave."""


class _Section(TenantLimits, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tenant's section in the file of keys."""

    key: Key | Annotated[list[Key], Meta(min_length=1)] | None = None
    sha256: Key | Annotated[list[Key], Meta(min_length=1)] | None = None
    role: Role = "user"


class Tenant(msgspec.Struct, frozen=True):
    """A holder of API keys or of a key over TCP."""

    name: str
    role: Role = "user"
    limits: TenantLimits | None = TenantLimits()
    """Limits of the tenant; None: it has none, like the owner and the keys of `--api-key`."""
    digests: tuple[str, ...] = ()
    """SHA-256 digests of its API keys, in hexadecimal."""

    def may(self, role: Role) -> bool:
        """Return True if the tenant has this role. An admin has every role."""
        return self.role in (role, "admin")


THE_OWNER = Tenant(OWNER, "admin", None)


class Tenants:
    """Table of all tenants that have an entry."""

    def __init__(self, tenants: tuple[Tenant, ...] = ()) -> None:
        self.tenants = tenants
        self._by_name = {tenant.name: tenant for tenant in tenants}
        self._by_digest = {digest: tenant for tenant in tenants for digest in tenant.digests}

    def of_key(self, key: bytes) -> Tenant | None:
        """Return the tenant that holds this API key, or None. The key is looked up by its digest, so the time
        this takes tells nothing about any key.
        """
        return self._by_digest.get(hashlib.sha256(key).hexdigest())

    def named(self, name: str) -> Tenant:
        """Return the tenant of this name. A name without an entry, known by its key over TCP only, is a user
        with default limits.
        """
        return self._by_name.get(name) or (THE_OWNER if name == OWNER else Tenant(name))


def read_tenants(config: RuntimeConfig) -> Tenants:
    """Read all API keys that the settings name. Raises ConfigError, which names the setting, the file and the
    entry.
    """
    keys = [key.strip() for key in config.api_key.split(",")] if config.api_key else []
    if not all(keys):
        raise ConfigError("api_key: between two commas there is no key, and an empty one opens to nobody")
    if config.api_key_file:
        if keys:
            raise ConfigError("api_key_file: there is an api_key as well; give one of them")
        keys = [_key_of_file(Path(config.api_key_file))]
    sections = _read_sections(config) if config.api_keys else {}
    # A single key needs no name, because there is no other to confuse it with. The others have names that no
    # section and no key over TCP can have.
    names = [OWNER] if len(keys) == 1 else [f"key:{number}" for number in range(1, len(keys) + 1)]
    tenants = [Tenant(name, "admin", None, (_digest(key),)) for name, key in zip(names, keys, strict=True)]
    tenants += [_tenant(name, section) for name, section in sections.items()]
    _check_different(tenants)
    return Tenants(tuple(tenants))


def _key_of_file(path: Path) -> str:
    key = _read_text("api_key_file", path).strip()
    _check_owner("api_key_file", path, is_secret=True)
    if not key or len(key.split()) != 1:
        raise ConfigError(f"api_key_file: {path} must hold one key and nothing else")
    return key


def _read_sections(config: RuntimeConfig) -> dict[str, _Section]:
    path = Path(config.api_keys)
    try:
        tables = tomllib.loads(_read_text("api_keys", path))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"api_keys: {path} is not TOML: {error}") from None
    sections = {name: _section(path, name, table) for name, table in tables.items()}
    if not sections:
        raise ConfigError(f"api_keys: {path} names nobody; add a section [NAME] with key or sha256")
    for name, section in sections.items():
        if section.key is None and section.sha256 is None and not config.zmq_bind:
            raise ConfigError(f"api_keys: {path}: [{name}] has no key; add key or sha256")
        if section.cache_share is not None and config.share_prefixes_across_keys:
            raise ConfigError(
                f"api_keys: {path}: [{name}] cache_share: with share_prefixes_across_keys nobody has a share "
                "of the cache; give one of them"
            )
    _check_owner("api_keys", path, is_secret=any(section.key is not None for section in sections.values()))
    if sum(section.cache_share or 0.0 for section in sections.values()) > MAX_SHARES:
        raise ConfigError(f"api_keys: {path}: the cache_share of all tenants together is more than 1")
    return sections


def _section(path: Path, name: str, table: Any) -> _Section:
    where = f"api_keys: {path}: [{name}]"
    if not isinstance(table, dict):
        raise ConfigError(f"api_keys: {path}: {name} stands in no section; begin one with [NAME]")
    if not NAME.fullmatch(name):
        raise ConfigError(f"{where}: a name has at most 64 letters, digits, dots, dashes and underscores")
    try:
        section = msgspec.convert(table, _Section)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {str(error).replace('`', '').replace('$.', '')}") from None
    if section.key is not None and section.sha256 is not None:
        raise ConfigError(f"{where}: give key or sha256, not both")
    if not all(SHA256.fullmatch(each.lower()) for each in _several(section.sha256)):
        raise ConfigError(f"{where}: sha256 must be 64 hexadecimal digits (printf %s KEY | sha256sum)")
    return section


def _tenant(name: str, section: _Section) -> Tenant:
    digests = [each.lower() for each in _several(section.sha256)] + list(map(_digest, _several(section.key)))
    limits = TenantLimits(**{field: getattr(section, field) for field in TenantLimits.__struct_fields__})
    return Tenant(name, section.role, limits, tuple(digests))


def _several(value: str | list[str] | None) -> list[str]:
    if value is None:
        return []
    return [value] if isinstance(value, str) else value


def _check_different(tenants: list[Tenant]) -> None:
    holders: dict[str, Tenant] = {}
    for tenant in tenants:
        for digest in tenant.digests:
            other = holders.setdefault(digest, tenant)
            if other is not tenant:
                both = (tenant.name or "api_key", other.name or "api_key")
                raise ConfigError(f"api_keys: {' and '.join(both)} have the same key")
        if len(set(tenant.digests)) < len(tenant.digests):
            raise ConfigError(f"api_keys: {tenant.name} has the same key twice")


def _read_text(setting: str, path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        raise ConfigError(f"{setting}: {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{setting}: {path} is not UTF-8 text") from None


def _check_owner(setting: str, path: Path, *, is_secret: bool) -> None:
    """Raise ConfigError if another user may have changed the file, or read the keys in it."""
    fault = fault_of(path, is_secret=is_secret)
    if fault is not None:
        raise ConfigError(f"{setting}: {fault}")


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


class TenantsFile:
    """Table of tenants in the run directory. The launcher writes it, all other processes read it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._version: tuple[int, int] | None = None
        self._fault = ""
        """Fault of the file at the last `read_new`; empty: none."""

    def write(self, tenants: Tenants) -> None:
        """Replace the file atomically. Raises OSError."""
        write_atomically(self._path, msgspec.json.encode(tenants.tenants))

    def read_if_changed(self) -> Tenants | None:
        """Return the table if it was written since the last call, else None. The first call always returns
        it. Raises OSError.
        """
        info = os.stat(self._path)
        version = (info.st_ino, info.st_mtime_ns)
        if version == self._version:
            return None
        tenants = msgspec.json.decode(self._path.read_bytes(), type=tuple[Tenant, ...])
        self._version = version
        return Tenants(tenants)

    def read_new(self) -> Tenants | None:
        """Return the table if it was written since the last call, else None. If the file cannot be read it
        also returns None and logs that once; the last table stays in force.
        """
        try:
            tenants = self.read_if_changed()
        except (OSError, msgspec.MsgspecError) as error:
            fault = f"{type(error).__name__}: {error}"
            if fault != self._fault:
                logger.error("the table of tenants cannot be read, the last one stays in force: %s", fault)
            self._fault = fault
            return None
        self._fault = ""
        return tenants
