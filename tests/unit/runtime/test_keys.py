"""Keys of clients over TCP: made once, private, and every fault named before anything is started."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from runtime.base.errors import ConfigError
from runtime.ring.keys import ClientKeys, ServerKeys, main, make_keys
from tests.harness.ring.other_user import give_away


def files(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*.key*")}


def test_a_client_gets_a_directory_to_take_along_and_its_public_key_is_let_in(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path / "keys"), "alice", "bob"]) == 0
    assert sorted(files(tmp_path / "keys")) == [
        "alice/client.key_secret",
        "alice/server.key",
        "bob/client.key_secret",
        "bob/server.key",
        "clients/alice.key",
        "clients/bob.key",
        "server.key",
        "server.key_secret",
    ]
    keys = ServerKeys.read(tmp_path / "keys")
    assert keys.public.decode() in (tmp_path / "keys" / "alice" / "server.key").read_text()
    assert keys.secret.decode() not in capsys.readouterr().out
    assert sorted(keys.clients.values()) == ["alice", "bob"]
    for key, name in keys.clients.items():
        assert key.decode() in (tmp_path / "keys" / "clients" / f"{name}.key").read_text()


def test_keys_are_for_their_owner_alone(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys")
    for path in (tmp_path / "keys").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


def test_another_client_is_added_and_nothing_that_exists_is_changed(tmp_path: Path) -> None:
    make_keys(tmp_path, ["alice"])
    before = files(tmp_path)
    make_keys(tmp_path, ["bob"])
    after = files(tmp_path)
    assert {name: after[name] for name in before} == before
    assert len(after) == len(before) + 3


@pytest.mark.parametrize("name", ["alice", "server", "clients", "", "../alice", "a/b", ".hidden", "x" * 65])
def test_a_name_that_is_taken_or_no_file_name_is_refused(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    make_keys(tmp_path, ["alice"])
    before = files(tmp_path)
    assert main([str(tmp_path), "carol", name]) == 64
    assert "error: " in capsys.readouterr().err
    assert files(tmp_path) == before


def test_faults_of_a_key_directory_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"curve_dir.*server\.key_secret"):
        ServerKeys.read(tmp_path)

    make_keys(tmp_path)
    secret = tmp_path / "server.key_secret"
    secret.chmod(0o644)
    with pytest.raises(ConfigError, match=r"server\.key_secret.*chmod 600"):
        ServerKeys.read(tmp_path)

    secret.chmod(0o600)
    whole = secret.read_text()
    secret.write_text((tmp_path / "server.key").read_text())
    with pytest.raises(ConfigError, match="no secret key"):
        ServerKeys.read(tmp_path)

    secret.write_text(whole)
    client = tmp_path / "clients" / "client.key"
    client.write_text('public-key = "short"')
    with pytest.raises(ConfigError, match=r"client\.key.*40 characters"):
        ServerKeys.read(tmp_path)

    client.unlink()
    with pytest.raises(ConfigError, match=r"nobody could connect.*runtime\.ring\.keys"):
        ServerKeys.read(tmp_path)


def test_two_names_for_one_key_are_refused(tmp_path: Path) -> None:
    """Otherwise nobody could say whose a message with that key is."""
    make_keys(tmp_path, ["alice", "bob"])
    clients = tmp_path / "clients"
    (clients / "carol.key").write_bytes((clients / "alice.key").read_bytes())
    with pytest.raises(ConfigError, match=r"curve_dir: carol and alice in .* have the same key"):
        ServerKeys.read(tmp_path)


@pytest.mark.parametrize("name", [".key", ".hidden.key", "a b.key", "é.key", f"{'x' * 65}.key"])
def test_a_key_whose_file_names_nobody_is_refused(tmp_path: Path, name: str) -> None:
    make_keys(tmp_path, ["alice"])
    (tmp_path / "clients" / "alice.key").rename(tmp_path / "clients" / name)
    with pytest.raises(ConfigError, match=r"curve_dir: .*(names no client|holds no client's key)"):
        ServerKeys.read(tmp_path)


def test_a_key_that_is_not_there_is_told_from_one_that_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no file .*server\.key_secret; python -m runtime\.ring\.keys"):
        ServerKeys.read(tmp_path)


def test_a_clients_secret_is_for_its_user_alone(tmp_path: Path) -> None:
    make_keys(tmp_path)
    own = tmp_path / "client"
    secret = own / "client.key_secret"
    assert ClientKeys.read(own).server == ServerKeys.read(tmp_path).public

    secret.chmod(0o640)
    with pytest.raises(ConfigError, match=r"client\.key_secret.*chmod 600"):
        ClientKeys.read(own)

    secret.chmod(0o600)
    secret.write_text((own / "server.key").read_text())
    with pytest.raises(ConfigError, match=r"client\.key_secret has no secret key"):
        ClientKeys.read(own)


SERVERS = [".", "server.key_secret", "clients", "clients/client.key"]
CLIENTS = ["client", "client/client.key_secret", "client/server.key"]


def read(keys: Path, name: str) -> None:
    if name in SERVERS:
        ServerKeys.read(keys)
    else:
        ClientKeys.read(keys / "client")


@pytest.mark.parametrize("name", [*SERVERS, *CLIENTS])
def test_what_another_user_may_have_put_there_or_changed_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    keys = tmp_path / "keys"
    make_keys(keys)
    path = keys / name
    mode = path.stat().st_mode
    path.chmod(mode | 0o020)
    with pytest.raises(ConfigError, match=rf"curve_dir: {path} .*\(chmod (go-w|600)\)"):
        read(keys, name)
    path.chmod(mode)
    read(keys, name)
    give_away(monkeypatch, path)
    with pytest.raises(ConfigError, match=rf"curve_dir: {path} belongs to another user"):
        read(keys, name)


def test_a_sticky_directory_as_secrets_are_mounted_in_is_taken(tmp_path: Path) -> None:
    """Others can only add files there, and each is looked at. But in clients/ what is added is let in."""
    make_keys(tmp_path)
    for name in (".", "client"):
        (tmp_path / name).chmod(0o1777)
    assert ClientKeys.read(tmp_path / "client").server == ServerKeys.read(tmp_path).public
    (tmp_path / "clients").chmod(0o1777)
    with pytest.raises(ConfigError, match="clients can be changed by other users"):
        ServerKeys.read(tmp_path)


@pytest.mark.parametrize("name", [".", "clients"])
def test_no_keys_are_made_where_another_user_may_change_them(tmp_path: Path, name: str) -> None:
    (tmp_path / "clients").mkdir()
    (tmp_path / name).chmod(0o777)
    with pytest.raises(ConfigError, match="chmod go-w"):
        make_keys(tmp_path)
    assert not files(tmp_path)
