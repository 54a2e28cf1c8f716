"""Where does the run's secret come from? Those who know it belong to the run.

    ECHELON_SECRET       the secret itself; Echelon's launchers draw one for each run and set it
    ECHELON_SECRET_FILE  a file with the secret, which only its owner may read

Without either, under another launcher: if all workers are on one machine, the secret is in a file that only
this user can read, made by the first of the user's runs. On several machines there is none that a stranger
could not know; the leader warns. All workers come to the same answer, however their machines resolve names.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import secrets
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

from echelon.errors import ConfigError

SECRET_VARIABLE = "ECHELON_SECRET"
FILE_VARIABLE = "ECHELON_SECRET_FILE"
PUBLIC = b"echelon: a run without a secret"
_SHORT = 16
_log = logging.getLogger(__name__)


def draw() -> str:
    """A new secret."""
    return secrets.token_hex(32)


def find(env: Mapping[str, str], address: str) -> tuple[bytes, bool]:
    """The secret of workers that meet at this address, and whether strangers cannot know it."""
    found = given(env)
    if found is not None:
        return found, True
    together = bool(env.get("WORLD_SIZE")) and env.get("LOCAL_WORLD_SIZE") == env.get("WORLD_SIZE")
    if together or is_loopback(address):
        return of_this_user(), True
    return PUBLIC, False


def is_loopback(name: str) -> bool:
    """Whether any machine takes this text for itself. A host's name may lead a host to itself, too."""
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def for_workers(env: Mapping[str, str]) -> dict[str, str]:
    """What a launcher sets for the workers of one run: the user's secret, or a new one."""
    found = given(env)
    return {SECRET_VARIABLE: os.fsdecode(found) if found is not None else draw()}


def given(env: Mapping[str, str]) -> bytes | None:
    """The secret that the environment holds or names; None if it does neither."""
    if env.get(SECRET_VARIABLE):
        return _long_enough(os.fsencode(env[SECRET_VARIABLE]))
    name = env.get(FILE_VARIABLE)
    if not name:
        return None
    return read_file(Path(name))


def _long_enough(secret: bytes) -> bytes:
    if len(secret) < _SHORT:
        raise ConfigError(
            f"{SECRET_VARIABLE} has {len(secret)} bytes, which can be guessed; {_SHORT} are the least",
            where=SECRET_VARIABLE,
            fix="set a random one: python -c 'import secrets; print(secrets.token_hex(32))'",
        )
    return secret


def read_file(path: Path) -> bytes:
    """The secret in a file; refuses a file that others may read, or that holds too little."""
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            secret = file.read().strip()
    except OSError as error:
        raise ConfigError(
            f"the file with the secret, {path}, cannot be read: {error.strerror}",
            where=FILE_VARIABLE,
            fix="check the path, and that this user may read the file",
        ) from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(
            f"others may read or write the file with the secret, {path}",
            where=FILE_VARIABLE,
            fix=f"chmod 600 {path}, and make a new secret if others may have read it",
        )
    if len(secret) < _SHORT or b"\0" in secret:
        raise ConfigError(
            f"the secret in {path} has {len(secret)} bytes, which can be guessed, or is no text",
            where=FILE_VARIABLE,
            fix="write a random one: python -c 'import secrets; print(secrets.token_hex(32))'",
        )
    return secret


def of_this_user() -> bytes:
    """The secret of this user's runs on this machine; it is made when there is none."""
    folder = _private_folder()
    path = folder / "secret"
    for _ in range(2):
        with contextlib.suppress(FileNotFoundError):
            return _checked(path)
        handle, made = tempfile.mkstemp(dir=folder)  # readable by its owner only
        with os.fdopen(handle, "w") as file:
            file.write(draw())
        with contextlib.suppress(FileExistsError):  # another process was faster: its secret counts
            os.link(made, path)
        Path(made).unlink()
    return _checked(path)


def _private_folder() -> Path:
    folder = Path(tempfile.gettempdir()) / f".echelon-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    _refuse_foreign(folder, folder.lstat(), stat.S_ISDIR)
    return folder


def _checked(path: Path) -> bytes:
    found = path.lstat()
    _refuse_foreign(path, found, stat.S_ISREG)
    return path.read_bytes()


def _refuse_foreign(path: Path, found: os.stat_result, kind: object) -> None:
    right = kind(found.st_mode) if callable(kind) else False
    if not right or found.st_uid != os.getuid() or found.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(
            f"{path} is not this user's alone, so the run's secret cannot be there",
            where="the secret of this user's runs",
            fix=f"remove {path}, or set {SECRET_VARIABLE} or {FILE_VARIABLE} on all workers",
        )


def warn_unprotected() -> None:
    """Say, on the leader, what is not protected."""
    _log.warning(
        "the run has no secret: whoever can reach its ports can read and change it; set %s or %s on "
        "all workers",
        SECRET_VARIABLE,
        FILE_VARIABLE,
    )
