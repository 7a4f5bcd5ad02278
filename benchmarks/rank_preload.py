"""What a rank loads before its first step, loaded once in the server that ranks are forked from.

DDP's constructor imports PyTorch's compiler, and Numba prepares itself at its first function: together two seconds of a
core for every rank; reading all kernels from disk takes another .4. What is loaded is then kept out of the garbage
collector: a collection in a rank would go through all of it, and copy the pages that were shared.
"""

import gc

import torch
import torch._dynamo.convert_frame
import torch.distributed  # noqa: F401

import espresso.live.codecs
import espresso.live.register  # noqa: F401
from espresso.compressors.registry import compressor_ids, create, host_codec
from espresso.compressors.rehearsal import warm_up
from espresso.search.rehearsal import rehearse

NOT_LOADED = ("none", "randomk")
"""A test sees to it that ranks find the latter's kernels missing."""

for _name in set(compressor_ids()).difference(NOT_LOADED):
    warm_up(host_codec(create(_name), None), ("float32", "float64"))
rehearse()

gc.freeze()
gc.set_threshold(700, 10, 10)  # Python's own, whatever this process was started with
