"""Every architecture goes on from state that another engine saved, and after preemption, as if nothing had happened."""

import random

import obstore.store
import pytest

from holdover.models.base import Model
from holdover.models.registry import load_model
from holdover.store.memory import MemoryTier
from holdover.store.objects import ObjectTier
from holdover.store.place import Place
from tests.checkpoints import KINDS, VOCAB_SIZE, save_checkpoint
from tests.engine.harness import Bench
from tests.engine.test_reuse import fresh

WINDOW = 24  # of those that have one


@pytest.fixture(scope="module", params=sorted(KINDS))
def each_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("checkpoint")
    save_checkpoint(folder, request.param)
    return load_model(folder, "float32")


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB_SIZE) for _ in range(length)]


@pytest.mark.parametrize("position", [1, 2, WINDOW - 1, WINDOW, WINDOW + 1, 64, 65, 149, 150])
def test_another_engine_goes_on_from_saved_state_token_for_token(each_model: Model, position: int) -> None:
    place = obstore.store.MemoryStore()
    tokens = prompt(position, 150)

    def engine() -> Bench:
        tier = ObjectTier(Place(place, "objects"), 64 << 20, "objects")
        return Bench(each_model, tiers=(tier,), find_from=1)

    engine().ask(tokens[:position], 1)
    other = engine()
    assert other.ask(tokens, 6) == fresh(each_model, tokens)
    usage = other.usage(other.last())
    assert (usage.reused, usage.computed) == ({"objects": position}, 150 - position)


def test_preempted_requests_go_on_token_for_token(each_model: Model) -> None:
    layout = each_model.layout
    windows = 6 * (layout.window + layout.window_block + 64) * layout.bytes_per_window_row
    device_bytes = 420 * layout.bytes_per_token + 12 * max(1024, layout.bytes_per_snapshot) + windows
    bench = Bench(each_model, device_bytes=device_bytes, tiers=(MemoryTier(64 << 20),), max_running=3)
    prompts = [prompt(seed, 60) for seed in range(3)]
    requests = [bench.submit(tokens, 150) for tokens in prompts]
    preempted = 0
    for step in range(2000):
        if bench.engine.idle and not bench.done:
            break
        bench.step()
        running = bench.engine.scheduler.running
        if step % 40 == 39 and running:  # models whose state does not grow are never out of room
            preempted += 1
            victim = running[-1]
            bench.engine.scheduler.remove(victim)
            bench.engine._preempt(victim)
    for request, tokens in zip(requests, prompts, strict=True):
        assert bench.tokens(request) == fresh(each_model, tokens, 150)
    assert preempted + bench.engine.scheduler.num_preemptions > 2
    assert bench.engine.counters.prompt_tokens_computed == 180, "nothing is computed twice"
    assert bench.tree.num_leases() == 0
