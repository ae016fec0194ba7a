"""The command line of `holdover store`: thin, one function per command."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from holdover.store.command import Session

store_app = typer.Typer(
    help="Look at, check, clean up and move what a folder or bucket keeps.", no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)  # fmt: skip

PlaceArgument = Annotated[
    str, typer.Argument(metavar="PLACE", help="The tier's folder, or s3://BUCKET/PREFIX, gs://..., az://...")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
KeyOption = Annotated[
    Path | None,
    typer.Option(
        "--encryption-key-file", metavar="FILE", help="The tier's key, if encrypted; or HOLDOVER_ENCRYPTION_KEY."
    ),
]
SaltOption = Annotated[str, typer.Option(help="The cache_salt that the tenant's requests had.")]


def _session(place: str, key_file: Path | None, as_json: bool) -> "Session":
    from holdover.store.command import Session

    return Session(place, key_file, as_json)


@store_app.command()
def ls(
    place: PlaceArgument,
    segments: Annotated[bool, typer.Option("--segments", help="Every segment, not only histories.")] = False,
    limit: Annotated[int, typer.Option(min=0, help="Show at most so many; 0 for all. JSON has all.")] = 40,
    key_file: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the histories that are kept, the most recent first."""
    from holdover.store.command import list_segments

    raise typer.Exit(list_segments(_session(place, key_file, as_json), segments, limit))


@store_app.command()
def stats(place: PlaceArgument, key_file: KeyOption = None, as_json: JsonOption = False) -> None:
    """Count segments, bytes, histories, models and tenants, and how much they share."""
    from holdover.store.command import show_statistics

    raise typer.Exit(show_statistics(_session(place, key_file, as_json)))


@store_app.command()
def verify(
    place: PlaceArgument,
    repair: Annotated[bool, typer.Option("--repair", help="Remove what is broken or can't be reached.")] = False,
    salt: SaltOption = "",
    key_file: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Read and check everything. Exits with 1 if something is broken and --repair was not given."""
    from holdover.store.command import verify_segments

    raise typer.Exit(verify_segments(_session(place, key_file, as_json), repair, salt))


@store_app.command()
def gc(
    place: PlaceArgument,
    older_than: Annotated[
        str | None, typer.Option(metavar="AGE", help="Remove histories not written to for so long: 12h, 30d, 8w.")
    ] = None,
    budget: Annotated[str | None, typer.Option(metavar="SIZE", help="Remove the oldest until the rest fits.")] = None,
    keep_model: Annotated[
        str | None, typer.Option(metavar="FINGERPRINT", help="Remove all other models' state (first digits will do).")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    key_file: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Remove what can't be reached, and what is too old or too much. Leaf first: no history loses its beginning."""
    from holdover.store.command import collect

    raise typer.Exit(collect(_session(place, key_file, as_json), older_than, budget, keep_model, dry_run))


@store_app.command()
def export(
    place: PlaceArgument,
    session: Annotated[
        str, typer.Argument(help="Its name (prompt_cache_key or user of its requests), or a history's first digits.")
    ],
    file: Annotated[Path, typer.Argument(help="Where to write it.")],
    key_file: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write one session's state to a file, not encrypted."""
    from holdover.store.command import export as run

    raise typer.Exit(run(_session(place, key_file, as_json), session, file))


@store_app.command("import")
def bring_in(
    place: PlaceArgument,
    file: Annotated[Path, typer.Argument(help="What `holdover store export` wrote.")],
    salt: SaltOption = "",
    key_file: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Put an exported session into a place. What is there already stays one copy."""
    from holdover.store.command import bring_in as run

    raise typer.Exit(run(_session(place, key_file, as_json), file, salt))
