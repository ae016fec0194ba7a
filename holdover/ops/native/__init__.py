"""Compiles the kernels once for this machine and loads it. Without a compiler the PyTorch form of each kernel runs."""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path

import torch

log = logging.getLogger(__name__)
FOLDER = Path(__file__).parent
SOURCES = ("kernels.c", "matrix.c", "recurrence.c")
HEADER = "common.h"
COMPILE_FLAGS = ["-O3", "-march=native", "-fPIC", "-fopenmp", "-std=gnu11", "-fno-math-errno", "-fno-trapping-math"]
if platform.machine() in ("x86_64", "AMD64"):
    COMPILE_FLAGS.append("-mprefer-vector-width=512")


def cache_folder() -> Path:
    """Where what this machine compiled or made once is kept."""
    base = os.environ.get("HOLDOVER_CACHE")
    if base:
        return Path(base)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "holdover"


def _openmp_library() -> list[str]:
    """Link to the OpenMP that PyTorch has loaded: two of them would keep two pools of threads spinning."""
    found = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    return [str(found[0])] if found else ["-fopenmp"]


def _processor() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next((line for line in lines if line.startswith("flags")), "") + platform.machine()
    except OSError:
        return platform.machine() + platform.processor()


def _compile(compiler: str, library: Path) -> None:
    library.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder) / "kernels.so"
        objects = [str(Path(folder) / f"{source}.o") for source in SOURCES]
        commands = [
            [compiler, *COMPILE_FLAGS, "-c", str(FOLDER / source), "-o", target]
            for source, target in zip(SOURCES, objects, strict=True)
        ]
        commands.append([compiler, "-shared", *objects, "-o", str(made), *_openmp_library(), "-lm"])
        for command in commands:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
        os.replace(made, library)  # whole or absent, also if two processes compile at once


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL | None:
    """The compiled kernels, or None (said once in the log) where they cannot be had."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        log.warning("no C compiler found: the PyTorch kernels run instead, several times slower. Install gcc or clang.")
        return None
    material = b"".join((FOLDER / name).read_bytes() for name in (*SOURCES, HEADER))
    material += " ".join([compiler, *COMPILE_FLAGS, *_openmp_library()]).encode()
    digest = hashlib.sha256(material + _processor().encode()).hexdigest()[:16]
    path = cache_folder() / f"kernels-{digest}.so"
    try:
        if not path.exists():
            _compile(compiler, path)
        return ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError) as error:
        detail = (getattr(error, "stderr", "") or str(error)).strip().splitlines()
        log.warning("the C kernels cannot be built (%s): the PyTorch kernels run instead, slower", detail[-1:] or error)
        return None


def has_matrix_unit(x: torch.Tensor) -> bool:
    """Whether the compiled kernels can multiply tensors like `x` on the processor's matrix unit (bfloat16)."""
    if x.device.type != "cpu" or x.dtype != torch.bfloat16:
        return False
    compiled = library()
    return compiled is not None and bool(compiled.holdover_matrix_unit())
