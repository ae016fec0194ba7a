"""Buckets: the same tier on a real S3 server (moto's, over HTTP), through outages."""

import random
import re
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from holdover.config import NO_LIMIT, TierConfig, choose_tiers, parse_tier, tier_names
from holdover.errors import HoldoverError, TierError
from holdover.models.oracle import Oracle
from holdover.store.objects import ObjectTier, bucket_tier
from holdover.store.opening import open_tier
from holdover.store.tier import PutStatus
from tests.engine.harness import Bench
from tests.s3 import BUCKET, S3, FaultyS3, s3_client

NAME = "ab" * 32 + ".rows"


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3]:
    server = S3()
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    yield server
    server.stop()


def content(size: int, value: int) -> torch.Tensor:
    return torch.full((size,), value, dtype=torch.uint8)


def test_a_bucket_keeps_segments_once_and_finds_them_again(s3: S3) -> None:
    tier = bucket_tier(f"s3://{BUCKET}/agents", 10_000, "s3")
    assert tier.put(NAME, 100, lambda: content(100, 7)).status is PutStatus.KEPT
    assert tier.put(NAME, 100, lambda: content(100, 8)).status is PutStatus.ALREADY_THERE
    other = open_tier(TierConfig("s3", f"s3://{BUCKET}/agents", NO_LIMIT), "s3")
    assert isinstance(other, ObjectTier)
    other.wait_opened()
    assert list(other.scan()) == [NAME]
    with other.get(NAME) as buffer:
        assert buffer is not None
        assert torch.equal(buffer, content(100, 7))
    assert list(bucket_tier(f"s3://{BUCKET}/elsewhere", 10_000, "s3").scan()) == [], "a prefix is a place of its own"
    tier.delete(NAME)
    assert list(bucket_tier(f"s3://{BUCKET}/agents", 10_000, "s3").scan()) == []


def test_two_that_write_one_address_to_a_bucket_keep_it_once(s3: S3) -> None:
    one, two = (bucket_tier(f"s3://{BUCKET}/agents", 10_000, "s3") for _ in range(2))
    statuses = []

    def write(tier: ObjectTier, value: int) -> None:
        for number in range(20):
            name = f"{number:02d}" * 32 + ".rows"
            statuses.append(tier.put(name, 100, lambda: content(100, value)).status)

    writers = [threading.Thread(target=write, args=(tier, value)) for tier, value in ((one, 1), (two, 2))]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert Counter(statuses) == {PutStatus.KEPT: 20, PutStatus.ALREADY_THERE: 20}
    for number in range(20):
        name = f"{number:02d}" * 32 + ".rows"
        kept = [tier.head(name, 100, None) for tier in (one, two)]
        assert kept[0] == kept[1]
        assert [one.has(name), two.has(name)].count(True) == 1, "whose was refused knows that he has not written it"


def test_a_bucket_has_a_budget_too(s3: S3) -> None:
    tier = bucket_tier(f"s3://{BUCKET}/small", 250, "s3")
    names = [f"{i:02d}" * 32 + ".rows" for i in range(4)]
    for name in names:
        tier.put(name, 100, lambda: content(100, 1))
    assert list(tier.scan()) == names[2:]
    assert (
        sum(item["Size"] for item in s3_client(s3.port).list_objects_v2(Bucket=BUCKET, Prefix="small")["Contents"])
        == 200
    )


def test_a_bucket_that_is_not_there_is_named_and_no_secret_is(s3: S3) -> None:
    with pytest.raises(TierError, match=r"s3://absent/x can't be used.*bucket") as error:
        bucket_tier("s3://absent/x", 1000, "s3")
    assert "very-secret" not in str(error.value)


def test_an_outage_is_a_fault_and_then_it_goes_on(s3: S3) -> None:
    tier: ObjectTier = bucket_tier(f"s3://{BUCKET}/agents", 10_000, "s3")
    tier.put(NAME, 100, lambda: content(100, 7))
    s3.stop()
    with pytest.raises(TierError, match="reading from the s3 tier"), tier.get(NAME):
        pass
    with pytest.raises(TierError, match="writing to the s3 tier"):
        tier.put("cd" * 32 + ".rows", 100, lambda: content(100, 1))
    s3.start()
    assert tier.put("cd" * 32 + ".rows", 100, lambda: content(100, 1)).status is PutStatus.KEPT


def test_what_tier_options_mean() -> None:
    assert parse_tier("memory:16GiB") == TierConfig("memory", "", 16 << 30)
    assert parse_tier("disk:/var/lib/holdover:2GiB") == TierConfig("disk", "/var/lib/holdover", 2 << 30)
    assert parse_tier("disk:C:/state:1MiB") == TierConfig("disk", "C:/state", 1 << 20)
    assert parse_tier("s3://bucket/some/prefix") == TierConfig("s3", "s3://bucket/some/prefix", NO_LIMIT)
    assert parse_tier("s3://bucket") == TierConfig("s3", "s3://bucket", NO_LIMIT)
    assert parse_tier("gs://bucket/p:5GiB") == TierConfig("gs", "gs://bucket/p", 5 << 30)
    assert parse_tier("az://container/p").kind == "az"
    chosen = choose_tiers(["memory:1GiB", "disk:/a:1GiB", "disk:/b:1GiB", "s3://b/p"], None, None)
    assert tier_names(chosen) == ["memory", "disk", "disk-2", "s3"]
    assert choose_tiers([], None, None) == (TierConfig("memory", "", 8 << 30),)
    assert choose_tiers(["none"], None, None) == choose_tiers([], "none", None) == ()
    assert [tier.kind for tier in choose_tiers([], "1GiB", "/a:1GiB")] == ["memory", "disk"]


@pytest.mark.parametrize(
    ("tiers", "memory", "words"),
    [
        (["ftp://x/y"], None, "--tier 'ftp://x/y' must be memory:SIZE"),
        (["memory"], None, "must be memory:SIZE"),
        (["memory:lots"], None, "lots"),
        (["disk:/a"], None, "DIR:SIZE"),
        (["s3:bucket"], None, "names no bucket"),
        (["s3://"], None, "names no bucket"),
        (["s3://b:big"], None, "big"),
        (["memory:1GiB", "memory:2GiB"], None, "given twice"),
        (["disk:/a:1GiB", "disk:/b/../a/:2GiB"], None, "given twice"),
        (["s3://b/p", "s3://b/p/:1GiB"], None, "given twice"),
        (["none", "memory:1GiB"], None, "must be memory:SIZE"),
        (["memory:1GiB"], "1GiB", "leave out --memory-tier"),
    ],
)
def test_bad_tiers_are_refused_with_what_to_write(tiers: list[str], memory: str | None, words: str) -> None:
    with pytest.raises(HoldoverError, match=re.escape(words)):
        choose_tiers(tiers, memory, None)


@pytest.fixture
def profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyS3]:
    """A bucket whose credentials, region and address stand in a profile's files only."""
    server = FaultyS3()
    for name in (*server.environment, "AWS_PROFILE", "AWS_DEFAULT_REGION", "AWS_DEFAULT_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "credentials").write_text(
        "[default]\naws_access_key_id = DEFAULTKEY\naws_secret_access_key = default-secret\n"
        "[agents]\naws_access_key_id = AGENTSKEY\naws_secret_access_key = agents-secret\n"
    )
    endpoint = f"endpoint_url = http://127.0.0.1:{server.port}\nregion = eu-north-1\n"
    (tmp_path / "config").write_text(f"[default]\n{endpoint}[profile agents]\n{endpoint}[profile bare]\n{endpoint}")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    yield server
    server.close()


@pytest.mark.parametrize(("name", "key"), [(None, "DEFAULTKEY"), ("agents", "AGENTSKEY")])
def test_a_profile_gives_credentials_region_and_address(
    name: str | None, key: str, profile: FaultyS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name is not None:
        monkeypatch.setenv("AWS_PROFILE", name)
    tier = bucket_tier(f"s3://{BUCKET}/of-{key}", 10_000, "s3")
    assert tier.put(NAME, 100, lambda: content(100, 7)).status is PutStatus.KEPT
    assert len(profile.authorizations) > 1
    for each in profile.authorizations:
        assert re.search(f"Credential={key}/\\d+/eu-north-1/s3/", each)


def test_the_environment_goes_before_a_profile(profile: FaultyS3, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in profile.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_PROFILE", "agents")
    bucket_tier(f"s3://{BUCKET}/agents", 10_000, "s3")
    assert all("Credential=tested/" in each for each in profile.authorizations)


@pytest.mark.parametrize(("name", "why"), [("nobody", "could not be found"), ("bare", "has no credentials")])
def test_a_profile_that_cannot_be_used_is_named(
    name: str, why: str, profile: FaultyS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_PROFILE", name)
    with pytest.raises(TierError, match=f"{name}.*{why}") as error:
        bucket_tier(f"s3://{BUCKET}/agents", 10_000, "s3")
    assert "secret" not in str(error.value)


def test_a_profile_without_boto3_says_what_to_install(profile: FaultyS3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "agents")
    monkeypatch.setitem(sys.modules, "obstore.auth.boto3", None)  # which imports it
    with pytest.raises(TierError, match=r"pip install 'holdover\[aws\]'"):
        bucket_tier(f"s3://{BUCKET}/agents", 10_000, "s3")


def test_a_long_session_in_a_bucket_is_found_in_a_few_round_trips(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixty turns, and a server that takes 50 ms for each request: their heads are asked for at once."""
    server = FaultyS3()
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    history: list[int] = random.Random(1).choices(range(256), k=40)
    first = Bench(Oracle("hybrid"), tiers=(bucket_tier(f"s3://{BUCKET}/long", NO_LIMIT, "s3"),), find_from=1)
    for turn in range(60):
        history = [*history, *first.ask(history, 2), *random.Random(turn).choices(range(256), k=5)]
    second = Bench(Oracle("hybrid"), tiers=(bucket_tier(f"s3://{BUCKET}/long", NO_LIMIT, "s3"),), find_from=1)
    server.delay = 0.05
    request = second.submit(history)
    server.delay = 0.0
    second.run()
    server.close()
    assert second.tokens(request) == Bench(Oracle("hybrid")).ask(history, 4)
    assert second.usage(request).computed == 5 + 1
    assert second.engine.counters.tiers["s3"].segments_found > 100
    assert server.slept_at_once > 4, "one after another"
