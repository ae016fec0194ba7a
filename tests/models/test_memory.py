"""Loading maps weights, and copies only what it has to lay out anew."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.checkpoints import make_reference

# Pages of mapped files are the kernel's cache, which it takes back when memory is short: the process's own ones count.
SCRIPT = """
import sys, threading, torch
from holdover.models.registry import load_model

def own_bytes():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))

torch.ones(64, 64) @ torch.ones(64, 64)
before, most, over = own_bytes(), 0, threading.Event()

def watch():
    global most
    while not over.wait(0.001):
        most = max(most, own_bytes())

watcher = threading.Thread(target=watch)
watcher.start()
model = load_model(sys.argv[1], "bfloat16")
over.set()
watcher.join()
print(max(most, own_bytes()) - before)
"""
SIZES = {
    "llama": {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "vocab_size": 32000},
    "qwen3_moe": {"hidden_size": 512, "num_experts": 16, "moe_intermediate_size": 512, "vocab_size": 32000},
    "granitemoehybrid": {"hidden_size": 512, "mamba_n_heads": 64, "intermediate_size": 512, "vocab_size": 32000},
}


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("kind", sorted(SIZES))
def test_loading_takes_at_most_a_little_more_than_the_weights(kind: str, tmp_path: Path) -> None:
    make_reference(kind, **SIZES[kind]).to(torch.bfloat16).save_pretrained(tmp_path)
    weights = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    room = 8 << 20  # for the interpreter, whatever the model's size
    assert weights > 60 << 20
    assert int(done.stdout) <= 1.15 * weights + room
