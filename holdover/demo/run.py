"""The demo's measurement: the same sessions in four modes, slice by slice in turn, and the figures that come of it."""

import asyncio
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from holdover.config import EngineConfig, SaveMode, TierConfig
from holdover.demo.server_process import Settings
from holdover.demo.servers import Counts, DemoServer
from holdover.demo.traffic import distinct_prefix_positions
from holdover.errors import HoldoverError
from holdover.loop import run_async
from holdover.server.chat import ChatTokenizer
from holdover.traffic.replay import ReplayOptions, TurnResult, replay, server_model
from holdover.traffic.report import percentiles
from holdover.traffic.trace import Session, Turn

MODES = ("recompute", "resave", "holdover", "unlimited")
SLICES = 2
DEVICE_SHARE = 8  # the limited modes get 1/8 of the working set on the device
TIER_SHARE = 1.5  # and resave and holdover a memory tier of this many times the working set
UNLIMITED_BYTES = 4 << 30
THINK_SCALE = 0.001  # a recorded minute of thinking takes 60 ms
THINK_LIMIT = 60.0  # recorded seconds: a session that was left over night goes on after a minute
SAMPLE_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be run. shrink: the factor that tokens were divided by, None if they weren't."""

    model: Path
    sessions: list[Session]
    agents: int
    shrink: float | None
    dtype: str
    device_bytes: int | None
    check: bool


@dataclass(slots=True)
class ModeRun:
    """What one mode did. samples: (turns done, prompt tokens computed, bytes saved) along the way."""

    results: list[TurnResult] = field(default_factory=list)
    wall_s: float = 0.0
    counts: Counts | None = None
    samples: list[tuple[int, float, float]] = field(default_factory=list)


@dataclass(slots=True)
class DemoRun:
    """All that was measured."""

    plan: Plan
    working_set_bytes: int
    device_budget_bytes: int
    tier_bytes: int
    distinct_tokens: int
    modes: dict[str, ModeRun]


Report = Callable[[str, int, int], None]  # phase, turns done, turns in all


def run(plan: Plan, report: Report) -> DemoRun:
    """Measure the working set, then all modes. Raises HoldoverError if a server can't start or a turn fails."""
    prompts = [(_prompt(turn, plan.model), turn.output_tokens) for each in plan.sessions for turn in each.turns]
    longest = max(len(tokens) + outputs for tokens, outputs in prompts)
    working_set, least = run_async(_measure_working_set(plan, longest, report))
    budget = plan.device_bytes or max(working_set // DEVICE_SHARE, least)
    tier = int(working_set * TIER_SHARE)
    modes = run_async(_run_modes(plan, budget, tier, report))
    distinct = distinct_prefix_positions([tokens for tokens, _ in prompts])
    return DemoRun(plan, working_set, budget, tier, distinct, modes)


_tokenizers: dict[Path, ChatTokenizer] = {}


def _prompt(turn: Turn, model: Path) -> list[int]:
    """Token ids of a turn's prompt, as the server makes them."""
    if turn.token_ids is not None:
        return list(turn.token_ids)
    tokenizer = _tokenizers.setdefault(model, ChatTokenizer(model))
    return tokenizer.encode_chat(list(turn.messages or ()), None, None)[0]


def _settings(plan: Plan, mode: str, device_bytes: int, tier_bytes: int) -> Settings:
    tiered = mode in ("resave", "holdover")
    config = EngineConfig(
        model=str(plan.model),
        to_engine="",
        from_engine="",
        dtype=plan.dtype,
        device_bytes=UNLIMITED_BYTES if mode == "unlimited" else device_bytes,
        tiers=(TierConfig("memory", "", tier_bytes),) if tiered else (),
        audit=tiered,
        save=SaveMode.EAGER if mode == "resave" else SaveMode.AUTO,
    )
    return Settings(config, resave=mode == "resave")


async def _measure_working_set(plan: Plan, longest: int, report: Report) -> tuple[int, int]:
    """Most bytes of state that are on the device when nothing ever has to leave it; and how many bytes the two
    longest requests need to run at once, below which a budget makes no sense."""
    total = sum(len(session.turns) for session in plan.sessions)
    done = 0

    def progress(_: TurnResult) -> None:
        nonlocal done
        done += 1
        report("working set", done, total)

    report("working set", 0, total)
    with DemoServer(_settings(plan, "unlimited", 0, 0)) as server:
        await asyncio.to_thread(server.wait_ready)  # so that Ctrl-C is heard meanwhile
        await _replay(plan, plan.sessions, {}, server, progress, [])
        facts = await server_model(server.url, None)
        least = 2 * (longest * facts["bytes_per_token"] + 4 * facts["bytes_per_snapshot"])
        return (await server.counts()).device_peak_bytes, least


async def _replay(
    plan: Plan,
    sessions: list[Session],
    first_turns: dict[str, int],
    server: DemoServer,
    progress: Callable[[TurnResult], None],
    results: list[TurnResult],
) -> None:
    options = ReplayOptions(
        agents=plan.agents, think_scale=THINK_SCALE, think_limit=THINK_LIMIT, model="demo", token_ids=plan.check,
        session_key=True,
    )  # fmt: skip
    await replay(sessions, server.url, options, progress, results, first_turns)
    failed = next((result.error for result in results if result.error), None)
    if failed:
        raise HoldoverError(f"a turn of the demo failed: {failed}")


async def _run_modes(plan: Plan, budget: int, tier: int, report: Report) -> dict[str, ModeRun]:
    runs = {mode: ModeRun() for mode in MODES}
    most = max(len(session.turns) for session in plan.sessions)
    edges = [round(most * i / SLICES) for i in range(SLICES + 1)]
    total = sum(len(session.turns) for session in plan.sessions)
    with ExitStack() as stack:
        servers = {mode: stack.enter_context(DemoServer(_settings(plan, mode, budget, tier))) for mode in MODES}
        stack.callback(_end_all, list(servers.values()))
        for server in servers.values():
            await asyncio.to_thread(server.wait_ready)  # so that Ctrl-C is heard meanwhile
        for first, last in zip(edges[:-1], edges[1:], strict=True):
            for mode in MODES:
                done = partial(_report_mode, report, mode, total)
                await _run_slice(plan, first, last, servers[mode], runs[mode], done)
        for mode in MODES:
            runs[mode].counts = await servers[mode].settled()
    return runs


def _end_all(servers: list[DemoServer]) -> None:
    """Tell all before any is waited for."""
    for server in servers:
        server.ask_to_end()


def _report_mode(report: Report, mode: str, total: int, turns_done: int) -> None:
    report(mode, turns_done, total)


async def _run_slice(
    plan: Plan, first: int, last: int, server: DemoServer, run: ModeRun, report: Callable[[int], None]
) -> None:
    """Turns `[first, last)` of every session in one mode; the other modes' servers are idle meanwhile."""
    parts = [part for session in plan.sessions if (part := session.part(first, last)).turns]
    first_turns = {session.id: first for session in parts}
    sampler = asyncio.create_task(_sample(server, run))
    begin = time.perf_counter()
    report(len(run.results))
    try:
        await _replay(plan, parts, first_turns, server, lambda _: report(len(run.results)), run.results)
    finally:
        run.wall_s += time.perf_counter() - begin
        sampler.cancel()
        await asyncio.gather(sampler, return_exceptions=True)
    await server.settled()


async def _sample(server: DemoServer, run: ModeRun) -> None:
    while True:
        counts = await server.counts()
        run.samples.append((len(run.results), counts.prompt_tokens_computed, counts.bytes_saved))
        await asyncio.sleep(SAMPLE_SECONDS)


def outputs_identical(modes: dict[str, ModeRun]) -> bool:
    """Whether every output token of every turn is the same in all modes."""
    outputs = [{(r.session, r.turn): r.token_ids for r in run.results} for run in modes.values()]
    return all(each == outputs[0] for each in outputs[1:]) and all(
        all(ids for ids in each.values()) for each in outputs
    )


def figures(demo: DemoRun) -> dict[str, Any]:
    """The demo's JSON, schema holdover.demo/1."""
    modes: dict[str, Any] = {}
    for mode, run in demo.modes.items():
        assert run.counts is not None
        points = percentiles([result.ttft for result in run.results if result.ttft is not None])
        modes[mode] = {
            "turns_per_hour": round(len(run.results) / run.wall_s * 3600, 1),
            "output_tokens_per_second": round(sum(r.output_tokens for r in run.results) / run.wall_s, 2),
            "prompt_tokens": sum(result.prompt_tokens for result in run.results),
            "prompt_tokens_computed": sum(result.computed or 0 for result in run.results),
            "bytes_saved": int(run.counts.bytes_saved),
            "bytes_new_state": int(run.counts.bytes_new_state),
            "max_copies": run.counts.max_copies,
            "ttft_ms": {"p50": points["p50"], "p95": points["p95"]},
            "wall_s": round(run.wall_s, 3),
        }
    ours, rate = modes["holdover"], {mode: modes[mode]["turns_per_hour"] for mode in modes}
    reusable = ours["prompt_tokens"] - demo.distinct_tokens
    return {
        "schema": "holdover.demo/1",
        "agents": demo.plan.agents,
        "turns": len(demo.modes["holdover"].results),
        "model": f"{demo.plan.model.name} ({demo.plan.dtype})",
        "device_budget_bytes": demo.device_budget_bytes,
        "modes": modes,
        "speedup": {
            "vs_recompute": round(rate["holdover"] / rate["recompute"], 3),
            "vs_resave": round(rate["holdover"] / rate["resave"], 3),
            "of_unlimited": round(rate["holdover"] / rate["unlimited"], 3),
        },
        "reuse_efficiency": round((ours["prompt_tokens"] - ours["prompt_tokens_computed"]) / reusable, 5),
        "write_amplification": round(ours["bytes_saved"] / ours["bytes_new_state"], 5),
        "copies": ours["max_copies"],
        "outputs_identical": outputs_identical(demo.modes) if demo.plan.check else None,
    }
