"""Where snapshots are kept: reuse efficiency against snapshot bytes, on recorded traffic, ours against others.

    python -m benchmarks.snapshots ../shared/traces/weka-claude-code.tar.xz --sessions 48
    python -m benchmarks.snapshots ../shared/traces/tau-bench-airline.jsonl.xz

Runs the real prefix tree and the real policy over a trace, with no model. Rows are never evicted; snapshots are, in the
order of the product's own `eviction_rank`, when there are more than the budget allows: the same for every policy but
those that say otherwise. A WEKA block is 8 units of 8 tokens; where a prompt goes on after the one
before, what follows for the length of the recorded output is taken for the answer.
"""

import itertools
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from holdover.demo.model import demo_model
from holdover.server.chat import ChatTokenizer
from holdover.state.address import Tokens, as_tokens
from holdover.state.eviction import EvictionQueue
from holdover.state.layout import LAST_HIDDEN, ArraySpec, Layout
from holdover.state.node import Node, common_length
from holdover.state.policy import ResponseReturns, eviction_rank, prefill_stops
from holdover.state.pool import DevicePool
from holdover.state.tree import PrefixTree
from holdover.traffic.importers import BlockTokens, load_trace

BYTES_PER_SNAPSHOT = 19 << 20  # Qwen3.5-0.8B in float32, from its configuration: 18 layers of 16 x 128 x 128, and tails
WEKA_UNIT = 8  # tokens
LAYOUT = Layout(
    (ArraySpec("rows", (1,), torch.int64),),
    (ArraySpec("recurrent", (1,), torch.int32), ArraySpec(LAST_HIDDEN, (1,), torch.float32)),
)


@dataclass(frozen=True)
class Request:
    """tokens: the prompt and the answer, `prompt_end` of them the prompt. boundary: the end of the system prompt."""

    session: int
    tokens: Tokens
    prompt_end: int
    boundary: int | None


@dataclass(frozen=True)
class Policy:
    """stops: positions at which a prefill keeps a snapshot, from (start, prompt end, known, boundaries)."""

    name: str
    stops: Callable[[int, int, int, list[int]], Iterable[int]]
    at_answers_end: bool
    thin: bool = False
    last_only: bool = False
    evicts: "type[ByRank] | None" = None


def policies(unit: int) -> list[Policy]:
    def ours(spacing: int) -> Callable[[int, int, int, list[int]], Iterable[int]]:
        return lambda start, end, known, boundaries: prefill_stops(
            start=start,
            prompt_end=end,
            known=known,
            boundaries=boundaries,
            spacing=max(1, spacing // unit),
            resumes_anywhere=False,
        )

    def grid(step: int) -> Callable[[int, int, int, list[int]], Iterable[int]]:
        return lambda start, end, known, boundaries: range((start // step + 1) * step, end + 1, step)

    def prompt_end(start: int, end: int, known: int, boundaries: list[int]) -> Iterable[int]:
        return [end] if end > start else []

    return [
        *(Policy(f"ours, spacing {spacing:,}", ours(spacing), True, thin=True) for spacing in (512, 2048, 8192)),
        Policy("ours, not thinned", ours(2048), True),
        Policy("ours, evicted by age", ours(2048), True, thin=True, evicts=ByAge),
        Policy("ours, GreedyDual", ours(2048), True, thin=True, evicts=GreedyDual),
        Policy("every 64 tokens", grid(64 // unit), False),
        Policy("784-token grid", grid(784 // unit), False),
        Policy("prompt end only", prompt_end, False),
        Policy("last only", prompt_end, False, last_only=True),
    ]


@dataclass
class Outcome:
    policy: str
    budget: int | None  # snapshots
    efficiency: float
    peak_snapshots: int
    snapshots_made: int


def run(requests: list[Request], policy: Policy, budget: int | None) -> Outcome:
    """One pass over the trace."""
    total = sum(len(request.tokens) for request in requests)
    pool = DevicePool(LAYOUT, 16 * (2 * total + 4096), 1, torch.device("cpu"))
    tree = PrefixTree(LAYOUT, pool)
    order = (policy.evicts or ByRank)(tree)
    root = tree.root(bytes(32))
    returns = ResponseReturns()
    last: dict[int, Node] = {}
    reused = best = made = peak = 0

    def keep(node: Node) -> None:
        nonlocal made, peak
        if node.snapshot_slots is not None or node.end == 0:
            return
        slots = pool.allocate(pool.slots_per_snapshot)
        assert slots is not None
        tree.keep_snapshot(node, slots)
        made += 1
        if policy.thin:
            tree.thin(node)
        order.add(node)
        while budget is not None and len(tree._snapshots_on_device) > budget:
            order.evict_one()
        peak = max(peak, len(tree._snapshots_on_device))

    for request in requests:
        prompt = request.tokens[: request.prompt_end]
        match = tree.match(root, prompt)
        reused += match.position
        best += match.known
        if match.followed_response is not None:
            returns.observe(match.followed_response)
        node = tree.node_at(match)
        tree.lease(node)
        slots = pool.allocate(len(prompt) - match.position)
        assert slots is not None
        end, _ = tree.extend(node, prompt[match.position :], slots)
        tree.release(node)
        tree.lease(end)
        boundaries = [] if request.boundary is None else [request.boundary]
        for position in policy.stops(match.position, request.prompt_end, match.known, boundaries):
            keep(tree.split_at(end, position))
        newest = end
        answer = request.tokens[request.prompt_end :]
        if len(answer):
            slots = pool.allocate(len(answer))
            assert slots is not None
            newest, _ = tree.extend(end, answer, slots, generated=True)
            if policy.at_answers_end and returns.keep_next():
                keep(newest)
        tree.release(end)
        if policy.last_only:
            before = last.get(request.session)
            if before is not None and before is not end:
                tree._drop_device_snapshot(before)
            last[request.session] = end
    return Outcome(policy.name, budget, reused / best, peak, made)


class ByRank:
    """Lets snapshots go in the order of the product's own ranks."""

    def __init__(self, tree: PrefixTree) -> None:
        self.tree = tree
        self.queue = EvictionQueue(lambda node: node.snapshot_slots is not None, self._rank)

    def _rank(self, node: Node) -> float:
        return eviction_rank(
            last_used=node.last_used,
            saved_tokens=node.end - older_snapshot(node).end,
            slots=self.tree.pool.slots_per_snapshot,
            horizon=len(self.tree._snapshots_on_device),
            superseded=node.superseded,
        )

    def add(self, node: Node) -> None:
        """A snapshot has been kept; it may supersede the one before it."""
        for each in (node, older_snapshot(node)):
            self.queue.add(each)

    def evict_one(self) -> None:
        first = self.queue.first()
        assert first is not None
        self.tree._drop_device_snapshot(first[1])


class ByAge(ByRank):
    """Superseded ones first, then the least recently used."""

    def _rank(self, node: Node) -> float:
        return node.last_used - (1e12 if node.superseded else 0.0)


class GreedyDual(ByRank):
    """What a snapshot saves, aged by what had to go (Young, "The k-server dual and loose competitiveness", 1994)."""

    def __init__(self, tree: PrefixTree) -> None:
        super().__init__(tree)
        self.age = 0.0
        self.values: dict[Node, tuple[int, float]] = {}

    def _rank(self, node: Node) -> float:
        used, value = self.values.get(node, (-1, 0.0))
        if used < node.last_used and not (used >= 0 and node.superseded):
            value = self.age + node.end - older_snapshot(node).end
            self.values[node] = (node.last_used, value)
        return value

    def evict_one(self) -> None:
        first = self.queue.first()
        assert first is not None
        self.age = max(self.age, first[0])
        del self.values[first[1]]
        self.tree._drop_device_snapshot(first[1])


def older_snapshot(node: Node) -> Node:
    """The next older node with a snapshot, or the root."""
    older = node.parent or node
    while older.parent is not None and older.snapshot_slots is None:
        older = older.parent
    return older


def weka(path: Path, limit: int) -> list[list[Request]]:
    sessions = load_trace(path, BlockTokens(1 << 30, 64 / (64 // WEKA_UNIT)), limit)
    result = []
    for index, session in enumerate(sessions):
        requests = []
        prompts = [as_tokens(turn.token_ids) for turn in session.turns]
        for i, (turn, prompt) in enumerate(zip(session.turns, prompts, strict=True)):
            tokens = prompt
            following = [p for p in prompts[i + 1 : i + 2] if common_length(p, prompt) == len(prompt)]
            if following:
                tokens = following[0][: len(prompt) + turn.output_tokens]
            requests.append(Request(index, tokens, len(prompt), None))
        result.append(requests)
    return result


def chat(path: Path, limit: int) -> list[list[Request]]:
    tokenizer = ChatTokenizer(demo_model())
    result = []
    for index, session in enumerate(load_trace(path, BlockTokens(8192), limit)):
        prompts = [tokenizer.encode_chat(list(turn.messages or ()), None, None) for turn in session.turns]
        requests = []
        for (ids, boundaries), following in itertools.zip_longest(prompts, prompts[1:]):
            prompt = as_tokens(ids)
            tokens = prompt
            if following is not None and following[0][: len(ids)] == ids:
                end = following[0].index(ids[-1], len(ids)) if ids[-1] in following[0][len(ids) :] else len(ids)
                tokens = as_tokens(following[0][: max(len(ids), end - 3)])
            requests.append(Request(index, tokens, len(prompt), boundaries[0] if boundaries else None))
        result.append(requests)
    return result


def interleaved(sessions: list[list[Request]]) -> list[Request]:
    """All agents at once: a turn of each, then the next of each."""
    return [request for row in itertools.zip_longest(*sessions) for request in row if request is not None]


def main(
    trace: Annotated[Path, typer.Argument(help="WEKA or tau-bench file.")],
    sessions: Annotated[int, typer.Option(help="Use this many sessions.")] = 160,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
) -> None:
    """Print reuse efficiency for each policy and each budget of snapshots."""
    is_weka = "weka" in trace.name
    unit = WEKA_UNIT if is_weka else 1
    found = weka(trace, sessions) if is_weka else chat(trace, sessions)
    requests = interleaved(found)
    budgets: list[int | None] = [None, *(int(len(found) * each) for each in (16, 8, 4, 2, 1.5, 1.25, 1))]
    outcomes = [
        run(requests, policy, budget)
        for policy in track(policies(unit), console=Console(stderr=True), description="policies")
        for budget in budgets
    ]
    table = Table(title=f"{trace.name}: {len(found)} sessions, {len(requests):,} requests; reuse efficiency")
    table.add_column("snapshots kept, each session")
    for budget in budgets:
        table.add_column("all" if budget is None else f"{budget / len(found):.3g}", justify="right")
    table.add_column("most at once", justify="right")
    table.add_column("GiB", justify="right")
    for name, group in itertools.groupby(outcomes, key=lambda outcome: outcome.policy):
        rows = list(group)
        table.add_row(
            name, *(f"{row.efficiency:.4f}" for row in rows), f"{rows[0].peak_snapshots:,}",
            f"{rows[0].peak_snapshots * BYTES_PER_SNAPSHOT / 2**30:.1f}",
        )  # fmt: skip
    Console(width=130).print(table)
    print("printed by: python -m benchmarks.snapshots " + " ".join(sys.argv[1:]))
    if json_file is not None:
        json_file.write_text(json.dumps([vars(outcome) for outcome in outcomes], indent=1))


if __name__ == "__main__":
    typer.run(main)
