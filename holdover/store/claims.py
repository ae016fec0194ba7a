"""Who is computing what: a note in a shared tier, so that several engines compute one prefix once. Plain data.

A claim lies under the name that the rows which are being computed will have. It is a hint: who finds one may wait for
the rows or not, and one that is left behind costs others a wait that they themselves have limited.
"""

import msgspec

from holdover.state.address import AddressChain

MOST_MARKS = 16
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
        if not shared < position <= last or chain.address(position)[:MARK_BYTES] != address:
            break
        shared = position
    end = marks[-1][0] if marks else first
    return shared if shared > first and (shared - first) * LEAST_SHARE >= end - first else first
