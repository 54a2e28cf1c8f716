import pytest

from echelon.comm.meet import foreign
from echelon.comm.meet.place import Place
from echelon.errors import ConfigError

FULL = {"RANK": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "head", "MASTER_PORT": "29500"}


def test_without_any_variable_the_process_is_alone():
    place = Place.from_environment({"PATH": "/bin", "LOCAL_RANK": "3"})
    assert place == Place()
    assert (place.rank, place.world_size) == (0, 1)


@pytest.mark.parametrize(
    "env",
    [
        {"RANK": "0", "WORLD_SIZE": "1"},
        {"RANK": "0"},
        {"WORLD_SIZE": "1"},
        {"RANK": "", "WORLD_SIZE": "", "MASTER_ADDR": "", "MASTER_PORT": ""},
        {"RANK": "0", "WORLD_SIZE": ""},
    ],
)
def test_a_world_of_one_needs_no_address(env):
    assert Place.from_environment(env) == Place()


def test_an_address_alone_means_alone():
    """As `accelerate launch --cpu` starts a script."""
    assert Place.from_environment({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}) == Place()


def test_the_last_processes_of_another_launcher_are_servers():
    workers = [Place.from_environment({**FULL, "RANK": str(rank)}, servers=1) for rank in range(4)]
    assert [(place.world_size, place.servers, place.serves) for place in workers] == [
        (3, 1, False),
        (3, 1, False),
        (3, 1, False),
        (3, 1, True),
    ]
    told = {**FULL, "ECHELON_SERVERS": "2"}
    assert Place.from_environment(told).servers == 2
    assert Place.from_environment(told, servers=0).world_size == 4, "the script's choice comes first"


def test_servers_of_echelon_run_are_besides_the_workers():
    env = {**FULL, "RANK": "4", "ECHELON_SERVERS": "1", "ECHELON_RUN": "runs/a"}
    place = Place.from_environment(env)
    assert (place.world_size, place.servers, place.process_count, place.serves) == (4, 1, 5, True)


PODS = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "4", "PET_NODE_RANK": "1"}


@pytest.mark.parametrize(
    "env",
    [
        {**FULL, **PODS, "WORLD_SIZE": "8", "RANK": "1"},
        PODS,
        {"PET_NNODES": "1:3", "PET_NPROC_PER_NODE": "auto"},
    ],
    ids=["PyTorchJob", "Trainer", "a range of pods"],
)
def test_a_pod_that_was_meant_for_torchrun_is_refused_without_it(env):
    with pytest.raises(ConfigError, match="was meant for torchrun") as caught:
        Place.from_environment(env)
    assert f"PET_NNODES={env['PET_NNODES']}" in caught.value.message
    assert "start the script with torchrun" in caught.value.fix


@pytest.mark.parametrize(
    ("env", "size"),
    [
        ({**FULL, **PODS, "TORCHELASTIC_RUN_ID": "a", "LOCAL_RANK": "0"}, 4),
        ({**FULL, "PET_NNODES": "4", "PET_NPROC_PER_NODE": "auto"}, 4),
        ({**FULL, "PET_NNODES": "4", "PET_NPROC_PER_NODE": "1"}, 4),
        ({"PET_NNODES": "1", "PET_NPROC_PER_NODE": "auto"}, 1),
    ],
    ids=["torchrun", "one each", "one each, in numbers", "one pod"],
)
def test_pods_with_a_place_of_their_own_keep_it(env, size):
    assert Place.from_environment(env).world_size == size


def test_a_world_of_one_may_have_an_address():
    place = Place.from_environment({**FULL, "RANK": "0", "WORLD_SIZE": "1"})
    assert (place.rank, place.world_size, place.address, place.port) == (0, 1, "head", 29500)


def test_all_variables_together_give_the_place():
    place = Place.from_environment({**FULL, "LOCAL_RANK": "1"})
    assert place == Place(rank=2, world_size=4, local_rank=1, address="head", port=29500)


def test_local_rank_is_optional():
    assert Place.from_environment(FULL).local_rank == 0


def test_torchrun_hosts_the_store_and_counts_restarts():
    env = {**FULL, "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "3"}
    place = Place.from_environment(env)
    assert (place.hosted, place.attempt) == (True, "3")
    assert not Place.from_environment({**FULL, "TORCHELASTIC_USE_AGENT_STORE": "False"}).hosted


@pytest.mark.parametrize("missing", list(FULL))
def test_a_missing_variable_is_named(missing):
    env = {name: value for name, value in FULL.items() if name != missing}
    with pytest.raises(ConfigError, match=f"are set but {missing} is not\n") as caught:
        Place.from_environment(env)
    assert caught.value.where == "environment"


@pytest.mark.parametrize("env", [{"WORLD_SIZE": "4"}, {"RANK": "3"}, {"RANK": "0", "WORLD_SIZE": "2"}])
def test_one_of_several_workers_without_an_address_is_refused(env):
    with pytest.raises(ConfigError, match="MASTER_ADDR and MASTER_PORT are not"):
        Place.from_environment(env)


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "MASTER_PORT", "LOCAL_RANK"])
def test_a_variable_that_is_not_a_number_is_named(name):
    with pytest.raises(ConfigError, match=f"{name} is 'many', which is not a number"):
        Place.from_environment({**FULL, name: "many"})


@pytest.mark.parametrize("rank", ["4", "-1"])
def test_a_rank_outside_of_the_world_is_refused(rank):
    with pytest.raises(ConfigError, match=f"RANK is {rank} in a world of 4") as caught:
        Place.from_environment({**FULL, "RANK": rank})
    assert "0 to 3" in caught.value.fix


OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "prterun-a-77@1",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "3", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "3"}
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "81",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "n[1-2]",
}


@pytest.mark.parametrize(
    ("env", "rank", "size", "local", "address"),
    [(OPENMPI, 2, 4, 2, "127.0.0.1"), (MPICH, 1, 3, 1, "127.0.0.1"), (SLURM, 3, 4, 1, "n1")],
    ids=["openmpi", "mpich", "slurm"],
)
def test_variables_of_other_launchers_give_the_place(env, rank, size, local, address):
    place = Place.from_environment(env, parent=5)
    assert (place.rank, place.world_size, place.local_rank, place.address) == (rank, size, local, address)
    assert 1024 < place.port < 32768
    assert place.port == Place.from_environment(env, parent=5).port
    told = Place.from_environment({**env, "MASTER_ADDR": "head", "MASTER_PORT": "5000"})
    assert (told.rank, told.address, told.port) == (rank, "head", 5000)
    assert Place.from_environment({**env, **FULL}).rank == 2, "RANK comes first"


def test_two_jobs_meet_at_different_ports():
    other = {**OPENMPI, "PMIX_NAMESPACE": "prterun-a-78@1"}
    assert Place.from_environment(other).port != Place.from_environment(OPENMPI).port
    assert Place.from_environment(MPICH, parent=1).port != Place.from_environment(MPICH, parent=2).port


def test_processes_of_mpi_on_several_machines_need_an_address():
    env = {**OPENMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    with pytest.raises(ConfigError, match="mpirun started 4 processes on several machines") as caught:
        Place.from_environment(env)
    assert "MASTER_ADDR" in caught.value.fix


def test_one_process_of_another_launcher_and_a_batch_script_are_alone():
    assert Place.from_environment(
        {**OPENMPI, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}
    ) == (Place())
    batch = {name: value for name, value in SLURM.items() if name != "SLURM_STEP_ID"}
    assert Place.from_environment(batch) == Place()


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("n[1-2]", "n1"),
        ("gpu[03-05,9],cpu1", "gpu03"),
        ("a,b", "a"),
        ("rack[2,4]-x,z", "rack2-x"),
        ("", ""),
    ],
)
def test_first_machine_of_a_slurm_list(nodes, first):
    assert foreign.first_host(nodes) == first
