"""What one partition does on one rank: every step of its option as an action on buffers.

May import: comm.parameter_server.
"""

from espresso.comm.memory import Codecs
from espresso.comm.program.part import TORCH_DTYPES, Context, Round
from espresso.comm.program.partition import PartitionProgram

__all__ = ["TORCH_DTYPES", "Codecs", "Context", "PartitionProgram", "Round"]
