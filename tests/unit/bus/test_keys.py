"""Files of keys: made once, read with care, and never shown."""

from __future__ import annotations

import stat
from typing import TYPE_CHECKING

import pytest

from bus._cli.main import run
from bus._keys import Security, read_key, read_keyring, security
from bus._net import is_loopback
from bus.errors import UsageError
from tests.support.keys import KeyFolder

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def keys(tmp_path: Path) -> KeyFolder:
    return KeyFolder(tmp_path)


def test_keygen_writes_a_secret_and_a_public_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The secret is for its owner's eyes; the public one names the role and has no secret."""
    assert run(["keygen", "engine-1", "--role", "engine", "-o", str(tmp_path / "new")]) == 0
    secret, public = tmp_path / "new" / "engine-1.secret", tmp_path / "new" / "engine-1.pub"
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    own = read_key(secret, secret=True)
    shown = read_key(public, secret=False)
    assert (own.name, own.role, own.public) == (shown.name, shown.role, shown.public)
    assert (shown.role, shown.secret) == ("engine", "")
    told = capsys.readouterr().out
    assert own.secret not in told + repr(own) + public.read_text(encoding="utf-8")


def test_keygen_never_overwrites(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither file, and it leaves no half of a pair."""
    command = ["keygen", "e", "--role", "engine", "-o", str(tmp_path)]
    assert run(command) == 0
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert run(command) == 2
    assert "e.secret exists already" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    (tmp_path / "e.secret").unlink()
    assert run(command) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["e.pub"]


@pytest.mark.parametrize("name", ["", "../e", "a/b", ".e", "a b", "e\n", "e" * 65])
def test_a_name_that_is_no_files_name_is_refused(tmp_path: Path, name: str) -> None:
    """So keys stay in their folder."""
    assert run(["keygen", "--role", "engine", "-o", str(tmp_path), "--", name]) == 2
    assert list(tmp_path.iterdir()) == []


def test_a_keyring_has_the_roles_of_all_public_files(keys: KeyFolder) -> None:
    """And of nothing else that lies there."""
    keys.make("e", "engine")
    keys.make("t", "trainer")
    (keys.authorized / "README").write_text("notes", encoding="utf-8")
    ring = read_keyring(keys.broker)
    assert ring.roles() == {keys.public_of("e"): "engine", keys.public_of("t"): "trainer"}


def test_a_keyring_with_a_wrong_file_is_refused_and_the_file_named(keys: KeyFolder) -> None:
    """Rather than one peer left out in silence."""

    def wrong(name: str, text: str, told: str) -> None:
        path = keys.authorized / name
        path.write_text(text, encoding="utf-8")
        path.chmod(0o600)
        with pytest.raises(UsageError, match=told):
            read_keyring(keys.broker)
        path.unlink()

    secret = keys.make("e", "engine").read_text(encoding="utf-8")
    public = (keys.authorized / "e.pub").read_text(encoding="utf-8")
    wrong("bad.pub", "nonsense", "bad.pub is not a key file")
    wrong("bad.pub", public.replace("engine", "king"), "has role 'king'")
    wrong("bad.pub", public.replace('public-key = "', 'public-key = "x'), "is not a key file")
    wrong("again.pub", public, "has the same key as e")
    wrong("e.secret", secret, "a secret file does not belong here")
    wrong(
        "b.pub", keys.public.read_text(encoding="utf-8"), "is a broker's key, which no peer may use"
    )
    assert len(read_keyring(keys.broker).authorized) == 1


def test_a_folder_without_the_brokers_own_key_says_how_to_make_it(tmp_path: Path) -> None:
    """With the command."""
    with pytest.raises(UsageError, match="keygen broker --role broker -o"):
        read_keyring(tmp_path)


@pytest.mark.parametrize("mode", [0o604, 0o640, 0o620])
def test_a_secret_that_others_may_read_is_refused(keys: KeyFolder, mode: int) -> None:
    """Whoever reads it is whom it names. Its group counts as others."""
    secret = keys.make("e", "engine")
    secret.chmod(mode)
    with pytest.raises(UsageError, match="chmod 600"):
        security(secret, keys.public)


def test_what_a_peer_connects_with_comes_from_arguments_or_the_environment(
    keys: KeyFolder,
) -> None:
    """Arguments first; nothing at all is no keys."""
    first, second = keys.make("first", "engine"), keys.make("second", "engine")
    env = {"WAVEBUS_KEY": str(second), "WAVEBUS_BROKER_KEY": str(keys.public)}
    own = security(env=env).own
    assert own is not None
    assert own.name == "second"
    own = security(first, env=env).own
    assert own is not None
    assert own.name == "first"
    assert security(env={}) == Security()
    assert security(env={"WAVEBUS_INSECURE": "1"}).insecure
    assert not security(env={"WAVEBUS_INSECURE": "0"}).insecure


def test_a_wrong_pair_of_files_is_refused_by_option(keys: KeyFolder) -> None:
    """One of them missing, or one in the other's place."""
    secret = keys.make("e", "engine")
    other = keys.authorized / "e.pub"
    for pair, told in (
        ((secret, None), "--broker-key: broker.pub is missing"),
        ((None, keys.public), "--key: this peer's secret file is missing"),
        ((other, keys.public), "is a public key file; give the file that ends in .secret"),
        ((secret, other), "--broker-key .* has a key of role engine"),
        ((keys.broker / "broker.secret", keys.public), "--key .* is a broker's key"),
        ((keys.broker / "none", keys.public), "--key .*: No such file"),
    ):
        with pytest.raises(UsageError, match=told):
            security(*pair, env={})


@pytest.mark.parametrize(
    ("address", "here"),
    [
        ("tcp://127.0.0.1:7710", True),
        ("tcp://127.8.9.1:*", True),
        ("tcp://localhost:7710", True),
        ("tcp://[::1]:7710", True),
        ("ipc:///tmp/bus", True),
        ("inproc://bus", True),
        ("tcp://0.0.0.0:7710", False),
        ("tcp://*:7710", False),
        ("tcp://[::]:7710", False),
        ("tcp://10.0.0.7:7710", False),
        ("tcp://broker.example:7710", False),
        ("tcp://lo:7710", False),
        ("tcp://127.0.0.1.example:7710", False),
        ("tcp://127.0.0.1:0;10.0.0.7:7710", False),
        ("tcp://127.0.0.1@10.0.0.7:7710", False),
        ("tcp://[::1:7710", False),
        ("", False),
    ],
)
def test_loopback_is_what_only_this_machine_reaches(address: str, here: bool) -> None:
    """In doubt it is not."""
    assert is_loopback(address) is here
