"""The table of tenants: read from the settings, left in the run directory, read there again."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from runtime.base.errors import ConfigError
from runtime.ring.tenants import OWNER, Tenant, TenantLimits, Tenants, TenantsFile, read_tenants
from runtime.settings.config import RuntimeConfig
from tests.harness.cases import for_each

DIGEST = hashlib.sha256(b"key of bob").hexdigest()
FILE = f"""
[alice]
key = "key of alice"
role = "admin"
max_running = 8
max_waiting = 32
tokens_per_minute = 1000
max_priority = -3
cache_share = 0.25

[bob]
sha256 = "{DIGEST.upper()}"
"""


def written(path: Path, text: str, mode: int = 0o600) -> RuntimeConfig:
    file = path / "keys.toml"
    file.write_text(text)
    file.chmod(mode)
    return RuntimeConfig(api_keys=str(file))


def test_a_file_says_who_has_which_key_and_may_do_what(tmp_path: Path) -> None:
    tenants = read_tenants(written(tmp_path, FILE))
    alice, bob = tenants.of_key(b"key of alice"), tenants.of_key(b"key of bob")
    assert alice is not None
    assert bob is not None
    assert tenants.of_key(b"") is None
    assert tenants.of_key(DIGEST.encode()) is None
    assert (alice.name, alice.role) == ("alice", "admin")
    limits = TenantLimits(
        max_running=8, max_waiting=32, tokens_per_minute=1000, max_priority=-3, cache_share=0.25
    )
    assert alice.limits == limits
    assert bob == Tenant("bob", "user", TenantLimits(), (DIGEST,))
    assert tenants.named("alice") is alice
    assert tenants.named("carol") == Tenant("carol", "user", TenantLimits())
    assert tenants.named(OWNER).may("admin")
    assert tenants.named(OWNER).limits is None
    assert alice.may("user")
    assert alice.may("metrics")
    assert bob.may("user")
    assert not bob.may("metrics")
    assert not bob.may("admin")


@pytest.mark.parametrize("as_digests", [False, True])
def test_a_tenant_may_have_several_keys_while_one_takes_the_place_of_another(
    tmp_path: Path, as_digests: bool
) -> None:
    keys = ["old", "new"]
    values = [hashlib.sha256(key.encode()).hexdigest() for key in keys] if as_digests else keys
    quoted = ", ".join(f'"{value}"' for value in values)
    field = "sha256" if as_digests else "key"
    tenants = read_tenants(written(tmp_path, f'[a]\n{field} = [{quoted}]\n[b]\nkey = "other"'))
    found = [tenants.of_key(key.encode()) for key in (*keys, "other")]
    assert [tenant and tenant.name for tenant in found] == ["a", "a", "b"]


def test_the_keys_of_the_command_line_may_do_everything(tmp_path: Path) -> None:
    alone = read_tenants(RuntimeConfig(api_key="secret")).of_key(b"secret")
    assert alone is not None
    assert (alone.name, alone.role, alone.limits) == (OWNER, "admin", None)
    several = read_tenants(RuntimeConfig(api_key="a, b"))
    names = {tenant.name for tenant in several.tenants}
    assert len(names) == 2
    assert OWNER not in names
    # No client over TCP can have such a name and with it the role.
    assert all(":" in name for name in names)
    path = tmp_path / "key"
    path.write_text("from-a-file\n")
    path.chmod(0o600)
    filed = read_tenants(RuntimeConfig(api_key_file=str(path))).of_key(b"from-a-file")
    assert filed is not None
    assert filed.name == OWNER


@for_each(
    ("text", "problem"),
    [
        ("", "names nobody"),
        ("x", "is not TOML"),
        ('key = "x"', "key stands in no section"),
        ("[a]", r"\[a\] has no key"),
        ('[a]\nkey = ""', r"\[a\]: Expected str of length >= 1 - at key"),
        ('[a]\nkey = "x"\nsha256 = "y"', "not both"),
        ('[a]\nsha256 = "abc"', "64 hexadecimal digits"),
        ('[a]\nkey = "x"\nrole = "root"', r"\[a\]: Invalid enum value 'root' - at role"),
        ('[a]\nkey = "x"\nmax_runing = 1', r"\[a\]: Object contains unknown field max_runing"),
        ('[a]\nkey = "x"\nmax_running = 0', r"\[a\]: Expected int >= 1 - at max_running"),
        ('[a]\nkey = "x"\ncache_share = 1.5', "at cache_share"),
        ('[a]\nkey = "x"\ncache_share = 0.6\n[b]\nkey = "y"\ncache_share = 0.6', "more than 1"),
        ('[a]\nkey = "x"\n[b]\nkey = "x"', "b and a have the same key"),
        ('["a b"]\nkey = "x"', "a name has at most 64"),
        ("[a]\nkey = []", r"\[a\]: Expected array of length >= 1 - at key"),
        ('[a]\nkey = ["x", ""]', r"\[a\]: Expected str of length >= 1 - at key"),
        ('[a]\nkey = ["x", "x"]', "a has the same key twice"),
        (f'[a]\nsha256 = ["{DIGEST}", "abc"]', "64 hexadecimal digits"),
    ],
)
def test_a_mistake_is_named_with_the_file_and_the_entry(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as error:
        read_tenants(written(tmp_path, text))
    assert str(error.value).startswith("api_keys: ")


def test_keys_that_others_could_read_or_change_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="chmod 600"):
        read_tenants(written(tmp_path, FILE, 0o644))
    digests = f'[bob]\nsha256 = "{DIGEST}"'
    assert read_tenants(written(tmp_path, digests, 0o644)).of_key(b"key of bob") is not None
    with pytest.raises(ConfigError, match="chmod go-w"):
        read_tenants(written(tmp_path, digests, 0o666))
    with pytest.raises(ConfigError, match=r"api_keys: .* cannot be read: No such file"):
        read_tenants(RuntimeConfig(api_keys=str(tmp_path / "nothing")))
    path = tmp_path / "key"
    for text, problem in (("", "one key and nothing else"), ("a b", "one key"), ("x", "chmod 600")):
        path.write_text(text)
        path.chmod(0o644 if text == "x" else 0o600)
        with pytest.raises(ConfigError, match=problem):
            read_tenants(RuntimeConfig(api_key_file=str(path)))
    with pytest.raises(ConfigError, match="api_key_file: there is an api_key as well"):
        read_tenants(RuntimeConfig(api_key="a", api_key_file=str(path)))


def test_who_comes_over_tcp_only_needs_no_api_key(tmp_path: Path) -> None:
    config = written(tmp_path, "[far]\nmax_running = 2")
    over_tcp = RuntimeConfig(api_keys=config.api_keys, zmq_bind="tcp://127.0.0.1:5000")
    tenants = read_tenants(over_tcp)
    assert tenants.named("far").limits == TenantLimits(max_running=2)
    assert tenants.of_key(b"") is None


def test_the_table_in_the_run_directory_has_no_keys_and_is_read_when_it_changes(tmp_path: Path) -> None:
    path = tmp_path / "tenants.json"
    file, reader = TenantsFile(path), TenantsFile(path)
    file.write(read_tenants(written(tmp_path, FILE)))
    assert b"key of alice" not in path.read_bytes()
    assert os.stat(path).st_mode & 0o077 == 0
    first = reader.read_if_changed()
    assert first is not None
    assert first.tenants == read_tenants(written(tmp_path, FILE)).tenants
    assert reader.read_if_changed() is None
    file.write(Tenants())
    again = reader.read_if_changed()
    assert again is not None
    assert again.of_key(b"key of alice") is None
