from __future__ import annotations

import gzip
import json
from collections import defaultdict
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.errors import ConfigError
from echelon.observe.events import BucketReduced, Evaluated, FaultInjected, Noted, StepEnded
from echelon.observe.trace import chrome_trace, write_trace


def _check_structure(trace) -> None:
    """What every reader of the format requires."""
    json.loads(json.dumps(trace, allow_nan=False))
    lanes = defaultdict(list)
    named = {(e["pid"], e["tid"]) for e in trace["traceEvents"] if e["name"] == "thread_name"}
    rows = {
        e["tid"]
        for e in trace["traceEvents"]
        if e["name"] == "thread_name" and e["args"]["name"].startswith("buckets")
    }
    flows = defaultdict(dict)
    for event in trace["traceEvents"]:
        assert event["ph"] in "MXiCsf"
        assert isinstance(event["pid"], int)
        assert event["pid"] > 0
        if event["ph"] == "M":
            continue
        assert isinstance(event["ts"], int)
        assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] > 0
            assert (event["pid"], event["tid"]) in named
            lanes[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        if event["ph"] == "i":
            assert event["s"] in "gp"
            assert (event["pid"], event["tid"]) in named
        if event["ph"] in "sf":
            flows[event["id"]][event["ph"]] = event
    for (_, tid), spans in lanes.items():
        if tid in rows:
            _check_nested(spans)
        else:
            assert all(one[1] <= other[0] for one, other in pairwise(spans))
    for flow in flows.values():
        assert set(flow) == {"s", "f"}
        assert flow["s"]["ts"] <= flow["f"]["ts"]
        for end in flow.values():
            lane = lanes[end["pid"], end["tid"]]
            assert any(begin <= end["ts"] < over for begin, over in lane)


def _check_nested(spans) -> None:
    """Slices of one row are disjoint or nested."""
    over = []
    for begin, end in spans:
        while over and over[-1] <= begin:
            over.pop()
        assert not over or end <= over[-1]
        over.append(end)


def _slices(trace, name=None):
    return [e for e in trace["traceEvents"] if e["ph"] == "X" and name in (None, e["name"])]


@pytest.mark.parametrize(
    "situation",
    [
        {},
        {"faults": True},
        {"dies": (2, 50)},
        {"gaps": (3, 4, 5)},
        {"losses": False, "evaluate": False},
        {"speeds": (800.0,), "shares": (32,), "nodes": ("laptop",)},
        {"skew_s": (0.0, 5.0, -3.0, 1.0)},
        {"epochs": 0},
        {"buckets": 5},
        {"buckets": 5, "timed": False, "dies": (2, 50)},
        {"buckets": 3, "skew_s": (0.0, 5.0, -3.0, 1.0)},
    ],
)
def test_the_trace_of_any_run_is_well_formed(imagined, a_plan, situation):
    _check_structure(chrome_trace(imagined(a_plan(**situation))))


def test_each_worker_is_a_process_with_a_lane_per_activity(imagined):
    trace = chrome_trace(imagined())
    names = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert names == {"run", "rank 0 · node-a", "rank 1 · node-b", "rank 2 · node-c", "rank 3 · node-d"}
    lanes = defaultdict(set)
    for event in trace["traceEvents"]:
        if event["name"] == "thread_name":
            lanes[event["pid"]].add(event["args"]["name"])
    assert sum({"data", "compute", "wait", "apply"} <= lane for lane in lanes.values()) == 4
    tids = [e["tid"] for e in trace["traceEvents"] if e["name"] == "thread_name"]
    assert len(tids) == len(set(tids))


def test_an_arrow_links_the_workers_of_a_round(imagined):
    trace = chrome_trace(imagined())
    of_step = [e for e in _slices(trace) if e["args"]["step"] == 17]
    assert {(e["pid"], e["name"]) for e in of_step} == {
        (pid, name) for pid in (100, 110, 120, 130) for name in ("data", "compute", "wait", "apply")
    }
    assert all(e["args"]["share"] == 16 and e["args"]["epoch"] == 0 for e in of_step)
    flow = [e for e in trace["traceEvents"] if e.get("id") == 17]
    assert [e["ph"] for e in flow] == ["s", "f"]
    assert flow[0]["pid"] == 130


def test_slices_are_as_long_as_their_activities(imagined):
    events = imagined()
    for name in ("data", "compute", "wait", "apply"):
        drawn_s = sum(e["dur"] for e in _slices(chrome_trace(events), name)) / 1e6
        meant_s = sum(getattr(e, f"{name}_s") for e in events if isinstance(e, StepEnded))
        assert drawn_s == pytest.approx(meant_s, abs=1e-6 * 480)


def test_incidents_are_instants_with_their_fields(imagined, a_plan):
    trace = chrome_trace(imagined(a_plan(faults=True, dies=(2, 100))))
    instants = {e["name"]: e for e in trace["traceEvents"] if e["ph"] == "i"}
    assert instants["fault: slow node-b"]["s"] == "g"
    assert instants["fault: slow node-b"]["args"]["detail"] == "slowed node-b down to 0.5 cores"
    assert instants["rank 2 failed"]["args"]["cause"] == "killed by signal 9"
    assert instants["evaluated"]["args"]["accuracy"] == pytest.approx(0.85)
    assert {"checkpoint saved", "note", "run failed"} <= set(instants)


def test_loss_and_throughput_are_counters(imagined):
    counters = [e for e in chrome_trace(imagined())["traceEvents"] if e["ph"] == "C"]
    by_name = defaultdict(list)
    for event in counters:
        by_name[event["name"]].append(event)
    assert len(by_name["train loss"]) == len(by_name["throughput"]) == 120
    losses = [e["args"]["loss"] for e in by_name["train loss"]]
    assert losses[0] > losses[-1]


def test_disagreeing_clocks_are_corrected_in_the_trace(imagined, a_plan):
    straight = chrome_trace(imagined())
    skewed = chrome_trace(imagined(a_plan(skew_s=(0.0, 5.0, -3.0, 1.0))))
    offsets = skewed["otherData"]["clocks_put_right_by_s"]
    assert offsets == pytest.approx({"rank 0": 0.0, "rank 1": 5.0, "rank 2": -3.0, "rank 3": 1.0}, abs=1e-3)

    def arrivals(trace):
        waits = [e for e in _slices(trace, "wait") if e["args"]["step"] == 17]
        return [wait["ts"] - waits[0]["ts"] for wait in waits]

    assert arrivals(skewed) == pytest.approx(arrivals(straight), abs=5)


def test_buckets_have_rows_of_their_own_with_their_parts(imagined, a_plan):
    trace = chrome_trace(imagined(a_plan(buckets=5)))
    rows = {
        e["args"]["name"]: e["tid"]
        for e in trace["traceEvents"]
        if e["name"] == "thread_name" and e["pid"] == 110 and "buckets" in e["args"]["name"]
    }
    assert set(rows) == {"buckets", "buckets, row 2"}, "each is under way a little longer than alone"
    of_step = [
        e
        for e in _slices(trace)
        if e["pid"] == 110 and e["tid"] in rows.values() and e["args"]["step"] == 17
    ]
    named = [e["name"] for e in of_step]
    assert [name for name in named if name.startswith("bucket")] == [
        f"bucket {i} (8.0 MB)" for i in range(5)
    ]
    assert {named.count(name) for name in ("encode", "send", "reduce and receive")} == {5}
    outer, encode, reduce, send = of_step[:4]
    assert outer["ts"] == encode["ts"]
    assert encode["ts"] + encode["dur"] == reduce["ts"] == send["ts"]
    assert outer["ts"] + outer["dur"] == reduce["ts"] + reduce["dur"] > send["ts"] + send["dur"]
    (compute,) = (e for e in _slices(trace, "compute") if e["pid"] == 110 and e["args"]["step"] == 17)
    assert compute["ts"] < outer["ts"] < outer["ts"] + outer["dur"] < compute["ts"] + compute["dur"]


def test_buckets_of_a_group_that_reports_no_times_show_only_encoding(imagined, a_plan):
    trace = chrome_trace(imagined(a_plan(buckets=2, timed=False)))
    names = {e["name"] for e in _slices(trace) if e["cat"] == "bucket"}
    assert names == {"bucket 0 (8.0 MB)", "bucket 1 (8.0 MB)", "encode"}


def test_buckets_are_corrected_to_the_common_clock_too(imagined, a_plan):
    straight = chrome_trace(imagined(a_plan(buckets=2)))
    skewed = chrome_trace(imagined(a_plan(buckets=2, skew_s=(0.0, 5.0, -3.0, 1.0))))

    def after_arrival(trace):
        waits = {e["pid"]: e["ts"] for e in _slices(trace, "wait") if e["args"]["step"] == 17}
        lasts = [e for e in _slices(trace, "bucket 1 (8.0 MB)") if e["args"]["step"] == 17]
        return [e["ts"] - waits[e["pid"]] for e in lasts]

    assert after_arrival(skewed) == pytest.approx(after_arrival(straight), abs=5)


def _step(rank: int, number: int, times: tuple[float, ...]) -> StepEnded:
    t, start, arrival, data_s, compute_s, wait_s, apply_s = times
    return StepEnded(
        t=t, rank=rank, step=number, epoch=0, start=start, data_s=data_s, compute_s=compute_s,
        arrival=arrival, wait_s=wait_s, apply_s=apply_s, share=1, batch=2, sent_bytes=0, loss=float("nan"),
    )  # fmt: skip


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 4), st.tuples(*[st.floats(0, 50)] * 7)), max_size=12
    )
)
def test_impossible_times_still_give_a_well_formed_trace(steps):
    events = [event for step in steps for event in (_bucket(*step), _step(*step))]
    _check_structure(msgspec.to_builtins(_without_nan(chrome_trace(events))))


def _bucket(rank: int, number: int, times: tuple[float, ...]) -> BucketReduced:
    t, start, encode_s, begun, sent, ended, wait_s = times
    return BucketReduced(
        t=t, rank=rank, step=number, index=0, size_bytes=1, sent_bytes=1, start=start, encode_s=encode_s,
        begun=begun, sent=sent, ended=ended, adding_s=0.0, wait_s=wait_s,
    )  # fmt: skip


def _without_nan(trace):
    return json.loads(msgspec.json.encode(trace))


def test_no_events_give_an_empty_trace():
    assert chrome_trace([])["traceEvents"] == []


def test_events_without_steps_are_traced_from_the_first_event_on():
    events = [
        FaultInjected(t=12.0, rank=-1, action="kill", target="a", detail=""),
        Noted(t=10.0, rank=0, text="x"),
        Evaluated(t=11.5, rank=0, epoch=0, step=0, loss=1.0, samples=1),
    ]
    trace = chrome_trace(events)
    _check_structure(trace)
    assert sorted(e["ts"] for e in trace["traceEvents"] if e["ph"] == "i") == [0, 1_500_000, 2_000_000]


def test_the_file_is_json_also_when_compressed(folder, imagined, written, tmp_path):
    written(folder, imagined(), torn=True)
    plain = write_trace(folder, tmp_path / "new" / "trace.json")
    packed = write_trace(folder, tmp_path / "trace.json.gz")
    _check_structure(json.loads(plain.read_bytes()))
    assert gzip.decompress(packed.read_bytes()) == plain.read_bytes()


def test_a_run_without_events_is_refused_with_its_folder(folder, tmp_path):
    with pytest.raises(ConfigError, match="no events yet") as caught:
        write_trace(folder, tmp_path / "trace.json")
    assert caught.value.where == str(folder.events)
    assert not (tmp_path / "trace.json").exists()


def test_a_served_run_has_its_updates_and_no_rounds(imagined_served):
    trace = chrome_trace(imagined_served())
    _check_structure(trace)
    counters = {e["name"] for e in trace["traceEvents"] if e["ph"] == "C"}
    assert counters == {"train loss", "gradients per update"}
    assert not any(e["ph"] in "sf" for e in trace["traceEvents"])
    assert "rank 4 · server" in [
        e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"
    ]


def test_averaging_workers_have_no_rounds_in_their_trace(imagined):
    trace = chrome_trace(imagined(), "local(4)")
    _check_structure(trace)
    assert not any(e["ph"] in "sf" for e in trace["traceEvents"])
