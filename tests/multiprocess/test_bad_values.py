"""NaN on one worker, and damaged frames: nobody applies them, and the others go on."""

from __future__ import annotations

from tests.losses import FLIPPING, run, unfit


def test_gradients_that_are_not_finite_on_one_worker_are_in_no_sum_and_their_samples_are_drawn_again(
    tmp_path,
):
    outcome = run(tmp_path, "tcp", [], script=unfit(2, "session.step == 9"))
    assert (outcome.code, outcome.wrong) == (0, []), outcome.output
    assert "rank 2: gradients held NaN or infinity in step 9" in " ".join(outcome.output.split())
    assert "left out" not in outcome.output
    assert "done with 4 workers" in outcome.output


def test_a_worker_whose_gradients_stay_unfit_is_left_out_and_started_again(tmp_path):
    outcome = run(tmp_path, "shm", [], respawn=3, script=unfit(0, "session.step >= 9"))
    assert (outcome.code, outcome.wrong) == (0, []), outcome.output
    assert "rank 0 was left out: its gradients were not finite in 3 steps in a row" in outcome.output
    assert "rank 0 is back after" in outcome.output
    assert "done with 4 workers" in outcome.output


def test_if_all_gradients_are_not_finite_the_run_ends_and_says_why(tmp_path):
    script = unfit(0, "session.step >= 9").replace('slot == "0" and', "")
    outcome = run(tmp_path, "shm", [], script=script)
    assert outcome.code not in (0, -1), outcome.output
    assert "NaN" in outcome.output


def test_a_frame_with_a_changed_bit_is_refused_and_its_exchange_repeated(tmp_path):
    outcome = run(tmp_path, "tcp", [], script=FLIPPING)
    assert (outcome.code, outcome.wrong) == (0, []), outcome.output
    assert "4 workers met again, and repeat the exchange" in outcome.output
    assert "done with 4 workers" in outcome.output


def test_a_link_that_changes_frames_again_and_again_ends_the_run_and_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("ALWAYS", "1")
    outcome = run(tmp_path, "tcp", [], script=FLIPPING)
    assert outcome.code not in (0, -1), outcome.output
    assert outcome.output.count("workers met again, and repeat the exchange") == 3
    assert "what arrived from rank" in outcome.output.split("workers met again, and repeat")[-1]
