"""The store against what the machine can do: copies in memory, plain files, and an engine that saves nothing.

    python -m benchmarks.store [--folder DIR] [--only NAME] [--json FILE]

Each figure is a ratio of medians of rounds that take turns (A B A B) in one process. Names: memory, disk, decode, load,
amplification, index, opening.
"""

import argparse
import gc
import json
import os
import random
import resource
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from holdover.demo.model import demo_model
from holdover.engine.engine import Engine
from holdover.engine.messages import Generate, Sampling
from holdover.models.registry import load_model
from holdover.state.address import as_tokens
from holdover.state.layout import LAST_HIDDEN, ArraySpec, Layout
from holdover.state.pool import DevicePool
from holdover.state.segment import Kind, Link, SegmentHeader, decode, encode, segment_bytes, state_bytes
from holdover.state.tree import PrefixTree
from holdover.store.allocator import keep_freed_memory
from holdover.store.jobs import Done
from holdover.store.ledger import Ledger
from holdover.store.memory import MemoryTier
from holdover.store.objects import disk_tier, object_path
from holdover.store.queues import Store, ThreadWorker
from holdover.store.tier import Tier

MIB = 1 << 20
SIZES = (1 * MIB, 8 * MIB, 64 * MIB)
# As Kimi-Linear-48B in bfloat16: 7 MLA layers of 576 values a token; 20 KDA layers of 32 heads of 128 x 128 values.
LAYOUT = Layout(
    tuple(ArraySpec(f"layers.{i}.latent", (576,), torch.bfloat16) for i in range(7)),
    (*(ArraySpec(f"layers.{i}.recurrent", (32, 128, 128), torch.float32) for i in range(2)),
     ArraySpec(LAST_HIDDEN, (2304,), torch.bfloat16)),
)  # fmt: skip


def seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def compare(rounds: int, **works: Callable[[], object]) -> dict[str, float]:
    """Median seconds of each, taking turns."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for number in range(rounds + 1):
        for name, work in works.items():
            taken = seconds(work)
            if number:  # the first warms up
                times[name].append(taken)
    return {name: statistics.median(each) for name, each in times.items()}


def header(number: int, count: int) -> SegmentHeader:
    address = number.to_bytes(32, "big")
    return SegmentHeader(Kind.ROWS, "bench", bytes(32), address, bytes(32), bytes(32), address, 0, count)


class Rows:
    """Rows on the device, and the calls with which the store saves and loads them."""

    def __init__(self, nbytes: int, spread: int) -> None:
        self.count = nbytes // LAYOUT.bytes_per_token
        self.nbytes = self.count * LAYOUT.bytes_per_token
        budget = spread * (self.nbytes + self.count * 512) + 64 * MIB
        self.pool = DevicePool(LAYOUT, budget, 1, torch.device("cpu"))
        self.pool.arena.random_(0, 255)
        self.slots = []
        while (slots := self.pool.allocate_rows(self.count)) is not None and len(self.slots) < spread:
            self.slots.append(slots)
        self.tokens = as_tokens(np.arange(self.count))
        self.turn = 0

    def next_slots(self) -> Any:
        self.turn += 1
        return self.slots[self.turn % len(self.slots)]

    def encode(self, number: int) -> torch.Tensor:
        slots = self.next_slots()
        return encode(
            header(number, self.count), LAYOUT,
            lambda place, first: self.pool.copy_rows(slots[first : first + len(place)], place), self.tokens,
        )  # fmt: skip

    def load(self, buffer: torch.Tensor, name: str) -> None:
        segment = decode(buffer, LAYOUT, "bench", name, check=False)
        slots = self.next_slots()
        assert segment.rows is not None
        for first, last in segment.seal.blocks():
            self.pool.write_rows(slots[first:last], segment.rows[first:last])


def memory(rounds: int) -> dict[str, Any]:
    """Device to memory and back, checksums and books included, against memcpy of the same bytes."""
    result = {}
    for size in SIZES:
        spread = max(4, 256 * MIB // size)
        rows = Rows(size, spread)
        tier = MemoryTier(spread * (rows.nbytes + rows.count * 4 + 8192))
        sources = [np.ones(rows.nbytes, dtype=np.uint8) for _ in range(spread)]
        targets = [np.ones(rows.nbytes, dtype=np.uint8) for _ in range(spread)]
        number = [0]
        kept: deque[str] = deque(maxlen=max(2, spread // 2))  # the newest: what the tier has for sure

        def copy(sources: Any = sources, targets: Any = targets, number: Any = number, spread: int = spread) -> None:
            number[0] += 1
            np.copyto(targets[number[0] % spread], sources[number[0] % spread])

        def save(rows: Rows = rows, tier: MemoryTier = tier, number: Any = number, kept: deque[str] = kept) -> None:
            number[0] += 1
            head = header(number[0], rows.count)
            nbytes = segment_bytes(head, LAYOUT)
            tier.put(head.name, nbytes, lambda: rows.encode(number[0]))
            kept.append(head.name)

        def load(rows: Rows = rows, tier: MemoryTier = tier, kept: deque[str] = kept) -> None:
            kept.rotate(1)
            name = kept[0]
            tier.touch([name])
            with tier.get(name) as buffer:
                assert buffer is not None
                rows.load(buffer, name)

        for _ in range(2 * spread):  # the tier is full: each save evicts, as in use
            save()
        taken = compare(rounds, copy=copy, save=save, load=load)
        result[f"{size // MIB} MiB"] = {
            "memcpy_gb_s": rows.nbytes / taken["copy"] / 1e9,
            "save_ratio": taken["copy"] / taken["save"],
            "load_ratio": taken["copy"] / taken["load"],
        }
        del rows, tier, sources, targets
        gc.collect()
    return result


def drop_from_cache(files: list[Path]) -> None:
    """The next read comes from the disk itself."""
    for path in files:
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def disk(rounds: int, folder: Path) -> dict[str, Any]:
    """Files of segments against plain files of the same bytes, both through the page cache."""
    result = {}
    for size in SIZES:
        rows = Rows(size, 4)
        tier = disk_tier(folder / "tier", 1 << 40)
        plain = folder / "plain"
        plain.mkdir(exist_ok=True)
        number = [0]
        content = rows.encode(1).numpy().tobytes()

        def write_plain(number: Any = number, content: bytes = content, plain: Path = plain) -> None:
            number[0] += 1
            with open(plain / str(number[0] % 4), "wb") as file:
                file.write(content)

        def remove(number: Any = number, tier: Any = tier, plain: Path = plain) -> None:
            """So that both write into new files."""
            for name in list(tier.scan()):
                tier.delete(name)
            (plain / str((number[0] + 1) % 4)).unlink(missing_ok=True)

        def save(rows: Rows = rows, number: Any = number, tier: Any = tier) -> None:
            head = header(number[0], rows.count)
            tier.put(head.name, segment_bytes(head, LAYOUT), lambda: rows.encode(number[0]), Link("", None, ""))

        writes: dict[str, list[float]] = {"plain": [], "save": []}
        for round_number in range(rounds + 1):
            remove()
            for name, work in (("plain", write_plain), ("save", save)):
                taken = seconds(work)
                if round_number:
                    writes[name].append(taken)

        def read_plain(number: Any = number, plain: Path = plain) -> None:
            with open(plain / str(number[0] % 4), "rb") as file:
                file.read()

        def load(rows: Rows = rows, tier: Any = tier) -> None:
            name = next(iter(tier.scan()))
            with tier.get(name) as buffer:
                rows.load(buffer, name)

        def tier_read(tier: Any = tier) -> None:
            with tier.get(next(iter(tier.scan()))):
                pass

        reads = compare(rounds, plain=read_plain, load=load, tier=tier_read)
        files = [*(folder / "tier/segments").rglob("*.rows"), *plain.iterdir()]
        cold: dict[str, list[float]] = {"plain": [], "load": []}
        for _ in range(rounds):
            for cold_name, work in (("plain", read_plain), ("load", load)):
                drop_from_cache(files)
                cold[cold_name].append(seconds(work))
        cold_plain, cold_load = (statistics.median(each) for each in cold.values())
        plain_write, saved = (statistics.median(writes[name]) for name in ("plain", "save"))
        result[f"{size // MIB} MiB"] = {
            "plain_write_gb_s": len(content) / plain_write / 1e9,
            "write_ratio": plain_write / saved,
            "plain_read_gb_s": len(content) / reads["plain"] / 1e9,
            "tier_read_ratio": reads["plain"] / reads["tier"],
            "read_check_and_place_ratio": reads["plain"] / reads["load"],
            "cold_plain_read_gb_s": len(content) / cold_plain / 1e9,
            "cold_read_check_and_place_ratio": cold_plain / cold_load,
        }
        for name in list(tier.scan()):
            tier.delete(name)
        tier.close()
    return result


class Running:
    """The demo's model in an engine of this process, with its store's own threads."""

    def __init__(self, tiers: list[Tier], device_bytes: int = 512 * MIB) -> None:
        import queue

        self.inbox: queue.SimpleQueue[Done] = queue.SimpleQueue()
        model = load_model(str(demo_model()), "bfloat16", torch.device("cpu"))
        self.pool = DevicePool(model.layout, device_bytes, 16, torch.device("cpu"))
        self.store = Store(self.pool, model.fingerprint, tiers, self.inbox.put)
        tree = PrefixTree(model.layout, self.pool)
        self.engine = Engine(model, self.pool, tree, self.store, max_batch_tokens=512, snapshot_spacing=2048)
        self.model = model
        self.ids = 0
        self.rng = random.Random(5)

    def ask(self, prompt: list[int], tokens: int) -> None:
        self.ids += 1
        sampling = Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        self.engine.submit(Generate(self.ids, as_tokens(prompt).tobytes(), sampling))

    def prompt(self, length: int) -> list[int]:
        return [self.rng.randrange(self.model.vocab_size) for _ in range(length)]

    def step(self) -> float:
        """Seconds of the next step in which the model runs."""
        while True:
            done = []
            while not self.inbox.empty():
                done.append(self.inbox.get())
            begin = time.perf_counter()
            _, ran = self.engine.step(done)
            if ran:
                return time.perf_counter() - begin
            time.sleep(0.0002)

    def finish(self) -> None:
        while self.engine.has_work or self.engine.scheduler.loading:
            self.step()
        while not self.engine.idle:
            self.engine.step([self.inbox.get()])


def decode_while_saving(rounds: int, folder: Path) -> dict[str, Any]:
    """Eight answers are decoded while new prompts arrive, are computed and saved: tokens a second, with tiers and
    without."""
    plain = Running([])
    saving = Running([MemoryTier(1 << 30), disk_tier(folder / "decode", 4 << 30)])

    def work(running: Running) -> None:
        for _ in range(8):
            running.ask(running.prompt(60), 96)
        for number in range(96):
            if number % 8 == 7:
                running.ask(running.prompt(200), 1)
            running.step()
        running.finish()

    taken = compare(rounds, plain=lambda: work(plain), saving=lambda: work(saving))
    saved = sum(counters.bytes_saved for counters in saving.engine.counters.tiers.values())
    return {"throughput_ratio": taken["plain"] / taken["saving"], "mib_saved": saved / MIB}


def load_beside_decode(rounds: int, folder: Path) -> dict[str, Any]:
    """Steps of eight decoding answers while the loader brings in 64 MiB from disk, and while it has nothing to do."""
    tier = disk_tier(folder / "load", 1 << 40)
    running = Running([tier])
    rows = Rows(64 * MIB, 2)
    head = header(1, rows.count)
    tier.put(head.name, segment_bytes(head, LAYOUT), lambda: rows.encode(1), Link("", None, ""))
    go = threading.Event()

    def load(_: object) -> None:
        with tier.get(head.name) as buffer:
            assert buffer is not None
            rows.load(buffer, head.name)
        go.clear()

    worker = ThreadWorker("loader", load)
    quiet: list[float] = []
    loaded: list[float] = []
    for _ in range(rounds):
        for _ in range(8):
            running.ask(running.prompt(60), 400)
        for _ in range(60):
            running.step()
        for number in range(300):
            if number % 20 == 10:
                go.set()
                worker.submit(head)
            busy = go.is_set()
            taken = running.step()
            (loaded if busy or go.is_set() else quiet).append(taken * 1e3)
        running.finish()
    worker.close()

    def at(times: list[float], share: float) -> float:
        return float(np.quantile(times, share))

    return {
        "steps_while_loading": len(loaded),
        "quiet_ms": {"p50": at(quiet, 0.5), "p99": at(quiet, 0.99), "max": max(quiet)},
        "loading_ms": {"p50": at(loaded, 0.5), "p99": at(loaded, 0.99), "max": max(loaded)},
        "delay_ms_p50": at(loaded, 0.5) - at(quiet, 0.5),
        "delay_ms_max": max(loaded) - at(quiet, 0.5),
    }


def amplification() -> dict[str, Any]:
    """Bytes of a turn's segment for each byte of its state, and its header, for turns of some lengths."""
    result: dict[str, Any] = {}
    for tokens in (16, 300, 4000):
        head = header(1, tokens)
        whole = segment_bytes(head, LAYOUT)
        state = tokens * state_bytes(LAYOUT, Kind.ROWS)
        ids = 4 * tokens
        result[f"{tokens} tokens"] = {"data": (state + ids) / state, "header_bytes": whole - state - ids}
    return result


def peak_memory() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def index(count: int = 1_000_000) -> dict[str, Any]:
    """The books of so many segments."""
    gc.collect()
    before = peak_memory()
    ledger = Ledger(1 << 50, lambda _: None)
    rng = random.Random(1)
    parent: str | None = None
    begin = time.perf_counter()
    for _ in range(count):
        name = f"{rng.getrandbits(256):064x}.rows"
        ledger.adopt(name, 100_000, Link("", parent, ""))
        parent = name if rng.random() < 0.9 else None
    taken = time.perf_counter() - begin
    return {"segments": count, "mib": (peak_memory() - before) / MIB, "seconds": taken}


def opening(folder: Path, count: int = 100_000) -> dict[str, Any]:
    """A folder with so many segments: until the books are complete, and until the first can be read."""
    place = folder / "many"
    rng = random.Random(2)
    parent: str | None = None
    first: tuple[str, str | None] | None = None
    for number in range(count):
        name = f"{rng.getrandbits(256):064x}.rows"
        path = place / object_path(name, parent)
        if number < 2000:
            path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * 100)
        first = first or (name, parent)
        parent = name if rng.random() < 0.9 else None
    assert first is not None
    begin = time.perf_counter()
    tier = disk_tier(place, 1 << 40, wait=False)
    made = time.perf_counter() - begin
    assert tier.head(first[0], 10, first[1]) == b"x" * 10
    usable = time.perf_counter() - begin
    tier.wait_opened(600)
    whole = time.perf_counter() - begin
    assert tier.num_segments == count, tier.num_segments
    tier.close()
    return {"segments": count, "seconds": whole, "seconds_until_made": made, "seconds_until_first_read": usable}


def main() -> None:
    keep_freed_memory()  # as the engine's process does
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, help="where disk tiers are made; default: a temporary folder")
    parser.add_argument("--only", action="append", help="one of the names; may be given several times")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="holdover-bench-", dir=options.folder))
    works: dict[str, Callable[[], dict[str, Any]]] = {
        "memory": lambda: memory(options.rounds),
        "disk": lambda: disk(options.rounds, folder),
        "decode": lambda: decode_while_saving(options.rounds, folder),
        "load": lambda: load_beside_decode(max(3, options.rounds // 5), folder),
        "amplification": amplification,
        "index": index,
        "opening": lambda: opening(folder),
    }
    found: dict[str, Any] = {"command": " ".join(["python -m benchmarks.store", *sys.argv[1:]]), "cpus": os.cpu_count()}
    try:
        for name, work in works.items():
            if options.only and name not in options.only:
                continue
            found[name] = work()
            print(json.dumps({name: found[name]}, indent=1), flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    print(found["command"])


if __name__ == "__main__":
    main()
