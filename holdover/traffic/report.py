"""What a replay measured."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.table import Table

from holdover.traffic.replay import TurnResult

PERCENTILES = (50, 95, 99)


def percentiles(values: Sequence[float]) -> dict[str, float | None]:
    """p50, p95 and p99 in milliseconds of values in seconds; None where there are none."""
    if not values:
        return {f"p{p}": None for p in PERCENTILES}
    points = np.percentile(np.asarray(values), PERCENTILES) * 1e3
    return {f"p{p}": round(float(point), 3) for p, point in zip(PERCENTILES, points, strict=True)}


def summarise(
    results: Sequence[TurnResult], wall_seconds: float, trace: str, options: dict[str, Any]
) -> dict[str, Any]:
    """The report of a replay as JSON. Rates count turns that ended well."""
    good = [result for result in results if result.error is None]
    reused: dict[str, int] = {}
    for result in good:
        for place, tokens in result.reused.items():
            reused[place] = reused.get(place, 0) + tokens
    cached = sum(result.cached_tokens for result in good)
    if not reused and cached:
        reused["unknown"] = cached
    prompt = sum(result.prompt_tokens for result in good)
    computed = [result.computed for result in good if result.computed is not None]
    return {
        "schema": "holdover.replay/1",
        "trace": trace,
        "options": options,
        "turns": len(good),
        "failed_turns": len(results) - len(good),
        "first_error": next((result.error for result in results if result.error), None),
        "sessions": len({result.session for result in results}),
        "wall_s": round(wall_seconds, 3),
        "turns_per_hour": round(len(good) / wall_seconds * 3600, 1) if wall_seconds else 0.0,
        "output_tokens_per_second": round(sum(r.output_tokens for r in good) / wall_seconds, 2)
        if wall_seconds
        else 0.0,
        "ttft_ms": percentiles([result.ttft for result in good if result.ttft is not None]),
        "inter_token_ms": percentiles([gap for result in good for gap in result.gaps]),
        "turn_ms": percentiles([result.duration for result in good]),
        "prompt_tokens": {
            "sent": prompt,
            "reused": cached,
            "computed": sum(computed) if computed else prompt - cached,
            "reused_by_place": reused,
        },
        "output_tokens": sum(result.output_tokens for result in good),
    }


def table(report: dict[str, Any]) -> Table:
    """The report for a terminal."""
    lines = Table(title=f"Replay of {report['trace']}", show_header=False, title_justify="left")
    lines.add_column(style="bold")
    lines.add_column(justify="right")

    def add(name: str, value: str) -> None:
        lines.add_row(name, value)

    add("turns (failed)", f"{report['turns']:,} ({report['failed_turns']:,}) in {report['wall_s']:,.1f} s")
    add("turns per hour", f"{report['turns_per_hour']:,.0f}")
    add("output tokens/s", f"{report['output_tokens_per_second']:,.1f}")
    for key, name in (("ttft_ms", "first token"), ("inter_token_ms", "between tokens"), ("turn_ms", "whole turn")):
        points = report[key]
        shown = " / ".join("-" if points[f"p{p}"] is None else f"{points[f'p{p}']:,.1f}" for p in PERCENTILES)
        add(f"{name}, ms (p50/p95/p99)", shown)
    tokens = report["prompt_tokens"]
    add("prompt tokens sent", f"{tokens['sent']:,}")
    add("  reused", f"{tokens['reused']:,}")
    for place, count in tokens["reused_by_place"].items():
        add(f"    from {place}", f"{count:,}")
    add("  computed", f"{tokens['computed']:,}")
    if report["first_error"]:
        add("first error", report["first_error"])
    return lines
