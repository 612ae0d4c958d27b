"""The ledger of claims as a TOML file: what may be in it, with all that is wrong told at once."""

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Literal

from lorabench.arithmetic import names
from lorabench.errors import ConfigError, did_you_mean
from lorabench.evidence import COUNTED, MEASURED, measured_names
from lorabench.resources import read_toml

Kind = Literal["counted", "derived", "measured"]


def read_ledger(path: Path) -> dict[str, dict[str, Any]]:
    """Return the table of each claim by its id, with every key that it may have.

    Raises
    ------
    ConfigError
        A file that can't be read or isn't a ledger; all that is wrong in it is told at once.
    """
    tables = read_toml(path)
    found = tables.pop("claims", {})
    problems = [f"{key}: unknown key{did_you_mean(key, ['claims'])}" for key in tables]
    if not isinstance(found, dict) or not found:
        problems.append("claims: expected a table [claims.ID] for each claim, found none")
        found = {}
    claims: dict[str, dict[str, Any]] = {}
    for name, table in found.items():
        claim, wrong = _validate(f"claims.{name}", table)
        problems += wrong
        if claim is not None:
            claims[name] = claim
    numbered = {
        name for name, table in found.items() if isinstance(table, dict) and "value" in table
    }
    for name, claim in claims.items():
        problems += _problems(name, claim, found, numbered)
    if problems:
        head = f"{path}: not a ledger of claims yet, problems found: {len(problems)}"
        raise ConfigError("\n  ".join([head, *problems]))
    return claims


def _validate(where: str, table: object) -> tuple[dict[str, Any] | None, list[str]]:
    """Check the keys and types of one claim's table, and fill in what it leaves out."""
    from pydantic import BaseModel, ConfigDict, Field, ValidationError

    strict = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    class CheckTable(BaseModel):
        model_config = strict
        kind: Kind
        formula: str
        within: float = Field(ge=0)
        how: str = Field(min_length=1)
        reading: str = ""
        reading_formula: str = ""

    class ClaimTable(BaseModel):
        model_config = strict
        says: str = Field(min_length=1)
        source: str = Field(min_length=1)
        value: int | float | None = None
        at_least: int | float | None = None
        unit: str = ""
        hardware: str = ""
        needs: str = ""
        checks: list[CheckTable] = []

    try:
        return ClaimTable.model_validate(table).model_dump(), []
    except ValidationError as error:
        problems = []
        for found in error.errors(include_url=False):
            at = ".".join(map(str, (where, *found["loc"])))
            if found["type"] == "missing":
                problems.append(f"{at}: required, but missing")
            elif found["type"] == "extra_forbidden":
                keys = list((CheckTable if len(found["loc"]) > 1 else ClaimTable).model_fields)
                near = did_you_mean(at.rpartition(".")[2], keys)
                problems.append(f"{at}: unknown key{near}; keys here: {', '.join(keys)}")
            else:
                problems.append(f"{at}: {found['msg']}, found {found['input']!r}")
        return None, problems


def _problems(
    name: str, claim: dict[str, Any], ids: Collection[str], numbered: Collection[str]
) -> Iterator[str]:
    """Hold a claim and its checks against each other and against the other claims."""
    where, checks = f"claims.{name}", claim["checks"]
    told = [key for key in ("value", "at_least") if claim[key] is not None]
    if not name.isidentifier() or name.startswith((COUNTED, MEASURED)):
        yield f"{where}: expected letters, digits and _, and not '{COUNTED}' or '{MEASURED}' first"
    if len(told) > 1:
        yield f"{where}: has a value and an at_least; give one of the two"
    if checks and not told:
        yield f"{where}: has checks but no number to hold them against; give a value or an at_least"
    if not claim["needs"] and all(check["kind"] == "measured" for check in checks):
        yield f"{where}.needs: required, for nothing but a measurement can check this claim"
    for number, check in enumerate(checks):
        at = f"{where}.checks.{number}"
        for problem in _formula_problems(check["formula"], check["kind"], ids, numbered):
            yield f"{at}.formula: {problem}"
        if reading := check["reading_formula"]:
            for problem in _formula_problems(reading, None, ids, numbered):
                yield f"{at}.reading_formula: {problem}"
            if not check["reading"]:
                yield f"{at}.reading: required beside a reading_formula"


def _formula_problems(
    formula: str, kind: Kind | None, ids: Collection[str], numbered: Collection[str]
) -> Iterator[str]:
    """Say what is wrong with a formula; counts are known only when a model is counted."""
    try:
        found = names(formula)
    except ConfigError as error:
        yield str(error)
        return
    measured = [name for name in found if name.startswith(MEASURED)]
    counted = [name for name in found if name.startswith(COUNTED)]
    for name in found:
        if name in measured and name not in measured_names():
            yield f"nothing is measured as '{name}'{did_you_mean(name, measured_names())}"
        elif name in ids and name not in numbered:
            yield f"claim '{name}' has no value to count with"
        elif name not in (*ids, *measured, *counted):
            yield f"there is no claim '{name}'{did_you_mean(name, ids)}"
    if kind == "measured" and not measured:
        yield f"a measured check names a figure '{MEASURED}...'; found {', '.join(found) or 'none'}"
    if kind in ("counted", "derived") and measured:
        yield f"a {kind} check names no measured figure; found {', '.join(measured)}"
    if kind == "counted" and not counted:
        yield f"a counted check names a figure '{COUNTED}...'; found {', '.join(found) or 'none'}"
