"""FSDP2's front of a job: shards inside a host, replicas between hosts, whose exchange is compressed.

    state = espresso.fsdp.register(model, replicate=mesh["replicate"], compressor="efsignsgd")

May import: live.
"""

from espresso.fsdp.layout import hybrid_mesh, hybrid_shard
from espresso.fsdp.registration import register

__all__ = ["hybrid_mesh", "hybrid_shard", "register"]
