"""`holdover doctor`: what a model is, what of it fits in this machine, what will run, and whether it is right here."""

import json
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import obstore.store
import torch
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn
from rich.table import Table
from safetensors import safe_open

from holdover.config import format_bytes
from holdover.engine.engine import Engine
from holdover.engine.messages import Failed, Generate, Output, Sampling, Usage
from holdover.engine.process import default_max_running
from holdover.errors import HoldoverError
from holdover.models.base import Model
from holdover.models.loader import read_config
from holdover.models.oracle import PREFIX
from holdover.models.registry import load_model
from holdover.ops import native
from holdover.state.layout import LAST_HIDDEN, Layout
from holdover.state.pool import DevicePool
from holdover.state.tree import PrefixTree
from holdover.store.jobs import Done
from holdover.store.objects import ObjectTier
from holdover.store.place import Place
from holdover.store.queues import Store

SCHEMA = "holdover.doctor/1"
PROMPT_TOKENS = 48
ANSWER_TOKENS = 8
MOST_STEPS = 10_000
TRIAL_SEQUENCES = 2


@dataclass(slots=True)
class Check:
    """One thing that the self-test has tried. detail: what came out."""

    name: str
    passed: bool
    detail: str


@dataclass(slots=True)
class Report:
    """All that is found. Sizes in bytes; tokens: of state, in device memory as given."""

    schema: str
    model: str
    model_type: str
    dtype: str
    device: str
    parameters: int
    weight_bytes: int
    vocab_size: int
    context_length: int
    tokenizer: bool
    chat_template: bool
    kinds_of_state: dict[str, int]
    bytes_per_token: int
    bytes_per_window_row: int
    window: int
    bytes_per_snapshot: int
    resumes_anywhere: bool
    device_memory: int
    tokens_that_fit: int | None
    snapshots_that_fit: int
    machine_memory: int
    cores: int
    kernels: list[str]
    checks: list[Check] = field(default_factory=list)
    passed: bool = False


def kinds_of_state(layout: Layout) -> dict[str, int]:
    """How many arrays the state has of each kind."""
    kinds: dict[str, int] = {}
    for spec in layout.token_arrays:
        kind = "MLA latents" if spec.name.endswith("latent") else "keys and values of all tokens"
        kinds[kind] = kinds.get(kind, 0) + 1
    if layout.window_arrays:
        kinds["keys and values in a window"] = len(layout.window_arrays)
    for spec in layout.snapshot_arrays:
        kind = "last hidden vector" if spec.name == LAST_HIDDEN else "recurrent"
        kind = "convolution tails" if spec.name.endswith("conv") else kind
        kinds[kind] = kinds.get(kind, 0) + 1
    return kinds


def kernels(model: Model) -> list[str]:
    """What computes here."""
    if model.device.type != "cpu":
        return [f"PyTorch on {model.device}"]
    if native.library() is None:
        return ["PyTorch (no C compiler is found: several times slower; install gcc or clang)"]
    dtype = next((spec.dtype for spec in model.layout.snapshot_arrays if spec.name == LAST_HIDDEN), torch.float32)
    compiled = ["C, compiled for this processor"]
    if native.has_matrix_unit(torch.empty(1, dtype=dtype)):
        compiled.append("its matrix unit (AMX)")
    return [*compiled, "PyTorch for the rest"]


def examine(name: str, dtype: str, device: str, device_memory: int) -> Report:
    """Load a model, and try it. Raises HoldoverError if it can't be loaded."""
    where = torch.device(device)
    if where.type == "cuda" and not torch.cuda.is_available():
        raise HoldoverError("--device cuda: PyTorch finds no GPU on this machine; use --device cpu.")
    model = load_model(name, dtype, where)
    layout, folder = model.layout, Path(name)
    oracle = name.startswith(PREFIX)
    weight_bytes, parameters = (0, 0) if oracle else _weights(folder)
    per_token = layout.bytes_per_token
    report = Report(
        schema=SCHEMA,
        model=name,
        model_type="oracle" if oracle else str(read_config(folder)["model_type"]),
        dtype=str(next(s.dtype for s in layout.snapshot_arrays if s.name == LAST_HIDDEN)).removeprefix("torch."),
        device=device,
        parameters=parameters,
        weight_bytes=weight_bytes,
        vocab_size=model.vocab_size,
        context_length=model.context_length,
        tokenizer=oracle or (folder / "tokenizer.json").exists(),
        chat_template=_has_chat_template(folder),
        kinds_of_state=kinds_of_state(layout),
        bytes_per_token=per_token,
        bytes_per_window_row=layout.bytes_per_window_row,
        window=layout.window + 1 if layout.window else 0,
        bytes_per_snapshot=layout.bytes_per_snapshot,
        resumes_anywhere=layout.resumes_anywhere,
        device_memory=device_memory,
        tokens_that_fit=device_memory // per_token if per_token else None,
        snapshots_that_fit=device_memory // layout.bytes_per_snapshot,
        machine_memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        cores=os.cpu_count() or 1,
        kernels=kernels(model),
    )
    report.checks = try_out(model)
    report.passed = all(check.passed for check in report.checks)
    return report


def _weights(folder: Path) -> tuple[int, int]:
    """Bytes of the weights as they lie there, and how many numbers those are."""
    nbytes = numbers = 0
    for file in sorted(folder.glob("*.safetensors")):
        nbytes += file.stat().st_size
        with safe_open(file, framework="pt") as opened:
            names = list(opened.keys())
            numbers += sum(int(np.prod(opened.get_slice(name).get_shape())) for name in names)
    return nbytes, numbers


def _has_chat_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").exists() or (folder / "chat_template.json").exists():
        return True
    config = folder / "tokenizer_config.json"
    return config.exists() and '"chat_template"' in config.read_text(errors="replace")


class Trial:
    """An engine in this process, over a store that forgets everything when it goes."""

    def __init__(self, model: Model, place: Any) -> None:
        layout = model.layout
        per_token = layout.bytes_per_token + layout.bytes_per_window_row
        tokens = 4 * (PROMPT_TOKENS + ANSWER_TOKENS + layout.window + layout.window_block)
        nbytes = tokens * max(per_token, 1) + 16 * max(layout.bytes_per_snapshot, layout.slot_bytes)
        pool = DevicePool(layout, nbytes, min(TRIAL_SEQUENCES, default_max_running(model, nbytes)), model.device)
        tier = ObjectTier(Place(place, "doctor"), 8 * nbytes, "doctor")
        self._done: list[Done] = []
        store = Store(pool, model.fingerprint, [tier], self._done.append, start_worker=None)
        tree = PrefixTree(layout, pool)
        self._engine = Engine(
            model, pool, tree, store, max_batch_tokens=PROMPT_TOKENS // 3, snapshot_spacing=1024, find_from=1
        )

    def ask(self, prompt: list[int]) -> tuple[list[int], Usage]:
        """The best tokens after a prompt, and what they cost. Raises HoldoverError."""
        sampling = Sampling(max_tokens=ANSWER_TOKENS, temperature=0.0, ignore_eos=True)
        self._engine.submit(Generate(1, np.asarray(prompt, dtype="<u4").tobytes(), sampling))
        tokens: list[int] = []
        usage: Usage | None = None
        for _ in range(MOST_STEPS):
            if self._engine.idle and not self._done:
                break
            done, self._done[:] = list(self._done), []
            events, _ = self._engine.step(done)
            for event in events:
                if isinstance(event, Failed):
                    raise HoldoverError(f"the engine fails: {event.message}")
                if isinstance(event, Output):
                    tokens += event.token_ids
                    usage = event.usage or usage
        if usage is None:
            raise HoldoverError("the engine does not come to an end.")
        return tokens, usage


def try_out(model: Model) -> list[Check]:
    """The self-test: a repeated prompt, a longer one, and another engine, each must hit and give the same answer."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, model.vocab_size, PROMPT_TOKENS).tolist()
    place, checks = obstore.store.MemoryStore(), []
    first = Trial(model, place)
    expected, usage = first.ask(prompt)
    checks.append(_check("a new prompt is computed", expected, expected, usage, 0))
    again, usage = first.ask(prompt)
    checks.append(_check("a repeated prompt hits, with the same answer", again, expected, usage, PROMPT_TOKENS))
    longer = [*prompt, *expected, 1]
    grown, usage = first.ask(longer)
    scratch = Trial(model, obstore.store.MemoryStore())
    if next(spec.dtype for spec in model.layout.snapshot_arrays if spec.name == LAST_HIDDEN) != torch.float32:
        scratch.ask(prompt)  # a prompt that is cut elsewhere may round elsewhere, and so have another best token
    fresh, _ = scratch.ask(longer)
    cached = PROMPT_TOKENS + ANSWER_TOKENS - 1  # the last token was never fed
    checks.append(_check("the next turn computes what is new", grown, fresh, usage, cached))
    other, usage = Trial(model, place).ask(longer)
    checks.append(_check("another engine goes on from saved state", other, grown, usage, len(longer)))
    return checks


def _check(name: str, got: list[int], expected: list[int], usage: Usage, cached: int) -> Check:
    if got != expected:
        return Check(name, False, f"tokens {got}, but from scratch they are {expected}")
    if usage.cached_tokens != cached:
        return Check(name, False, f"{usage.cached_tokens} of {usage.prompt_tokens} tokens were reused, not {cached}")
    return Check(name, True, f"{usage.cached_tokens} of {usage.prompt_tokens} tokens reused, the same answer")


def run_doctor(name: str, dtype: str, device: str, device_memory: int, as_json: bool) -> int:
    """Examine a model and say what was found. The exit code: 1 if the self-test fails."""
    console = Console(stderr=True)
    began = time.monotonic()
    with Progress(SpinnerColumn(), TextColumn("{task.description}"), console=console, transient=True) as progress:
        progress.add_task(f"loading and trying {name}")
        report = examine(name, dtype, device, device_memory)
    if as_json:
        print(json.dumps({**asdict(report), "seconds": round(time.monotonic() - began, 3)}, indent=1))
    else:
        _print(report)
    return 0 if report.passed else 1


def _print(report: Report) -> None:
    console = Console()
    table = Table(title=f"{report.model}: {report.model_type}", show_header=False, title_justify="left")
    rows: list[tuple[str, str]] = [
        (
            "weights",
            f"{report.parameters:,} parameters, {format_bytes(report.weight_bytes)}; computed in {report.dtype}",
        ),
        ("context", f"{report.context_length:,} tokens, vocabulary {report.vocab_size:,}"),
        ("text", _text(report)),
        ("state", "; ".join(f"{count} × {kind}" for kind, count in report.kinds_of_state.items())),
        ("a token", f"{report.bytes_per_token:,} bytes"),
    ]
    if report.window:
        rows.append(("a window row", f"{report.bytes_per_window_row:,} bytes, of the last {report.window:,} tokens"))
    anywhere = "a prefix is reused up to any token" if report.resumes_anywhere else "reused where one is kept"
    rows.append(("a snapshot", f"{report.bytes_per_snapshot:,} bytes; {anywhere}"))
    fits = f"{report.snapshots_that_fit:,} snapshots"
    if report.tokens_that_fit is not None:
        contexts = report.tokens_that_fit / report.context_length
        fits = f"{report.tokens_that_fit:,} tokens ({contexts:,.1f} contexts) or {fits}"
    rows.append((f"in {format_bytes(report.device_memory)}", fits))
    rows.append(("this machine", f"{report.cores} cores, {format_bytes(report.machine_memory)} of memory"))
    rows.append(("computes with", ", ".join(report.kernels)))
    for name, value in rows:
        table.add_row(name, value)
    console.print(table)
    for check in report.checks:
        verdict = "ok  " if check.passed else "FAIL"
        console.print(f"{verdict} {check.name}: {check.detail}", highlight=False, soft_wrap=True)
    if report.weight_bytes > report.machine_memory:
        console.print("FAIL the weights are larger than this machine's memory", highlight=False)


def _text(report: Report) -> str:
    if not report.tokenizer:
        return "no tokenizer.json: token ids only"
    return "tokenizer and chat template" if report.chat_template else "a tokenizer, no chat template"
