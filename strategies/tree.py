"""The decision tree: every option of Espresso's search space, generated from its grammar.

The grammar (EuroSys '23, section 4.2), with two devices for each Comp and Dec::

    T1 (2nd intra, raw)        = Comm2 | Comp > Comm2c > Dec
    T2 (2nd intra, compressed) = Comm2c > Dec | Dec > T1
    T5 (2nd inter, raw)        = Comm2 > T1 | Comp > Comm2c > T2
    T3 (inter, raw)            = Comm > T1 | Comm1 > T5
    T4 (inter, compressed)     = Commc > T2 | Comm1c > Comm2c > T2 | Comm1c > Dec > T5
    Flat = Comm | Comm1 > T1 | Comp > Commc > Dec | Comp > Comm1c > T2
    Hier = Comm1 > T3 | Comm1 > Comp > T4 | Comp > Comm1c > { T4 | Dec > T3 | Dec > Comp > T4 }

which has 63 flat and 4278 hierarchical leaves, the paper's 4341. Beside it stands an extension for
*summable* compressors: compress, any raw pipeline over the payload, decompress; for those of two rounds
(PowerSGD) compress, a pipeline, transform, the same pipeline again, decompress. Both are counted apart.
So are the *parameter-server* leaves, where the cluster has servers::

    Raw     = push > sum@server > pull
    One-way = Comp > push > dec@server > pull
    Two-way = Comp > push > dec@server > comp@server > pull > Dec
    Leaf    = Raw | One-way | Two-way                                                      (flat)
            | intra.reduce_scatter[:fp16] > { Raw | One-way | Two-way } > intra.allgather  (hierarchical)
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from espresso.strategies.cluster import Cluster
from espresso.strategies.fields import shown
from espresso.strategies.option import (
    Device,
    Form,
    Option,
    Phase,
    Routine,
    Scope,
    Step,
    aggregate,
    communicate,
    compress,
    decompress,
    transform,
)

Tail = tuple[Step, ...]

_BOTH = (Device.TRAINING, Device.OFFLOAD)
_SECOND_OF = {
    Routine.REDUCE_SCATTER: Routine.ALLGATHER,
    Routine.REDUCE: Routine.BROADCAST,
    Routine.ALL_TO_ALL: Routine.ALLGATHER,
    Routine.GATHER: Routine.BROADCAST,
}
_RAW_FIRSTS = (Routine.REDUCE_SCATTER, Routine.REDUCE)
_PAYLOAD_FIRSTS = (Routine.ALL_TO_ALL, Routine.GATHER)


class _Grammar:
    """The productions above, for one set of devices; each returns every tail it derives.

    ``second`` arguments name the routine that the first step of that scope has fixed.
    """

    def __init__(self, devices: tuple[Device, ...]) -> None:
        self.comps = tuple((compress(device),) for device in devices)
        self.decs = tuple((decompress(device),) for device in devices)

    def t1(self, scope: Scope, second: Routine) -> list[Tail]:
        return [_second(second, scope), *_product(self.comps, [_second(second, scope, Form.PAYLOAD)], self.decs)]

    def t2(self, scope: Scope, second: Routine) -> list[Tail]:
        packed = _second(second, scope, Form.PAYLOAD)
        return [*_product([packed], self.decs), *_product(self.decs, self.t1(scope, second))]

    def t5(self, inter_second: Routine, intra_second: Routine) -> list[Tail]:
        raw, packed = _second(inter_second, Scope.INTER), _second(inter_second, Scope.INTER, Form.PAYLOAD)
        return [
            *_product([raw], self.t1(Scope.INTRA, intra_second)),
            *_product(self.comps, [packed], self.t2(Scope.INTRA, intra_second)),
        ]

    def t3(self, intra_second: Routine) -> list[Tail]:
        whole = (communicate(Routine.ALLREDUCE, Scope.INTER, Phase.WHOLE, Form.RAW),)
        leaves = _product([whole], self.t1(Scope.INTRA, intra_second))
        for first in _RAW_FIRSTS:
            step = (communicate(first, Scope.INTER, Phase.FIRST, Form.RAW),)
            leaves += _product([step], self.t5(_SECOND_OF[first], intra_second))
        return leaves

    def t4(self, intra_second: Routine) -> list[Tail]:
        whole = (communicate(Routine.ALLGATHER, Scope.INTER, Phase.WHOLE, Form.PAYLOAD),)
        t2 = self.t2(Scope.INTRA, intra_second)
        leaves = _product([whole], t2)
        for first in _PAYLOAD_FIRSTS:
            step = (communicate(first, Scope.INTER, Phase.FIRST, Form.PAYLOAD),)
            back = _second(_SECOND_OF[first], Scope.INTER, Form.PAYLOAD)
            leaves += _product([step], [back], t2)
            leaves += _product([step], self.decs, self.t5(_SECOND_OF[first], intra_second))
        return leaves

    def flat(self) -> list[Tail]:
        leaves: list[Tail] = [(communicate(Routine.ALLREDUCE, Scope.FLAT, Phase.WHOLE, Form.RAW),)]
        for first in _RAW_FIRSTS:
            step = (communicate(first, Scope.FLAT, Phase.FIRST, Form.RAW),)
            leaves += _product([step], self.t1(Scope.FLAT, _SECOND_OF[first]))
        whole = (communicate(Routine.ALLGATHER, Scope.FLAT, Phase.WHOLE, Form.PAYLOAD),)
        leaves += _product(self.comps, [whole], self.decs)
        for first in _PAYLOAD_FIRSTS:
            step = (communicate(first, Scope.FLAT, Phase.FIRST, Form.PAYLOAD),)
            leaves += _product(self.comps, [step], self.t2(Scope.FLAT, _SECOND_OF[first]))
        return leaves

    def hierarchical(self) -> list[Tail]:
        leaves: list[Tail] = []
        for first in _RAW_FIRSTS:
            step = (communicate(first, Scope.INTRA, Phase.FIRST, Form.RAW),)
            leaves += _product([step], self.t3(_SECOND_OF[first]))
            leaves += _product([step], self.comps, self.t4(_SECOND_OF[first]))
        for first in _PAYLOAD_FIRSTS:
            step = (communicate(first, Scope.INTRA, Phase.FIRST, Form.PAYLOAD),)
            second = _SECOND_OF[first]
            leaves += _product(self.comps, [step], self.t4(second))
            leaves += _product(self.comps, [step], self.decs, self.t3(second))
            leaves += _product(self.comps, [step], self.decs, self.comps, self.t4(second))
        return leaves


def _second(routine: Routine, scope: Scope, form: Form = Form.RAW) -> Tail:
    return (communicate(routine, scope, Phase.SECOND, form),)


def _product(*parts: Iterable[Tail]) -> list[Tail]:
    """Every concatenation of one tail from each part, in order."""
    tails: list[Tail] = [()]
    for part in parts:
        part = tuple(part)
        tails = [head + tail for head in tails for tail in part]
    return tails


@cache
def flat_options(devices: tuple[Device, ...] = _BOTH) -> tuple[Option, ...]:
    """The options without intra and inter steps: 63 with both devices, 12 with one."""
    return tuple(map(Option, _Grammar(devices).flat()))


@cache
def hierarchical_options(devices: tuple[Device, ...] = _BOTH) -> tuple[Option, ...]:
    """The options over intra and inter steps: 4278 with both devices, 162 with one."""
    return tuple(map(Option, _Grammar(devices).hierarchical()))


@cache
def summable_options(hierarchical: bool, devices: tuple[Device, ...] = _BOTH) -> tuple[Option, ...]:
    """The extension: compress, a raw pipeline over the payload, decompress.

    Nine raw pipelines on a hierarchical cluster, three on a flat one, times the devices of both ends.
    """
    comps, decs = _summable_ends(devices)
    pipelines = _value_pipelines(hierarchical, devices)
    return tuple(Option(leaf) for pipeline in pipelines for leaf in _product(comps, [pipeline], decs))


@cache
def round_options(hierarchical: bool, devices: tuple[Device, ...] = _BOTH) -> tuple[Option, ...]:
    """The extension for two rounds: the same raw pipeline over both vectors, a transform step between.

    Nine raw pipelines on a hierarchical cluster, three on a flat one, times the devices of the three steps:
    72 and 24 with both devices, 9 and 3 with one.
    """
    (comps, decs), between = _summable_ends(devices), [(transform(device),) for device in devices]
    pipelines = _value_pipelines(hierarchical, devices)
    return tuple(Option(leaf) for once in pipelines for leaf in _product(comps, [once], between, [once], decs))


def _summable_ends(devices: tuple[Device, ...]) -> tuple[list[Tail], list[Tail]]:
    comps: list[Tail] = [(compress(device, Form.SUMMABLE),) for device in devices]
    return comps, [(decompress(device, Form.SUMMABLE),) for device in devices]


def _value_pipelines(hierarchical: bool, devices: tuple[Device, ...]) -> list[Tail]:
    """The raw pipelines, over a summable payload's numbers."""
    pipelines = [option for option in flat_options(devices) if not option.is_compressed]
    if hierarchical:
        pipelines += [option for option in hierarchical_options(devices) if not option.is_compressed]
    return [
        tuple(Step(s.kind, Form.SUMMABLE, None, s.routine, s.scope, s.phase) for s in pipeline.steps)
        for pipeline in pipelines
    ]


def compressed_options(
    cluster: Cluster,
    devices: tuple[Device, ...] = _BOTH,
    *,
    summable: bool = False,
    rounds: int = 1,
) -> tuple[Option, ...]:
    """The options that a compressor of these traits can take; one of several rounds has no payload of its own."""
    if rounds > 1:
        return round_options(cluster.is_hierarchical, devices)
    return tuple(option for option in options_for(cluster, devices=devices, summable=summable) if option.is_compressed)


@cache
def server_options(hierarchical: bool, devices: tuple[Device, ...] = _BOTH) -> tuple[Option, ...]:
    """The parameter-server leaves: 7 flat ones with both devices, 3 with one; three times as many hierarchically."""
    leaves = _through_servers(Scope.FLAT, devices)
    if hierarchical:
        back = _second(Routine.ALLGATHER, Scope.INTRA)
        for form in (Form.RAW, Form.HALF):
            first = (communicate(Routine.REDUCE_SCATTER, Scope.INTRA, Phase.FIRST, form),)
            leaves += _product([first], _through_servers(Scope.INTER, devices), [back])
    return tuple(map(Option, leaves))


@cache
def halved_options(devices: tuple[Device, ...] = _BOTH) -> tuple[Option, ...]:
    """The extension: two-way between nodes, as BytePS-Compress, where numbers inside a node travel as fp16.

    Sixteen with both devices, one with one.
    """
    first = (communicate(Routine.REDUCE_SCATTER, Scope.INTRA, Phase.FIRST, Form.HALF),)
    shuffle = (communicate(Routine.ALL_TO_ALL, Scope.INTER, Phase.FIRST, Form.PAYLOAD),)
    comps, decs = [(compress(device),) for device in devices], [(decompress(device),) for device in devices]
    gather, back = _second(Routine.ALLGATHER, Scope.INTER, Form.PAYLOAD), _second(Routine.ALLGATHER, Scope.INTRA)
    return tuple(map(Option, _product([first], comps, [shuffle], decs, comps, [gather], decs, [back])))


def two_way_option(cluster: Cluster, *, halves: bool = False) -> Option:
    """Compressed both ways, on the training device: BytePS-Compress as a leaf, through servers where there are any.

    Args:
        halves: whether numbers inside a node travel as fp16.
    """
    there, back = "comp > {0}.push > dec@server", "comp@server > {0}.pull > dec"
    if not cluster.num_servers:
        there, back = "comp > {0}.all_to_all > dec", "comp > {0}.allgather > dec"
    if not cluster.is_hierarchical:
        return parse_option(f"{there} > {back}".format("flat"))
    inside = "intra.reduce_scatter:fp16" if halves else "intra.reduce_scatter"
    return parse_option(f"{inside} > {there} > {back} > intra.allgather".format("inter"))


def _through_servers(scope: Scope, devices: tuple[Device, ...]) -> list[Tail]:
    """Raw, one-way and two-way, as the ranks of ``scope`` exchange their regions through the servers."""
    comps = [(compress(device),) for device in devices]
    decs = [(decompress(device),) for device in devices]
    push = {form: (communicate(Routine.PUSH, scope, Phase.FIRST, form),) for form in Form}
    pull = {form: (communicate(Routine.PULL, scope, Phase.SECOND, form),) for form in Form}
    decode = (decompress(Device.SERVER),)
    return [
        *_product([push[Form.RAW]], [(aggregate(Device.SERVER),)], [pull[Form.RAW]]),
        *_product(comps, [push[Form.PAYLOAD]], [decode], [pull[Form.RAW]]),
        *_product(comps, [push[Form.PAYLOAD]], [decode], [(compress(Device.SERVER),)], [pull[Form.PAYLOAD]], decs),
    ]


def options_for(
    cluster: Cluster,
    *,
    devices: tuple[Device, ...] = _BOTH,
    summable: bool = False,
) -> tuple[Option, ...]:
    """Every option that ``cluster`` can carry out, through its servers too; with ``summable``, the extension's.

    But for those whose numbers travel as fp16 inside a node: nothing keeps what that rounds away, no budget counts it.
    """
    options = flat_options(devices)
    if cluster.is_hierarchical:
        options += hierarchical_options(devices)
    if summable:
        options += summable_options(cluster.is_hierarchical, devices)
    if cluster.num_servers:
        options += tuple(option for option in server_options(cluster.is_hierarchical, devices) if not option.halves)
    return options


@cache
def _common_by_id() -> dict[str, Option]:
    """Ids of what most strategies and all baselines use: a twentieth of the tree, found in a twentieth of the time."""
    device = (Device.TRAINING,)
    usual = flat_options(device) + hierarchical_options(device) + server_options(True, device)
    return {str(option): option for option in usual}


@cache
def _by_id() -> dict[str, Option]:
    every = flat_options() + hierarchical_options() + halved_options()
    every += summable_options(True) + round_options(True) + server_options(True)
    return {str(option): option for option in every}


def parse_option(text: str) -> Option:
    """The option with this id.

    Raises:
        ValueError: no leaf of the tree has it; the message says where the nearest prefix ends.
    """
    option = _common_by_id().get(text) or _by_id().get(text)
    if option is not None:
        return option
    raise ValueError(f"unknown option {shown(text)}: {_where_it_leaves_the_tree(text)}")


def _where_it_leaves_the_tree(text: str) -> str:
    words = text.split(" > ")
    known = [identifier.split(" > ") for identifier in _by_id()]
    for length in range(min(len(words), max(map(len, known))), 0, -1):
        followers = {
            word[length] if len(word) > length else "<end>" for word in known if word[:length] == words[:length]
        }
        if followers:
            return f"after {' > '.join(words[:length])!r} the tree allows {', '.join(sorted(followers))}"
    return f"an option starts with one of {', '.join(sorted({word[0] for word in known}))}"
