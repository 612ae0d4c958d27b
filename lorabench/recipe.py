"""What a render asks of the weights: phases, each in one adapter state.

A recipe is a TOML file: a shipped one under ``data/recipes``, or a user's own. Reading one needs
pydantic; the dataclasses here need nothing.
"""

import contextlib
import math
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from numbers import Real
from pathlib import Path
from typing import Any

from lorabench.errors import ConfigError, did_you_mean
from lorabench.resources import data_folder, read_toml, toml_problems


@dataclass(frozen=True, init=False, repr=False)
class State(Mapping[str, float]):
    """Which adapters are fused into the weights, and at what strengths.

    Immutable, hashable and ordered: rounding depends on the order in which adapters are added, so
    two states that differ in order alone are different states. Strength 0 drops out.

    Parameters
    ----------
    strengths
        Adapter (or role) name to strength, in the order of fusing.
    **named
        The same as keywords: ``State(user=1.0, distilled=0.25)``.

    Raises
    ------
    ConfigError
        A strength isn't a finite number.
    """

    _pairs: tuple[tuple[str, float], ...]

    def __init__(
        self, strengths: Mapping[str, float] | Iterable[tuple[str, float]] = (), /, **named: float
    ) -> None:
        checked = {name: _finite(name, s) for name, s in dict(strengths, **named).items()}
        pairs = tuple((name, strength) for name, strength in checked.items() if strength != 0)
        object.__setattr__(self, "_pairs", pairs)

    def __getitem__(self, name: str) -> float:
        return dict(self._pairs)[name]

    def __iter__(self) -> Iterator[str]:
        return (name for name, _ in self._pairs)

    def __len__(self) -> int:
        return len(self._pairs)

    def __str__(self) -> str:
        # repr keeps every digit of a strength, where %g would drop some
        terms = (f"{name}@{repr(strength).removesuffix('.0')}" for name, strength in self._pairs)
        return " + ".join(terms) or "base"

    def __repr__(self) -> str:
        return f"State({self.as_dict()!r})" if self._pairs else "State()"

    def as_dict(self) -> dict[str, float]:
        """Return the strengths by name, for JSON."""
        return dict(self._pairs)

    @classmethod
    def parse(cls, text: str) -> "State":
        """Read a state from what `str` makes of one.

        Raises
        ------
        ConfigError
            The text is of another form.
        """
        if text == str(BASE):
            return BASE
        terms = (term.rpartition("@") for term in text.split(" + "))
        try:
            return cls((name, float(strength)) for name, _, strength in terms)
        except ValueError:
            raise ConfigError(
                f"state '{text}': expected base, or name@strength + name@strength ..."
            ) from None


BASE = State()


def bound_state(state: Mapping[str, float], bound: Iterable[str]) -> State:
    """Return a mapping of strengths as a state, if it names bound adapters only.

    Raises
    ------
    ConfigError
        It isn't a mapping, or names another adapter.
    """
    if not isinstance(state, Mapping):
        raise ConfigError(f"expected a State or a mapping of strengths, found {state!r}")
    state, bound = State(state), list(bound)
    if unbound := [role for role in state if role not in bound]:
        raise ConfigError(
            f"state '{state}' needs adapter {', '.join(map(repr, unbound))}; bound are: "
            f"{', '.join(map(repr, bound)) or 'none'}"
        )
    return state


@dataclass(frozen=True)
class Role:
    """What a recipe calls an adapter; a run binds roles to files."""

    name: str
    required: bool


@dataclass(frozen=True)
class Phase:
    """A run of denoise steps in one state; its number is its place in the recipe, from 0.

    It runs ``steps * evaluations * guidance_passes`` forwards of the transformer. Tokens are those
    of one forward, and None where the phase has no such stream (sound alone has no video tokens);
    a prompt is padded to its text tokens.
    """

    state: State
    steps: int
    evaluations: int = 1
    guidance_passes: int = 1
    video_tokens: int | None = None
    audio_tokens: int | None = None
    note: str = ""
    text_tokens: int = 1024

    @property
    def forwards(self) -> int:
        """Forwards of the transformer in the phase."""
        return self.steps * self.evaluations * self.guidance_passes

    @property
    def tokens(self) -> dict[str, int]:
        """Tokens of a forward by stream: ``video``, ``audio``, ``text``; 0 where there is none."""
        streams = {"video": self.video_tokens, "audio": self.audio_tokens, "text": self.text_tokens}
        return {stream: tokens or 0 for stream, tokens in streams.items()}


@dataclass(frozen=True)
class Recipe:
    """A kind of render: its roles, and its phases in order."""

    name: str
    description: str
    source: str
    roles: tuple[Role, ...]
    phases: tuple[Phase, ...]
    aliases: tuple[str, ...] = ()

    def bind(self, strengths: Mapping[str, float] | None = None) -> "Recipe":
        """Return the recipe with only the bound roles left in its roles and phases.

        Parameters
        ----------
        strengths
            Role to the user's strength, which multiplies the recipe's own in every phase. None
            binds the required roles at 1.

        Raises
        ------
        ConfigError
            A role that the recipe doesn't have, a required role left out, or a strength that
            isn't a finite number.
        """
        if strengths is None:
            strengths = {role.name: 1.0 for role in self.roles if role.required}
        names = [role.name for role in self.roles]
        problems = [
            f"has no role '{name}'{did_you_mean(name, names)}"
            for name in strengths
            if name not in names
        ] + [
            f"needs its required role '{role.name}', which isn't bound"
            for role in self.roles
            if role.required and role.name not in strengths
        ]
        if problems:
            needs = (f"{r.name} ({'required' if r.required else 'optional'})" for r in self.roles)
            raise ConfigError(
                f"recipe '{self.name}' {' and '.join(problems)}; its roles are: "
                f"{', '.join(needs) or 'none'}; bind each required role, and no role but these"
            )
        bound = {name: _finite(name, strength) for name, strength in strengths.items()}
        return replace(
            self,
            roles=tuple(role for role in self.roles if role.name in bound),
            phases=tuple(
                replace(
                    phase,
                    state=State((r, s * bound[r]) for r, s in phase.state.items() if r in bound),
                )
                for phase in self.phases
            ),
        )


def recipe_names() -> list[str]:
    """Return the names of the shipped recipes, sorted."""
    return sorted(path.stem for path in data_folder("recipes").glob("*.toml"))


def load_recipe(name_or_path: str | Path) -> Recipe:
    """Load a shipped recipe by its name or alias, or a user's recipe by its path.

    A ``Path``, and a string that ends in ``.toml`` or has a folder in it, is a path; a recipe read
    from a path is called after the file.

    Raises
    ------
    ConfigError
        No such recipe, a file that can't be read, or a file that isn't a recipe; all that is
        wrong in a file is reported at once.
    """
    text = str(name_or_path)
    if isinstance(name_or_path, Path) or text.endswith(".toml") or Path(text).name != text:
        return _read_toml(Path(name_or_path))
    folder, names = data_folder("recipes"), recipe_names()
    if text in names:
        return _read_toml(folder / f"{text}.toml")
    shipped = [_read_toml(folder / f"{name}.toml") for name in names]
    aliases = {alias: recipe for recipe in shipped for alias in recipe.aliases}
    if text in aliases:
        return aliases[text]
    raise ConfigError(
        f"unknown recipe '{text}'{did_you_mean(text, [*names, *aliases])}; shipped recipes: "
        f"{', '.join(names)}; to use a file of your own, give its path, ending in .toml"
    )


def _finite(name: str, strength: object) -> float:
    # a bool is a number to Python, but "fused: yes" isn't a strength
    if isinstance(strength, Real) and not isinstance(strength, bool):
        with contextlib.suppress(OverflowError):  # a whole number larger than any float
            if math.isfinite(number := float(strength)):
                return number
    raise ConfigError(
        f"strength of '{name}': expected a finite number, found {reprlib.repr(strength)}"
    )


def _read_toml(path: Path) -> Recipe:
    tables = read_toml(path)
    recipe, problems = _validate(path.stem, tables)
    problems += _role_problems(tables)
    if recipe is None or problems:
        head = f"{path}: not a recipe yet, problems found: {len(problems)}"
        raise ConfigError("\n  ".join([head, *problems]))
    return recipe


def _validate(name: str, tables: dict[str, Any]) -> tuple[Recipe | None, list[str]]:
    """Check the keys and types of a recipe's tables, and make the recipe if they are right."""
    from typing import Annotated, Literal

    from pydantic import BaseModel, ConfigDict, Field, ValidationError

    strict = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    most = 10**9

    class PhaseTable(BaseModel):
        model_config = strict
        adapters: dict[str, float] = {}
        steps: int = Field(ge=1, le=most)
        evaluations: int = Field(1, ge=1, le=most)
        guidance_passes: int = Field(1, ge=1, le=most)
        video_tokens: int | None = Field(None, ge=1, le=most)
        audio_tokens: int | None = Field(None, ge=1, le=most)
        text_tokens: int = Field(1024, ge=1, le=most)
        note: str = ""

    class RecipeTable(BaseModel):
        model_config = strict
        description: str
        source: str = ""
        aliases: list[str] = []
        # a role's name stays free of what other notations use: user@0.5 + distilled, role=file
        roles: dict[
            Annotated[str, Field(pattern=r"^[\w-]+$")], Literal["required", "optional"]
        ] = {}
        phases: list[PhaseTable] = Field(min_length=1)

    try:
        table = RecipeTable.model_validate(tables)
    except ValidationError as error:
        keys = {(): [*RecipeTable.model_fields], ("phases",): [*PhaseTable.model_fields]}
        return None, toml_problems(error, keys)
    return Recipe(
        name=name,
        description=table.description,
        source=table.source,
        roles=tuple(Role(role, need == "required") for role, need in table.roles.items()),
        phases=tuple(
            Phase(State(phase.adapters), **phase.model_dump(exclude={"adapters"}))
            for phase in table.phases
        ),
        aliases=tuple(table.aliases),
    ), []


def _role_problems(tables: dict[str, Any]) -> list[str]:
    """Hold the phases' adapters against the roles, as far as the tables have the right shape."""
    roles, phases = tables.get("roles", {}), tables.get("phases", [])
    if not isinstance(roles, dict) or not isinstance(phases, list):
        return []
    adapters = [phase.get("adapters") if isinstance(phase, dict) else None for phase in phases]
    adapters = [used if isinstance(used, dict) else {} for used in adapters]
    undeclared = [
        f"phases.{number}.adapters.{role}: not one of the roles{did_you_mean(role, roles)}; "
        f"declare it under [roles] as required or optional"
        for number, used in enumerate(adapters)
        for role in used
        if role not in roles
    ]
    unused = [
        f"roles.{role}: no phase uses it; give it a strength in a phase's adapters, or remove it"
        for role in roles
        if not any(used.get(role) for used in adapters)
    ]
    return undeclared + unused
