"""Attention of a batch of unlike sequences over rows that lie in slots."""

import ctypes
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from holdover.ops import native
from holdover.ops.shapes import pads_shapes, widens

QUERY_BLOCK = 64
KEY_BLOCK = 256


def causal_mask(
    num_queries: int, num_keys: int, device: torch.device, window: int | None = None
) -> torch.Tensor | None:
    """Which keys each of the last `num_queries` positions may see: bool [num_queries, num_keys]; None for all. With a
    window, the last so many up to its own."""
    if num_queries == 1 and (window is None or num_keys <= window):
        return None
    mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device).tril(num_keys - num_queries)
    return mask if window is None else mask.triu(num_keys - num_queries - window + 1)


def grouped_query_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of one sequence. q: [queries, heads, head_dim]; k, v: [keys, kv_heads, head_dim].

    Returns [queries, heads, head_dim]. mask: bool [queries, keys] or None. sinks: [heads], a score of each head that
    takes its share of the attention and gives nothing for it.
    """
    if sinks is not None:  # one more key, of zeros, whose score comes from the mask alone
        queries, keys = len(q), len(k)
        scores = torch.zeros(len(sinks), queries, keys + 1, dtype=q.dtype, device=q.device)
        if mask is not None:
            scores[..., :keys].masked_fill_(~mask, float("-inf"))
        scores[..., keys] = sinks[:, None]
        mask = scores
        k, v = (torch.cat([each, torch.zeros_like(each[:1])]) for each in (k, v))
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        k.transpose(0, 1)[None],
        v.transpose(0, 1)[None],
        attn_mask=mask,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out[0].transpose(0, 1)


def latent_attention(
    q: torch.Tensor,
    rows: torch.Tensor,
    latent_dim: int,
    scale: float,
    bounds: Sequence[tuple[int, int]],
    tables: Sequence[torch.Tensor],
) -> torch.Tensor:
    """Multi-head latent attention of a batch in its absorbed form: all heads share the latents as keys and values.

    q: [tokens, heads, latent_dim + shared_dim]; rows: view [slots, latent_dim + shared_dim] of the arena. Sequence i
    has the tokens `bounds[i]` of the batch, its last ones, and its rows lie in the slots `tables[i]`, int64 [keys].
    Returns [tokens, heads, latent_dim]; zero for tokens of no sequence.
    Source: DeepSeek-AI, "DeepSeek-V2" (2024), section 2.1.3.
    """
    tokens, heads, _ = q.shape
    out = torch.zeros(tokens, heads, latent_dim, dtype=q.dtype, device=q.device)
    library = native.library() if q.device.type == "cpu" else None
    single = [i for i, (first, last) in enumerate(bounds) if last - first == 1]
    if library is not None and single:
        _native_tokens(
            library, q, rows, latent_dim, scale, [bounds[i][0] for i in single], [tables[i] for i in single], out
        )
    matrix_unit = q.shape[2] % 32 == latent_dim % 32 == 0 and native.has_matrix_unit(q)
    for (first, last), table in zip(bounds, tables, strict=True):
        if last - first == 1 and library is not None:
            continue
        if matrix_unit and library is not None:
            _native_chunk(library, q[first:last], rows, latent_dim, scale, table, out[first:last])
        else:
            _latent_chunk(q[first:last], rows, latent_dim, scale, table, out[first:last])
    return out


def _native_chunk(
    library: ctypes.CDLL,
    q: torch.Tensor,
    rows: torch.Tensor,
    latent_dim: int,
    scale: float,
    table: torch.Tensor,
    out: torch.Tensor,
) -> None:
    q = q.contiguous()
    status = library.holdover_latent_chunk(
        ctypes.c_void_p(q.data_ptr()), ctypes.c_void_p(rows.data_ptr()), ctypes.c_int64(rows.stride(0) * 2),
        ctypes.c_void_p(table.data_ptr()), ctypes.c_int64(len(table)), ctypes.c_int64(len(q)), q.shape[1], q.shape[2],
        latent_dim, ctypes.c_float(scale), ctypes.c_void_p(out.data_ptr()), torch.get_num_threads(),
    )  # fmt: skip
    if status != 0:
        raise MemoryError(f"attention over {len(table)} keys failed (status {status})")


def _latent_chunk(
    q: torch.Tensor, rows: torch.Tensor, latent_dim: int, scale: float, table: torch.Tensor, out: torch.Tensor
) -> None:
    """A chunk of one sequence, in blocks of queries, each against the keys that its last query may see."""
    queries, heads, width = q.shape
    start = len(table) - queries
    pad = pads_shapes(q)
    if pad and len(table) % KEY_BLOCK:
        table = torch.cat([table, table[:1].expand(-len(table) % KEY_BLOCK)])
    latents, dtype = rows.index_select(0, table), q.dtype
    if widens(q):
        q, latents = q.float(), latents.float()
    for first in range(0, queries, QUERY_BLOCK):
        last = min(first + QUERY_BLOCK, queries)
        keys = start + last
        block = q[first:last]
        if pad:
            keys = -(-keys // KEY_BLOCK) * KEY_BLOCK
            block = F.pad(block, (0, 0, 0, 0, 0, QUERY_BLOCK - len(block)))
        seen = latents[:keys]
        scores = (block.reshape(-1, width) @ seen.t()).float().mul_(scale).view(len(block), heads, keys)
        edge = start + first  # keys before it are seen by all queries of the block
        hidden = torch.ones(len(block), keys - edge, dtype=torch.bool, device=q.device).triu(1)
        scores[:, :, edge:].masked_fill_(hidden[:, None], float("-inf"))
        weights = torch.softmax(scores, dim=-1).to(dtype).to(q.dtype).view(-1, keys)
        out[first:last] = (weights @ seen[:, :latent_dim]).view(-1, heads, latent_dim)[: last - first]


def _native_tokens(
    library: ctypes.CDLL,
    q: torch.Tensor,
    rows: torch.Tensor,
    latent_dim: int,
    scale: float,
    tokens: list[int],
    tables: list[torch.Tensor],
    out: torch.Tensor,
) -> None:
    _, heads, width = q.shape
    q = q.contiguous()
    assert q.dtype in (torch.float32, torch.bfloat16) and rows.dtype == q.dtype and rows.stride(1) == 1
    count = len(tokens)
    status = library.holdover_latent_tokens(
        ctypes.c_void_p(q.data_ptr()), ctypes.c_void_p(rows.data_ptr()), ctypes.c_int64(rows.stride(0) * q.itemsize),
        (ctypes.c_void_p * count)(*(table.data_ptr() for table in tables)),
        (ctypes.c_int64 * count)(*map(len, tables)), (ctypes.c_int64 * count)(*tokens),
        count, heads, width, latent_dim, ctypes.c_float(scale), ctypes.c_void_p(out.data_ptr()),
        int(q.dtype == torch.bfloat16), torch.get_num_threads() if count > 1 else 1,
    )  # fmt: skip
    if status != 0:
        raise ValueError(f"rows of {width} numbers are wider than the kernel was built for")
