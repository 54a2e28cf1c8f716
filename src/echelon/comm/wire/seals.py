"""How does a receiver find bytes that were changed, repeated, left out or put in another order?

Each part of a frame or message has a seal of 16 bytes, and the receiver computes the same seal.

Checksum  finds accidents, not intent: anybody can compute it.
KeyedSeal GMAC (AES-256): only those who have the connection's key for this direction can compute it. The
          number of the frame is the nonce, so a seal is valid for one frame at one position only. Under a
          key no number occurs twice: it ends with its connection, and a number has 64 bits.

A keyed variant of a fast checksum (xxh3 with a secret seed) would not do: it is not made to resist those
who see many seals, and choose bytes. `benchmarks/authentication.py` measures the candidates.
"""

from __future__ import annotations

import hmac
import struct
from abc import ABC, abstractmethod
from dataclasses import dataclass

import xxhash
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

SEAL_BYTES = 16
NO_SEAL = bytes(SEAL_BYTES)  # of no bytes
KEY_BYTES = 32
_NONCE = struct.Struct("<IQ")
HEADER, PAYLOAD, MESSAGE = 1, 2, 3  # what a seal is for: a header's is never valid for a payload


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """A connection's keys, which both sides have derived in the handshake: one for each direction."""

    sending: bytes
    receiving: bytes

    def __repr__(self) -> str:
        return "Keys(...)"  # not in logs


class Seal(ABC):
    """Computes seals. `keyed`: whether a stranger cannot."""

    keyed = False

    @abstractmethod
    def of(self, number: int, part: int, data: bytes | bytearray | memoryview) -> bytes:
        """The seal of a part of frame `number`."""

    def fits(self, seal: bytes, number: int, part: int, data: bytes | bytearray | memoryview) -> bool:
        """Whether it is the right seal; takes the same time for any wrong one."""
        return hmac.compare_digest(seal, self.of(number, part, data))


class Checksum(Seal):
    """Against accidents: bytes that are damaged on their way."""

    def of(self, number: int, part: int, data: bytes | bytearray | memoryview) -> bytes:
        """The XXH3 checksum; the number is in the header, which has a checksum itself."""
        return xxhash.xxh3_128_digest(data) if len(data) else NO_SEAL


class KeyedSeal(Seal):
    """Against everybody who does not have the key."""

    keyed = True

    def __init__(self, key: bytes) -> None:
        self._cipher = AESGCM(key)

    def of(self, number: int, part: int, data: bytes | bytearray | memoryview) -> bytes:
        """The GMAC: what AES-GCM says of bytes that it does not encrypt."""
        if not len(data):
            return NO_SEAL  # a header, which has a seal, says that there are none
        return self._cipher.encrypt(_NONCE.pack(part, number), b"", data)


def seals_of(keys: Keys | None) -> tuple[Seal, Seal]:
    """The seals of outgoing and of incoming bytes; without keys, checksums."""
    if keys is None:
        return Checksum(), Checksum()
    return KeyedSeal(keys.sending), KeyedSeal(keys.receiving)
