"""`holdover replay`: from the command line to a report."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from holdover.errors import HoldoverError, TraceError
from holdover.loop import run_async
from holdover.traffic.importers import BlockTokens, load_trace
from holdover.traffic.replay import ReplayOptions, TurnResult, replay, server_model
from holdover.traffic.report import summarise, table
from holdover.traffic.trace import Session

DEFAULT_VOCAB_SIZE = 32_000


def write_json(body: dict[str, Any], target: str) -> None:
    """Write a report to a file, or to standard output for "-". Raises HoldoverError."""
    text = json.dumps(body, indent=2)
    if target == "-":
        sys.stdout.write(text + "\n")
        return
    try:
        Path(target).write_text(text + "\n")
    except OSError as error:
        raise HoldoverError(f"can't write {target}: {error.strerror}.") from None


def run_replay(
    trace: Path,
    *,
    url: str,
    agents: int,
    think_scale: float,
    think_limit: float | None,
    shrink: float,
    sessions: int | None,
    turns: int | None,
    seconds: float | None,
    model: str | None,
    vocab_size: int | None,
    fixed_length: bool,
    json_file: str | None,
) -> None:
    """Replay and report. An interrupted replay reports what it has. Raises HoldoverError."""
    key = os.environ.get("OPENAI_API_KEY")
    offered = run_async(server_model(url, key))
    blocks = BlockTokens(vocab_size or int(offered.get("vocab_size") or DEFAULT_VOCAB_SIZE), shrink)
    loaded = [session.part(0, turns or len(session.turns)) for session in load_trace(trace, blocks, sessions)]
    options = ReplayOptions(
        agents=agents,
        think_scale=think_scale,
        think_limit=think_limit,
        model=model or str(offered["id"]),
        fixed_length=fixed_length,
        api_key=key,
        seconds=seconds,
    )
    results: list[TurnResult] = []
    begin = time.perf_counter()
    interrupted = _run(loaded, url, options, results)
    report = summarise(
        results,
        time.perf_counter() - begin,
        trace.name,
        {
            "agents": agents,
            "think_scale": think_scale,
            "think_limit": think_limit,
            "shrink": shrink,
            "url": url,
            "interrupted": interrupted,
        },
    )
    if json_file != "-":
        Console().print(table(report))
    if json_file:
        write_json(report, json_file)
    if not report["turns"]:
        raise TraceError(f"no turn ended well; the first error was: {report['first_error']}")


def _run(sessions: list[Session], url: str, options: ReplayOptions, results: list[TurnResult]) -> bool:
    """Replays with a progress bar; True if it was interrupted."""
    total = sum(len(session.turns) for session in sessions)
    columns = (
        TextColumn("replaying"), BarColumn(), MofNCompleteColumn(), TextColumn("turns"), TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total, note="")
        failed = 0

        def ended(result: TurnResult) -> None:
            nonlocal failed
            failed += result.error is not None
            bar.update(task, advance=1, note=f"{failed} failed" if failed else "")

        try:
            run_async(replay(sessions, url, options, ended, results))
        except KeyboardInterrupt:
            return True
    return False
