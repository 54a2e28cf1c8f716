"""Events are one line each; unreadable lines are skipped."""

from __future__ import annotations

import json
import math
from typing import get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.observe import events
from echelon.observe.events import (
    AnyEvent,
    Evaluated,
    LinkMeasured,
    Logged,
    Noted,
    StepEnded,
    decode_line,
    encode,
    read_events,
)

KINDS = get_args(AnyEvent)
VALUES = {
    dict[str, int]: {"gradients": 3},
    float: 1.5,
    int: 3,
    str: 'text, "quoted"\nand more',
    bool: True,
    list[str]: ["a", "b c"],
    list[int]: [1, 3],
    list[list[int]]: [[0, 2], [1]],
    list[tuple[int, int]]: [(1200, 35), (80, 0)],
    list[tuple[int, int, float]]: [(0, 7, 0.5), (2, 6, 0.5)],
    list[tuple[str, int, int, int, int]]: [("forward", 0, 5, 20, 340), ("backward", 0, 370, 0, 600)],
    dict[str, str]: {"step-1": "damaged"},
    dict[str, float]: {"lr": 0.1},
}


def example(kind):
    fields = {field.name: VALUES.get(field.type, 0.25) for field in msgspec.structs.fields(kind)}
    return kind(**fields)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_event_survives_encoding_and_decoding(kind):
    line = encode(example(kind))
    assert b"\n" not in line
    assert decode_line(line) == example(kind)
    assert type(decode_line(line)) is kind


def test_every_event_class_can_be_read():
    defined = {
        value for value in vars(events).values() if isinstance(value, type) and value is not events.Event
    }
    assert {kind for kind in defined if issubclass(kind, events.Event)} == set(KINDS)


def test_types_are_kebab_case_and_differ():
    tags = [kind.__struct_config__.tag for kind in KINDS]
    assert len(set(tags)) == len(tags)
    assert all(tag == tag.lower().replace("_", "-") for tag in tags)


def test_a_line_is_plain_json_with_its_type():
    line = json.loads(encode(Noted(t=1.0, rank=-1, text="é")))
    assert line == {"type": "noted", "t": 1.0, "rank": -1, "text": "é", "warning": False}


def test_fields_with_defaults_may_be_missing_and_unknown_ones_present():
    raw = json.loads(encode(example(StepEnded)))
    del raw["loss"], raw["delay_s"]
    event = decode_line(json.dumps({**raw, "invented_later": 1}).encode())
    assert (event.loss, event.delay_s) == (None, 0.0)


@pytest.mark.parametrize(
    "line",
    [b"", b"\n", b"{", b'"text"', b"[1]", b"null", b"\0" * 50,
     b'{"type":"noted"}', b'{"type":"of-tomorrow","t":1}',
     b'{"type":"noted","t":"now","rank":0,"text":"x"}', b'{"type":"noted","t":1.0,"rank":0,"text":"\xff"}',
     b'{"type":"logged","t":1.0,"rank":0,"step":1,"values":null}', b'{"type":["noted"]}', b"[" * 100_000],
    ids=lambda line: repr(line[:30]),
)  # fmt: skip
def test_a_line_that_is_not_an_event_gives_none(line):
    assert decode_line(line) is None


@given(st.integers(0, 200), st.binary(max_size=4))
@settings(max_examples=200, deadline=None)
def test_a_damaged_line_never_raises(at, noise):
    line = encode(example(StepEnded))
    decode_line(line[:at])
    decode_line(line[:at] + noise + line[at + len(noise) :])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_are_read_as_nan(value):
    link = decode_line(encode(LinkMeasured(t=1.0, rank=0, peer=1, latency_s=value, bytes_per_s=5.0)))
    assert math.isnan(link.latency_s)
    assert (link.peer, link.bytes_per_s) == (1, 5.0)
    evaluated = decode_line(encode(Evaluated(t=1.0, rank=0, epoch=1, step=2, loss=value, samples=5)))
    assert (evaluated.loss, evaluated.accuracy, evaluated.samples) == (None, None, 5)
    logged = decode_line(encode(Logged(t=1.0, rank=0, step=2, values={"a": value, "b": 2.0})))
    assert math.isnan(logged.values["a"])
    assert logged.values["b"] == 2.0


def test_a_file_is_read_in_order_without_damaged_lines(tmp_path):
    notes = [Noted(t=float(i), rank=0, text=str(i)) for i in range(3)]
    lines = [encode(note) for note in notes]
    (tmp_path / "rank-0.jsonl").write_bytes(
        b"\n".join([lines[0], b"garbage", lines[1], b"", lines[2], lines[0][:9]])
    )
    assert list(read_events(tmp_path / "rank-0.jsonl")) == notes
