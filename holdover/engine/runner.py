"""One step on the device: build the batch, run the model, keep last hidden vectors."""

import numpy as np
import torch

from holdover.engine.scheduler import Work
from holdover.models.base import Batch, BatchSequence, Model
from holdover.ops.shapes import padded_length, pads_shapes
from holdover.state.layout import LAST_HIDDEN
from holdover.state.pool import DevicePool


class Runner:
    """Runs a model over sequences whose state lies in a device pool."""

    def __init__(self, model: Model, pool: DevicePool) -> None:
        self.model = model
        self.pool = pool

    @torch.inference_mode()
    def run(self, works: list[Work]) -> torch.Tensor:
        """Feed each work's tokens. Returns scores of the token after each work's last one, float32 [works, vocab].

        Works with no tokens are at a position whose last hidden vector is in the live row already.
        """
        device = self.model.device
        fed = [work for work in works if work.num_tokens]
        last_hidden = self.pool.live_views[LAST_HIDDEN]
        if fed:
            batch = self._batch(fed)
            hidden = self.model.forward(batch, self.pool)
            last_hidden[batch.live_rows.to(device)] = hidden[batch.starts[1:].to(device) - 1]
        rows = [work.sequence.live_row for work in works]
        rows += rows[:1] * self._padding(len(rows))
        return self.model.logits(last_hidden[torch.tensor(rows, device=device)])[: len(works)]

    def _batch(self, works: list[Work]) -> Batch:
        device, windowed = self.model.device, self.pool.slots_per_window_row > 0
        ids, positions, slots, sequences = [], [], [], []
        for work in works:
            sequence = work.sequence
            first, last = sequence.position, sequence.position + work.num_tokens
            ids.append(sequence.tokens[first:last])
            positions.append(np.arange(first, last))
            slots.append(sequence.table[first:last])
            table = torch.from_numpy(sequence.table[:last]).to(device)
            assert sequence.live_row is not None
            window = None
            if windowed:
                read_from = max(0, first - self.pool.layout.window)
                window = torch.from_numpy(sequence.window[read_from:last]).to(device)
            sequences.append(BatchSequence(table, work.num_tokens, sequence.live_row, window))
        padding = np.zeros(self._padding(sum(work.num_tokens for work in works)), dtype=np.int64)
        return Batch(
            torch.from_numpy(np.concatenate([*ids, padding]).astype(np.int64)).to(device),
            torch.from_numpy(np.concatenate([*positions, padding])).to(device),
            torch.from_numpy(np.concatenate(slots)).to(device),
            sequences,
        )

    def _padding(self, num_tokens: int) -> int:
        return padded_length(num_tokens) - num_tokens if pads_shapes(self.pool.live_views[LAST_HIDDEN]) else 0
