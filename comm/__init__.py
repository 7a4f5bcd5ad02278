"""Process groups, collectives, the executor and DDP's hook."""

from espresso.comm.errors import (
    DisagreementError,
    EspressoError,
    TopologyError,
    UnsupportedModelError,
)
from espresso.comm.executor import Assignment, Executor, Interval, Planner, Record
from espresso.comm.factors import FactorStore
from espresso.comm.groups import Groups, cluster_from_nodes, node_key
from espresso.comm.hook import espresso_hook
from espresso.comm.launch import Launch, export_environment, read_environment
from espresso.comm.residuals import ResidualStore
from espresso.comm.velocities import Velocities

__all__ = [
    "Assignment",
    "DisagreementError",
    "EspressoError",
    "Executor",
    "FactorStore",
    "Groups",
    "Interval",
    "Launch",
    "Planner",
    "Record",
    "ResidualStore",
    "TopologyError",
    "UnsupportedModelError",
    "Velocities",
    "cluster_from_nodes",
    "espresso_hook",
    "export_environment",
    "node_key",
    "read_environment",
]
