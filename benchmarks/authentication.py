"""How fast are the checksums and keyed hashes that could guard frames, and what does a step pay for one?

    python benchmarks/authentication.py

prints, for frames of 64, 256 and 512 KiB, the GB/s of one core with each candidate; how fast another thread
of the same process counts meanwhile, in percent of alone (a candidate that holds the interpreter lock makes
it slower); and the rate of frames over a pair of sockets within this process, with checksums and with keys.
Candidates whose package is not installed are left out, and named. XXH3 is no candidate: it is what frames
have with --integrity checksum, and is not secure with a secret seed either.
"""

from __future__ import annotations

import hashlib
import hmac
import importlib
import os
import socket
import statistics
import threading
import time
from collections.abc import Callable

import xxhash
from cryptography.hazmat.primitives import poly1305
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from echelon.comm.wire.connection import Connection, Whole
from echelon.comm.wire.seals import MESSAGE, KeyedSeal, Keys

_KEY = bytes(range(32))
_EACH_S = 0.3
_ROUNDS = 5
Hash = Callable[[memoryview], object]


def candidates() -> dict[str, Hash]:
    """By name; each computes the hash of the bytes that it is given."""
    seal = KeyedSeal(_KEY)
    numbers = iter(range(1 << 62))

    def stepwise(data: memoryview) -> object:
        made = Cipher(algorithms.AES(_KEY), modes.GCM(next(numbers).to_bytes(12, "little"))).encryptor()
        made.authenticate_additional_data(data)
        made.finalize()
        return made.tag

    found: dict[str, Hash] = {
        "XXH3 (no key)": xxhash.xxh3_128_digest,
        "GMAC (cryptography)": lambda data: seal.of(next(numbers), MESSAGE, data),
        "GMAC in steps (cryptography)": stepwise,
        "Poly1305 (cryptography)": lambda data: poly1305.Poly1305.generate_tag(_KEY, data),
        "BLAKE2b (hashlib)": lambda data: hashlib.blake2b(data, key=_KEY, digest_size=16).digest(),
        "HMAC-SHA256 (hmac)": lambda data: hmac.digest(_KEY, data, "sha256"),
    }
    try:
        blake3 = importlib.import_module("blake3")
        found["BLAKE3 (blake3)"] = lambda data: blake3.blake3(data, key=_KEY).digest()
    except ImportError:
        print("BLAKE3 is left out: the package blake3 is not installed")
    return found


def bytes_per_s(act: Hash, data: memoryview) -> float:
    """The median of several rounds."""
    rates = []
    for _ in range(_ROUNDS):
        count, begun = 0, time.perf_counter()
        while time.perf_counter() - begun < _EACH_S / _ROUNDS:
            act(data)
            count += 1
        rates.append(count * len(data) / (time.perf_counter() - begun))
    return statistics.median(rates)


def counted(act: Hash | None, data: memoryview) -> int:
    """How far this thread counts while another one hashes."""
    over = threading.Event()

    def hash_on() -> None:
        while act is not None and not over.is_set():
            act(data)

    thread = threading.Thread(target=hash_on)
    thread.start()
    count, begun = 0, time.perf_counter()
    while time.perf_counter() - begun < _EACH_S:
        count += 1
    over.set()
    thread.join()
    return count


def frames_per_s(keys: tuple[Keys, Keys] | None, size: int, seconds: float = 1.0) -> float:
    """The bytes/s of messages from one connection to another in one thread: sent, received, checked."""
    one, other = socket.socketpair()
    with one, other:
        for sock in (one, other):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
        sender = Connection(one, view=bytes(16), peer="", keys=keys and keys[0])
        receiver = Connection(other, view=bytes(16), peer="", keys=keys and keys[1])
        payload, place = memoryview(os.urandom(size)), memoryview(bytearray(size))
        begun, moved, number = time.perf_counter(), 0, 0
        while time.perf_counter() - begun < seconds:
            number += 1
            arrived: list[bool] = []
            receiver.expect((number, 0), Whole(place, lambda a=arrived: a.append(True)))
            sender.send((number, 0), payload, 0, lambda: None)
            while not arrived:
                sender.write()
                receiver.read()
            moved += size
        return moved / (time.perf_counter() - begun)


def main() -> None:
    """Print all figures."""
    sizes = [64 << 10, 256 << 10, 512 << 10]
    data = memoryview(os.urandom(sizes[-1]))
    alone = counted(None, data)
    print(f"{'GB/s of one core':32}{''.join(f'{size >> 10:>7} KiB' for size in sizes)}   other thread")
    for name, act in candidates().items():
        rates = "".join(f"{bytes_per_s(act, data[:size]) / 1e9:11.1f}" for size in sizes)
        print(f"{name:32}{rates}{counted(act, data[: 256 << 10]) / alone:14.0%}")
    key, other = bytes(32), bytes(range(32))
    both = (Keys(sending=key, receiving=other), Keys(sending=other, receiving=key))
    plain, keyed = (statistics.median(frames_per_s(k, 4 << 20) for _ in range(3)) for k in (None, both))
    more_s = (1 / keyed - 1 / plain) / 2  # sender and receiver are one thread here, two on two machines
    print(f"messages of 4 MiB, one thread at both ends: checksum {plain / 1e9:.2f} GB/s, ", end="")
    print(f"authenticated {keyed / 1e9:.2f} GB/s")
    for gigabits in (1, 10):
        print(f"of the time on the wire at {gigabits} Gb/s: {more_s * gigabits * 1e9 / 8:.2%}")


if __name__ == "__main__":
    main()
