"""`python -m tests.store.kills FOLDER KILLS SEED`: engines that save into a folder, each killed at a random moment.

Prints the names of all segments that were acknowledged. A process of its own: children are forked from it, which must
happen before it has any threads.
"""

import os
import queue
import random
import signal
import sys
import time
from pathlib import Path

import torch

from holdover.engine.engine import Engine
from holdover.engine.messages import Generate, Sampling
from holdover.models.oracle import Oracle
from holdover.state.address import as_tokens
from holdover.state.pool import DevicePool
from holdover.state.tree import PrefixTree
from holdover.store.jobs import Done, SaveDone
from holdover.store.objects import disk_tier
from holdover.store.queues import Store

BUDGET = 256 << 20  # nothing is evicted: what was acknowledged must be there


def serve_and_acknowledge(folder: Path, seed: int, acknowledged: int) -> None:
    """An engine with real threads, that asks itself, and writes the name of each segment that it was told is kept."""
    rng = random.Random(seed)
    model = Oracle("everything")
    pool = DevicePool(model.layout, 1 << 20, 4, torch.device("cpu"))
    inbox: queue.SimpleQueue[Done] = queue.SimpleQueue()
    store = Store(pool, model.fingerprint, [disk_tier(folder, BUDGET, wait=False)], inbox.put)
    engine = Engine(model, pool, PrefixTree(model.layout, pool), store, max_batch_tokens=64, snapshot_spacing=100)
    os.write(acknowledged, b"\n")
    history = [rng.randrange(4)]
    for number in range(1, 100_000):
        if rng.random() < 0.2:
            history = history[: rng.randrange(1, len(history) + 1)]
        history += rng.choices(range(256), k=rng.randrange(1, 60))
        sampling = Sampling(max_tokens=2, temperature=0.0, ignore_eos=True)
        engine.submit(Generate(number, as_tokens(history).tobytes(), sampling))
        while not engine.idle:
            done = []
            while not inbox.empty():
                done.append(inbox.get())
            for each in done:
                if isinstance(each, SaveDone) and each.kept:
                    os.write(acknowledged, (each.job.saved.name + "\n").encode())
            engine.step(done)


def main(folder: Path, kills: int, seed: int) -> None:
    rng = random.Random(seed)
    torch.set_num_threads(1)
    for life in range(kills):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                serve_and_acknowledge(folder, seed + life, writing)
            finally:
                os._exit(1)
        os.close(writing)
        with os.fdopen(reading) as pipe:
            assert pipe.readline() == "\n"
            for _ in range(rng.randrange(4)):  # counted, not timed, so that a slow machine comes to save something too
                sys.stdout.write(pipe.readline())
            time.sleep(rng.uniform(0.0, 0.1))
            os.kill(child, signal.SIGKILL)
            assert os.waitpid(child, 0)[1] == signal.SIGKILL, "it ended by itself"
            sys.stdout.write(pipe.read())


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
