"""The demo's report: one HTML file that needs no network."""

import html
from collections.abc import Callable
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs
from plotly.subplots import make_subplots

from holdover.config import format_bytes
from holdover.demo.run import DemoRun
from holdover.errors import HoldoverError

COLOURS = {"recompute": "#b0413e", "resave": "#d9963b", "holdover": "#2a7f62", "unlimited": "#8a8f98"}
MEANING = {
    "recompute": "prefix reuse on the device only; what falls out is lost",
    "resave": "each session saves its own copy, the whole of it at every turn",
    "holdover": "one copy per shared prefix; each turn saves only what is new",
    "unlimited": "device memory that holds everything: the ceiling",
}
FIGURES: dict[str, Callable[[dict[str, Any]], str]] = {
    "turns/hour": lambda row: f"{row['turns_per_hour']:,.0f}",
    "output tokens/s": lambda row: f"{row['output_tokens_per_second']:,.1f}",
    "prompt tokens": lambda row: f"{row['prompt_tokens']:,}",
    "computed": lambda row: f"{row['prompt_tokens_computed']:,}",
    "saved": lambda row: format_bytes(row["bytes_saved"]),
    "new state": lambda row: format_bytes(row["bytes_new_state"]),
    "copies": lambda row: f"{row['max_copies']:,}",
    "TTFT p50": lambda row: f"{row['ttft_ms']['p50']:,.0f} ms",
    "TTFT p95": lambda row: f"{row['ttft_ms']['p95']:,.0f} ms",
}
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Holdover demo</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; color: #222; }}
table {{ border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }}
th, td {{ padding: .35rem .6rem; text-align: right; border-bottom: 1px solid #ddd; }}
th:first-child, td:first-child {{ text-align: left; }}
tr.holdover {{ background: #eaf5f0; font-weight: 600; }}
.headline {{ display: flex; gap: 1rem; flex-wrap: wrap; }}
.headline div {{ flex: 1 1 8rem; background: #f5f6f7; border-radius: .5rem; padding: .8rem 1rem; }}
.headline b {{ display: block; font-size: 1.7rem; }}
code {{ background: #f1f1f1; padding: .1rem .3rem; border-radius: .2rem; }}
</style><script>{plotly}</script></head><body>
<h1>Holdover demo</h1>
<p>{what}</p>
<div class="headline">{headline}</div>
<h2>Side by side</h2>{table}
<h2>Over the run</h2>{figure}
<p>Made by <code>{command}</code></p>
</body></html>
"""


def write_report(demo: DemoRun, body: dict[str, Any], path: Path, command: str) -> None:
    """Write the report. Raises HoldoverError if it can't be written."""
    speed = body["speedup"]
    headline = "".join(
        f"<div><b>{value}</b>{name}</div>"
        for value, name in (
            (f"{speed['vs_recompute']:.2f}×", "the turns per hour of recompute"),
            (f"{speed['vs_resave']:.2f}×", "those of resave"),
            (f"{speed['of_unlimited']:.0%}", "of unlimited device memory"),
            (f"{body['reuse_efficiency']:.2%}", "of reusable prompt tokens reused"),
            (f"{body['write_amplification']:.3f}", "bytes written per byte of new state"),
            (f"{body['copies']}", "copies of a prefix at most"),
        )
    )
    shrunk = f" (tokens shrunk {demo.plan.shrink:g}-fold)" if demo.plan.shrink else ""
    what = (
        f"{body['agents']} agents, {body['turns']:,} turns of recorded traffic{shrunk}, model "
        f"{html.escape(body['model'])}, device budget {format_bytes(demo.device_budget_bytes)} of a working set of "
        f"{format_bytes(demo.working_set_bytes)}, memory tier {format_bytes(demo.tier_bytes)}. All modes run the same "
        "sessions with the same weights through the real server, slice by slice in turn."
    )
    page = PAGE.format(
        plotly=get_plotlyjs(),
        what=what,
        headline=headline,
        table=_table(body),
        figure=_figure(demo, body).to_html(full_html=False, include_plotlyjs=False),
        command=html.escape(command),
    )
    try:
        path.write_text(page)
    except OSError as error:
        raise HoldoverError(f"can't write the report {path}: {error.strerror}.") from None


def _table(body: dict[str, Any]) -> str:
    rows = []
    for mode, row in body["modes"].items():
        cells = (f"{mode}<br><small>{MEANING[mode]}</small>", *(text(row) for text in FIGURES.values()))
        rows.append(f'<tr class="{mode}">' + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    heads = "".join(f"<th>{head}</th>" for head in ("mode", *FIGURES))
    return f"<table><tr>{heads}</tr>{''.join(rows)}</table>"


def _figure(demo: DemoRun, body: dict[str, Any]) -> go.Figure:
    titles = ("Turns per hour", "Prompt tokens computed, over turns", "Bytes saved, over turns")
    figure = make_subplots(rows=1, cols=3, subplot_titles=titles)
    names = list(body["modes"])
    figure.add_bar(
        x=names,
        y=[body["modes"][mode]["turns_per_hour"] for mode in names],
        marker_color=[COLOURS[mode] for mode in names],
        showlegend=False,
        row=1,
        col=1,
    )
    for mode, run in demo.modes.items():
        assert run.counts is not None
        samples = [*run.samples, (len(run.results), run.counts.prompt_tokens_computed, run.counts.bytes_saved)]
        for column, value in ((2, 1), (3, 2)):
            figure.add_scatter(
                x=[sample[0] for sample in samples],
                y=[sample[value] for sample in samples],
                name=mode,
                legendgroup=mode,
                showlegend=column == 2,
                line_color=COLOURS[mode],
                row=1,
                col=column,
            )
    figure.update_layout(height=420, margin={"l": 40, "r": 20, "t": 50, "b": 40}, legend={"orientation": "h"})
    return figure
