"""`python -m tests.simulation`: run many seeds, or tell the story of one."""

import multiprocessing
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tests.simulation.check import failure_of, kind_of, quiet, run_seed
from tests.simulation.scenario import Scenario, make_scenario
from tests.simulation.shrink import keep, load, shrink
from tests.simulation.world import World, simulate

FRESH_SEEDS_FROM = 1_000_000_000


def main(
    seeds: Annotated[str, typer.Option(help="A:B runs the seeds from A up to B.")] = "",
    fresh: Annotated[int, typer.Option(help="Run this many seeds that nobody has chosen: they begin at the time.")] = 0,
    seed: Annotated[int | None, typer.Option(help="Run one seed.")] = None,
    file: Annotated[Path | None, typer.Option(exists=True, help="Run one scenario that was kept.")] = None,
    trace: Annotated[bool, typer.Option(help="With --seed or --file: tell what happens.")] = False,
    minutes: Annotated[float | None, typer.Option(help="Stop after this time.")] = None,
    processes: Annotated[int, typer.Option(help="Run in this many processes.")] = os.cpu_count() or 1,
    save: Annotated[bool, typer.Option(help="Shrink failing scenarios and keep them as tests.")] = True,
) -> None:
    """Try to break the laws. Exits with 1 if a law was broken."""
    if seed is not None or file is not None:
        scenario = make_scenario(seed) if seed is not None else load(file or Path())
        raise typer.Exit(_tell(scenario, trace))
    if fresh:
        first = FRESH_SEEDS_FROM + int(time.time())
        wanted = range(first, first + fresh)
    else:
        parts = seeds.split(":")
        if len(parts) != 2 or not all(part.isdecimal() for part in parts) or int(parts[0]) >= int(parts[1]):
            typer.echo("say --seeds A:B (A below B), --fresh N, --seed N or --file FILE", err=True)
            raise typer.Exit(2)
        wanted = range(int(parts[0]), int(parts[1]))
    raise typer.Exit(_run_many(wanted, minutes, processes, save))


def _tell(scenario: Scenario, trace: bool) -> int:
    if not trace:
        failure = failure_of(scenario)
        print(f"seed {scenario.seed}: {failure or 'no law was broken'}")
        return int(failure is not None)
    try:
        world: World = simulate(scenario, story=True)
    except Exception:
        traceback.print_exc(file=sys.stdout)
        return 1
    print(f"seed {scenario.seed}: no law was broken in {world.num_events} events, {world.now:.3f} s")
    return 0


def _run_many(wanted: range, minutes: float | None, processes: int, save: bool) -> int:
    started = time.monotonic()
    failures: dict[int, str] = {}
    count = 0
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    context = multiprocessing.get_context("spawn")
    with context.Pool(processes, quiet) as pool, Progress(*columns, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("seeds", total=len(wanted))
        for seed, failure in pool.imap_unordered(run_seed, wanted, chunksize=8):
            count += 1
            progress.advance(task)
            if failure is not None:
                failures[seed] = failure
                progress.console.print(f"seed {seed}: {failure}", highlight=False)
            if minutes is not None and time.monotonic() - started > minutes * 60:
                break
    seconds = time.monotonic() - started
    print(
        f"seeds {wanted.start}:{wanted.start + count if count < len(wanted) else wanted.stop}: {count} run in "
        f"{seconds:.0f} s ({count / seconds * 60:.0f} a minute), {len(failures)} failed"
    )
    if save:
        _keep_failures(failures)
    return int(bool(failures))


def _keep_failures(failures: dict[int, str]) -> None:
    """One of each kind is shrunk and kept."""
    quiet()
    done: set[str | None] = set()
    for seed, failure in sorted(failures.items()):
        kind = kind_of(failure)
        if kind not in done:
            done.add(kind)
            small = shrink(make_scenario(seed), lambda scenario, kind=kind: kind_of(failure_of(scenario)) == kind)
            print(f"shrunk and kept: python -m tests.simulation --trace --file {os.path.relpath(keep(small))}")


if __name__ == "__main__":
    typer.run(main)
