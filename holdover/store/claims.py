"""Who is computing what: a note in a shared tier, so that several engines compute one prefix once.

A claim lies under the name that the rows which are being computed will have. It is a hint: who finds one may wait for
the rows or not, and one that is left behind costs others a wait that they themselves have limited.
"""

import msgspec

from holdover.state.address import AddressChain
from holdover.state.segment import Kind, segment_name
from holdover.store.finding import Reach
from holdover.store.jobs import Claimed, FindJob
from holdover.store.tier import Tier

MOST_MARKS = 16
MOST_OTHERS = 64  # notes of others that are remembered
MOST_BYTES = 1024
MARK_BYTES = 8
LEAST_SHARE = 2  # waiting for all of it pays if at least half of it is one's own


class Claim(msgspec.Struct, frozen=True, array_like=True):
    """marks: positions, ascending, with the beginning of the address of each, up to the end of what is computed."""

    marks: list[tuple[int, bytes]]


def make_claim(chain: AddressChain, first: int, last: int) -> bytes:
    """A note that rows `[first, last)` of a prompt are being computed."""
    step = max(1, -(-(last - first) // MOST_MARKS))
    positions = [*range(first + step, last, step), last]
    return msgspec.msgpack.encode(Claim([(each, chain.address(each)[:MARK_BYTES]) for each in positions]))


def shared_with(content: bytes, chain: AddressChain, first: int, last: int) -> int:
    """Up to which position what a note says is being computed is `chain`'s prompt too; `first` if it is not, or not
    enough of it to wait for."""
    try:
        marks = msgspec.msgpack.decode(content, type=Claim).marks
    except (msgspec.MsgspecError, ValueError):
        return first
    shared = first
    for position, address in marks[:MOST_MARKS]:
        if not 0 < position <= last or chain.address(position)[:MARK_BYTES] != address:
            break
        shared = max(shared, position)  # what is before `first` is kept by now
    end = marks[-1][0] if marks else first
    return shared if shared > first and (shared - first) * LEAST_SHARE >= end - first else first


class Claims:
    """The notes that one engine knows of: those it has left, and those of others that were still there when it last
    looked. Used by one thread, but for `forget`."""

    def __init__(self) -> None:
        self.own: set[Claimed] = set()
        self._others: dict[Claimed, bytes] = {}

    def forget(self, claimed: Claimed) -> None:
        """One of its own is gone."""
        self.own.discard(claimed)

    def ask(self, tier: Tier, job: FindJob, reach: Reach) -> tuple[Claimed | None, int]:
        """Leave a note that what the tier lacks of a prompt is being computed, or find that another engine does so:
        how many tokens of it, beyond what the request can go on from. Raises TierError."""
        chain, length = job.context.chain, len(job.context.tokens)
        first = max(reach.state, job.resume)
        if job.claim_from is None or length - first < job.claim_from:
            return None, 0
        mine = Claimed(segment_name(Kind.ROWS, chain.address(reach.state + 1)), tier.name)
        if mine in self.own:  # for another request: the scheduler lets one wait for the other
            return None, 0
        # Who computes what has been found here only now may be at work still: part of it is saved, and part is not.
        maybe = {Claimed(name, tier.name): None for name in reach.new_rows[:1]}
        shared = max(
            (self._shared(tier, each, chain, first, length) for each in (*maybe, *self._others)), default=first
        )
        if shared == first:
            there = tier.claim(mine.name, make_claim(chain, reach.state, length))
            if there is None:
                self.own.add(mine)
                return mine, 0
            shared = self._heed(mine, there, chain, first, length)
        return None, shared - first

    def _shared(self, tier: Tier, claimed: Claimed, chain: AddressChain, first: int, last: int) -> int:
        known = self._others.get(claimed)
        if claimed in self.own or claimed.tier != tier.name:
            return first
        if known is not None and shared_with(known, chain, first, last) == first:
            return first
        there = tier.claimed(claimed.name)
        if there is None:
            self._others.pop(claimed, None)
            return first
        return self._heed(claimed, there, chain, first, last)

    def _heed(self, claimed: Claimed, there: bytes, chain: AddressChain, first: int, last: int) -> int:
        shared = shared_with(there, chain, first, last)
        if shared > first:
            self._others.pop(claimed, None)
            self._others[claimed] = there[:MOST_BYTES]
            while len(self._others) > MOST_OTHERS:
                del self._others[next(iter(self._others))]
        return shared
