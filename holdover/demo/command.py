"""`holdover demo`: from the command line to a table, a report and JSON."""

import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from holdover.config import format_bytes, parse_bytes
from holdover.demo.model import VOCAB_SIZE, demo_model
from holdover.demo.report import FIGURES, write_report
from holdover.demo.run import DEVICE_SHARE, MODES, THINK_SCALE, DemoRun, Plan, figures, run
from holdover.demo.traffic import QUICK_SHRINK, SHRINK, demo_sessions
from holdover.errors import HoldoverError
from holdover.models.loader import SERVED_DTYPES
from holdover.traffic.command import write_json

FULL_TURNS, QUICK_TURNS, QUICK_AGENTS = 24, 8, 24


def run_demo(
    *,
    agents: int,
    quick: bool,
    check: bool,
    dtype: str,
    traffic: str,
    device_memory: str | None,
    json_file: str | None,
    report: str | None,
) -> None:
    """Run and report. Raises HoldoverError."""
    if dtype not in SERVED_DTYPES:
        raise HoldoverError(f"--dtype {dtype!r} is not served; use {' or '.join(SERVED_DTYPES)}.")
    quiet = json_file == "-"
    console = Console(stderr=quiet)
    report_path = Path(report or "holdover-demo.html")
    if not report_path.parent.is_dir():
        raise HoldoverError(f"--report {report_path}: there is no folder {report_path.parent}.")
    with console.status("making the demo's model (first use only)"):
        model = demo_model()
    agents = min(agents, QUICK_AGENTS) if quick else agents
    turns_each, shrink = (QUICK_TURNS, QUICK_SHRINK) if quick else (FULL_TURNS, SHRINK)
    sessions = demo_sessions(traffic, agents, turns_each, VOCAB_SIZE, shrink)
    device_bytes = parse_bytes(device_memory, "--device-memory") if device_memory else None
    plan = Plan(
        model,
        sessions,
        agents,
        shrink if traffic == "weka" else None,
        "float32" if check else dtype,
        device_bytes,
        check,
    )
    turns = sum(len(session.turns) for session in sessions)
    shrunk = f", tokens shrunk {shrink:g}-fold" if plan.shrink else ""
    console.print(
        f"[bold]holdover demo[/bold]: {agents} agents, {turns:,} turns of {traffic} traffic{shrunk}, "
        f"thinking {1 / THINK_SCALE:,.0f} times faster than recorded; {len(MODES)} modes, {plan.dtype}"
    )
    demo = _run_with_progress(plan, console)
    body = figures(demo)
    write_report(demo, body, report_path, " ".join(["holdover", *sys.argv[1:]]))
    if json_file:
        write_json(body, json_file)
    console.print(result_table(body))
    console.print(summary(demo, body), soft_wrap=True)
    console.print(f"report: {report_path}", soft_wrap=True)
    if body["outputs_identical"] is False:
        raise HoldoverError("the modes' outputs differ: this is a bug; please report it with the JSON file.")


def _run_with_progress(plan: Plan, console: Console) -> DemoRun:
    columns = (
        TextColumn("{task.description:>12}"), BarColumn(), MofNCompleteColumn(), TextColumn("turns"),
        TimeElapsedColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True) as bar:
        tasks: dict[str, Any] = {}

        def progress(phase: str, done: int, total: int) -> None:
            if phase not in tasks:
                tasks[phase] = bar.add_task(phase, total=total)
            bar.update(tasks[phase], completed=done)

        return run(plan, progress)


def result_table(body: dict[str, Any]) -> Table:
    """The modes side by side, one column each: it fits a terminal of 80 columns."""
    table = Table(title_justify="left")
    table.add_column("")
    for mode in body["modes"]:
        table.add_column(mode, justify="right", style="green" if mode == "holdover" else None)
    for label, text in FIGURES.items():
        table.add_row(label, *(text(row) for row in body["modes"].values()))
    return table


def summary(demo: DemoRun, body: dict[str, Any]) -> str:
    """What the table means, in a few lines."""
    speed = body["speedup"]
    share = f"1/{DEVICE_SHARE}"
    if demo.device_budget_bytes != demo.working_set_bytes // DEVICE_SHARE:
        share = "as given" if demo.plan.device_bytes else f"more than 1/{DEVICE_SHARE}, for two of the longest requests"
    identical = {None: "not checked (--check)", True: "yes", False: "NO"}[body["outputs_identical"]]
    return (
        f"device budget {format_bytes(demo.device_budget_bytes)} of a working set of "
        f"{format_bytes(demo.working_set_bytes)} ({share}); memory tier "
        f"{format_bytes(demo.tier_bytes)}\n"
        f"[bold]{speed['vs_recompute']:.2f} times[/bold] the turns/hour of recompute, {speed['vs_resave']:.2f} times "
        f"those of resave, {speed['of_unlimited']:.0%} of unlimited\n"
        f"reuse efficiency {body['reuse_efficiency']:.4f}; write amplification {body['write_amplification']:.4f}; "
        f"copies {body['copies']}; outputs identical: {identical}"
    )
