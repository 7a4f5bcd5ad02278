"""Optimizers for compressed gradients: LANS, CLAN (LANS over the two-way exchange), compressed Adam.

optimizer = espresso.optim.CLAN(ddp_model, lr=0.01, compressor="efsignsgd")

May import: live.
"""

from espresso.optim.clan import CLAN
from espresso.optim.compressed_adam import CompressedAdam
from espresso.optim.exchange import TwoWay, scale_residuals
from espresso.optim.lans import LANS

__all__ = ["CLAN", "LANS", "CompressedAdam", "TwoWay", "scale_residuals"]
