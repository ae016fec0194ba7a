"""The books of a tier count positions, not segments."""

from holdover.state.address import Tokens, as_tokens
from holdover.state.node import Saved
from holdover.state.segment import Kind
from holdover.store.audit import TierAudit, position_digests


def segment(name: int, tokens: list[int], start: int, kind: Kind = Kind.ROWS) -> tuple[Saved, Tokens, bytes]:
    return Saved(kind, bytes([name]) * 32, start, len(tokens)), as_tokens(tokens), bytes(32)


def test_positions_are_told_apart_by_their_whole_prefix() -> None:
    a, b = position_digests(as_tokens([1, 2, 3, 4])), position_digests(as_tokens([1, 2, 9, 4]))
    assert a[:2] == b[:2]
    assert a[2] != b[2]
    assert a[3] != b[3], "the same token after another prefix is another position"
    assert position_digests(as_tokens([1, 2, 3, 4]), 2) == a[2:]
    assert position_digests(as_tokens(range(1000)), 10)[0] == position_digests(as_tokens(range(11)))[10]


def test_copies_and_new_positions_are_counted() -> None:
    audit = TierAudit()
    assert audit.added(*segment(1, [1, 2, 3], 0)) == 3
    assert audit.added(*segment(2, [1, 2, 3, 4], 3)) == 1
    assert audit.max_copies == 1
    assert audit.added(*segment(3, [1, 2, 3, 4], 0)) == 0, "a second copy of everything"
    assert audit.max_copies == 2
    audit.removed(f"{'03' * 32}.rows")
    audit.removed(f"{'01' * 32}.rows")
    assert audit.added(*segment(4, [1, 2, 3], 0)) == 3, "gone, so new again"
    assert audit.added(*segment(5, [1, 2, 3], 0, Kind.SNAPSHOT)) == 1
    assert audit.added(*segment(6, [1, 2, 3], 0, Kind.SNAPSHOT)) == 0
    assert audit.max_copies == 2, "snapshots are not token state"


def test_the_same_tokens_of_two_tenants_are_no_copies() -> None:
    audit = TierAudit()
    saved, tokens, space = segment(1, [1, 2, 3], 0)
    other, _, _ = segment(2, [1, 2, 3], 0)
    assert audit.added(saved, tokens, space) == 3
    assert audit.added(other, tokens, bytes([1]) * 32) == 3
    assert audit.max_copies == 1
