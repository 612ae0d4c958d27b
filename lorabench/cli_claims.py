"""The command ``lorabench claims``: hold each published claim against what can be checked here."""

import json
from pathlib import Path
from typing import Annotated

import typer

from lorabench.errors import CheckError

GEOMETRY = "ltx-2.5-22b"


def claims(
    records: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="A file or folder of records; by default the committed ones, in a checkout.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON instead of text for people.")
    ] = False,
) -> None:
    """Check the issue's claims, and others', by counts, by arithmetic and against records.

    Fails if a count that must be reproduced isn't; figures that disagree among themselves are
    only told.
    """
    from lorabench.claims import judge, load_claims
    from lorabench.evidence import counted_figures, measured_figures
    from lorabench.geometry import load_geometry
    from lorabench.recipe import load_recipe, recipe_names
    from lorabench.records import read
    from lorabench.tables import claims_text

    ledger = load_claims()
    geometry = load_geometry(GEOMETRY)
    bound = [load_recipe(name).bind() for name in recipe_names()]
    path = records or _committed_records()
    measured = measured_figures(read(path), geometry) if path else {}
    judged = judge(ledger, counted_figures(geometry, bound), measured)
    fields = [one.as_dict() for one in judged]
    typer.echo(json.dumps(fields, indent=2, allow_nan=False) if as_json else claims_text(fields))
    if broken := [one.claim.id for one in judged if one.broken]:
        raise CheckError(
            f"claims that must be reproduced and aren't: {', '.join(broken)}; see their checks, "
            f"and correct data/claims.toml, the model or the recipes"
        )


def _committed_records() -> Path | None:
    root = Path(__file__).parent.parent
    folder = root / "data" / "records"
    return folder if (root / "pyproject.toml").is_file() and folder.is_dir() else None
