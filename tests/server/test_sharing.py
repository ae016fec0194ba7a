"""Several servers on one folder, with nothing between them: what they share lies there once, and all find it."""

import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from holdover.config import EngineConfig
from tests.copies import copies
from tests.server.running import RunningServer

SHARED = random.Random(5).choices(range(256), k=10_000)
AGENTS, SERVERS = 32, 4
SPACING = EngineConfig(model="", to_engine="", from_engine="").snapshot_spacing
OPTIONS = ("--device-memory", "64MiB", "--tier", "memory:64MiB", "--find-wait", "60")


def prompt(agent: int) -> list[int]:
    return [*SHARED, *random.Random(agent).choices(range(256), k=70 + agent)]


def ask(server: RunningServer, tokens: list[int]) -> list[int]:
    body = {"prompt": tokens, "max_tokens": 4, "temperature": 0, "return_token_ids": True, "ignore_eos": True}
    status, answer = server.post("/v1/completions", body)
    assert status == 200, answer
    ids: list[int] = answer["choices"][0]["token_ids"]
    return ids


@pytest.mark.parametrize("kind", ["hybrid", "dense"])
def test_agents_on_several_servers_that_start_at_one_moment_share_their_prompt(kind: str, tmp_path: Path) -> None:
    with RunningServer(f"oracle:{kind}", *OPTIONS) as alone:
        right = [ask(alone, prompt(agent)) for agent in range(AGENTS)]
    tier = ("--tier", f"disk:{tmp_path}/state:1GiB")
    with ExitStack() as stack:
        servers = [stack.enter_context(RunningServer(f"oracle:{kind}", *OPTIONS, *tier)) for _ in range(SERVERS)]
        with ThreadPoolExecutor(AGENTS) as pool:
            places = [servers[agent % SERVERS] for agent in range(AGENTS)]
            assert list(pool.map(ask, places, map(prompt, range(AGENTS)))) == right
        own = sum(len(prompt(agent)) - len(SHARED) for agent in range(AGENTS))
        computed = 0.0
        for server in servers:
            server.wait_for("holdover_saves_under_way", 0)
            computed += server.metric("holdover_prompt_tokens_computed_total")
        # A follower that comes when the first is past the branch point goes on from the last snapshot before it: of a
        # recurrent state nobody could know that one would be wanted there.
        late = SERVERS * SPACING if kind == "hybrid" else 0
        once = len(SHARED) + own + AGENTS
        assert computed <= once + late, "the shared prompt once in all"
        counts = copies(tmp_path)
        assert set(counts.values()) == {1}
        assert len(counts) >= len(SHARED)
        # A second turn on any other server finds the first one's state.
        for agent in range(0, AGENTS, 5):
            server = servers[(agent + 1) % SERVERS]
            before = server.metric("holdover_prompt_tokens_computed_total")
            ask(server, [*prompt(agent), 1, 2, 3])
            assert server.metric("holdover_prompt_tokens_computed_total") - before <= 3 + 1
        for server in servers:
            server.wait_for("holdover_saves_under_way", 0)
        assert set(copies(tmp_path).values()) == {1}
