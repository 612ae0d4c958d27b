"""A machine as the cost model sees it: what it reads, copies and multiplies in a second.

A machine is a TOML file: a shipped one under ``data/machines``, from published figures, or one that
``lorabench calibrate`` measured. Every figure says where it is from.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from lorabench.errors import ConfigError, did_you_mean
from lorabench.plan import STRATEGY_VALUES
from lorabench.resources import data_folder, read_toml, toml_problems

CLASSES: dict[str, int] = {"small": 1 << 20, "medium": 1 << 24}
"""Weights by their elements: those under this many, the smallest class first; then ``large``."""

SIZES = (*CLASSES, "large")

_LEAST, _MOST = 1e-12, 1e24
"""What a figure may be: seconds that follow from others are no machine's, and may overflow."""

PROVENANCES = ("measured", "derived", "published")


def class_of(elements: int) -> str:
    """Return the class of a weight by its elements."""
    return next((name for name, below in CLASSES.items() if elements < below), "large")


@dataclass(frozen=True)
class Pace:
    """How fast a kernel goes through weights of a class."""

    flops_per_second: float
    """Of its matrix product."""
    params_per_second: float = math.inf
    """Elements that it rounds, adds and stores beside that."""

    def seconds(self, flops: float, params: float) -> float:
        """Return what a weight takes, but for the launch."""
        return flops / self.flops_per_second + params / self.params_per_second


@dataclass(frozen=True)
class Origin:
    """Where a figure is from."""

    provenance: str
    """``measured``, ``derived`` (from others, or a bound), or ``published``."""
    source: str
    ceiling: bool = False
    """Whether the machine can't do better, so that seconds which follow are the least."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The rates of a machine: bytes, weights and FLOP a second; None where a figure isn't known.

    Attributes
    ----------
    device
        Where the weights live: ``cpu`` (memory that the CPU shares with a GPU, too) or ``cuda``.
    memory_bytes, host_bytes
        The device's memory, and the host's where that is apart from it.
    launch_seconds
        Of a weight, beside its bytes and FLOP.
    read_cold, read_warm
        Bytes from the disk, and from the page cache into memory that is in use.
    load_warm
        Bytes from the page cache into new memory.
    load_beside
        The same beside a fuse: the bytes for which a load that fuses takes a second longer than its
        fuse. None where reading takes nothing from fusing.
    copy_host
        Bytes of weights from or to a snapshot in the host's memory.
    copy_device
        Bytes of weights copied within a GPU's memory.
    copy_new
        Bytes of weights copied into new memory, as an image's.
    encode, decode
        Weights whose corrections ``residual`` finds beside a fuse, or applies beside one.
    kernels
        The pace of a fuse by kernel and class of weight.
    forward
        The pace of a forward's products by class of weight; its elements are read for each forward.
    origins
        Of each figure, by its name in the file: ``read_cold``, ``kernels.gemm.large``.
    """

    name: str
    title: str
    device: str
    memory_bytes: int
    host_bytes: int | None = None
    launch_seconds: float = 0.0
    read_cold: float | None = None
    read_warm: float | None = None
    load_warm: float | None = None
    load_beside: float | None = None
    copy_host: float
    copy_device: float | None = None
    copy_new: float | None = None
    encode: float | None = None
    decode: float | None = None
    kernels: Mapping[str, Mapping[str, Pace]]
    forward: Mapping[str, Pace]
    origins: Mapping[str, Origin]

    @property
    def provenance(self) -> str:
        """The weakest provenance of a figure: ``published``, if one of them is."""
        found = {origin.provenance for origin in self.origins.values()}
        return next(p for p in reversed(PROVENANCES) if p in found)


_FIGURES = [
    field.name for field in fields(Machine)
    if field.name not in ("name", "title", "device", "kernels", "forward", "origins")
]  # fmt: skip
_NEEDED = ("memory_bytes", "copy_host")


def machine_names() -> list[str]:
    """Return the names of the shipped machines, sorted."""
    return sorted(path.stem for path in data_folder("machines").glob("*.toml"))


def load_machine(name_or_path: str | Path) -> Machine:
    """Load a shipped machine by its name, or a calibrated one by its file's path.

    A ``Path``, and a string that ends in ``.toml`` or has a folder in it, is a path.

    Raises
    ------
    ConfigError
        No such machine, or a file that isn't one; all that is wrong in it is told at once.
    FileError
        The file can't be read.
    """
    text = str(name_or_path)
    if isinstance(name_or_path, Path) or text.endswith(".toml") or Path(text).name != text:
        return _parse(Path(name_or_path))
    if text not in (names := machine_names()):
        raise ConfigError(
            f"no machine '{text}'{did_you_mean(text, names)}; shipped: {', '.join(names)}; a path "
            f"to the .toml file that 'lorabench calibrate' wrote will do too"
        )
    return _parse(data_folder("machines") / f"{text}.toml")


def machine_toml(machine: Machine) -> str:
    """Return a machine as the text of a file that `load_machine` reads back equal."""
    lines = [f"{key} = {_text(getattr(machine, key))}" for key in ("title", "device")]

    def table(name: str, figures: Mapping[str, float]) -> Iterator[str]:
        origin = machine.origins[name]
        ceiling = {"ceiling": True} if origin.ceiling else {}
        told = {**figures, "provenance": origin.provenance, **ceiling, "source": origin.source}
        return (f"{key} = {_text(value)}" for key, value in told.items())

    for key in _FIGURES:
        if getattr(machine, key) is not None and key in machine.origins:
            lines.append(f"{key} = {{ {', '.join(table(key, {'value': getattr(machine, key)}))} }}")
    groups = {f"kernels.{name}": paces for name, paces in machine.kernels.items()}
    for group, paces in {**groups, "forward": machine.forward}.items():
        for size, pace in paces.items():
            known = {k: v for k, v in vars(pace).items() if math.isfinite(v)}
            lines += ["", f"[{group}.{size}]", *table(f"{group}.{size}", known)]
    return "\n".join(lines) + "\n"


def _text(value: str | float) -> str:
    import json

    # Which TOML reads alike, for numbers, and for texts but for one character.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _parse(path: Path) -> Machine:
    from typing import Literal

    from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

    strict = ConfigDict(extra="forbid", allow_inf_nan=False)

    class Told(BaseModel):
        model_config = strict
        provenance: Literal["measured", "derived", "published"]
        source: str = Field(min_length=1)
        ceiling: bool = Field(False, strict=True)

        @property
        def origin(self) -> Origin:
            return Origin(self.provenance, self.source, self.ceiling)

    class Figure(Told):
        value: float = Field(ge=_LEAST, le=_MOST, strict=True)

    class PaceTable(Told):
        flops_per_second: float = Field(ge=_LEAST, le=_MOST, strict=True)
        params_per_second: float = Field(math.inf, ge=_LEAST, le=_MOST, strict=True)

    class Paces(BaseModel):
        model_config = strict
        small: PaceTable
        medium: PaceTable
        large: PaceTable

    class Fixed(BaseModel):
        model_config = strict
        title: str = Field(min_length=1)
        device: Literal["cpu", "cuda"]
        kernels: dict[Literal[STRATEGY_VALUES["kernel"]], Paces] = Field(min_length=1)  # pyright: ignore
        forward: Paces

    optional = {key: (Figure | None, None) for key in _FIGURES if key not in _NEEDED}
    needed = dict.fromkeys(_NEEDED, (Figure, ...))
    table_model = create_model("MachineTable", __base__=Fixed, **needed, **optional)  # pyright: ignore
    try:
        table: Any = table_model.model_validate(read_toml(path))
    except ValidationError as error:
        problems = toml_problems(error, {(): [*table_model.model_fields]})
        head = f"{path}: not a machine yet, problems found: {len(problems)}"
        raise ConfigError("\n  ".join([head, *problems])) from None
    figures = {key: found for key in _FIGURES if (found := getattr(table, key)) is not None}
    groups = {f"kernels.{name}": paces for name, paces in table.kernels.items()}
    groups["forward"] = table.forward
    origins = {key: found.origin for key, found in figures.items()}
    paced: dict[str, dict[str, Pace]] = {}
    for group, paces in groups.items():
        for size in SIZES:
            told = getattr(paces, size)
            pace = Pace(told.flops_per_second, told.params_per_second)
            paced.setdefault(group, {})[size] = pace
            origins[f"{group}.{size}"] = told.origin
    whole = ("memory_bytes", "host_bytes")
    return Machine(
        name=path.stem,
        title=table.title,
        device=table.device,
        kernels={name: paced[f"kernels.{name}"] for name in table.kernels},
        forward=paced["forward"],
        origins=origins,
        **{k: int(f.value) if k in whole else f.value for k, f in figures.items()},
    )
