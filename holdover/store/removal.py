"""Removing segments from a place from outside, so that the engines that use it keep count."""

from collections.abc import Iterable

from holdover.errors import TierError
from holdover.store.catalog import Tell
from holdover.store.place import Item, Place
from holdover.store.usage import FolderUsage


def remove(place: Place, items: Iterable[Item], tell: Tell = lambda _: None) -> int:
    """Remove objects; returns the bytes that are free now. Engines that run miss them, and compute.

    Raises TierError.
    """
    usage = None
    if place.folder is not None:
        try:
            usage = FolderUsage(place.folder)
        except OSError as error:
            raise TierError(f"{place.shown} can't be changed ({error.strerror or error}).") from None
        if usage.enter():
            usage.admit_others()  # what was counted last still holds; who opens the folder alone counts anew
    total = 0
    try:
        for item in items:
            freed = place.delete(item.path)
            if usage is not None:
                usage.give(freed or 0)
            total += item.nbytes if freed is None else freed
            tell(1)
    finally:
        if usage is not None:
            usage.close()
    return total
