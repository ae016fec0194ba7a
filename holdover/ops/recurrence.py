"""States that tokens are folded into one after another: outer products (gated DeltaNet, Mamba-2) and selective scans
(Mamba-1), over a batch of unlike sequences."""

import ctypes

import torch

from holdover.ops import native
from holdover.ops.norm import threads_for
from holdover.ops.sequences import LiveSequences


def outer_recurrence(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor | None,
    state: torch.Tensor,
    sequences: LiveSequences,
) -> torch.Tensor:
    """S <- decay S + k v^T, y = S^T q for each token and head; updates the live states in place.

    With `beta` v is first replaced by beta (v - (decay S)^T k): the gated delta rule. All float32. q, k: [tokens,
    key_heads, keys], each head for `heads / key_heads` of v's; v: [tokens, heads, width]; decay, beta: [tokens, heads],
    decay between 0 and 1. state: view [max_running, heads, keys, width] of the live states.
    Returns [tokens, heads, width]; zero for tokens of no sequence.
    Sources: Yang et al., "Gated Delta Networks" (2024), equation 10; Dao and Gu, "Transformers are SSMs" (2024).
    """
    (tokens, key_heads, keys), (heads, width) = q.shape, v.shape[1:]
    out = torch.zeros(tokens, heads, width, dtype=torch.float32, device=v.device)
    library = native.library() if v.device.type == "cpu" else None
    if library is None:
        for first, last, row in sequences.parts():
            now = state[row]
            for t in range(first, last):
                qt, kt = (each[t].repeat_interleave(heads // key_heads, dim=0) for each in (q, k))
                now = now * decay[t, :, None, None]
                value = v[t]
                if beta is not None:
                    value = (value - torch.einsum("hkv,hk->hv", now, kt)) * beta[t, :, None]
                now = now + kt[:, :, None] * value[:, None]
                out[t] = torch.einsum("hkv,hk->hv", now, qt)
            state[row] = now
        return out
    q, k = (each if each.stride()[1:] == (keys, 1) else each.contiguous() for each in (q, k))
    if q.stride(0) != k.stride(0):
        q, k = q.contiguous(), k.contiguous()
    v = v if v.stride()[1:] == (width, 1) else v.contiguous()
    decay, beta = decay.contiguous(), None if beta is None else beta.contiguous()
    assert all(each.dtype == torch.float32 for each in (q, k, v, decay, state))
    pointer, long, live = ctypes.c_void_p, ctypes.c_int64, sequences.live
    status = library.holdover_outer_recurrence(
        pointer(q.data_ptr()), pointer(k.data_ptr()), pointer(v.data_ptr()), long(q.stride(0)), long(v.stride(0)),
        pointer(decay.data_ptr()), pointer(None if beta is None else beta.data_ptr()), pointer(live.data_ptr()),
        long(live.stride(0)), long(state.data_ptr() - live.data_ptr()), pointer(sequences.live_rows.data_ptr()),
        pointer(sequences.starts.data_ptr()), len(sequences.live_rows), key_heads, heads, keys, width,
        pointer(out.data_ptr()), threads_for(out.numel() * keys),
    )  # fmt: skip
    if status != 0:
        raise ValueError(f"heads of {width} values are wider than the kernel was built for")
    return out


def selective_scan(
    x: torch.Tensor,
    step: torch.Tensor,
    rates: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    state: torch.Tensor,
    sequences: LiveSequences,
) -> torch.Tensor:
    """S <- exp(step rates) S + step x B, y = S . C for each token and channel; updates the live states in place.

    All float32. x, step: [tokens, channels]; rates: [states, channels], below 0; b, c: [tokens, states]. state: view
    [max_running, states, channels] of the live states. Returns [tokens, channels]; zero for tokens of no sequence.
    Source: Gu and Dao, "Mamba" (2023), algorithm 2.
    """
    states, channels = rates.shape
    out = torch.zeros(len(x), channels, dtype=torch.float32, device=x.device)
    library = native.library() if x.device.type == "cpu" else None
    if library is None:
        for first, last, row in sequences.parts():
            now = state[row]
            for t in range(first, last):
                now = now * torch.exp(step[t] * rates) + b[t, :, None] * (step[t] * x[t])
                out[t] = c[t] @ now
            state[row] = now
        return out
    x, step, rates, b, c = (each.contiguous() for each in (x, step, rates, b, c))
    assert all(each.dtype == torch.float32 for each in (x, step, rates, b, c, state))
    pointer, long, live = ctypes.c_void_p, ctypes.c_int64, sequences.live
    status = library.holdover_selective_scan(
        pointer(x.data_ptr()), pointer(step.data_ptr()), pointer(rates.data_ptr()), pointer(b.data_ptr()),
        pointer(c.data_ptr()), pointer(live.data_ptr()), long(live.stride(0)),
        long(state.data_ptr() - live.data_ptr()), pointer(sequences.live_rows.data_ptr()),
        pointer(sequences.starts.data_ptr()), len(sequences.live_rows), long(channels), states,
        pointer(out.data_ptr()), threads_for(out.numel() * states),
    )  # fmt: skip
    if status != 0:
        raise ValueError(f"{states} states of a channel are more than the kernel was built for")
    return out
