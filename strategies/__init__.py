"""What can be decided: cluster shape, steps, options, the decision tree, strategies and plans.

Standard library only: importing this package never loads torch. May import: nothing of ours.
"""

from espresso.strategies.cluster import Cluster
from espresso.strategies.fields import FormError
from espresso.strategies.flow import Site, State, StepFlow, cut, trace
from espresso.strategies.option import (
    RANK_DEVICES,
    UNCOMPRESSED,
    Device,
    Form,
    Option,
    Phase,
    Routine,
    Scope,
    Step,
    StepKind,
)
from espresso.strategies.plan import (
    Bucket,
    Group,
    Lane,
    Mode,
    Partition,
    Plan,
    Run,
    Slot,
    Stage,
    Task,
    paper_buckets,
    plan,
)
from espresso.strategies.spec import NONE, CompressorSpec
from espresso.strategies.strategy import (
    DTYPES,
    PLAIN,
    Choice,
    Strategy,
    StrategyError,
    TensorSpec,
    fingerprint,
)
from espresso.strategies.tree import (
    compressed_options,
    flat_options,
    hierarchical_options,
    options_for,
    parse_option,
    round_options,
    server_options,
    summable_options,
)

__all__ = [
    "DTYPES",
    "NONE",
    "PLAIN",
    "RANK_DEVICES",
    "UNCOMPRESSED",
    "Bucket",
    "Choice",
    "Cluster",
    "CompressorSpec",
    "Device",
    "Form",
    "FormError",
    "Group",
    "Lane",
    "Mode",
    "Option",
    "Partition",
    "Phase",
    "Plan",
    "Routine",
    "Run",
    "Scope",
    "Site",
    "Slot",
    "Stage",
    "State",
    "Step",
    "StepFlow",
    "StepKind",
    "Strategy",
    "StrategyError",
    "Task",
    "TensorSpec",
    "compressed_options",
    "cut",
    "fingerprint",
    "flat_options",
    "hierarchical_options",
    "options_for",
    "paper_buckets",
    "parse_option",
    "plan",
    "round_options",
    "server_options",
    "summable_options",
    "trace",
]
