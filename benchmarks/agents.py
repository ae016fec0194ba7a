"""The README's claim about agents: turns per hour against recomputing, side by side.

    python -m benchmarks.agents [--runs 3] [holdover demo's options]

Runs `holdover demo` several times and prints each figure's median and spread, and the command.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

KEYS = (
    ("speedup", "vs_recompute"), ("speedup", "vs_resave"), ("speedup", "of_unlimited"), ("reuse_efficiency",),
    ("write_amplification",), ("copies",),
)  # fmt: skip


def main(arguments: list[str]) -> None:
    runs = 3
    if arguments[:1] == ["--runs"]:
        runs, arguments = int(arguments[1]), arguments[2:]
    figures = []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(runs):
            target = Path(folder) / "demo.json"
            command = [
                sys.executable,
                "-m",
                "holdover",
                "demo",
                "--json",
                str(target),
                "--report",
                f"{folder}/demo.html",
            ]
            subprocess.run([*command, *arguments], check=True, stdout=subprocess.DEVNULL)
            figures.append(json.loads(target.read_text()))
    print(
        f"holdover demo {' '.join(arguments)}: {runs} runs, {figures[0]['agents']} agents, {figures[0]['turns']} turns"
    )
    for key in KEYS:
        values = []
        for figure in figures:
            value = figure
            for part in key:
                value = value[part]
            values.append(float(value))
        print(
            f"{'.'.join(key):>24}: median {statistics.median(values):.4f} (from {min(values):.4f} to {max(values):.4f})"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
