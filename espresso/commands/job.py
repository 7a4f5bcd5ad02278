"""``espresso job``: a job from a published trace and a cluster preset."""

from pathlib import Path
from typing import Annotated

import typer

from espresso.commands._common import JsonFlag, check_output, emit_json, next_step, out, say, user_errors


@user_errors
def job(
    trace: Annotated[
        str,
        typer.Argument(
            help="bert_base, gpt2, lstm, ugatit, vgg16, or the path of a trace file (docs/cli.md).", show_default=False
        ),
    ],
    nodes: Annotated[int, typer.Option("--nodes", min=1, help="Machines.", show_default=False)],
    ranks_per_node: Annotated[int, typer.Option(min=1, help="Ranks on each machine.", show_default=False)],
    cluster: Annotated[
        str, typer.Option(help="nvlink-100g, pcie-25g, or the path of a cluster file.", show_default=False)
    ],
    servers: Annotated[int, typer.Option(min=0, help="Parameter servers beside the machines.")] = 0,
    servers_per_node: Annotated[int, typer.Option(min=0, help="Parameter servers on each of the machines.")] = 0,
    output: Annotated[Path, typer.Option("-o", "--output", help="The job file to write.")] = Path("job.json"),
    json_output: JsonFlag = False,
) -> None:
    """Make a job from a published backward trace and published costs, without running anything."""
    from espresso.model.presets import job_from_trace
    from espresso.show.report import human_bytes, human_us

    check_output(output)
    made = job_from_trace(trace, nodes, ranks_per_node, cluster, servers=servers, servers_per_node=servers_per_node)
    made.save(output)
    num_bytes = sum(tensor.num_bytes for tensor in made.tensors)
    if json_output:
        emit_json(
            {
                "job": str(output),
                "model": made.model,
                "mode": made.mode.value,
                "num_tensors": len(made.tensors),
                "num_bytes": num_bytes,
                "num_nodes": nodes,
                "ranks_per_node": ranks_per_node,
                "backward_us": made.backward_us,
                "source": made.source,
            }
        )
        return
    out().print(
        f"{made.model} on {made.cluster} ({cluster}): {len(made.tensors)} tensors, {human_bytes(num_bytes)},"
        f" backward {human_us(made.backward_us)}. Source: {made.source}",
        markup=False,
    )
    say(f"job written to {output}; {next_step(output)}")
