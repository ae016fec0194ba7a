"""The device pool: all state kept on the device, under one byte budget.

The budget is cut into equal slots of the layout's `slot_bytes`. A token row takes one slot; a window row takes one for
each of its pages, a snapshot as many as its bytes need, all of them anywhere. So there is one budget for all kinds of
state, no fixed split, and no fragmentation. Models without token state (`slots_per_token` 0) keep no token rows: their
tokens take no slots, and "rows" are in name only.
Beside the slots lie the live states: one row per running sequence, updated in place by the model at every step.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from holdover.errors import HoldoverError
from holdover.state.layout import Layout
from holdover.state.segment import BLOCK_BYTES

Slots = NDArray[np.int64]
TRANSFER_BYTES = 16 << 20  # between host and another device


class DevicePool:
    """Slots and live states of one engine.

    arena: uint8 [num_slots, slot_bytes]. window_views: for each window array, the page that it lies in and its view of
    the arena: a row with the slots `pages`, [slots_per_window_row], has it at `view[pages[page]]`. live: uint8
    [max_running, live_bytes], a snapshot row per running sequence.
    Raises HoldoverError if the budget cannot hold even the live states and one slot.
    """

    def __init__(self, layout: Layout, budget_bytes: int, max_running: int, device: torch.device) -> None:
        self.layout = layout
        self.budget_bytes = budget_bytes
        self.slot_bytes = layout.slot_bytes
        self.slots_per_token = 1 if layout.bytes_per_token else 0
        self.slots_per_window_row = len(layout.window_pages)
        self.slots_per_snapshot = -(-layout.bytes_per_snapshot // self.slot_bytes)
        self.live_bytes = self.slots_per_snapshot * self.slot_bytes
        self.num_slots = (budget_bytes - max_running * self.live_bytes) // self.slot_bytes
        if self.num_slots < self.slots_per_snapshot + self.slots_per_token + self.slots_per_window_row:
            raise HoldoverError(
                f"device memory of {budget_bytes:,} bytes is too small: {max_running} running sequences take "
                f"{max_running * self.live_bytes:,} bytes and each kept token {self.slot_bytes:,}. "
                "Give more with --device-memory, or run fewer at once with --max-running."
            )
        self.arena = torch.zeros(self.num_slots, self.slot_bytes, dtype=torch.uint8, device=device)
        self.live = torch.zeros(max_running, self.live_bytes, dtype=torch.uint8, device=device)
        self.token_views = {part.spec.name: part.view(self.arena) for part in layout.token_fields}
        self.window_views = {
            part.spec.name: (index, part.view(self.arena))
            for index, page in enumerate(layout.window_pages)
            for part in page.fields
        }
        self.live_views = {part.spec.name: part.view(self.live) for part in layout.snapshot_fields}
        # On the CPU, copies go through numpy: PyTorch would start a team of threads for each thread that copies, and
        # the teams would spin against the model's.
        self._host = self.arena.numpy() if device.type == "cpu" else None
        self._free: Slots = np.arange(self.num_slots, dtype=np.int64)[::-1].copy()
        self._num_free = self.num_slots
        self.peak_used = 0

    @property
    def on_host(self) -> bool:
        """Whether the device is the host's own memory."""
        return self._host is not None

    @property
    def block_bytes(self) -> int:
        """How much to copy in or out at once: on the host what fits into a cache, else what is worth a transfer."""
        return BLOCK_BYTES if self.on_host else TRANSFER_BYTES

    @property
    def num_free(self) -> int:
        return self._num_free

    @property
    def num_used(self) -> int:
        return self.num_slots - self._num_free

    @property
    def max_running(self) -> int:
        return int(self.live.shape[0])

    def allocate(self, count: int) -> Slots | None:
        """Take `count` slots; None if fewer are free (then nothing is taken)."""
        if count > self._num_free:
            return None
        first = self._num_free - count
        slots = self._free[first : self._num_free][::-1].copy()
        self._num_free = first
        self.peak_used = max(self.peak_used, self.num_used)
        return slots

    def free(self, slots: Slots) -> None:
        """Give slots back. Nobody may read or write them afterwards."""
        end = self._num_free + len(slots)
        if end > self.num_slots:
            raise AssertionError("slots were given back twice")
        self._free[self._num_free : end] = slots[::-1]
        self._num_free = end

    def allocate_rows(self, count: int) -> Slots | None:
        """Take slots for the rows of `count` tokens, [count]; None if too few are free. All 0 where none are needed."""
        return self.allocate(count) if self.slots_per_token else np.zeros(count, dtype=np.int64)

    def free_rows(self, slots: Slots) -> None:
        """Give back what `allocate_rows` gave."""
        if self.slots_per_token:
            self.free(slots)

    def allocate_window(self, count: int) -> Slots | None:
        """Take slots for `count` window rows, [count, slots_per_window_row]; None if too few are free."""
        slots = self.allocate(count * self.slots_per_window_row)
        return None if slots is None else slots.reshape(count, self.slots_per_window_row)

    def free_window(self, slots: Slots) -> None:
        """Give back slots of window rows, [count, slots_per_window_row]."""
        self.free(slots.reshape(-1))

    def free_slots(self) -> Slots:
        """The free slots (a copy), for integrity checks."""
        return self._free[: self._num_free].copy()

    def read_rows(self, slots: Slots) -> torch.Tensor:
        """Copy out slots: uint8 [len(slots), slot_bytes], on the CPU."""
        if self._host is None:
            return self.arena.index_select(0, torch.from_numpy(slots).to(self.arena.device)).cpu()
        return torch.from_numpy(self._host.take(slots, axis=0))

    def copy_rows(self, slots: Slots, place: torch.Tensor) -> None:
        """Copy token rows to `place`: uint8 [len(slots), bytes_per_token], on the CPU."""
        if not self.slots_per_token:
            return
        self._copy(slots, place)

    def write_rows(self, slots: Slots, rows: torch.Tensor) -> None:
        """Copy in token rows: uint8 [len(slots), bytes_per_token]."""
        if self.slots_per_token:
            self._write(slots, rows)

    def copy_window(self, slots: Slots, place: torch.Tensor) -> None:
        """Copy window rows to `place`: uint8 [rows, bytes_per_window_row]. slots: [rows, slots_per_window_row]."""
        for index, page in enumerate(self.layout.window_pages):
            self._copy(slots[:, index], place[:, page.start : page.start + page.nbytes])

    def write_window(self, slots: Slots, rows: torch.Tensor) -> None:
        """Copy in window rows: uint8 [rows, bytes_per_window_row]. slots: [rows, slots_per_window_row]."""
        for index, page in enumerate(self.layout.window_pages):
            self._write(slots[:, index], rows[:, page.start : page.start + page.nbytes])

    def _copy(self, slots: Slots, place: torch.Tensor) -> None:
        """Copy the first bytes of slots to `place`: uint8 [len(slots), bytes]."""
        nbytes = place.shape[1]
        if self._host is None:
            place.copy_(self.read_rows(slots)[:, :nbytes])
        elif nbytes == self.slot_bytes and place.is_contiguous():
            self._host.take(slots, axis=0, out=place.numpy(), mode="clip")
        else:
            place.numpy()[:] = self._host[slots, :nbytes]

    def _write(self, slots: Slots, rows: torch.Tensor) -> None:
        """Copy in the first bytes of slots: uint8 [len(slots), bytes]."""
        nbytes = rows.shape[1]
        if self._host is None:
            index = torch.from_numpy(np.ascontiguousarray(slots)).to(self.arena.device)
            self.arena[:, :nbytes].index_copy_(0, index, rows.to(self.arena.device))
        elif nbytes == self.slot_bytes:
            self._host[slots] = rows.numpy()
        else:
            self._host[slots, :nbytes] = rows.numpy()

    def copy_snapshot(self, slots: Slots, place: torch.Tensor) -> None:
        """Copy a kept snapshot to `place`: uint8 [bytes_per_snapshot], on the CPU."""
        rows = self.read_rows(slots).flatten()[: self.layout.bytes_per_snapshot]
        np.copyto(place.numpy(), rows.numpy())

    def keep_snapshot(self, live_row: int, slots: Slots) -> None:
        """Copy a live state into slots: the snapshot of the position that the live state is at."""
        self._write(slots, self.live[live_row].view(self.slots_per_snapshot, self.slot_bytes))

    def resume_snapshot(self, slots: Slots, live_row: int) -> None:
        """Copy a kept snapshot into a live state."""
        self.live[live_row] = self.read_rows(slots).flatten()

    def fill_live(self, live_row: int, snapshot: torch.Tensor, first: int = 0) -> None:
        """Copy a loaded snapshot, or its bytes from `first` on, into a live state."""
        last = first + len(snapshot)
        if self._host is None:
            self.live[live_row, first:last] = snapshot.to(self.live.device)
        else:
            self.live.numpy()[live_row, first:last] = snapshot.numpy()

    def clear_live(self, live_row: int) -> None:
        """Make a live state that of position 0."""
        self.live[live_row].zero_()
