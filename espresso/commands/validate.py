"""``espresso validate``: is this strategy file sound, and does it fit this job?"""

from pathlib import Path
from typing import Annotated

import typer

from espresso.commands._common import ExitStatus, JsonFlag, StrategyFile, emit_json, say, user_errors


@user_errors
def validate(
    strategy: StrategyFile,
    job: Annotated[Path | None, typer.Option("--job", help="Also check that it fits this job.", readable=False)] = None,
    json_output: JsonFlag = False,
) -> None:
    """Check a strategy file: keys, options, compressors and fingerprint; with --job, that it fits the job.

    Exit status: 0 if it is valid, 1 if not (the message names what is wrong).
    """
    from espresso.compressors.schedule import check_choices
    from espresso.model.job import Job
    from espresso.model.payload_sizes import compressed, offloaded
    from espresso.strategies import Strategy, StrategyError

    # A job that cannot be read is no verdict on the strategy, so it is read outside the try.
    loaded_job = None if job is None else Job.load(job)
    try:
        loaded = Strategy.load(strategy)
        check_choices(loaded)
        if loaded_job is not None:
            loaded.check_model(loaded_job.tensors, loaded_job.cluster)
    except StrategyError as error:
        if json_output:
            emit_json({"valid": False, "error": str(error)})
        else:
            say(f"error: {error}")
        raise typer.Exit(int(ExitStatus.FAILED)) from None
    if json_output:
        emit_json(
            {
                "valid": True,
                "error": None,
                "num_tensors": len(loaded.tensors),
                "num_compressed": len(compressed(loaded)),
                "num_offloaded": len(offloaded(loaded)),
                "num_nodes": loaded.cluster.num_nodes,
                "ranks_per_node": loaded.cluster.ranks_per_node,
                "fingerprint": loaded.fingerprint,
            }
        )
        return
    fits = "" if job is None else f", and fits {job}"
    typer.echo(
        f"{strategy} is valid{fits}: {len(loaded.tensors)} tensors, {len(compressed(loaded))} compressed,"
        f" {len(offloaded(loaded))} of them on the offload device, {loaded.cluster}"
    )
