"""Makes an authority and certificates for the machines of a run: `echelon certs`.

A folder holds the authority's certificate and key, and a certificate and key for each machine. A machine's
certificate names it: its host name and addresses, which the others check. The authority's key is needed for
further machines only, and stays where it was made.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import re
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from echelon.errors import ConfigError

AUTHORITY = "authority"
_HERE = ("localhost", "127.0.0.1", "::1")  # every machine takes these for itself
_EARLIER = datetime.timedelta(minutes=10)  # clocks differ


def make(folder: Path, machines: Sequence[Sequence[str]], *, days: int) -> list[Path]:
    """Certificates of these machines, by the names of each, and the authority's if there is none yet.

    Returns the certificates' files; each one's key is beside it.
    """
    for names in machines:
        _check(names)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    authority, key = _authority(folder, days)
    return [_issue(folder, names, authority, key, days) for names in machines]


def _check(names: Sequence[str]) -> None:
    if not names or names[0] == AUTHORITY or not all(re.fullmatch(r"[\w.:-]+", name) for name in names):
        raise ConfigError(
            f"{','.join(names)!r} does not name a machine",
            where="echelon certs",
            fix="give its host name and addresses, such as gpu-a,10.0.0.2",
        )


def _authority(folder: Path, days: int) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    files = folder / f"{AUTHORITY}.pem", folder / f"{AUTHORITY}.key"
    if files[0].exists() or files[1].exists():
        try:
            found = x509.load_pem_x509_certificate(files[0].read_bytes())
            key = serialization.load_pem_private_key(files[1].read_bytes(), None)
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(
                f"the authority in {folder} cannot be used: {error}",
                where="echelon certs",
                fix=f"give another folder, or the authority's own {files[0].name} and {files[1].name}",
            ) from None
        if isinstance(key, ec.EllipticCurvePrivateKey) and found.public_key() == key.public_key():
            return found, key
        raise ConfigError(
            f"{files[1]} is not the key of {files[0]}", where="echelon certs", fix="give another folder"
        )
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Echelon's workers")])
    made = _builder(name, name, key, days)
    made = made.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    usage = _usage(signs_certificates=True)
    certificate = made.add_extension(usage, critical=True).sign(key, hashes.SHA256())
    _write(files[1], _private(key))
    _write(files[0], certificate.public_bytes(serialization.Encoding.PEM), mode=0o644)
    return certificate, key


def _issue(
    folder: Path,
    names: Sequence[str],
    authority: x509.Certificate,
    authority_key: ec.EllipticCurvePrivateKey,
    days: int,
) -> Path:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0][:64])])
    made = _builder(subject, authority.subject, key, days)
    above = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key())
    made = made.add_extension(above, critical=False)
    alternatives = [_alternative(name) for name in dict.fromkeys((*names, *_HERE))]
    made = made.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
    made = made.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    made = made.add_extension(_usage(signs_certificates=False), critical=True)
    both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    made = made.add_extension(x509.ExtendedKeyUsage(both), critical=False)
    certificate = made.sign(authority_key, hashes.SHA256())
    path = folder / f"{names[0]}.pem"
    _write(path.with_name(f"{names[0]}.key"), _private(key))
    _write(path, certificate.public_bytes(serialization.Encoding.PEM), mode=0o644)
    return path


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _EARLIER)
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _alternative(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _write(path: Path, data: bytes, *, mode: int = 0o600) -> None:
    """Write a file that has its permissions from the beginning, and replaces an older one at once."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(data)
    beside.replace(path)
