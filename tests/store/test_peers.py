"""The tiers of another engine, read over the network: found, exact, encrypted, and no hang when it goes."""

import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import torch
import zmq

from holdover.config import NO_LIMIT, TierConfig, parse_tier
from holdover.engine.process import listen_for_peers
from holdover.errors import HoldoverError, TierError
from holdover.models.oracle import Oracle
from holdover.store.memory import MemoryTier
from holdover.store.objects import disk_tier
from holdover.store.opening import open_tier
from holdover.store.peer import PeerTier
from holdover.store.peer_protocol import OK, PROTOCOL, Answer, Ask, key_pair, listening_address, parse_address
from holdover.store.peer_server import PeerServer
from holdover.store.tier import PutStatus, Tier
from tests.engine.harness import Bench
from tests.s3 import free_port
from tests.server.running import RunningServer

SECRET, OTHER = "0a" * 32, "0b" * 32
KINDS = ["hybrid", "dense", "recurrent", "sliding", "mixed", "everything"]
KEPT = "ab" * 32 + ".rows"
PROMPT = random.Random(3).choices(range(256), k=120)


@contextmanager
def serving(*tiers: Tier, secret: str = SECRET) -> Iterator[PeerServer]:
    server = PeerServer("127.0.0.1:0", secret, tiers)
    try:
        yield server
    finally:
        server.close()


def expected(kind: str, prompt: list[int]) -> list[int]:
    return Bench(Oracle(kind)).ask(prompt, 4)


@pytest.mark.parametrize("kind", KINDS)
def test_what_one_engine_has_computed_another_loads_from_it(kind: str, tmp_path: Path) -> None:
    memory = MemoryTier(16 << 20)
    first = Bench(Oracle(kind), tiers=(memory,))
    first.ask(PROMPT[:70], 1)
    first.ask(PROMPT, 1)
    kept = set(memory.scan())
    with serving(memory) as server:
        own, disk = MemoryTier(16 << 20), disk_tier(tmp_path, 16 << 20)
        second = Bench(Oracle(kind), tiers=(own, disk, PeerTier(server.address, SECRET)), find_from=1)
        prompt = [*PROMPT, 1, 2, 3]
        assert second.ask(prompt) == expected(kind, prompt)
        usage = second.usage(second.last())
        assert (usage.computed, usage.reused) == (3, {"peer": 120})
        assert server.segments_given > 0
        assert set(memory.scan()) == kept, "nothing is written at the peer"
        counters = second.engine.counters.tiers
        assert counters["memory"].segments_promoted == counters["disk"].segments_promoted > 0
        assert {audit.max_copies for audit in second.engine.exchange.audits.values()} <= {0, 1}
    third = Bench(Oracle(kind), tiers=(MemoryTier(16 << 20), disk_tier(tmp_path, 16 << 20)), find_from=1)
    assert third.ask(prompt) == expected(kind, prompt)
    assert third.usage(third.last()).cached_tokens >= 120, "the whole chain came to the second one's disk"


@pytest.mark.parametrize("kind", ["hybrid", "dense"])
def test_engines_that_are_each_others_peers_go_on_from_each_other(kind: str) -> None:
    tiers = [MemoryTier(16 << 20) for _ in range(2)]
    with serving(tiers[0]) as a, serving(tiers[1]) as b:
        benches = [
            Bench(Oracle(kind), tiers=(tier, PeerTier(address, SECRET)), find_from=1)
            for tier, address in zip(tiers, (b.address, a.address), strict=True)
        ]
        history = PROMPT
        for turn in range(6):
            bench = benches[turn % 2]
            answer = bench.ask(history, 4)
            assert answer == expected(kind, history)
            assert bench.usage(bench.last()).computed <= (120 if turn == 0 else 11)
            history = [*history, *answer, *random.Random(turn).choices(range(256), k=10)]


@pytest.mark.parametrize("secret", [OTHER, "00" * 32])
def test_who_has_another_secret_is_not_heard(secret: str) -> None:
    memory = MemoryTier(16 << 20)
    Bench(Oracle("hybrid"), tiers=(memory,)).ask(PROMPT, 1)
    with serving(memory) as server:
        peer = PeerTier(server.address, secret)
        assert not peer.answers()
        bench = Bench(Oracle("hybrid"), tiers=(MemoryTier(16 << 20), peer), find_from=1)
        assert bench.ask(PROMPT) == expected("hybrid", PROMPT)
        assert bench.usage(bench.last()).computed == 120
        assert bench.store.faults["peer"] == 1
        assert (server.segments_given, server.bytes_given) == (0, 0)
        assert PeerTier(server.address, SECRET).answers()


def test_nothing_can_be_had_without_encryption_or_with_a_key_of_ones_own() -> None:
    """Plain ZeroMQ, and CURVE with the server's right public key but a client's key that does not follow."""
    context: zmq.Context = zmq.Context()
    with serving(MemoryTier(1 << 20)) as server:
        public, own = zmq.curve_keypair()
        for keys in (None, (public, own)):
            client = context.socket(zmq.REQ)
            client.linger = 0
            if keys is not None:
                client.curve_serverkey, _ = key_pair(SECRET, "server")
                client.curve_publickey, client.curve_secretkey = keys
            client.connect(f"tcp://{server.address}")
            client.send(msgspec.msgpack.encode(Ask(PROTOCOL, "")))
            assert not client.poll(700)
            client.close()
        assert PeerTier(server.address, SECRET).answers()
    context.term()


@pytest.mark.parametrize(
    "frames",
    [[b""], [b"\xff" * 40], [b"x", b"y"], [msgspec.msgpack.encode(Ask(PROTOCOL + 1, "a"))],
     [msgspec.msgpack.encode([PROTOCOL, 5])], [msgspec.msgpack.encode(Ask(PROTOCOL, "../../etc/passwd", 10, None))],
     [msgspec.msgpack.encode(Ask(PROTOCOL, "no.such.name", 1 << 40, "x"))],
     [msgspec.msgpack.encode(Ask(PROTOCOL, KEPT, 10, "../../../../etc/passwd"))],
     [msgspec.msgpack.encode(Ask(PROTOCOL, KEPT, 10, f"{'0' * 62}/..rows"))],
     [msgspec.msgpack.encode(Ask(PROTOCOL, KEPT, -1))], [msgspec.msgpack.encode(Ask(PROTOCOL, KEPT, 1 << 40))],
     [msgspec.msgpack.encode(Ask(PROTOCOL, f"{KEPT}/../x"))]],
)  # fmt: skip
def test_whatever_a_peer_asks_is_answered_and_nothing_but_a_name_becomes_a_path(
    frames: list[bytes], tmp_path: Path
) -> None:
    disk = disk_tier(tmp_path, 1 << 20)
    disk.put(KEPT, 100, lambda: torch.zeros(100, dtype=torch.uint8))
    with serving(MemoryTier(1 << 20), disk) as server:
        peer = PeerTier(server.address, SECRET)
        client = peer._socket()
        client.send_multipart(frames)
        assert client.poll(3000)
        answer = msgspec.msgpack.decode(client.recv_multipart()[0], type=Answer)
        assert answer.status != OK
        assert server.refused == 1
        assert peer.answers()
        assert peer.head(KEPT, 10, None) == bytes(10)


def test_a_request_that_is_too_long_only_costs_its_sender_the_connection() -> None:
    with serving(MemoryTier(1 << 20)) as server:
        with pytest.raises(TierError):
            PeerTier(server.address, SECRET)._ask(Ask(PROTOCOL, "x" * 100_000), 0.5)
        assert PeerTier(server.address, SECRET).answers()


def test_a_peer_that_goes_away_costs_recompute_and_is_used_again_when_it_is_back() -> None:
    memory = MemoryTier(16 << 20)
    Bench(Oracle("hybrid"), tiers=(memory,)).ask(PROMPT, 1)
    now = [0.0]
    with serving(memory) as server:
        address = server.address
        bench = Bench(Oracle("hybrid"), tiers=(PeerTier(address, SECRET),), find_from=1)
        bench.store._clock = lambda: now[0]
        assert bench.ask(PROMPT) == expected("hybrid", PROMPT)
        assert bench.usage(bench.last()).computed == 0
        bench.tree.make_room(bench.pool.num_slots)
    began = time.monotonic()
    prompt = [*PROMPT, 5]
    assert bench.ask(prompt) == expected("hybrid", prompt)
    assert bench.usage(bench.last()).cached_tokens == 0
    assert time.monotonic() - began < 5.0
    server = PeerServer(address, SECRET, [memory])
    now[0] = 100.0
    other = random.Random(9).choices(range(256), k=50)
    Bench(Oracle("hybrid"), tiers=(memory,)).ask(other, 1)
    assert bench.ask([*other, 1]) == expected("hybrid", [*other, 1])
    assert bench.usage(bench.last()).reused == {"peer": 50}
    server.close()


def test_a_peer_that_takes_questions_and_never_answers_is_given_up() -> None:
    context: zmq.Context = zmq.Context()
    silent = context.socket(zmq.ROUTER)
    silent.curve_server = True
    silent.curve_publickey, silent.curve_secretkey = key_pair(SECRET, "server")
    port = silent.bind_to_random_port("tcp://127.0.0.1")
    bench = Bench(Oracle("hybrid"), tiers=(PeerTier(f"127.0.0.1:{port}", SECRET),), find_from=1)
    began = time.monotonic()
    assert bench.ask(PROMPT) == expected("hybrid", PROMPT)
    assert time.monotonic() - began < 5.0
    assert bench.store.faults["peer"] == 1
    silent.close(0)
    context.term()


class LyingTier(MemoryTier):
    """Gives bytes that are not what they should be."""

    def __init__(self, damage: str) -> None:
        super().__init__(16 << 20)
        self.damage = damage

    @contextmanager
    def get(self, name: str) -> Iterator[torch.Tensor | None]:
        with super().get(name) as buffer:
            if buffer is not None and self.damage == "flip":
                buffer = buffer.clone()
                buffer[len(buffer) // 2] ^= 1
            elif buffer is not None and self.damage == "cut":
                buffer = buffer[: len(buffer) // 2]
            elif buffer is not None and self.damage == "other":
                buffer = next(iter(self._buffers.values()))
            yield buffer


@pytest.mark.parametrize("damage", ["flip", "cut", "other"])
@pytest.mark.parametrize("kind", ["hybrid", "dense"])
def test_a_peer_that_lies_costs_recompute_and_no_wrong_token(kind: str, damage: str) -> None:
    lying = LyingTier(damage)
    Bench(Oracle(kind), tiers=(lying,)).ask(PROMPT, 1)
    prompt = [*PROMPT, 1]
    with serving(lying) as server:
        bench = Bench(Oracle(kind), tiers=(MemoryTier(16 << 20), PeerTier(server.address, SECRET)), find_from=1)
        for _ in range(2):
            assert bench.ask(prompt) == expected(kind, prompt)
        assert bench.tree.num_leases() == 0


def test_what_is_being_sent_is_not_evicted(tmp_path: Path) -> None:
    memory = MemoryTier(16 << 20)
    memory.put("a" * 64 + ".rows", 1 << 20, lambda: torch.full((1 << 20,), 7, dtype=torch.uint8))
    with serving(memory) as server:
        peers = [PeerTier(server.address, SECRET) for _ in range(3)]
        found: list[int] = []

        def read(peer: PeerTier) -> None:
            for _ in range(10):
                with peer.get("a" * 64 + ".rows") as buffer:
                    assert buffer is not None
                    assert bool((buffer == 7).all())
                    found.append(len(buffer))

        threads = [threading.Thread(target=read, args=(peer,)) for peer in peers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert found == [1 << 20] * 30
        assert server.bytes_given == 30 << 20
        assert memory._ledger._entries["a" * 64 + ".rows"].leases == 0
        assert peers[0].put("b" * 64 + ".rows", 10, lambda: torch.zeros(10)).status is PutStatus.REFUSED


def test_bad_settings_are_refused_with_what_to_do() -> None:
    assert parse_tier("peer://10.0.0.5:7700") == TierConfig("peer", "10.0.0.5:7700", NO_LIMIT)
    for text in ("peer://", "peer://host", "peer:host:1", "peer://host:99999", "peer://a/b:1"):
        with pytest.raises(HoldoverError, match="peer://HOST:PORT"):
            parse_tier(text)
    with pytest.raises(HoldoverError, match="--peer-secret-file or HOLDOVER_PEER_SECRET"):
        open_tier(parse_tier("peer://127.0.0.1:1"), "peer")
    with pytest.raises(HoldoverError, match="must be HOST:PORT"):
        parse_address("here", "--peer-listen")
    with pytest.raises(HoldoverError, match="an address of this machine"):
        listening_address("example.org:7700")
    assert listening_address("localhost:7700") == "tcp://127.0.0.1:7700"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(HoldoverError, match="can't be had"):
            PeerServer(f"127.0.0.1:{taken.getsockname()[1]}", SECRET, [])


def test_the_secret_is_shown_nowhere(caplog: pytest.LogCaptureFixture) -> None:
    with serving(MemoryTier(1 << 20)) as server:
        peer = PeerTier(server.address, OTHER)
        with pytest.raises(TierError) as error:
            peer.head(KEPT, 10, None)
    assert SECRET not in repr(vars(server)) + str(error.value) + caplog.text
    assert OTHER not in repr(vars(peer)) + str(error.value) + caplog.text


def test_real_servers_share_over_the_network(tmp_path: Path) -> None:
    """Through the command line, with the secret in a file; then the first is killed, and the second serves on."""
    file = tmp_path / "secret"
    file.write_text(SECRET)
    port = free_port()
    given = ("--peer-secret-file", str(file))
    body = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0, "return_token_ids": True, "ignore_eos": True}
    with RunningServer("oracle:hybrid", "--peer-listen", f"127.0.0.1:{port}", *given) as first:
        assert f"  peers may read at peer://127.0.0.1:{port}" in first.lines
        _, right = first.post("/v1/completions", body)
        first.wait_for("holdover_saves_under_way", 0)
        options = ("--tier", "memory:64MiB", "--tier", f"peer://127.0.0.1:{port}", *given)
        with RunningServer("oracle:hybrid", *options) as second:
            _, answer = second.post("/v1/completions", body)
            assert answer["choices"] == right["choices"]
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == len(PROMPT)
            assert first.metric("holdover_peer_bytes_given_total") > 0
            first.stop(9)
            longer = {**body, "prompt": [*PROMPT[:60], *PROMPT]}
            status, _ = second.post("/v1/completions", longer)
            assert status == 200
        assert SECRET not in "".join(first.lines + second.lines)


def test_an_engine_with_nothing_of_its_own_does_not_listen() -> None:
    from holdover.config import EngineConfig

    config = EngineConfig("", "", "", tiers=(parse_tier("peer://127.0.0.1:9"),), peer_listen="127.0.0.1:0")
    bench = Bench(Oracle("hybrid"), tiers=(PeerTier("127.0.0.1:9", SECRET),))
    with pytest.raises(HoldoverError, match="HOLDOVER_PEER_SECRET"):
        listen_for_peers(config, bench.engine)
    with pytest.raises(HoldoverError, match="nothing to give"):
        listen_for_peers(msgspec.structs.replace(config, peer_secret=SECRET), bench.engine)
