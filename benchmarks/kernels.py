"""Our CPU kernels against PyTorch's and against the machine's limit, interleaved A B A B in one run.

    python -m benchmarks.kernels

Prints medians of ratios: products with packed weights and attention of a chunk, for shapes that come once (as turns
do) and for shapes that come again, and what part of the best bfloat16 product rate they reach.
"""

import random
import statistics
import time
from collections.abc import Callable

import torch

from holdover.ops import native
from holdover.ops.attention import _latent_chunk, latent_attention
from holdover.ops.linear import Linear

ROUNDS = 40


def seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def peak_flops() -> float:
    """The best rate of a large bfloat16 product, FLOP/s."""
    a = torch.randn(2048, 2048, dtype=torch.bfloat16)
    return 2 * 2048**3 / min(seconds(lambda: a @ a) for _ in range(10))


def compare(name: str, ours: Callable[[int], object], theirs: Callable[[int], object], sizes: list[int]) -> list[float]:
    """Times of ours by size; prints the median of theirs / ours over interleaved pairs."""
    ratios, times = [], []
    for size in sizes:
        mine, other = seconds(lambda size=size: ours(size)), seconds(lambda size=size: theirs(size))
        ratios.append(other / mine)
        times.append(mine)
    low, high = min(ratios), max(ratios)
    print(f"{name}: PyTorch takes {statistics.median(ratios):.2f} times as long (from {low:.2f} to {high:.2f})")
    return times


def main() -> None:
    print(f"python -m benchmarks.kernels: {torch.get_num_threads()} threads, C kernels: {native.library() is not None}")
    rng = random.Random(0)
    weight = (torch.randn(1536, 384) / 20).to(torch.bfloat16)
    linear, x = Linear(weight), torch.randn(2048, 384, dtype=torch.bfloat16)
    new = rng.sample(range(1, 600), ROUNDS)

    def ours(n: int) -> object:
        return linear(x[:n])

    def theirs(n: int) -> object:
        return torch.nn.functional.linear(x[:n], weight)

    compare("products, shapes that come once", ours, theirs, new)
    compare("products, the same shapes again", ours, theirs, new)
    times = compare("products of 1,024 rows", ours, theirs, [1024] * ROUNDS)
    rate = 2 * 1024 * 384 * 1536 / statistics.median(times)
    print(f"  {rate / 1e12:.2f} TFLOP/s, {rate / peak_flops():.0%} of the best product on this machine")

    rows = torch.randn(20_000, 128, dtype=torch.bfloat16)
    q = torch.randn(256, 4, 128, dtype=torch.bfloat16)
    tables = {n: torch.from_numpy(torch.randperm(20_000)[:n].numpy()) for n in rng.sample(range(600, 6000), ROUNDS)}
    out = torch.empty(256, 4, 96, dtype=torch.bfloat16)
    compare(
        "attention of 256 queries over 600 to 6,000 keys",
        lambda n: latent_attention(q, rows, 96, 0.1, [(0, 256)], [tables[n]]),
        lambda n: _latent_chunk(q, rows, 96, 0.1, tables[n], out),
        list(tables),
    )


if __name__ == "__main__":
    main()
