"""Workers are killed, and the others go on: the same weights to the bit, every sample once."""

from __future__ import annotations

import re
import subprocess
import sys
from random import Random

import pytest
from tests.losses import (
    CORRUPTED,
    OVERLAPPED,
    SAVING,
    SCRIPT,
    SLOW,
    UNEQUAL,
    WIDE,
    Kill,
    changes,
    endless,
    normalised,
    run,
)

from echelon.checkpoint.store import read_newest
from echelon.observe.events import BucketReduced, CorruptionFound, SharesChanged, read_events
from echelon.observe.run_folder import RunFolder

SEEDED = Random(17)


@pytest.mark.parametrize(
    ("transport", "kills"),
    [
        ("tcp", [Kill(2, SEEDED.uniform(0, 0.3))]),
        ("tcp", [Kill(0, SEEDED.uniform(0, 0.3)), Kill(3, SEEDED.uniform(0, 0.05))]),
        ("shm", [Kill(0, SEEDED.uniform(0, 0.3))]),
        ("shm", [Kill(1, SEEDED.uniform(0, 0.3)), Kill(2, SEEDED.uniform(0, 0.05))]),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(str(kill.slot) for kill in value),
)
def test_the_others_go_on_with_the_same_weights_and_every_sample_once(tmp_path, transport, kills):
    outcome = run(tmp_path, transport, kills)
    assert (outcome.code, outcome.wrong) == (0, []), outcome.output
    assert f"done with {4 - len(kills)} workers" in outcome.output, "the leader of then prints it"
    for kill in kills:
        assert f"rank {kill.slot} was lost (SIGKILL)" in outcome.output
    told = changes(tmp_path, next(slot for slot in range(4) if slot not in {kill.slot for kill in kills}))
    assert sorted(slot for lost, *_ in told for slot in lost) == sorted(kill.slot for kill in kills)
    assert not list((tmp_path / "runs").glob("*/errors/*"))


@pytest.mark.parametrize(("transport", "dies"), [("shm", "0:backward"), ("tcp", "2:forward")])
def test_between_two_exchanges_of_batch_normalisation_the_others_go_on_with_the_same_buffers(
    tmp_path, transport, dies
):
    outcome = run(tmp_path, transport, [], script=normalised(), dies=dies)
    assert (outcome.code, outcome.wrong) == (0, []), outcome.output
    assert f"rank {dies[0]} was lost (SIGKILL); 3 workers go on" in outcome.output
    assert "done with 3 workers" in outcome.output


@pytest.mark.parametrize(
    ("transport", "slot", "script", "words"),
    [("shm", 0, SCRIPT, ("--checkpoint-every", "3steps")), ("tcp", 2, normalised(), ())],
    ids=["shm-saving", "tcp-batchnorm"],
)
def test_a_lost_worker_is_started_again_and_has_the_same_weights_in_the_end(
    tmp_path, transport, slot, script, words
):
    outcome = run(tmp_path, transport, [Kill(slot, 0.1)], respawn=3, script=script, words=words)
    assert (outcome.code, outcome.wrong) == (0, []), outcome.output
    assert f"rank {slot} was lost (SIGKILL); 3 workers go on" in outcome.output
    assert f"rank {slot} is back after" in outcome.output
    assert "done with 4 workers" in outcome.output
    assert (tmp_path / f"weights-{slot}").exists()
    told = changes(tmp_path, 1)
    assert [one[:4] for one in told] == [[[slot], [], [], 3], [[], [], [slot], 4]]
    assert changes(tmp_path, slot) == told[1:], "the new process is told, too"
    assert not (next((tmp_path / "runs").iterdir()) / "admission").exists()


def test_shares_that_follow_speeds_still_do_after_a_loss_and_are_the_same_on_all(tmp_path):
    outcome = run(tmp_path, "shm", [Kill(0, 0.4)], script=UNEQUAL)
    assert (outcome.code, outcome.wrong) == (0, []), outcome.output
    assert "done with 3 workers" in outcome.output
    (record,) = (tmp_path / "runs").iterdir()
    changes = [
        [
            (e.step, e.shares)
            for e in read_events(RunFolder(record).events_of(rank))
            if isinstance(e, SharesChanged)
        ]
        for rank in (1, 2, 3)
    ]
    assert changes[0]
    assert changes[0] == changes[1] == changes[2]


@pytest.mark.parametrize(
    ("codec", "transport", "respawn"), [("power-sgd(rank=2)", "tcp", 0), ("one-bit", "shm", 3)]
)
def test_encoded_gradients_are_encoded_again_by_those_who_are_left(tmp_path, codec, transport, respawn):
    words = ("--codec", codec)
    outcome = run(tmp_path, transport, [Kill(2, 0.15)], respawn=respawn, words=words)
    assert (outcome.code, outcome.wrong) == (0, []), outcome.output
    assert "lost with rank 2: what the codec had left out" in " ".join(outcome.output.split())
    assert f"done with {4 if respawn else 3} workers" in outcome.output


def test_workers_that_average_weights_go_on_with_the_mean_of_who_is_left_and_of_who_is_back(tmp_path):
    words = ("--sync", "local(4)")
    outcome = run(tmp_path, "tcp", [Kill(0, 0.15)], respawn=3, words=words, period=4)
    assert (outcome.code, outcome.wrong) == (0, []), outcome.output
    assert "rank 0 was lost (SIGKILL); 3 workers go on" in outcome.output
    assert "done with 4 workers" in outcome.output


@pytest.mark.parametrize(("transport", "slot", "respawn"), [("shm", 0, 3), ("tcp", 2, 0)])
def test_a_round_in_flight_behind_the_next_step_is_reduced_again_by_those_who_are_left(
    tmp_path, transport, slot, respawn
):
    words = ("--overlap", "step")
    kills = [Kill(slot, 0.15)]
    outcome = run(tmp_path, transport, kills, respawn=respawn, script=OVERLAPPED, words=words, period=2)
    assert (outcome.code, outcome.wrong) == (0, []), outcome.output
    assert f"rank {slot} was lost (SIGKILL); 3 workers go on" in outcome.output
    assert f"done with {4 if respawn else 3} workers" in outcome.output


@pytest.mark.parametrize(
    ("transport", "slot", "factors", "respawn"), [("shm", 0, "always", 3), ("tcp", 2, "auto", 0)]
)
def test_rows_of_linear_layers_are_sent_again_by_those_who_are_left(
    tmp_path, transport, slot, factors, respawn
):
    words = ("--factors", factors)
    outcome = run(tmp_path, transport, [Kill(slot, 0.15)], respawn=respawn, script=WIDE, words=words)
    assert (outcome.code, outcome.wrong) == (0, []), outcome.output
    assert f"rank {slot} was lost (SIGKILL); 3 workers go on" in outcome.output
    (record,) = (tmp_path / "runs").iterdir()
    sent = [e for e in read_events(RunFolder(record).events_of(1)) if isinstance(e, BucketReduced)]
    assert {e.how for e in sent} == ({"dense", "factors"} if factors == "always" else {"dense"})
    assert any(e.size_bytes == 4 * (512 * 512 + 1) for e in sent) == (factors == "auto"), "as one buffer"
    assert f"done with {4 if respawn else 3} workers" in outcome.output


@pytest.mark.parametrize(("transport", "respawn"), [("shm", 3), ("tcp", 0)])
def test_checks_go_on_with_who_is_left_and_name_workers_by_their_first_ranks(tmp_path, transport, respawn):
    words = ("--verify", "gradients; weights(every=5); replay(every=3)")
    outcome = run(tmp_path, transport, [Kill(0, 0.15)], respawn=respawn, script=CORRUPTED, words=words)
    assert (outcome.code, outcome.wrong) == (0, []), outcome.output
    assert "rank 0 was lost (SIGKILL); 3 workers go on" in outcome.output
    assert f"done with {4 if respawn else 3} workers" in outcome.output
    (record,) = (tmp_path / "runs").iterdir()
    found = [
        (event.check, event.worker, event.action)
        for slot in range(4)
        for event in read_events(RunFolder(record).events_of(slot))
        if isinstance(event, CorruptionFound)
    ]
    assert sorted(found) == [("replay", 2, "repaired"), ("weights", 3, "repaired")]


@pytest.mark.parametrize(
    ("transport", "slot", "words", "respawn"),
    [
        ("shm", 0, ("--sync", "gossip(period=2)"), 3),
        ("tcp", 2, ("--sync", "gossip(matching, period=2)"), 0),
        ("tcp", 1, ("--sync", "local(periods=[2, 4])", "--groups", "2,2"), 3),
    ],
    ids=["shm-gossip", "tcp-matching", "tcp-groups"],
)
def test_workers_that_average_with_some_go_on_with_who_is_left(tmp_path, transport, slot, words, respawn):
    outcome = run(tmp_path, transport, [Kill(slot, 0.15)], respawn=respawn, words=words, period=4)
    assert (outcome.code, outcome.wrong) == (0, []), outcome.output
    assert f"rank {slot} was lost (SIGKILL); 3 workers go on" in outcome.output
    assert f"done with {4 if respawn else 3} workers" in outcome.output


@pytest.mark.parametrize(("dies", "said"), [("2:write_part", "rank 2"), ("0:commit", "its leader")])
def test_a_checkpoint_under_way_is_void_when_a_writer_is_lost_and_the_others_save_again(
    tmp_path, dies, said
):
    words = ("--checkpoint", "kept", "--checkpoint-every", "10steps")
    outcome = run(tmp_path, "shm", [], script=SAVING, dies=dies, words=words)
    assert (outcome.code, outcome.wrong) == (0, []), outcome.output
    assert "done with 3 workers" in outcome.output
    assert f"is void: {said} was lost before it was complete" in " ".join(outcome.output.split())
    for folder in ("kept", "own"):
        found = read_newest(tmp_path / folder, lambda state: None)
        assert len(found.workers) == 3
        assert found.step >= 70
        assert not [path for path in (tmp_path / folder).iterdir() if path.name.startswith(".")]


def test_a_run_that_lost_a_worker_saves_on_sigterm_and_is_resumed_with_every_sample_once(tmp_path):
    words = ("--checkpoint-every", "1epoch")
    outcome = run(tmp_path, "shm", [Kill(2, 0.3)], script=SLOW, words=words, stops=True)
    assert (outcome.code, outcome.wrong) == (0, []), outcome.output
    assert "rank 2 was lost (SIGKILL); 3 workers go on" in outcome.output
    assert "stopped by SIGTERM after a last checkpoint" in outcome.output
    assert "continues at step" in outcome.output
    assert "done with 4 workers" in outcome.output


def test_a_worker_that_comes_back_and_makes_other_calls_is_left_out(tmp_path):
    differing = SCRIPT.replace(
        "optimizer.step()", "optimizer.step(); 'ECHELON_RETURNS' in os.environ or session.mean(1.0)"
    )
    outcome = run(tmp_path, "shm", [Kill(1, 0.1)], respawn=3, script=differing)
    assert (outcome.code, outcome.wrong) == (0, []), outcome.output
    assert "rank 1 is back after" in outcome.output
    assert "rank 1 is not started again: after it had come back" in outcome.output
    assert "done with 3 workers" in outcome.output


def test_a_stopped_worker_is_left_out_and_started_again_and_one_stopped_for_a_moment_stays(tmp_path):
    outcome = run(tmp_path, "shm", [Kill(0, 0.1, on_s=0.5), Kill(2, 0.2, on_s=60)], respawn=3)
    assert (outcome.code, outcome.wrong) == (0, []), outcome.output
    told = r"rank 2 was left out: no progress for [\d.]+ s \(stopped\); 3 workers go on"
    assert re.search(told, flat(outcome)), outcome.output
    assert "rank 2 is back after" in outcome.output
    assert "workers: 1 left out, 1 back; never fewer than 3 went on" in flat(outcome)
    assert "done with 4 workers" in outcome.output


def test_a_worker_in_an_endless_loop_is_left_out_and_started_again(tmp_path):
    words = ("--round-timeout-s", "10")
    outcome = run(tmp_path, "tcp", [], respawn=3, script=endless(1, 9), words=words)
    assert (outcome.code, outcome.wrong) == (0, []), outcome.output
    assert re.search(r"rank 1 was left out: no progress for [\d.]+ s; 3 workers go on", flat(outcome))
    assert "done with 4 workers" in outcome.output


def test_with_too_few_left_the_run_ends_and_names_the_lost_worker(tmp_path):
    outcome = run(tmp_path, "tcp", [Kill(2, 0.1)], fewest=4)
    assert outcome.code == 128 + 9
    assert "rank 2" in outcome.output
    assert "killed by SIGKILL" in outcome.output


def flat(outcome):
    return " ".join(outcome.output.split())


def start(folder, script, *words):
    (folder / "train.py").write_text(script)
    command = [sys.executable, "-m", "echelon", "run", "--workers", "4", *words, "train.py"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)


def test_an_error_of_the_script_still_ends_the_run_with_that_error(tmp_path):
    faulty = SCRIPT.replace("optimizer.step()", "optimizer.step(); 1 / (session.step < 3)")
    ended = start(tmp_path, faulty, "--min-workers", "1")
    assert ended.returncode == 1
    assert "ZeroDivisionError" in ended.stdout + ended.stderr
    assert "was lost" not in ended.stdout + ended.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--min-workers", "5"), "5 workers are needed, and 4 are started"),
        (("--min-workers", "2", "--sync", "hogwild"), "--sync hogwild cannot go on yet"),
        (("--min-workers", "2", "--transport", "c10d"), "--transport c10d cannot go on yet"),
        (("--min-workers", "0"), "min workers is 0"),
    ],
)
def test_what_cannot_go_on_without_a_worker_is_refused_before_the_start(tmp_path, words, said):
    refused = start(tmp_path, SCRIPT, *words)
    assert refused.returncode == 2, refused.stdout + refused.stderr
    assert said in " ".join((refused.stdout + refused.stderr).split())
    assert not (tmp_path / "runs").exists()
