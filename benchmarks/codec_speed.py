"""How fast are codecs on one core? Encoding and decoding of a gradient, beside a copy of it.

    python benchmarks/codec_speed.py [--mb 64] [--rounds 5] [--codecs "one-bit; dgc(ratio=0.001)"] [--json]

A gradient of normally distributed numbers, a matrix of 4096 columns, is written by one worker and read
once. Codecs whose numbers are added as they are go through all their rounds. What a codec keeps from step
to step it keeps here, too. Codecs and the copy take turns, medians are shown; the first turn warms up.

GB/s is of float32 numbers, encoded and decoded; `x copy` is how many times longer that takes than copying
them; `smaller` is float32 bytes by written bytes, whichever way they travel.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import torch
from torch import Tensor

from echelon.bench.codecs import asked_codecs, usual_codecs
from echelon.codec.codec import Codec, CodecContext, State, Summed, seed_of

COLUMNS = 4096
SPREAD = 2e-4  # as gradients have it for which codecs' usual options are meant
GRADIENTS = 2  # different ones in turn, so that what is kept is not the same number every time


def code(
    codec: Codec, values: Tensor, out: Tensor, state: State, turn: CodecContext
) -> tuple[float, float, int]:
    """Seconds to encode, seconds to decode, and the bytes in between."""
    begun = time.perf_counter()
    if isinstance(codec, Summed):
        numbers = codec.first(values, state, turn)
        size = numbers.numel() * numbers.element_size()
        for _ in range(codec.rounds - 1):
            numbers = codec.further(numbers, state, turn)
            size += numbers.numel() * numbers.element_size()
        encoded = time.perf_counter()
        codec.finish(numbers, out, state, turn)
    else:
        payload = codec.encode(values, state, turn)
        size = payload.numel() * payload.element_size()
        encoded = time.perf_counter()
        codec.read(payload, out, turn)
    return encoded - begun, time.perf_counter() - encoded, size


def measure(codecs: dict[str, Codec], length: int, rounds: int) -> list[dict[str, Any]]:
    """A row for the copy, and one for each codec."""
    torch.manual_seed(0)
    gradients = [SPREAD * torch.randn(length) for _ in range(GRADIENTS)]
    out = torch.zeros(length)
    states = {name: codec.begin(length) for name, codec in codecs.items()}
    copies: list[float] = []
    took: dict[str, list[tuple[float, float, int]]] = {name: [] for name in codecs}
    for step in range(rounds + 1):
        values = gradients[step % GRADIENTS]
        turn = CodecContext(step=step, seed=seed_of("weight"), shape=(length // COLUMNS, COLUMNS))
        begun = time.perf_counter()
        out.copy_(values)
        copies.append(time.perf_counter() - begun)
        for name, codec in codecs.items():
            took[name].append(code(codec, values, out, states[name], turn))
    copy_s = statistics.median(copies[1:])
    rows = [{"codec": "copy", "encode_s": copy_s, "decode_s": 0.0, "smaller": 1.0}]
    for name, found in took.items():
        encode_s, decode_s, sizes = zip(*found[1:], strict=True)
        rows.append(
            {
                "codec": name,
                "encode_s": statistics.median(encode_s),
                "decode_s": statistics.median(decode_s),
                "smaller": 4 * length / max(1.0, statistics.fmean(sizes)),
            }
        )
    for row in rows:
        both_s = row["encode_s"] + row["decode_s"]
        row |= {"GB/s": 4 * length / both_s / 1e9, "x copy": both_s / copy_s}
    return rows


def main() -> None:
    """Measure and print."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--mb", type=float, default=64, help="how large the gradient is, in MiB")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--codecs", help="with ; between them; default: all")
    options.add_argument("--json", action="store_true")
    asked = options.parse_args()
    torch.set_num_threads(1)
    length = max(1, round(asked.mb * 2**20 / 4 / COLUMNS)) * COLUMNS
    texts = asked.codecs.split(";") if asked.codecs else [*usual_codecs(), "dgc(ratio=0.001)"]
    codecs = asked_codecs([text.strip() for text in texts], momentum=0.9)
    rows = measure(codecs, length, asked.rounds)
    if asked.json:
        print(json.dumps({"bytes": 4 * length, "rows": rows}))
        return
    print(f"{4 * length / 2**20:.0f} MiB of float32, one core")
    width = max(len(row["codec"]) for row in rows)
    for row in rows:
        encode_ms, decode_ms = row["encode_s"] * 1e3, row["decode_s"] * 1e3
        print(
            f"{row['codec']:{width}s}  encode {encode_ms:7.1f} ms  decode {decode_ms:7.1f} ms  "
            f"{row['GB/s']:6.2f} GB/s  {row['x copy']:6.1f} x copy  {row['smaller']:7.1f} x smaller"
        )


if __name__ == "__main__":
    main()
