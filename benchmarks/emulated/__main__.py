"""``python -m benchmarks.emulated --hosts 2 --workers 1 --rate 1gbit --pin -- python script.py args``."""

import json
import logging
import sys
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.emulated import (
    BulkRate,
    DeadlineError,
    Distance,
    Network,
    WorkerError,
    format_rate,
    measure_bulk_rate,
    measure_round_trip,
    open_network,
    remove_leftovers,
    run_workers,
)

app = typer.Typer(pretty_exceptions_enable=False)


def _describe(rates: tuple[BulkRate, ...]) -> str:
    parts = []
    for rate in rates:
        verdict = "" if rate.limit_bps is None else (" ok" if rate.is_verified else " NOT as asked")
        parts.append(f"{rate.sender}->{rate.receiver} {format_rate(rate.payload_bps)}{verdict}")
    return ", ".join(parts)


def _as_json(network: Network, rates: tuple[BulkRate, ...], tx_bytes: list[int]) -> str:
    return json.dumps(
        {
            "hosts": len(network.hosts),
            "rate_bps": network.rate_bps,
            "why_unlimited": network.why_unlimited,
            "bulk_bps": [rate.payload_bps for rate in rates],
            "verified": all(rate.is_verified for rate in rates),
            "tx_bytes": tx_bytes,
        }
    )


@app.command()
def main(
    command: Annotated[list[str] | None, typer.Argument(help="The worker's command, after --.")] = None,
    hosts: Annotated[int, typer.Option(help="How many hosts.")] = 2,
    workers: Annotated[int, typer.Option(help="Workers per host.")] = 1,
    rate: Annotated[str, typer.Option(help="Each host's egress limit.")] = "1gbit",
    rtt_ms: Annotated[float, typer.Option(help="Round trip between hosts far apart; 0: one local network.")] = 0.0,
    jitter_ms: Annotated[float, typer.Option(help="Up to this much more each way (with --rtt-ms).")] = 0.0,
    loss: Annotated[float, typer.Option(help="Part of the packets that is lost (with --rtt-ms).")] = 0.0,
    congestion: Annotated[str, typer.Option(help="TCP's congestion control (with --rtt-ms).")] = "cubic",
    pin: Annotated[bool, typer.Option(help="Pin each host to one core.")] = False,
    deadline: Annotated[float, typer.Option(help="Seconds until workers that still run are killed.")] = 600.0,
    check: Annotated[bool, typer.Option(help="Verify the bulk rate first.")] = True,
    clean: Annotated[bool, typer.Option("--clean", help="Remove what killed runs left behind.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end.")] = False,
) -> None:
    """Run a command as workers on emulated hosts."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    console = Console(stderr=True, highlight=False)
    if clean:
        console.print(f"removed: {', '.join(remove_leftovers()) or 'nothing was left'}")
        return
    if not command:
        raise typer.BadParameter("give the worker's command after --")
    try:
        distance = Distance(rtt_ms, jitter_ms, loss, congestion=congestion) if rtt_ms else None
        with open_network(hosts, rate, distance=distance) as network:
            rates = measure_bulk_rate(network) if check else ()
            if rates:
                console.print(f"bulk rate: {_describe(rates)}")
            if check and distance is not None and hosts > 1:
                console.print(f"round trip: {measure_round_trip(network):.1f} ms")
            before = [host.tx_bytes() for host in network.hosts]
            run_workers(network, command, workers_per_host=workers, pin=pin, deadline_s=deadline)
            sent = [host.tx_bytes() - start for host, start in zip(network.hosts, before, strict=True)]
            console.print("sent by each host: " + ", ".join(f"{size / 1e6:.2f} MB" for size in sent))
            if as_json:
                sys.stdout.write(_as_json(network, rates, sent) + "\n")
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    except (WorkerError, DeadlineError) as error:
        console.print(str(error), style="red")
        raise typer.Exit(1) from None


if __name__ == "__main__":
    app()
