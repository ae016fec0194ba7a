"""The engine's own process: `python -m holdover.engine.process`, configuration on standard input.

It ends when told to, or when standard input closes: a parent that dies takes its engine with it.
"""

import gc
import logging
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
import zmq

from holdover.config import PEER, EngineConfig, tier_names
from holdover.engine.deferred import Saving
from holdover.engine.engine import Engine
from holdover.engine.messages import (
    AskStatistics,
    Cancel,
    FromEngine,
    Generate,
    Ready,
    Shutdown,
    StartFailed,
    ToEngine,
)
from holdover.engine.text import NoText, StreamDecoder, TextDecoder
from holdover.errors import HoldoverError
from holdover.models.base import Model
from holdover.models.registry import load_model, model_folder
from holdover.orphans import outlive_parent
from holdover.state.pool import DevicePool
from holdover.state.tree import PrefixTree
from holdover.store.allocator import keep_freed_memory
from holdover.store.jobs import Done, SaveDone
from holdover.store.keys import NO_SECRET
from holdover.store.opening import open_tier
from holdover.store.peer_server import PeerServer
from holdover.store.planning import SavePlanner, plan_delta
from holdover.store.queues import Store

log = logging.getLogger("holdover.engine")
LIVE_SHARE = 8  # live states take at most this part (1/8) of device memory, unless --max-running says otherwise
MOST_RUNNING = 64
IDLE_SECONDS = 1.0
Inbox = queue.SimpleQueue[ToEngine | Done | None]


def default_max_running(model: Model, device_bytes: int) -> int:
    """How many sequences may run at once where the user doesn't say."""
    per_sequence = max(1, model.layout.bytes_per_snapshot)
    return max(1, min(MOST_RUNNING, device_bytes // LIVE_SHARE // per_sequence))


def decoder_factory(folder: Path) -> Callable[[], TextDecoder]:
    """Makes text decoders from the checkpoint's tokenizer.json; without one there is no text."""
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    if not path.exists():
        return NoText
    tokenizer = Tokenizer.from_file(str(path))
    return lambda: StreamDecoder(tokenizer)


def build_engine(config: EngineConfig, inbox: Inbox, plan_saves: SavePlanner) -> Engine:
    """An engine as configured. Raises HoldoverError."""
    device = torch.device(config.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise HoldoverError("--device cuda: PyTorch finds no GPU on this machine; use --device cpu.")
    tiers = [
        open_tier(each, name, config.encryption_key, config.peer_secret)
        for each, name in zip(config.tiers, tier_names(config.tiers), strict=True)
    ]
    model = load_model(config.model, config.dtype, device)
    if config.context_length is not None:
        if config.context_length > model.context_length:
            raise HoldoverError(
                f"--context-length {config.context_length} is longer than the model's {model.context_length}."
            )
        model.context_length = config.context_length
    max_running = config.max_running or default_max_running(model, config.device_bytes)
    pool = DevicePool(model.layout, config.device_bytes, max_running, device)
    tree = PrefixTree(model.layout, pool)
    store = Store(pool, model.fingerprint, tiers, inbox.put, find_seconds=config.find_seconds)
    return Engine(
        model,
        pool,
        tree,
        store,
        max_batch_tokens=config.max_batch_tokens,
        snapshot_spacing=config.snapshot_spacing,
        new_decoder=decoder_factory(model_folder(config.model)),
        saving=Saving(plan_saves, config.save),
        audit=config.audit,
    )


def listen_for_peers(config: EngineConfig, engine: Engine) -> PeerServer | None:
    """Let peers read what the engine's own tiers keep, if they may. Raises HoldoverError."""
    if config.peer_listen is None:
        return None
    if config.peer_secret is None:
        raise HoldoverError(f"--peer-listen {config.peer_listen}: {NO_SECRET}")
    own = [tier for tier, each in zip(engine.store.tiers, config.tiers, strict=True) if each.kind != PEER]
    if not own:
        raise HoldoverError("--peer-listen: without a tier of its own this engine has nothing to give; add one.")
    return PeerServer(config.peer_listen, config.peer_secret, own)


def facts(engine: Engine, peers: PeerServer | None) -> Ready:
    """What the server needs to know."""
    model, pool = engine.model, engine.pool
    return Ready(
        context_length=model.context_length,
        max_request_tokens=engine.holdings.longest_request(model.context_length),
        vocab_size=model.vocab_size,
        eos_token_ids=sorted(model.eos_token_ids),
        bytes_per_token=model.layout.bytes_per_token,
        bytes_per_snapshot=model.layout.bytes_per_snapshot,
        device_bytes=pool.budget_bytes,
        max_running=pool.max_running,
        fingerprint=model.fingerprint,
        peer_address=None if peers is None else peers.address,
    )


class EngineLoop:
    """Feeds an engine from its inbox, and sends out what it says."""

    def __init__(
        self, engine: Engine, inbox: Inbox, send: Callable[[list[FromEngine]], None], peers: PeerServer | None = None
    ) -> None:
        self._engine = engine
        self._peers = peers
        self._inbox = inbox
        self._send = send
        self._done: list[Done] = []
        self._stopping = False

    def run(self) -> None:
        """Until a Shutdown, or None (the parent has gone)."""
        active = False
        while True:
            self._take_in(0.0 if active else self._idle_seconds())
            if self._stopping:
                return
            done, self._done = self._done, []
            events, active = self._engine.step(done)
            if events:
                self._send([*events])

    def _idle_seconds(self) -> float:
        moment = self._engine.wakes_at()
        return IDLE_SECONDS if moment is None else min(IDLE_SECONDS, max(0.01, moment - self._engine.store.now()))

    def _take_in(self, seconds: float) -> None:
        try:
            item = self._inbox.get(timeout=seconds) if seconds else self._inbox.get_nowait()
            while True:
                self._handle(item)
                item = self._inbox.get_nowait()
        except queue.Empty:
            return

    def _handle(self, item: ToEngine | Done | None) -> None:
        match item:
            case Generate():
                self._engine.submit(item)
            case Cancel():
                self._engine.cancel(item.id)
            case AskStatistics():
                statistics = self._engine.statistics(item.id)
                if self._peers is not None:
                    statistics.counters.update(self._peers.counters())
                self._send([statistics])
            case Shutdown() | None:
                self._stopping = True
            case _:
                self._done.append(item)


def finish_saving(engine: Engine, inbox: Inbox, seconds: float) -> None:
    """Save what was to be saved later, and let saves that are under way end, for a while."""
    engine.exchange.save_all()
    waiter = threading.Thread(target=engine.store.close, daemon=True)
    waiter.start()
    waiter.join(seconds)
    while not inbox.empty():
        item = inbox.get_nowait()
        if isinstance(item, SaveDone):
            engine.step([item])


def _watch_parent(inbox: Inbox) -> None:
    """Standard input closes when the parent ends, however it ends."""
    while sys.stdin.buffer.read(1):
        pass
    inbox.put(None)
    threading.Timer(4.0, os._exit, (3,)).start()  # should a step hang


def _receive(socket: "zmq.Socket[bytes]", inbox: Inbox) -> None:
    decoder = msgspec.msgpack.Decoder(ToEngine)
    while True:
        message = decoder.decode(socket.recv())
        inbox.put(message)
        if isinstance(message, Shutdown):
            return


def main(plan_saves: SavePlanner = plan_delta) -> int:
    """Run one engine until it is told to end."""
    keep_freed_memory()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    logging.basicConfig(level=logging.INFO, format="holdover engine: %(levelname)s: %(message)s", stream=sys.stderr)
    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=EngineConfig)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    incoming = context.socket(zmq.PULL)
    incoming.setsockopt(zmq.RCVHWM, 0)
    incoming.connect(config.to_engine)  # first: who hears from this engine knows that it can be reached
    outgoing = context.socket(zmq.PUSH)
    outgoing.setsockopt(zmq.SNDHWM, 0)
    outgoing.setsockopt(zmq.LINGER, 1000)
    outgoing.connect(config.from_engine)
    encoder = msgspec.msgpack.Encoder()

    def send(messages: list[FromEngine]) -> None:
        outgoing.send(encoder.encode(messages))

    inbox: Inbox = queue.SimpleQueue()
    threading.Thread(target=_watch_parent, args=(inbox,), daemon=True).start()
    try:
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        engine = build_engine(config, inbox, plan_saves)
        peers = listen_for_peers(config, engine)
    except HoldoverError as error:
        send([StartFailed(str(error))])
        context.destroy(linger=1000)
        return 2
    threading.Thread(target=_receive, args=(incoming, inbox), daemon=True).start()
    outlive_parent()
    gc.freeze()  # what is loaded by now stays: collections, which stop every running sequence, need not walk it
    send([facts(engine, peers)])
    try:
        EngineLoop(engine, inbox, send, peers).run()
    except Exception:
        log.exception("the engine has failed; every running request is lost")
        return 1
    finish_saving(engine, inbox, seconds=2.0)
    return 0


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # sockets and threads of this process need no farewell
