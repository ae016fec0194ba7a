"""The command line: thin, one function per command."""

import json
import logging
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from holdover import __version__
from holdover.config import FIND_SECONDS, EngineConfig, SaveMode, choose_tiers, format_bytes, parse_bytes
from holdover.errors import HoldoverError
from holdover.store.cli import store_app

app = typer.Typer(
    name="holdover",
    help="Inference for agents: never computes, stores or sends the same part of a history twice.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"auto_envvar_prefix": "HOLDOVER", "help_option_names": ["-h", "--help"]},
)
app.add_typer(store_app, name="store")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"holdover {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Inference for agents: never computes, stores or sends the same part of a history twice."""


@app.command()
def serve(
    model: Annotated[str, typer.Argument(help="Folder of a Hugging Face checkpoint, or oracle: (for tests of state).")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 8000,
    device_memory: Annotated[str, typer.Option(help="Budget for state on the device.")] = "2GiB",
    tier: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TIER",
            help="Where to keep state; give it several times, nearest first: memory:16GiB, disk:DIR:200GiB, "
            "s3://BUCKET/PREFIX, gs://..., az://..., peer://HOST:PORT. Default: memory:8GiB.",
        ),
    ] = None,
    memory_tier: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Short for --tier memory:SIZE; none for no tier.")
    ] = None,
    disk_tier: Annotated[
        str | None, typer.Option(metavar="DIR:SIZE", help="Short for --tier disk:DIR:SIZE, after memory.")
    ] = None,
    encryption_key_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Encrypt disk tiers and buckets with this key; or HOLDOVER_ENCRYPTION_KEY."),
    ] = None,
    peer_listen: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Let other engines (--tier peer://HOST:PORT) read what the tiers keep."),
    ] = None,
    peer_secret_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The secret that peers share; or HOLDOVER_PEER_SECRET."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto, bfloat16 or float32.")] = "auto",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    served_model_name: Annotated[str | None, typer.Option(help="Name in the API; default: the folder's.")] = None,
    context_length: Annotated[int | None, typer.Option(min=1, help="Default: the model's own.")] = None,
    max_running: Annotated[
        int | None, typer.Option(min=1, help="Sequences that run at once; default: by memory.")
    ] = None,
    max_batch_tokens: Annotated[int, typer.Option(min=1, help="Tokens fed in one step.")] = 1024,
    snapshot_spacing: Annotated[
        int, typer.Option(min=1, help="Most tokens of a prefill that are lost if it is cut off.")
    ] = 2048,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of the CPU kernels; default: all cores.")] = None,
    save: Annotated[
        SaveMode,
        typer.Option(
            help="When a turn is saved: eager, at its end; lazy, when its room on the device is wanted, or after "
            "half a minute; auto, at its end as long as the tiers keep up."
        ),
    ] = SaveMode.AUTO,
    find_wait: Annotated[
        float, typer.Option(min=0.0, help="Most seconds that a request waits to hear what shared tiers know of it.")
    ] = FIND_SECONDS,
    audit_tiers: Annotated[
        bool, typer.Option(help="Count how often each prefix position lies in each tier (for proofs).")
    ] = False,
) -> None:
    """Serve a model over OpenAI's API. `--tier none` keeps state on the device only."""
    from holdover.engine.messages import Ready
    from holdover.server.serve import serve as run_server
    from holdover.store.keys import PEER_SECRET, read_key

    logging.basicConfig(level=logging.INFO, format="holdover: %(levelname)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    config = EngineConfig(
        model=model,
        to_engine="",
        from_engine="",
        dtype=dtype,
        device=device,
        device_bytes=parse_bytes(device_memory, "--device-memory"),
        tiers=choose_tiers(tier or [], memory_tier, disk_tier),
        max_running=max_running,
        max_batch_tokens=max_batch_tokens,
        snapshot_spacing=snapshot_spacing,
        context_length=context_length,
        threads=threads,
        audit=audit_tiers,
        find_seconds=find_wait,
        save=save,
        encryption_key=read_key(encryption_key_file, os.environ.get("HOLDOVER_ENCRYPTION_KEY")),
        peer_listen=peer_listen,
        peer_secret=read_key(peer_secret_file, os.environ.get("HOLDOVER_PEER_SECRET"), PEER_SECRET),
    )
    name = served_model_name or Path(model).resolve().name

    def announce(ready: Ready, url: str) -> None:
        tiers = [str(each) for each in config.tiers]
        typer.echo(
            f"holdover {__version__} serves {name} at {url}/v1\n"
            f"  state: {ready.bytes_per_token:,} bytes a token, {ready.bytes_per_snapshot:,} a snapshot; "
            f"device {format_bytes(ready.device_bytes)}, up to {ready.max_running} sequences at once\n"
            + (f"  peers may read at peer://{ready.peer_address}\n" if ready.peer_address else "")
            + f"  tiers: {', '.join(tiers) or 'none: state that leaves the device is lost'}"
        )
        sys.stdout.flush()

    raise typer.Exit(run_server(config, host=host, port=port, model_name=name, announce=announce))


@app.command()
def doctor(
    model: Annotated[str, typer.Argument(help="Folder of a Hugging Face checkpoint.")],
    dtype: Annotated[str, typer.Option(help="auto, bfloat16 or float32.")] = "auto",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    device_memory: Annotated[str, typer.Option(help="Budget for state on the device, to say what fits.")] = "2GiB",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """What a model is and what of it fits here. Exits with 1 unless a repeated prompt hits, with the same answer."""
    from holdover.doctor import run_doctor

    nbytes = parse_bytes(device_memory, "--device-memory")
    raise typer.Exit(run_doctor(model, dtype, device, nbytes, as_json))


@app.command()
def models(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False) -> None:
    """The types of models that can be served, and the kinds of state that each has."""
    from holdover.models.registry import MODELS

    if as_json:
        typer.echo(json.dumps({name: served.state for name, served in MODELS.items()}, indent=1))
        return
    width = max(map(len, MODELS))
    for name, served in MODELS.items():
        typer.echo(f"{name:<{width}}  {served.state}")


@app.command()
def replay(
    trace: Annotated[
        Path, typer.Argument(help="WEKA, tau-bench or SWE-agent file: .json, .jsonl, .traj, .tar; .gz, .xz.")
    ],
    url: Annotated[str, typer.Option(help="The server to send to.")] = "http://127.0.0.1:8000",
    agents: Annotated[int, typer.Option(min=1, help="Sessions that run at once.")] = 8,
    think_scale: Annotated[float, typer.Option(min=0.0, help="Recorded think times are multiplied by this.")] = 1.0,
    think_limit: Annotated[
        float | None, typer.Option(min=0.0, help="Cut recorded think times to this many seconds before scaling.")
    ] = None,
    shrink: Annotated[float, typer.Option(help="Divide tokens of block traces by this (1 to 64).")] = 1,
    sessions: Annotated[int | None, typer.Option(min=1, help="At most so many sessions.")] = None,
    turns: Annotated[int | None, typer.Option(min=1, help="At most so many turns of each session.")] = None,
    seconds: Annotated[float | None, typer.Option(min=0.1, help="Begin no turn after so long.")] = None,
    model: Annotated[str | None, typer.Option(help="Default: the first that the server offers.")] = None,
    vocab_size: Annotated[
        int | None, typer.Option(min=2, help="For block traces; default: the server's, or 32000.")
    ] = None,
    fixed_length: Annotated[
        bool, typer.Option(help="Make responses exactly as long as recorded (ignore_eos, min_tokens).")
    ] = True,
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write the report; - for stdout.")
    ] = None,
) -> None:
    """Replay recorded agent sessions against any OpenAI-compatible server, in a closed loop.

    The key for the server, if it needs one, is read from the environment variable OPENAI_API_KEY.
    """
    from holdover.traffic.command import run_replay

    run_replay(
        trace, url=url, agents=agents, think_scale=think_scale, think_limit=think_limit, shrink=shrink,
        sessions=sessions, turns=turns,
        seconds=seconds, model=model, vocab_size=vocab_size, fixed_length=fixed_length, json_file=json_file,
    )  # fmt: skip


@app.command()
def demo(
    agents: Annotated[int, typer.Option(min=1, max=96, help="Agents that work at once.")] = 64,
    quick: Annotated[bool, typer.Option("--quick", help="24 agents, fewer turns: under a minute.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="In float32; compares every output token of all modes.")
    ] = False,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    traffic: Annotated[str, typer.Option(help="weka or tau-bench.")] = "weka",
    device_memory: Annotated[
        str | None, typer.Option(help="Device budget of the limited modes; default: an eighth of the working set.")
    ] = None,
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write figures; - for stdout.")
    ] = None,
    report: Annotated[str | None, typer.Option(metavar="FILE.html", help="Where to write the report.")] = None,
) -> None:
    """Real agent traffic through the real server in four modes, side by side: what is saved, and what it brings."""
    from holdover.demo.command import run_demo

    run_demo(
        agents=agents, quick=quick, check=check, dtype=dtype, traffic=traffic, device_memory=device_memory,
        json_file=json_file, report=report,
    )  # fmt: skip


def main() -> None:
    """Entry point. Errors that the user can mend: one line, exit code 2."""
    try:
        app()
    except HoldoverError as error:
        sys.stderr.write(f"holdover: {error}\n")
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
