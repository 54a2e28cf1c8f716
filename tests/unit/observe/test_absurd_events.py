"""Numbers that no clock or counter shows are damage; summary, report and trace survive them."""

from __future__ import annotations

import math

import pytest

from echelon.observe.events import StepEnded, WorkerJoined, decode_line, encode

STEP = StepEnded(
    t=12.0, rank=0, step=1, epoch=0, start=10.0, data_s=0.1, compute_s=1.0, arrival=11.0, wait_s=0.5,
    apply_s=0.1, share=4, batch=8, sent_bytes=100, loss=2.5,
)  # fmt: skip


def changed(name, value):
    was = encode(STEP).decode()
    now = was.replace(f'"{name}":{getattr(STEP, name)}', f'"{name}":{value}')
    assert now != was
    return decode_line(now.encode())


@pytest.mark.parametrize("name", ["t", "start", "arrival", "compute_s", "wait_s", "sent_bytes"])
@pytest.mark.parametrize("value", ["1e308", "-1e308", "1e+100", "null", "9" * 400])
def test_an_absurd_time_or_count_is_a_damaged_line(name, value):
    assert changed(name, value) is None


def test_an_absurd_loss_is_read_as_nan_and_a_large_one_as_it_is():
    assert changed("loss", "1e308").loss is None or math.isnan(changed("loss", "1e308").loss)
    assert changed("loss", "1e38").loss == 1e38
    assert changed("compute_s", "1e-300").compute_s == 1e-300


def test_a_text_that_looks_like_a_large_number_is_not_damage():
    joined = WorkerJoined(t=1.0, rank=0, node="a1e500", host="8e204f-1e999", pid=1, threads=1, device="cpu")
    assert decode_line(encode(joined)) == joined
