"""The claims that lorabench answers, and how each stands against counts, arithmetic and records.

The ledger is ``data/claims.toml``; its head explains the form. Reading it needs pydantic.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lorabench.arithmetic import Number, evaluate, names, spell
from lorabench.errors import ConfigError
from lorabench.evidence import MEASURED
from lorabench.ledger import Kind, read_ledger
from lorabench.resources import data_file

if TYPE_CHECKING:
    import pandas as pd

Verdict = Literal["reproduced", "consistent", "inconsistent", "open"]
VERDICTS: tuple[Verdict, ...] = ("reproduced", "consistent", "inconsistent", "open")


@dataclass(frozen=True)
class Check:
    """A way to arrive at a claim's figure.

    Attributes
    ----------
    kind
        ``counted`` from what is shipped, and must hold; ``derived`` from other claims;
        ``measured`` in records.
    formula
        What gives the figure, in the claim's unit.
    within
        How far from the claim the figure may be, as a share of the claim; 0 means equal. For a
        measured figure, a factor of 1 + ``within`` either way.
    how
        What the formula means.
    reading, reading_formula
        What would explain a figure that is further off.
    """

    kind: Kind
    formula: str
    within: float
    how: str
    reading: str = ""
    reading_formula: str = ""


@dataclass(frozen=True)
class Claim:
    """One statement, as its source makes it.

    It tells a ``value``, or that something is ``at_least`` so much, or no number.
    """

    id: str
    says: str
    source: str
    value: Number | None = None
    at_least: Number | None = None
    unit: str = ""
    hardware: str = ""
    needs: str = ""
    checks: tuple[Check, ...] = ()

    @property
    def told(self) -> Number | None:
        """The number that figures are held against."""
        return self.at_least if self.value is None else self.value


@dataclass(frozen=True)
class Outcome:
    """What a check came to, on one machine if it is a measured one.

    Attributes
    ----------
    machine
        Whose records gave the figure; None for counts and arithmetic.
    figure, difference
        The figure, and how far it is from what is told, as a share of that; None without records,
        and no difference from 0 is a share.
    inside
        Whether the figure is within the check's band; None without records.
    arithmetic, reading_arithmetic
        The formula with its names replaced by their numbers, and what that makes.
    """

    check: Check
    machine: str | None = None
    figure: Number | None = None
    difference: float | None = None
    inside: bool | None = None
    arithmetic: str = ""
    reading_arithmetic: str = ""


@dataclass(frozen=True)
class Judged:
    """A claim with its verdict and what its checks came to."""

    claim: Claim
    outcomes: tuple[Outcome, ...]

    @property
    def verdict(self) -> Verdict:
        """``inconsistent`` if one figure is outside its band, else what the best check shows."""
        held = {o.check.kind for o in self.outcomes if o.inside}
        if any(o.inside is False for o in self.outcomes):
            return "inconsistent"
        return "reproduced" if "counted" in held else "consistent" if held else "open"

    @property
    def broken(self) -> bool:
        """Whether a count, which must hold, doesn't."""
        return any(o.check.kind == "counted" and o.inside is False for o in self.outcomes)

    def as_dict(self) -> dict[str, Any]:
        """Return the claim, its verdict and its outcomes for JSON."""
        fields = asdict(self.claim)
        del fields["checks"]
        outcomes = []
        for outcome in self.outcomes:
            found = asdict(outcome)
            outcomes.append(found.pop("check") | found)
        return fields | {"verdict": self.verdict, "broken": self.broken, "checks": outcomes}


def load_claims(path: Path | None = None) -> tuple[Claim, ...]:
    """Read a ledger, by default the shipped one.

    Raises
    ------
    ConfigError
        A file that can't be read or isn't a ledger; all that is wrong in it is told at once.
    """
    tables = read_ledger(path or data_file("claims.toml"))
    claims = []
    for name, table in tables.items():
        checks = tuple(Check(**check) for check in table.pop("checks"))
        claims.append(Claim(name, **table, checks=checks))
    return tuple(claims)


def judge(
    claims: Iterable[Claim],
    counted: Mapping[str, Number],
    measured: Mapping[str, Mapping[str, Number]] | None = None,
) -> tuple[Judged, ...]:
    """Work out every check of every claim.

    Parameters
    ----------
    counted
        Figures of the shipped model and recipes, by name: see `counted_figures`.
    measured
        For each machine its figures by name: see `measured_figures`.

    Raises
    ------
    ConfigError
        A formula names a count that there isn't, or can't be worked out.
    """
    claims = tuple(claims)
    known = {c.id: c.value for c in claims if c.value is not None} | dict(counted)
    return tuple(
        Judged(claim, tuple(o for c in claim.checks for o in _work_out(claim, c, known, measured)))
        for claim in claims
    )


def count_verdicts(judged: Iterable[Judged]) -> dict[Verdict, int]:
    """Return how many claims have each verdict."""
    found = Counter(one.verdict for one in judged)
    return {verdict: found[verdict] for verdict in VERDICTS}


def to_frame(judged: Iterable[Judged]) -> "pd.DataFrame":
    """Return a frame with a row for each outcome, and one for a claim without a check.

    Columns: the claim's ``id``, ``says``, ``told``, ``unit``, ``hardware``, ``source`` and
    ``verdict``; then the outcome's ``kind``, ``how``, ``machine``, ``figure``, ``difference``,
    ``within``, ``inside``, ``arithmetic``, ``reading`` and ``reading_arithmetic``.
    """
    import pandas as pd

    of_claim = ("id", "says", "told", "unit", "hardware", "source", "verdict")
    of_check = ("kind", "how", "machine", "figure", "difference", "within", "inside", "arithmetic")
    columns = [*of_claim, *of_check, "reading", "reading_arithmetic"]
    rows = []
    for one in judged:
        fields: dict[str, Any] = {**one.as_dict(), "told": one.claim.told}
        rows += [fields | check for check in fields["checks"] or [{}]]
    return pd.DataFrame(rows, columns=columns)


def _work_out(
    claim: Claim,
    check: Check,
    known: Mapping[str, Number],
    measured: Mapping[str, Mapping[str, Number]] | None,
) -> Iterator[Outcome]:
    if check.kind != "measured":
        yield _outcome(claim, check, known, None)
        return
    wanted = {name for name in names(check.formula) if name.startswith(MEASURED)}
    machines = {m: found for m, found in (measured or {}).items() if wanted <= found.keys()}
    for machine, found in machines.items():
        yield _outcome(claim, check, {**known, **found}, machine)
    if not machines:
        yield Outcome(check)


def _outcome(
    claim: Claim, check: Check, values: Mapping[str, Number], machine: str | None
) -> Outcome:
    told = claim.told
    assert told is not None  # a claim that tells no number has no checks
    try:
        figure = evaluate(check.formula, values)
        arithmetic = spell(check.formula, values)
        explained = spell(check.reading_formula, values) if check.reading_formula else ""
    except ConfigError as error:
        raise ConfigError(f"claim '{claim.id}': {error}") from error
    off, band = figure - told, check.within * abs(told)
    if claim.value is None:
        inside = off >= -band
    elif check.kind == "measured" and check.within:
        # On other hardware: a factor either way, not a difference.
        inside = told / (1 + check.within) <= figure <= told * (1 + check.within)
    else:
        inside = abs(off) <= band
    return Outcome(
        check,
        machine,
        figure,
        difference=off / abs(told) if told else None if off else 0.0,
        inside=inside,
        arithmetic=arithmetic,
        reading_arithmetic="" if inside else explained,
    )
