"""What a rank loads before its first step, loaded once in the server that ranks are forked from.

DDP's constructor imports PyTorch's compiler, and Numba prepares itself at its first function: together two seconds of a
core for every rank. What is loaded is then kept out of the garbage collector: a collection in a rank would go through
all of it, and copy the pages that were shared.
"""

import gc

import torch
import torch._dynamo.convert_frame
import torch.distributed  # noqa: F401
from numba import njit

import espresso.live.codecs
import espresso.live.register  # noqa: F401


@njit("int64(int64)")
def _prepared(number: int) -> int:
    return number


gc.freeze()
