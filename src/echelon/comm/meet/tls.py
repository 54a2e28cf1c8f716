"""Optional TLS between workers: which certificates to use, and a socket class that encrypts.

Each worker has a certificate, its key, and the certificate of the authority that signed all workers'
certificates: ECHELON_TLS_CERT, ECHELON_TLS_KEY and ECHELON_TLS_CA name the files, in PEM form. All workers
have them, or none. Connections use TLS 1.3, and both sides must show a certificate that the authority
signed.

The dialling side checks that the certificate names the address that it dialled, or the host of the worker
that it expects there. The answering side accepts any certificate of the authority. The HMAC that follows
inside the encrypted connection proves that a peer is a worker of this run, and that both ends see the same
two certificates (`handshake.py`). `echelon certs` makes an authority and certificates (`certs.py`).

The dialling side acts as the TLS server, the answering side as the TLS client. A TLS client shows its
certificate only after it has accepted the server's, so an outsider that connects sees none. At the end of
the handshake the dialling side knows that both sides have accepted, or why not.
"""

from __future__ import annotations

import ipaddress
import socket
import ssl
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from echelon.comm.meet.handshake import Refused
from echelon.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

CERTIFICATE_VARIABLE = "ECHELON_TLS_CERT"
KEY_VARIABLE = "ECHELON_TLS_KEY"
AUTHORITY_VARIABLE = "ECHELON_TLS_CA"
_VARIABLES = (CERTIFICATE_VARIABLE, KEY_VARIABLE, AUTHORITY_VARIABLE)
ALL_OR_NONE = f"set {', '.join(_VARIABLES)} on all workers, or on none"
_SAME_AUTHORITY = f"give all workers certificates of one authority; {AUTHORITY_VARIABLE} names it"
_RECORD_BYTES = 16 << 10  # the largest TLS record
_LATER = (ssl.SSLWantReadError, ssl.SSLWantWriteError)
_OUT_OF_DATE = (9, 10)  # X509_V_ERR_CERT_NOT_YET_VALID, X509_V_ERR_CERT_HAS_EXPIRED


@dataclass(frozen=True, slots=True, kw_only=True)
class Contexts:
    """TLS settings by role."""

    dialling: ssl.SSLContext
    answering: ssl.SSLContext
    certificate: bytes = b""
    """This worker's own, as the peer sees it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificates:
    """The certificate files of a worker."""

    certificate: Path
    key: Path
    authority: Path

    @classmethod
    def from_environment(cls, env: Mapping[str, str]) -> Certificates | None:
        """Read and check the files that the environment names; None if it names none."""
        missing = [name for name in _VARIABLES if not env.get(name)]
        if len(missing) == len(_VARIABLES):
            return None
        if missing:
            raise ConfigError(
                f"TLS was asked for without {' and '.join(missing)}", where="environment", fix=ALL_OR_NONE
            )
        certificate, key, authority = (Path(env[name]) for name in _VARIABLES)
        found = cls(certificate=certificate, key=key, authority=authority)
        found.contexts()
        return found

    def contexts(self) -> Contexts:
        """Load the files. ConfigError if peers with the same authority would reject them."""
        _check_certificates(self.authority, AUTHORITY_VARIABLE)
        _check_certificates(self.certificate, CERTIFICATE_VARIABLE)
        _check_readable(self.key, KEY_VARIABLE)
        made = Contexts(
            dialling=self._context(dialling=True),
            answering=self._context(dialling=False),
            certificate=_first(self.certificate.read_text()),
        )
        try:
            _shake_hands(made)
        except ssl.SSLCertVerificationError as error:
            raise ConfigError(
                f"{self.certificate} is not valid under {self.authority}: {error.verify_message}",
                where=f"{CERTIFICATE_VARIABLE}, {AUTHORITY_VARIABLE}",
                fix="renew it, or correct this machine's clock"
                if error.verify_code in _OUT_OF_DATE
                else "give a certificate that the authority signed, for clients and servers",
            ) from None
        except ssl.SSLError as error:
            raise ConfigError(
                f"no TLS connection can be made with {self.certificate}: {reason(error)}",
                where=CERTIFICATE_VARIABLE,
                fix="give a certificate with a key type and length that TLS 1.3 accepts",
            ) from None
        return made

    def _context(self, *, dialling: bool) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if dialling else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        context.sslsocket_class = TlsSocket
        if dialling:
            context.num_tickets = 0  # no session resumption: a connection lasts as long as its view
        context.load_verify_locations(cafile=self.authority)
        try:
            context.load_cert_chain(self.certificate, self.key, password=self._refuse_password)
        except ssl.SSLError as error:
            if error.reason == "KEY_VALUES_MISMATCH":
                message = f"the key {self.key} does not belong to the certificate {self.certificate}"
            else:
                message = f"{self.key} is not a private key in PEM form"
            raise ConfigError(
                message, where=KEY_VARIABLE, fix="give the key that the certificate was made with"
            ) from None
        return context

    def _refuse_password(self) -> NoReturn:
        """Raise: nobody is present to type a password."""
        raise ConfigError(
            f"the key {self.key} is protected by a password",
            where=KEY_VARIABLE,
            fix="write it without a password, readable only by you: openssl pkey -in KEY -out NEW-KEY",
        )


class TlsSocket(ssl.SSLSocket):
    """A non-blocking TLS socket: raises BlockingIOError like a plain socket, and sends several buffers."""

    def recv(self, buflen: int = 1024, flags: int = 0) -> bytes:
        """Receive at most one record, decrypted."""
        try:
            return super().recv(buflen, flags)
        except _LATER:
            raise BlockingIOError from None

    def recv_into(self, buffer: WriteableBuffer, nbytes: int | None = None, flags: int = 0) -> int:
        """Receive at most one record, decrypted. The rest is in `pending()`, unseen by `select`."""
        try:
            return super().recv_into(buffer, nbytes, flags)
        except _LATER:
            raise BlockingIOError from None

    def send(self, data: ReadableBuffer, flags: int = 0) -> int:
        """Send at most one record. After BlockingIOError, send again from the same byte."""
        try:
            return super().send(data, flags)
        except _LATER:
            raise BlockingIOError from None

    def sendmsg(self, buffers: Iterable[ReadableBuffer]) -> int:  # type: ignore[override]  # base has none
        """Send as many records as the kernel takes; a short first buffer shares a record with the next."""
        parts = [memoryview(buffer) for buffer in buffers]
        if len(parts) > 1 and len(parts[0]) < _RECORD_BYTES:
            room = _RECORD_BYTES - len(parts[0])
            parts[:2] = [memoryview(b"".join((parts[0], parts[1][:room]))), parts[1][room:]]
        sent = 0
        try:
            for part in parts:
                at = 0
                while at < len(part):
                    count = self.send(part[at:])
                    at += count
                    sent += count
        except BlockingIOError:
            if not sent:
                raise
        return sent


def refusal(error: ssl.SSLError, *, peer: str, rank: int, where: str) -> Refused:
    """The error for a failed TLS handshake with a dialled worker."""
    if isinstance(error, ssl.SSLCertVerificationError):
        message = f"{peer} has a certificate that is not valid here: {error.verify_message}"
        return Refused(message, ranks=(rank,), where=where, fix=_SAME_AUTHORITY)
    if "ALERT" in (error.reason or ""):
        message = f"{peer} does not accept this worker's certificate: {reason(error)}"
        return Refused(message, ranks=(rank,), where=where, fix=_SAME_AUTHORITY)
    message = f"{peer} does not use TLS as this worker does: {reason(error)}"
    return Refused(message, ranks=(rank,), where=where, fix=ALL_OR_NONE)


def check_names(sock: socket.socket, names: Iterable[str], *, rank: int) -> None:
    """Raise Refused if the peer's certificate has none of these names and addresses."""
    assert isinstance(sock, ssl.SSLSocket)
    shown: Any = (sock.getpeercert() or {}).get("subjectAltName", ())
    has = {_normal(str(name)) for kind, name in shown if kind in ("DNS", "IP Address")}
    wanted = list(dict.fromkeys(name for name in names if name))
    if not has & set(map(_normal, wanted)):
        raise Refused(
            f"the certificate of rank {rank} is for {', '.join(sorted(has)) or 'no name'}, not for "
            f"{' or '.join(wanted)}",
            ranks=(rank,),
            fix="give each machine a certificate with its host name and addresses: echelon certs",
        )


def _normal(name: str) -> str:
    """A name or an address as it is compared."""
    try:
        return str(ipaddress.ip_address(name.partition("%")[0]))
    except ValueError:
        return name.lower().rstrip(".")


def _first(text: str) -> bytes:
    """The first certificate of a file: the worker's own."""
    end = "-----END CERTIFICATE-----"
    begin = text.index("-----BEGIN CERTIFICATE-----")
    return ssl.PEM_cert_to_DER_cert(text[begin : text.index(end, begin) + len(end)])


def reason(error: ssl.SSLError) -> str:
    """OpenSSL's reason in words."""
    return error.reason.lower().replace("_", " ") if error.reason else str(error)


def _check_readable(path: Path, variable: str) -> None:
    try:
        path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}",
            where=variable,
            fix="check the path, and that this user may read the file",
        ) from None


def _check_certificates(path: Path, variable: str) -> None:
    _check_readable(path, variable)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cafile=path)
    except ssl.SSLError:
        raise ConfigError(
            f"{path} does not contain a certificate in PEM form",
            where=variable,
            fix="give a file with a BEGIN CERTIFICATE line; openssl x509 converts other forms",
        ) from None


def _shake_hands(contexts: Contexts) -> None:
    """Handshake in memory with this worker itself: fails if peers with this authority would refuse."""
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [
        contexts.answering.wrap_bio(back, there),
        contexts.dialling.wrap_bio(there, back, server_side=True),
    ]
    while sides:
        for side in list(sides):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
            sides.remove(side)
