"""Which ranks share a node, and the groups of every scope on real ranks."""

import itertools
import os
import socket
from collections.abc import Callable
from contextlib import closing

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as torch_groups
from torch.nn.parallel import DistributedDataParallel

import espresso
from benchmarks.rank_pool import POOL
from espresso.comm.errors import EspressoError, TopologyError
from espresso.comm.group_names import highest_number, named_after
from espresso.comm.groups import Groups
from espresso.comm.nodes import cluster_from_nodes, node_key, why_flat
from espresso.comm.pairs import MUCH, card_rate
from espresso.live.agreement import agree, agree_on_epoch, check_replicas
from espresso.strategies import Choice, Cluster, CompressorSpec, Scope, Strategy, parse_option
from tests.workers import run_ranks


def nodes(text: str) -> list[tuple[str, int, int | None]]:
    """One letter per rank: its host."""
    return [(letter, 0, None) for letter in text]


@pytest.mark.parametrize(
    ("hosts", "cluster"),
    [("a", (1, 1)), ("aaa", (1, 3)), ("abcd", (4, 1)), ("aabb", (2, 2)), ("bbbaaaccc", (3, 3))],
)
def test_even_nodes_form_a_cluster(hosts, cluster):
    assert cluster_from_nodes(nodes(hosts)) == Cluster(*cluster)


def test_uneven_nodes_leave_flat_options_and_the_reason_names_them():
    assert cluster_from_nodes(nodes("aab")) == Cluster(3, 1)
    assert why_flat(nodes("aab")) == "nodes have different numbers of ranks (a: ranks 0,1; b: ranks 2)"
    assert cluster_from_nodes(nodes("abab")) == Cluster(4, 1)
    assert "not consecutive (a: ranks 0,2; b: ranks 1,3;" in str(why_flat(nodes("abab")))
    assert why_flat(nodes("aabb")) is None


def test_long_rank_lists_are_cut_short():
    assert "a: ranks 0,1,2,3,4,5,6,7,…; b: ranks 9" in str(why_flat(nodes("aaaaaaaaab")))


def test_hosts_namespaces_and_launchers_tell_nodes_apart():
    same_host = [("host", 1, 0), ("host", 1, 1), ("host", 2, 0), ("host", 2, None)]
    assert cluster_from_nodes(same_host) == Cluster(4, 1)


def test_the_key_of_this_process(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"):
        monkeypatch.delenv(name, raising=False)
    host, namespace, number, boot = node_key()
    assert (host, number) == (socket.gethostname(), None)
    assert namespace == os.stat("/proc/self/ns/net").st_ino
    assert len(boot) == 36, "machines of one name are told apart"
    for name, value in {"RANK": "3", "WORLD_SIZE": "4", "GROUP_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    assert node_key() == (host, namespace, 1, boot)


def test_groups_need_torch_distributed():
    with pytest.raises(TopologyError, match="init_process_group"):
        Groups()


# On real ranks: two nodes of two, as the launcher's variables say


def describe(rank: int, ranks_per_node: int | None) -> tuple[Cluster, dict[str, tuple[tuple[int, ...], int]]]:
    groups = Groups(ranks_per_node=ranks_per_node, timeout_s=20)
    members = {scope.value: (m.ranks, m.index) for scope, m in groups.scopes.items()}
    for member in groups.scopes.values():
        # Every group works, and is neither the default one nor another's.
        total = torch.tensor([1 << rank])
        dist.all_reduce(total, group=member.group)
        assert int(total) == sum(1 << other for other in member.ranks)
        assert member.group is not dist.group.WORLD
    assert len({id(m.group) for m in groups.scopes.values()} | {id(groups.control.group)}) == len(members) + 1
    cluster = groups.cluster
    groups.close()
    groups.close()
    return cluster, members


def connect(rank: int) -> dict[str, tuple[int, bool]]:
    groups = Groups(ranks_per_node=2, timeout_s=20, connections=3)
    found = {}
    for scope, member in groups.scopes.items():
        ways = [member.connection(number) for number in range(6)]
        for way in ways[:3]:
            total = torch.tensor([1 << rank])
            dist.all_reduce(total, group=way.group)
            assert int(total) == sum(1 << other for other in member.ranks)
        found[scope.value] = len({id(way.group) for way in ways}), ways[0] is member and ways[3:] == ways[:3]
    groups.close()
    return found


def test_exchanges_go_in_turn_over_several_connections_between_nodes():
    for found in POOL.run(connect):
        assert found == {"flat": (3, True), "intra": (1, True), "inter": (3, True)}


def look_at_cards(rank: int, ranks_per_node: int) -> list[float | None]:
    groups = Groups(ranks_per_node=ranks_per_node, timeout_s=20)
    try:
        looks = itertools.count()  # a clock by which every send takes one
        return groups.all_objects(card_rate(groups, lambda: float(next(looks))))
    finally:
        groups.close()


@pytest.mark.parametrize(("ranks_per_node", "known"), [(2, (0, 2)), (1, (0, 1, 2, 3)), (4, ())])
def test_the_first_rank_of_a_node_says_what_its_card_sends(ranks_per_node, known):
    for rates in POOL.run(look_at_cards, ranks_per_node):
        assert tuple(rank for rank, rate in enumerate(rates) if rate is not None) == known
        # (Of a machine too busy to send more within the time only the first is known.)
        assert all(rate in (MUCH[0], max(MUCH)) for rate in rates if rate is not None)


def test_scopes_of_two_nodes_of_two_ranks():
    for rank, (cluster, members) in enumerate(POOL.run(describe, None)):
        node, local = divmod(rank, 2)
        assert cluster == Cluster(2, 2)
        assert members == {
            "flat": ((0, 1, 2, 3), rank),
            "intra": ((2 * node, 2 * node + 1), local),
            "inter": ((local, local + 2), node),
        }


@pytest.mark.parametrize(("ranks_per_node", "cluster"), [(1, (4, 1)), (4, (1, 4))])
def test_ranks_per_node_overrides_the_launcher(ranks_per_node, cluster):
    for rank, (found, members) in enumerate(POOL.run(describe, ranks_per_node)):
        assert found == Cluster(*cluster)
        assert members == {"flat": ((0, 1, 2, 3), rank)}


def refuse(rank: int, ranks_per_node: int) -> str:
    try:
        Groups(ranks_per_node=ranks_per_node, timeout_s=20)
    except TopologyError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("ranks_per_node", [3, 0, 8])
def test_ranks_per_node_must_divide_the_ranks(ranks_per_node):
    for text in POOL.run(refuse, ranks_per_node):
        assert f"ranks_per_node={ranks_per_node} does not divide the 4 ranks" in text


def in_a_subgroup(rank: int) -> tuple[int, Cluster, tuple[int, ...], list[int], str] | None:
    subgroup = dist.new_group([1, 3], backend="gloo")
    # A rank may be in groups that its peers are not in: a stage of a pipeline, say.
    more = [dist.new_group([3, 2], backend="gloo") for _ in range(2)]
    if rank not in (1, 3):
        return None
    assert len(more) == 2
    groups = Groups(subgroup, timeout_s=20)
    told = groups.from_rank_0(f"from {rank}")
    everybody = groups.all_objects(rank)
    groups.barrier()
    found = groups.rank, groups.cluster, groups.scopes[Scope.FLAT].ranks, everybody, told
    groups.close()
    return found


def test_a_subgroup_has_ranks_of_its_own():
    answers = POOL.run(in_a_subgroup)
    assert answers == [
        None,
        (0, Cluster(2, 1), (1, 3), [1, 3], "from 1"),
        None,
        (1, Cluster(2, 1), (1, 3), [1, 3], "from 1"),
    ]


def at_odds_in_a_subgroup(rank: int) -> list[str]:
    """What ranks 1 and 3 say of each other where they differ, and of rank 3 where it does not come."""
    subgroup = dist.new_group([1, 3], backend="gloo")
    if rank not in (1, 3):
        return []
    groups = Groups(subgroup, timeout_s=20)
    said = [
        caught(lambda: agree(groups, {"seed": rank})),
        caught(lambda: agree_on_epoch(groups, rank)),
        caught(lambda: check_replicas(groups, {"w": torch.tensor([float(rank)])})),
        caught(lambda: Groups(subgroup, ranks_per_node=rank, timeout_s=20)),
    ]
    groups.barrier()
    groups.close()
    return said if rank == 3 else [*said, caught(lambda: Groups(subgroup, timeout_s=1.0))]


def caught(action: Callable[[], object]) -> str:
    with pytest.raises(EspressoError) as error:
        action()
    return str(error.value)


def test_errors_of_a_subgroup_name_ranks_of_the_world():
    nobody, first, _, third = POOL.run(at_odds_in_a_subgroup)
    assert nobody == []
    assert first == [
        "rank 3 has another seed than rank 1 (1 on rank 1, 3 on rank 3); start all ranks alike",
        "rank 3 says that epoch 3 begins, rank 1 says 1; call state.set_epoch on all ranks at the same step",
        "parameter 'w' on rank 3 differs from rank 1: replicas diverged; nothing but equal optimizers may change"
        " parameters. Go on from a checkpoint that all ranks load",
        "rank 3 has another ranks_per_node than rank 1 (1 on rank 1, 3 on rank 3); start all ranks alike",
        "rank 3 did not come to espresso.register within 1 s; all ranks call it together",
    ]
    assert third == first[:4]
    assert "(a: ranks 1,3; b: ranks 6)" in str(why_flat(nodes("aab"), (1, 3, 6)))


def uneven(rank: int) -> tuple[bool, list[float]]:
    """A step on three ranks and one, with a compressor; the numbers that are in the average."""
    os.environ["GROUP_RANK"] = "0" if rank < 3 else "1"
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    choice = Choice(parse_option("comp > flat.allgather > dec"), CompressorSpec.parse("efsignsgd"))
    try:
        with closing(espresso.register(model, "efsignsgd", lambda t, c: Strategy.uniform(t, c, choice))) as state:
            model(torch.full((2, 64), 1.0 + rank)).sum().backward()
            weight = model.module.weight.grad
            assert weight is not None
            return state.session.groups.cluster == Cluster(4, 1), weight.unique().tolist()
    finally:
        os.environ["GROUP_RANK"] = str(rank // 2)


def test_what_only_its_members_make_leaves_names_as_they_are():
    """PyTorch counts it from 2.14 on: the next group of all would have another name on every rank outside."""
    world = torch_groups._world
    before, names = world.group_count, len(world.pg_names)
    number = highest_number() + 3
    with named_after(number):
        assert (world.group_count, len(world.pg_names)) == (number, number)
        world.group_count += 1
    assert (world.group_count, len(world.pg_names)) == (before, names)
    assert highest_number() == number


def test_a_job_on_uneven_nodes_runs_flat():
    # Two rows of 1, 2, 3 and 4: signs lose nothing of gradients that are all alike.
    assert POOL.run(uneven) == [(True, [5.0])] * 4


def run_default_group(rank: int) -> tuple[str, int, str, bool]:
    """``init_process_group()`` names no backend: each device has its own."""
    dist.init_process_group()
    groups = Groups(ranks_per_node=1, connections=2)
    flat = groups.scopes[Scope.FLAT]
    beside = Groups(ranks_per_node=1)
    with pytest.raises(TopologyError) as refused:
        Groups(dist.new_group(backend="cpu:gloo"), host_copies=True, beside=beside)
    found = "gloo" if flat.is_gloo else groups.backend, len(flat.others), str(refused.value), bool(beside._made)
    groups.close()
    dist.destroy_process_group()
    return found


def test_a_group_without_a_named_backend_is_what_serves_the_models_device():
    answers = [outcome.value for outcome in run_ranks(run_default_group, 2, init=False)]
    for backend, others, refused, stays in answers:
        assert (backend, others) == ("gloo", 1), "links of their own are Gloo's"
        assert "the model is on a GPU, and its process group serves cpu:gloo only" in refused
        assert not stays, "the groups beside go with what is refused"
