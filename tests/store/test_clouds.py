"""The same tier on `gs://` and `az://`: kept once, found by others, within its budget, and whole sessions come back."""

import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from holdover.errors import TierError
from holdover.models.oracle import Oracle
from holdover.store.memory import MemoryTier
from holdover.store.objects import bucket_tier
from holdover.store.tier import PutStatus
from tests.azure import CONTAINER, MAIN, Azurite
from tests.engine.harness import Bench
from tests.gcs import GCS
from tests.s3 import BUCKET

NAME = "ab" * 32 + ".rows"
AZURITE = Path(sys.prefix) / "azurite"


@pytest.fixture(params=["gs", pytest.param("az", marks=pytest.mark.slow)])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """The URL of a place that is empty: moto keeps what other tests of this process have put into its buckets."""
    if request.param == "az" and not (AZURITE / MAIN).exists():
        pytest.skip("Azurite is not installed: make azurite (it needs npm)")
    server = GCS(tmp_path) if request.param == "gs" else Azurite(AZURITE, tmp_path)
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    bucket = f"gs://{BUCKET}" if request.param == "gs" else f"az://{CONTAINER}"
    yield f"{bucket}/{tmp_path.name}"
    if isinstance(server, GCS):
        assert server.conditions > 0 or server.refused, "nothing was written on condition"
    server.close()


def content(size: int, value: int) -> torch.Tensor:
    return torch.full((size,), value, dtype=torch.uint8)


def test_a_bucket_keeps_segments_once_within_its_budget(place: str) -> None:
    tier = bucket_tier(f"{place}/agents", 250, "bucket")
    assert tier.put(NAME, 100, lambda: content(100, 7)).status is PutStatus.KEPT
    assert tier.put(NAME, 100, lambda: content(100, 8)).status is PutStatus.ALREADY_THERE
    other = bucket_tier(f"{place}/agents", 250, "bucket")
    assert list(other.scan()) == [NAME]
    assert other.put(NAME, 100, lambda: content(100, 8)).status is PutStatus.ALREADY_THERE
    assert other.head(NAME, 3, None) == b"\7\7\7"
    with other.get(NAME) as buffer:
        assert buffer is not None
        assert torch.equal(buffer, content(100, 7))
    for number in range(3):
        tier.put(f"{number:02d}" * 32 + ".rows", 100, lambda: content(100, 1))
    assert len(list(bucket_tier(f"{place}/agents", 250, "bucket").scan())) == 2
    assert list(bucket_tier(f"{place}/elsewhere", 250, "bucket").scan()) == []
    assert other.head("cd" * 32 + ".rows", 3, None) is None


def test_who_comes_second_while_neither_knew_is_told_so(place: str) -> None:
    one, two = (bucket_tier(f"{place}/agents", 10_000, "bucket") for _ in range(2))
    assert one.put(NAME, 100, lambda: content(100, 1)).status is PutStatus.KEPT
    assert two.put(NAME, 100, lambda: content(100, 2)).status is PutStatus.ALREADY_THERE
    assert two.head(NAME, 1, None) == b"\1"


@pytest.mark.parametrize("kind", ["hybrid", "everything"])
def test_an_engine_goes_on_from_what_another_has_saved(kind: str, place: str) -> None:
    prompt = random.Random(kind).choices(range(256), k=120)
    tiers = (MemoryTier(16 << 20), bucket_tier(f"{place}/agents", 16 << 20, "bucket"))
    Bench(Oracle(kind), tiers=tiers, find_from=1).ask(prompt, 1)
    bench = Bench(Oracle(kind), tiers=(bucket_tier(f"{place}/agents", 16 << 20, "bucket"),), find_from=1)
    assert bench.ask([*prompt, 1]) == Bench(Oracle(kind)).ask([*prompt, 1])
    assert bench.usage(bench.last()).reused == {"bucket": 120}


def test_a_bucket_that_is_not_there_is_named(place: str) -> None:
    bucket_tier(f"{place}/agents", 250, "bucket").put(NAME, 10, lambda: content(10, 1))
    scheme = place.partition("://")[0]
    with pytest.raises(TierError, match=rf"{scheme}://absent/x can't be used"):
        bucket_tier(f"{scheme}://absent/x", 1000, "bucket")
