"""The launchers' variables."""

import pytest

from espresso.comm.environment import Launch, export_environment, read_environment
from espresso.comm.errors import TopologyError

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
PMI = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
SLURM = {
    "SLURM_PROCID": "7",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "3",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_NODEID": "1",
}


@pytest.mark.parametrize(
    ("environment", "launch"),
    [
        (TORCHRUN, Launch("torchrun", 5, 8, 1, 4, 1)),
        (OPENMPI, Launch("openmpi", 3, 4, 1, 2, None)),
        (PMI, Launch("pmi", 2, 4, 0, 2, None)),
        (SLURM, Launch("slurm", 7, 8, 3, 4, 1)),
        ({"RANK": "0", "WORLD_SIZE": "1"}, Launch("torchrun", 0, 1, 0, 0, None)),
        ({}, None),
        ({"RANK": "0"}, None),
    ],
    ids=["torchrun", "openmpi", "pmi", "slurm", "bare torch", "none", "incomplete"],
)
def test_each_launcher(environment, launch):
    assert read_environment(environment) == launch


@pytest.mark.parametrize(
    ("said", "sizes"), [("4(x2)", (4, 4, 0)), ("2(x2),1", (2, 2, 1)), ("3,1", (3, 1, 0)), ("", (0,))]
)
def test_slurm_writes_the_sizes_of_all_nodes_of_a_step(said, sizes):
    for node, size in enumerate(sizes):
        step = {"SLURM_STEP_TASKS_PER_NODE": said, "SLURM_NODEID": str(node), "SLURM_LOCALID": "0"}
        assert read_environment({**SLURM, **step}).local_world_size == size


def test_srun_with_pmi2_says_where_a_rank_is_in_slurms_own_words():
    assert read_environment({**SLURM, "PMI_RANK": "7", "PMI_SIZE": "8"}) == read_environment(SLURM)


def test_the_innermost_launcher_counts():
    """mpirun inside a SLURM job, torchrun inside either."""
    batch = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}
    assert read_environment({**batch, **OPENMPI}).launcher == "openmpi"
    assert read_environment({**batch, **OPENMPI, **TORCHRUN}).launcher == "torchrun"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"RANK": "8"}, "RANK=8 is not below WORLD_SIZE=8"),
        ({"RANK": "-1"}, "RANK is -1, expected at least 0"),
        ({"WORLD_SIZE": "eight"}, "WORLD_SIZE is 'eight', expected a whole number"),
        ({"LOCAL_RANK": "4"}, "LOCAL_RANK=4 is not below LOCAL_WORLD_SIZE=4"),
        ({"LOCAL_WORLD_SIZE": "9"}, "LOCAL_WORLD_SIZE=9 is above WORLD_SIZE=8"),
        ({"LOCAL_WORLD_SIZE": "x"}, "LOCAL_WORLD_SIZE is 'x'"),
    ],
)
def test_contradictions_name_the_variable(changes, message):
    with pytest.raises(TopologyError, match=message.replace("(", r"\(")):
        read_environment({**TORCHRUN, **changes})


def test_a_slurm_step_may_run_fewer_tasks_than_the_job_asked_for():
    """SLURM_NTASKS_PER_NODE is what the job asked for."""
    step = {**SLURM, "SLURM_NTASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_NTASKS_PER_NODE": "4"}
    environment = {**step, "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
    export_environment(environment)
    assert environment["LOCAL_WORLD_SIZE"] == "1"
    assert read_environment(environment).world_size == 2, "what we wrote reads as torchrun's"


def test_srun_that_says_nothing_of_hosts_is_asked_for_an_address_where_there_are_several():
    environment = {key: value for key, value in SLURM.items() if key != "SLURM_STEP_TASKS_PER_NODE"}
    export_environment(several := {**environment, "SLURM_NNODES": "2"})
    assert "MASTER_ADDR" not in several
    export_environment(one := {**environment, "SLURM_NNODES": "1"})
    assert one["MASTER_ADDR"] == "127.0.0.1"


def test_export_speaks_torchruns_words():
    environment = dict(OPENMPI)
    assert export_environment(environment).launcher == "openmpi"
    assert {key: environment[key] for key in TORCHRUN if key in environment} == {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
    }
    assert "MASTER_ADDR" not in environment  # two nodes: only the user knows the address


def test_export_on_one_host_finds_an_address():
    environment = {**OPENMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "MASTER_PORT": "1234"}
    export_environment(environment)
    assert (environment["MASTER_ADDR"], environment["MASTER_PORT"]) == ("127.0.0.1", "1234")


def test_export_replaces_half_a_set_of_torchruns_variables():
    """A RANK left over without WORLD_SIZE must not be mixed with mpirun's size."""
    environment = {**OPENMPI, "RANK": "9"}
    export_environment(environment)
    assert (environment["RANK"], environment["WORLD_SIZE"]) == ("3", "4")


def test_export_without_a_launcher_changes_nothing():
    environment: dict[str, str] = {"PATH": "/bin"}
    assert export_environment(environment) is None
    assert environment == {"PATH": "/bin"}
