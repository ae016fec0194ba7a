"""Kimi delta attention (KDA): a recurrence with a decay per channel, over a batch of unlike sequences."""

import ctypes

import torch
import torch.nn.functional as F

from holdover.ops import native
from holdover.ops.sequences import LiveSequences


def kimi_delta_attention(
    mixed: torch.Tensor,
    decay: torch.Tensor,
    decay_bias: torch.Tensor,
    decay_rate: torch.Tensor,
    beta: torch.Tensor,
    gate: torch.Tensor,
    conv_weight: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    recurrent: torch.Tensor,
    conv_tail: torch.Tensor,
    sequences: LiveSequences,
) -> torch.Tensor:
    """Short convolution, delta rule and gated norm of one layer; updates the live states in place.

    mixed: [tokens, 3 * heads * head_dim], the projections to q, k and v (rows may be strided).
    decay: [tokens, heads * head_dim], from which a channel's decay is exp(rate * softplus(decay + bias)); decay_bias,
    decay_rate: float32 [heads * head_dim], rates below 0. beta: [tokens, heads], before its sigmoid (rows may be
    strided). gate: [tokens, heads * head_dim], before its sigmoid (decay and gate may be strided alike).
    conv_weight: float32 [conv_kernel, 3 * heads * head_dim].
    norm_weight: float32 [head_dim]. recurrent: float32 view [max_running, heads, head_dim, head_dim].
    conv_tail: view [max_running, conv_kernel - 1, 3 * heads * head_dim], in mixed's dtype: the last inputs.
    Returns [tokens, heads * head_dim] in mixed's dtype; zero for tokens of no sequence.
    Source: Kimi Team, "Kimi Linear" (2025), section 3: S <- (I - beta k k^T) diag(decay) S + beta k v^T, o = S^T q.
    """
    if mixed.device.type == "cpu" and (library := native.library()) is not None:
        return _native(
            library,
            mixed,
            decay,
            decay_bias,
            decay_rate,
            beta,
            gate,
            conv_weight,
            norm_weight,
            eps,
            recurrent,
            conv_tail,
            sequences,
        )
    return kimi_delta_attention_torch(
        mixed, decay, decay_bias, decay_rate, beta, gate, conv_weight, norm_weight, eps, recurrent, conv_tail, sequences
    )


def _native(
    library: ctypes.CDLL,
    mixed: torch.Tensor,
    decay: torch.Tensor,
    decay_bias: torch.Tensor,
    decay_rate: torch.Tensor,
    beta: torch.Tensor,
    gate: torch.Tensor,
    conv_weight: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    recurrent: torch.Tensor,
    conv_tail: torch.Tensor,
    sequences: LiveSequences,
) -> torch.Tensor:
    (tokens, heads), head_dim = beta.shape, recurrent.shape[-1]
    kernel = conv_weight.shape[0]
    if gate.stride() != decay.stride() or gate.stride(1) != 1:
        gate, decay = gate.contiguous(), decay.contiguous()
    assert beta.dtype == decay.dtype == mixed.dtype and beta.stride(1) == 1
    assert mixed.stride(1) == 1 and mixed.dtype in (torch.float32, torch.bfloat16)
    assert conv_tail.dtype == mixed.dtype == gate.dtype and recurrent.dtype == torch.float32
    out = torch.zeros(tokens, heads * head_dim, dtype=mixed.dtype)
    live, pointer, long = sequences.live, ctypes.c_void_p, ctypes.c_int64
    work = tokens * heads * head_dim * head_dim
    status = library.holdover_kimi_delta(
        pointer(mixed.data_ptr()), long(mixed.stride(0)), pointer(decay.data_ptr()),
        pointer(decay_bias.data_ptr()), pointer(decay_rate.data_ptr()), pointer(beta.data_ptr()),
        long(beta.stride(0)), pointer(gate.data_ptr()), long(gate.stride(0)),
        pointer(conv_weight.data_ptr()), pointer(norm_weight.data_ptr()),
        ctypes.c_float(eps), pointer(live.data_ptr()), long(live.stride(0)),
        long(recurrent.data_ptr() - live.data_ptr()), long(conv_tail.data_ptr() - live.data_ptr()),
        pointer(sequences.live_rows.data_ptr()), pointer(sequences.starts.data_ptr()),
        len(sequences.live_rows), heads, head_dim, kernel, pointer(out.data_ptr()),
        int(mixed.dtype == torch.bfloat16), torch.get_num_threads() if work > 1 << 17 else 1,
    )  # fmt: skip
    if status != 0:
        raise ValueError(f"head_dim {head_dim} or conv_kernel {kernel} is outside what the kernel was built for")
    return out


def kimi_delta_attention_torch(
    mixed: torch.Tensor,
    decay: torch.Tensor,
    decay_bias: torch.Tensor,
    decay_rate: torch.Tensor,
    beta: torch.Tensor,
    gate: torch.Tensor,
    conv_weight: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    recurrent: torch.Tensor,
    conv_tail: torch.Tensor,
    sequences: LiveSequences,
) -> torch.Tensor:
    """The same in PyTorch, for devices with no kernel of their own. Arguments as `kimi_delta_attention`."""
    (tokens, heads), head_dim = beta.shape, recurrent.shape[-1]
    kernel = conv_weight.shape[0]
    rates = torch.exp(F.softplus(decay.float() + decay_bias) * decay_rate).view(tokens, heads, head_dim)
    strengths = torch.sigmoid(beta.float())
    out = torch.zeros(tokens, heads, head_dim, dtype=torch.float32, device=mixed.device)
    for first, last, row in sequences.parts():
        inputs = torch.cat([conv_tail[row], mixed[first:last]])
        conv_tail[row] = inputs[len(inputs) - (kernel - 1) :]
        windows = inputs.float().unfold(0, kernel, 1)  # [tokens, channels, kernel]
        q, k, v = F.silu((windows * conv_weight.t()).sum(-1)).view(last - first, 3, heads, head_dim).unbind(1)
        q = q * torch.rsqrt(q.square().sum(-1, keepdim=True) + 1e-6) * head_dim**-0.5
        k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + 1e-6)
        state = recurrent[row]
        for t in range(last - first):
            state = state * rates[first + t].unsqueeze(-1)
            correction = (v[t] - torch.einsum("hkv,hk->hv", state, k[t])) * strengths[first + t].unsqueeze(-1)
            state = state + k[t].unsqueeze(-1) * correction.unsqueeze(-2)
            out[first + t] = torch.einsum("hkv,hk->hv", state, q[t])
        recurrent[row] = state
    normed = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + eps) * norm_weight
    return (normed * torch.sigmoid(gate.float()).view_as(normed)).flatten(1).to(mixed.dtype)
