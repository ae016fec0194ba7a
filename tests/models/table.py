"""`python -m tests.models.table`: write the table of models into docs/models.md, from the registry."""

from pathlib import Path

from holdover.models.registry import MODELS

PAGE = Path(__file__).parent.parent.parent / "docs" / "models.md"
BEGIN, END = "<!-- from the registry: python -m tests.models.table -->\n", "<!-- end -->\n"


def table() -> str:
    rows = [f"| `{name}` | {served.state} |\n" for name, served in MODELS.items()]
    return "".join(["| type | kinds of state |\n", "| --- | --- |\n", *rows])


def page(text: str) -> str:
    """The page with the table in its place."""
    before, rest = text.split(BEGIN)
    return before + BEGIN + table() + END + rest.split(END)[1]


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
