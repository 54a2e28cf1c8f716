"""Layouts as text: which workers are in which replica and stage, and what is refused."""

from __future__ import annotations

import pytest

from echelon.errors import ConfigError, UnknownName
from echelon.parallel.layout import mesh_of, parse_layout


@pytest.mark.parametrize(
    ("text", "workers", "ranks"),
    [
        ("data", 3, ((0,), (1,), (2,))),
        ("pipeline", 3, ((0, 1, 2),)),
        ("pipeline(stages=2) * data", 4, ((0, 1), (2, 3))),
        ("data * pipeline(stages=2)", 4, ((0, 2), (1, 3))),
        ("data(replicas=2) * pipeline", 6, ((0, 2, 4), (1, 3, 5))),
        ('pipeline(cuts="3,7")', 3, ((0, 1, 2),)),
        ('pipeline(schedule=interleaved, chunks=2, cuts="3,7,9")', 2, ((0, 1),)),
    ],
)
def test_the_first_dimension_goes_over_neighbours(text, workers, ranks):
    mesh = mesh_of(parse_layout(text), workers)
    assert mesh.ranks == ranks
    for replica, of in enumerate(ranks):
        for stage, rank in enumerate(of):
            assert (mesh.replica_of(rank), mesh.stage_of(rank)) == (replica, stage)


@pytest.mark.parametrize(
    ("text", "workers", "says"),
    [
        ("pipeline(stages=3)", 2, "the layout is for 3 workers, there are 2"),
        ("pipeline(stages=2)", 4, "add '\\* data'"),
        ("pipeline * data", 4, "both pipeline and data take the workers that are left"),
        ("pipeline(stages=3) * data", 4, "4 workers cannot be divided by 3"),
        ("data * data", 2, "has data twice"),
        ("data *", 2, "a dimension is missing"),
        ("pipeline(micro=0)", 2, "micro is 0"),
        ("pipeline(stages=-1)", 2, "stages is -1"),
        ("pipeline(ahead=-1)", 2, "ahead is -1"),
        ("pipeline(stages=2, chunks=2)", 2, "chunks is 2 with schedule gpipe"),
        ("pipeline(stages=1, schedule=interleaved)", 2, "both are at least 2"),
        ('pipeline(stages=2, schedule=interleaved, cuts="1,2")', 2, "make 3 chunks of layers, 2 for each"),
        ('pipeline(schedule=interleaved, cuts="1,2")', 2, "which are not 2 for each stage"),
        ("pipeline(schedule=filled, recompute=true)", 2, "recompute saves the memory that schedule filled"),
        ('pipeline(cuts="4,3")', 3, "cuts are '4,3'"),
        ('pipeline(cuts="a")', 2, "cuts are 'a'"),
        ('pipeline(stages=3, cuts="2")', 3, "1 cuts make 2 stages, not 3"),
        ("data(replicas=-1)", 2, "replicas is -1"),
    ],
)
def test_a_layout_that_cannot_be_is_refused_with_what_would_work(text, workers, says):
    with pytest.raises(ConfigError, match=says) as caught:
        mesh_of(parse_layout(text), workers)
    assert caught.value.fix


def test_an_unknown_dimension_names_its_nearest_neighbour():
    with pytest.raises(UnknownName, match="pipelines"):
        parse_layout("pipelines(stages=2)")
