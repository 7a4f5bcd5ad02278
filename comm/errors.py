"""Errors of the communication layer, worded for the person who meets them inside a DDP traceback."""

from __future__ import annotations


class EspressoError(RuntimeError):
    """Something in the exchange of gradients failed; the job cannot go on with consistent replicas."""


class TopologyError(EspressoError):
    """The ranks do not form a cluster of even nodes, or the launcher's variables contradict each other."""


class UnsupportedModelError(EspressoError, TypeError):
    """The model or the way DDP is used cannot work with this hook; says what and what to do instead."""


class DisagreementError(EspressoError):
    """Ranks differ in something that must be equal: the model, the strategy or the configuration."""


class PeerError(EspressoError):
    """Another rank said that it failed; its own log has the cause."""


class LostRankError(EspressoError):
    """A rank did not come, or a message between iterations did not arrive; says whose fault it seems to be."""


class ProtocolError(EspressoError):
    """A message that no rank, worker or server of this version sends."""
