"""``espresso links``, under torchrun or mpirun: measure every routine on every scope, and print the fit."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from espresso.commands._common import (
    ExitStatus,
    JsonFlag,
    UserError,
    check_output,
    emit_json,
    out,
    say,
    user_errors,
    working,
)

if TYPE_CHECKING:
    from espresso.model.links import Links
    from espresso.strategies import Cluster

EXAMPLE = "torchrun --nproc-per-node 2 -m espresso links"


@user_errors
def links(
    ranks_per_node: Annotated[
        int | None,
        typer.Option(min=1, help="Ranks that count as one node; found out by itself.", show_default=False),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="Also write a cluster file for espresso job.", show_default=False),
    ] = None,
    json_output: JsonFlag = False,
) -> None:
    """Measure the links between the ranks. Start it on all of them: torchrun … -m espresso links."""
    from espresso.comm.environment import export_environment
    from espresso.comm.errors import EspressoError, TopologyError
    from espresso.compressors.cuda import CudaUnavailableError

    try:
        launch = export_environment()
    except TopologyError as error:
        raise UserError(str(error), ExitStatus.USAGE) from None
    if launch is None:
        raise UserError(f"no launcher started this process; use, for example: {EXAMPLE}", ExitStatus.USAGE)
    if launch.world_size < 2:
        raise UserError(f"one rank has no links; start at least two, for example: {EXAMPLE}", ExitStatus.USAGE)
    if launch.rank == 0:
        check_output(output)
    try:
        cluster, measured, taken = _measure(launch.local_rank, ranks_per_node, shown=launch.rank == 0)
    except (EspressoError, CudaUnavailableError) as error:
        raise UserError(str(error)) from None
    if launch.rank == 0:
        _print(cluster, measured, taken, output, json_output)


def _measure(local_rank: int, ranks_per_node: int | None, *, shown: bool) -> "tuple[Cluster, Links, dict[str, float]]":
    """The cluster, its links and the cores that they take, on every rank; progress where ``shown``."""
    import torch
    import torch.distributed as dist

    from espresso.comm.groups import Groups
    from espresso.live.profiler import measure_links
    from espresso.live.runtime import runtime_of

    has_gpu = torch.cuda.is_available()
    if has_gpu:
        torch.cuda.set_device(local_rank % torch.cuda.device_count())
    runtime = runtime_of(torch.device("cuda", torch.cuda.current_device()) if has_gpu else torch.device("cpu"))
    try:
        dist.init_process_group("cpu:gloo,cuda:nccl" if has_gpu else "gloo")
    except (ValueError, RuntimeError) as error:  # no MASTER_ADDR, or its port is taken
        raise UserError(f"the ranks do not find each other: {error}") from None
    try:
        groups = Groups(ranks_per_node=ranks_per_node, host_copies=runtime.host_copies)
        try:
            with working(f"Measuring {groups.cluster}", shown=shown) as progress:
                return groups.cluster, *measure_links(groups, progress=progress.describe, place=runtime.place)
        finally:
            groups.close()
    finally:
        dist.destroy_process_group()


def _print(
    cluster: "Cluster", measured: "Links", taken: dict[str, float], output: Path | None, json_output: bool
) -> None:
    from espresso.show.report import link_rows, links_table

    rows = link_rows(measured.curves, cluster)
    body = {
        "num_nodes": cluster.num_nodes,
        "ranks_per_node": cluster.ranks_per_node,
        "links": rows,
        "comm_cpu": taken,
    }
    if output is not None:
        from espresso.model.presets import measured_cluster
        from espresso.strategies.fields import save

        written = measured_cluster(measured.curves, cluster, body, measured.in_flight)
        save(output, written)
        say(f"cluster file written to {output}; next: espresso job TRACE --cluster {output} …")
    if json_output:
        emit_json(body)
        return
    console = out()
    console.print(links_table(rows))
    console.print(
        f"{cluster}. Sizes are those of the whole array: what is reduced, or what all ranks hold together"
        " after a gather. Latency is that of a whole call; bandwidth is what one link carries."
    )
