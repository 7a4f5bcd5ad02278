"""``espresso explain``: what a strategy file does, in words."""

from espresso.commands._common import JsonFlag, StrategyFile, emit_json, out, user_errors, working


@user_errors
def explain(
    strategy: StrategyFile,
    json_output: JsonFlag = False,
) -> None:
    """Show what a strategy does: tensors with equal choices, and their pipeline step by step."""
    from espresso.compressors import create
    from espresso.compressors.schedule import check_choices
    from espresso.model.payload_sizes import compressed, offloaded
    from espresso.show.explain import explain as explain_groups
    from espresso.show.report import human_bytes, pipeline_heading, pipeline_table
    from espresso.strategies import Strategy

    with working(f"Reading {strategy}"):
        loaded = Strategy.load(strategy)
        check_choices(loaded)
        groups = explain_groups(loaded)
    if json_output:
        emit_json(
            {
                "num_nodes": loaded.cluster.num_nodes,
                "ranks_per_node": loaded.cluster.ranks_per_node,
                "partition_bytes": loaded.partition_bytes,
                "bucket_cap_mb": loaded.bucket_cap_mb,
                "gain_scale": loaded.gain_scale,
                "num_tensors": len(loaded.tensors),
                "num_compressed": len(compressed(loaded)),
                "num_offloaded": len(offloaded(loaded)),
                "groups": [group.to_json() for group in groups],
                "notes": dict(loaded.notes),
            }
        )
        return
    console = out()
    limit = loaded.partition_bytes
    cut = f"cut into partitions of at most {human_bytes(limit)}" if limit else "never cut into partitions"
    console.print(
        f"{len(loaded.tensors)} tensors on {loaded.cluster}: {len(compressed(loaded))} compressed,"
        f" {len(offloaded(loaded))} on the offload pool; {cut}"
    )
    if loaded.bucket_cap_mb is not None:
        console.print(f"DDP's buckets are to hold up to {loaded.bucket_cap_mb:g} MB")
    specs = dict.fromkeys(loaded.choices[tensor.name].compressor for tensor in compressed(loaded))
    corrected = any(create(spec).correction for spec in specs)  # is defined with a gain of 1, for all of them
    for spec in () if corrected else specs:
        traits = create(spec).traits
        gain, usual = traits.gain_at(loaded.gain_scale), traits.feedback_gain
        if gain != usual:
            console.print(f"the feedback gain of {spec} is {gain / usual:g} times the usual, by the job's optimizer")
    for key, value in loaded.notes.items():
        if isinstance(value, dict):
            continue  # the terms it was searched under are for programs
        shown = f"{value:.{1 if value >= 10 else 3}f}" if isinstance(value, float) else value
        console.print(f"{key}: {shown}", markup=False)
    for number, group in enumerate(groups, start=1):
        console.print()
        console.print(pipeline_heading(group, number), markup=False)
        console.print(pipeline_table(group))
    console.print(
        "\nSent: about, on average over the ranks, headers included. Residual: what error feedback keeps"
        " at that place for the next iteration."
    )
