"""Reads and writes CURVE keys: key files, the broker's keys, and a peer's keys.

`wavebus keygen NAME --role ROLE` writes ``NAME.secret``, which stays with its owner, and
``NAME.pub``. Both are TOML::

    name = "engine-1"
    role = "engine"
    public-key = "…"    # 40 characters of Z85
    secret-key = "…"    # only in the secret file

A broker has a folder with its own ``broker.secret`` and the folder ``authorized/``, which holds the
``.pub`` file of every peer that may connect.
"""

from __future__ import annotations

import os
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeAlias, cast, get_args

import msgspec
from msgspec import Meta

from bus._protocol.core.access import KeyRole
from bus.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

FileRole: TypeAlias = KeyRole | Literal["broker"]

ROLES: Final[tuple[str, ...]] = (*get_args(KeyRole), "broker")
SECRET: Final = ".secret"  # noqa: S105 - how a file's name ends
PUBLIC: Final = ".pub"
BROKER_SECRET: Final = f"broker{SECRET}"
AUTHORIZED: Final = "authorized"
KEY_VARIABLE: Final = "WAVEBUS_KEY"
BROKER_KEY_VARIABLE: Final = "WAVEBUS_BROKER_KEY"
INSECURE_VARIABLE: Final = "WAVEBUS_INSECURE"
# The API key that an engine's clients and sidecar send; vLLM reads this variable too.
API_KEY_VARIABLE: Final = "VLLM_API_KEY"

_NAME: Final = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z"
_Z85: Final = r"[0-9A-Za-z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}"
_MAX_FILE_BYTES: Final = 4096
_OTHERS: Final = 0o077


class _KeyFile(msgspec.Struct, rename="kebab", kw_only=True):
    name: Annotated[str, Meta(pattern=_NAME)]
    role: Any = None
    public_key: Annotated[str, Meta(pattern=rf"^{_Z85}\Z")]
    secret_key: Annotated[str, Meta(pattern=rf"^({_Z85})?\Z")] = ""


@dataclass(frozen=True, slots=True)
class Key:
    """The content of a key file.

    Attributes:
        name: the name of the key's owner.
        role: what the owner may do on the bus.
        public: the public key, as 40 characters of Z85.
        secret: the secret key, likewise; empty for a public file.
    """

    name: str
    role: FileRole
    public: str
    secret: str = ""

    def __repr__(self) -> str:
        return f"Key({self.name}, {self.role})"  # keeps the secret out of logs


@dataclass(frozen=True, slots=True)
class Security:
    """The keys of a peer's connection to the broker.

    Attributes:
        own: the peer's own key pair; None: the connection has no keys.
        broker: the broker's public key, as 40 characters of Z85; empty without keys.
        insecure: True permits a connection beyond loopback without keys.
    """

    own: Key | None = None
    broker: str = ""
    insecure: bool = False


@dataclass(frozen=True, slots=True)
class Keyring:
    """A broker's own key, and the authorised peers' keys by public key."""

    own: Key
    authorized: Mapping[str, Key]

    def roles(self) -> dict[str, KeyRole]:
        """Returns the role of each authorised key."""
        return {public: cast("KeyRole", key.role) for public, key in self.authorized.items()}


def write_pair(folder: Path, key: Key) -> tuple[Path, Path]:
    """Writes ``NAME.secret`` and ``NAME.pub`` for a key, and returns their paths.

    Only the user who writes it can read the secret file.

    Args:
        folder: where the files are written; made if it does not exist.

    Raises:
        UsageError: the name is no valid file name, or a file already exists or can't be written.
    """
    if not re.match(_NAME, key.name):
        raise UsageError(
            f"{key.name!r}: a key's name has 1 to 64 letters, digits and . _ -, "
            "starting with a letter or digit"
        )
    secret_path, public_path = folder / f"{key.name}{SECRET}", folder / f"{key.name}{PUBLIC}"
    public = f'name = "{key.name}"\nrole = "{key.role}"\npublic-key = "{key.public}"\n'
    secret = (
        f"# Keep this secret: whoever has it can act as {key.name}.\n"
        f'{public}secret-key = "{key.secret}"\n'
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write_new(secret_path, secret, 0o600)
        try:
            _write_new(public_path, public, 0o644)
        except OSError:
            secret_path.unlink()
            raise
    except FileExistsError as error:
        raise UsageError(
            f"{error.filename} exists already, and no key is overwritten; choose another name"
        ) from error
    except OSError as error:
        raise UsageError(f"--output {folder}: {error.strerror}") from error
    return secret_path, public_path


def _write_new(path: Path, text: str, mode: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)


def read_key(path: Path, *, secret: bool, option: str = "") -> Key:
    """Reads one key file.

    Args:
        secret: True: the file must have a secret key. False: a public file is enough.
        option: the command's option that the error's text names; empty: none.

    Raises:
        UsageError: the file can't be read, is malformed, lacks the secret, or has a secret that
            other users may read. The text contains no key.
    """
    where = f"{option} {path}" if option else str(path)
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            data = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{where}: {error.strerror}") from error
    try:
        fields = tomllib.loads(data[:_MAX_FILE_BYTES].decode())
        found = msgspec.convert(fields, _KeyFile)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError) as error:
        raise UsageError(f"{where} is not a key file; make one with `wavebus keygen`") from error
    if found.role not in ROLES:
        raise UsageError(f"{where} has role {found.role!r}; a role is one of {', '.join(ROLES)}")
    if secret and not found.secret_key:
        raise UsageError(f"{where} is a public key file; give the file that ends in {SECRET}")
    if found.secret_key and mode & _OTHERS:
        raise UsageError(f"{where}: other users may read this secret; run chmod 600 {path}")
    return Key(found.name, found.role, found.public_key, found.secret_key)


def read_keyring(folder: Path) -> Keyring:
    """Reads a broker's folder of keys.

    Raises:
        UsageError: a file is wrong, or two files have the same key. The text names the file.
    """
    own_path = folder / BROKER_SECRET
    if not own_path.is_file():
        raise UsageError(
            f"--curve-keys {folder}: the folder has no {BROKER_SECRET}; make one with "
            f"`wavebus keygen broker --role broker -o {folder}`"
        )
    own = read_key(own_path, secret=True)
    if own.role != "broker":
        raise UsageError(f"{own_path} has a key of role {own.role}; it must be of role broker")
    authorized: dict[str, Key] = {}
    try:
        paths = sorted((folder / AUTHORIZED).iterdir())
    except FileNotFoundError:
        paths = []
    except OSError as error:
        raise UsageError(f"{folder / AUTHORIZED}: {error.strerror}") from error
    for path in paths:
        if path.suffix == SECRET:
            raise UsageError(
                f"{path}: a secret file does not belong here; replace it by its {PUBLIC} file"
            )
        if path.suffix != PUBLIC:
            continue
        key = read_key(path, secret=False)
        if key.role == "broker":
            raise UsageError(f"{path} is a broker's key, which no peer may use; remove the file")
        if key.public in authorized:
            other = authorized[key.public].name
            raise UsageError(f"{path} has the same key as {other}; remove one of the two files")
        authorized[key.public] = key
    return Keyring(own, authorized)


def silence_hint(security: Security | None) -> str:
    """Returns a hint about keys, for errors that say that no broker answers.

    A broker does not answer a peer with a wrong key, so wrong keys look like an absent broker.
    """
    if security is None or security.own is None:
        return ". If the broker has keys, give --key and --broker-key"
    return (
        f". If one runs there, either its folder of authorised keys lacks {security.own.public} of "
        f"{security.own.name} (its log says key_refused), or --broker-key is not its key"
    )


def security(
    key: Path | str | None = None,
    broker_key: Path | str | None = None,
    *,
    insecure: bool = False,
    env: Mapping[str, str] = os.environ,
) -> Security:
    """Reads the keys of a peer's connection.

    Args:
        key: file with the peer's secret key. Default: ``WAVEBUS_KEY``.
        broker_key: file with the broker's public key. Default: ``WAVEBUS_BROKER_KEY``.
        insecure: whether to connect beyond loopback without keys. Default: ``WAVEBUS_INSECURE``.

    Raises:
        UsageError: a file is wrong, or only one of ``key`` and ``broker_key`` is given.
    """
    key = key or env.get(KEY_VARIABLE) or None
    broker_key = broker_key or env.get(BROKER_KEY_VARIABLE) or None
    insecure = insecure or env.get(INSECURE_VARIABLE, "") not in ("", "0", "false")
    if key is None and broker_key is None:
        return Security(insecure=insecure)
    if key is None or broker_key is None:
        missing = "--key: this peer's secret file" if key is None else "--broker-key: broker.pub"
        raise UsageError(f"{missing} is missing; a peer needs both keys")
    own = read_key(Path(key), secret=True, option="--key")
    broker = read_key(Path(broker_key), secret=False, option="--broker-key")
    if own.role == "broker":
        raise UsageError(f"--key {key} is a broker's key; make a key of another role")
    if broker.role != "broker":
        raise UsageError(
            f"--broker-key {broker_key} has a key of role {broker.role}; give the broker's file"
        )
    return Security(own, broker.public, insecure=insecure)
