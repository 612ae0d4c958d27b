"""What people type on a command line, turned into what the engine takes."""

import os
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from lorabench.checkpoint import Checkpoint
from lorabench.errors import ConfigError, FileError, did_you_mean
from lorabench.geometry import Geometry, from_tensors, geometry_names, load_geometry
from lorabench.keys import is_adapters
from lorabench.plan import STRATEGY_VALUES
from lorabench.rates import Machine, load_machine
from lorabench.synthetic import SIZES


@dataclass(frozen=True)
class Binding:
    """An adapter for a role, as ``role``, ``role=path`` or ``role=path=strength``."""

    role: str
    path: Path | None = None
    strength: float = 1.0


def parse_bindings(texts: Iterable[str]) -> dict[str, Binding]:
    """Read bindings by role, in the order given.

    Raises
    ------
    ConfigError
        A text has another form, or a role is bound twice.
    """
    bindings: dict[str, Binding] = {}
    for text in texts:
        binding = _parse_binding(text)
        if binding.role in bindings:
            raise ConfigError(f"--adapter {text}: role '{binding.role}' is bound twice; bind once")
        bindings[binding.role] = binding
    return bindings


def _parse_binding(text: str) -> Binding:
    role, equals, rest = text.partition("=")
    if not role or (equals and not rest):
        raise ConfigError(f"--adapter {text}: expected role, role=path or role=path=strength")
    if not rest:
        return Binding(role)
    return Binding(role, *_parse_file(rest, f"--adapter {text}"))


def _parse_file(text: str, where: str) -> tuple[Path, float]:
    path, equals, strength = text.rpartition("=")
    if not equals or os.path.lexists(text):  # a path may have an equals sign in it
        return Path(text), 1.0
    try:
        return Path(path), float(strength)
    except ValueError:
        raise ConfigError(
            f"{where}: expected a path, or path=strength, the strength a number; found '{strength}'"
        ) from None


def parse_adapters(texts: Iterable[str]) -> dict[str, tuple[Path, float]]:
    """Read adapter files with their strengths, ``path`` or ``path=strength``, by a name for each.

    The name is the file's, without its suffix; files of one name are told apart by their folders'.

    Raises
    ------
    ConfigError
        A strength isn't a number, or a file is given twice.
    """
    files = [_parse_file(text, text) for text in texts]
    stems = Counter(path.stem for path, _ in files)
    named: dict[str, tuple[Path, float]] = {}
    for path, strength in files:
        name = path.stem if stems[path.stem] == 1 else f"{path.absolute().parent.name}/{path.stem}"
        if name in named:
            raise ConfigError(
                f"{path}: an adapter '{name}' is given twice; give it once, or rename one"
            )
        named[name] = path, strength
    return named


def parse_alphas(texts: Iterable[str], known: Iterable[str]) -> dict[str, float]:
    """Read alphas, ``name=alpha``, by the adapters' names.

    Raises
    ------
    ConfigError
        A text has another form, or names an adapter that isn't there.
    """
    alphas: dict[str, float] = {}
    known = list(known)
    for text in texts:
        name, equals, alpha = text.rpartition("=")
        try:
            alphas[name] = float(alpha)
        except ValueError:
            equals = ""
        if not equals:
            raise ConfigError(f"--alpha {text}: expected name=alpha, the alpha a number")
        if name not in known:
            raise ConfigError(
                f"--alpha {text}{did_you_mean(name, known)}: the adapters are {', '.join(known)}"
            )
    return alphas


def parse_blocks(text: str) -> int | None:
    """Read a number of blocks; None for ``all``, connectors included.

    Raises
    ------
    ConfigError
        Neither.
    """
    if text == "all":
        return None
    if not text.isdecimal():
        raise ConfigError(f"--blocks {text}: expected a number of blocks, or all")
    return int(text)


def parse_bytes(text: str, option: str) -> int:
    """Read an amount of memory: ``64GiB``, ``80GB``, ``1.5 TiB``, or a whole number of bytes.

    Raises
    ------
    ConfigError
        Something else, or none at all.
    """
    found = _BYTES.fullmatch(text)
    number, letter, two, byte = found.groups() if found else ("", "", "", "")
    power = "kmgt".find(letter.lower()) + 1 if letter else 0
    nbytes = float(number or 0) * (1024 if two else 1000) ** power
    if nbytes < 1 or (power and not byte) or (two and not letter):
        raise ConfigError(
            f"{option} {text}: expected a size above 0, as 64GiB (2**30 bytes each), 80GB (1e9 "
            f"bytes each) or a number of bytes"
        )
    return int(nbytes)


_BYTES = re.compile(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*([kmgt]?)(i?)(b?)\s*", re.I)


def parse_only(texts: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Read what fields of a strategy may be: ``restore=reread/residual``, by the field.

    Raises
    ------
    ConfigError
        A text has another form, a strategy has no such field or value, or a field is given twice.
    """
    only: dict[str, tuple[str, ...]] = {}
    for text in texts:
        field, equals, values = (part.strip() for part in text.partition("="))
        if not equals:
            raise ConfigError(f"--only {text}: expected field=value or field=value/value")
        if field not in STRATEGY_VALUES:
            raise ConfigError(
                f"--only {text}: no field '{field}'{did_you_mean(field, STRATEGY_VALUES)}; fields: "
                f"{', '.join(STRATEGY_VALUES)}"
            )
        if field in only:
            raise ConfigError(f"--only {text}: field '{field}' is given twice; give it once")
        only[field] = tuple(dict.fromkeys(value.strip() for value in values.split("/")))
        for value in only[field]:
            if value not in (known := STRATEGY_VALUES[field]):
                raise ConfigError(
                    f"--only {text}: {field} can't be '{value}'{did_you_mean(value, known)}; it "
                    f"is {', '.join(known)}"
                )
    return only


def check_size(size: str) -> None:
    """Raise `ConfigError` unless sample weights come in this size."""
    if size not in SIZES:
        raise ConfigError(
            f"--size {size}{did_you_mean(size, SIZES)}: choose from {', '.join(SIZES)}"
        )


def find_geometry(
    name_or_path: str, *, blocks: int | None = None, shrink: int = 1, rank: int | None = None
) -> Geometry:
    """Load a shipped template by name, a ``.toml`` template, or a checkpoint's headers.

    Parameters
    ----------
    blocks
        Cut to this many blocks; None keeps the whole model.
    shrink, rank
        As in `load_geometry`; a checkpoint has one size, and no adapter rank but the one given.

    Raises
    ------
    ConfigError
        No such template, an adapter in a model's place, or a cut that can't be made.
    FileError
        The checkpoint can't be read.
    """
    path = Path(name_or_path)
    is_file = path.exists() or path.name != name_or_path or path.suffix in (".safetensors", ".json")
    if path.suffix == ".toml" or name_or_path in geometry_names() or not is_file:
        geometry = load_geometry(name_or_path, shrink=shrink, rank=rank)
    else:
        checkpoint = Checkpoint.open(path)
        if holds_adapter(checkpoint):
            raise ConfigError(
                f"{path}: is an adapter, and a model was expected; see it with 'lorabench inspect'"
            )
        if shrink != 1:
            raise ConfigError(f"{path}: a checkpoint can't be shrunk; leave --shrink away")
        geometry = from_tensors(checkpoint.path.name, checkpoint.tensors, rank)
    return geometry if blocks is None else geometry.cut(blocks)


def holds_adapter(checkpoint: Checkpoint) -> bool:
    """Tell an adapter from a base by its names."""
    return any(is_adapters(name) for name in checkpoint.entries)


def check_records_file(path: Path) -> None:
    """Make sure that records can be added to a file, before anything is measured for it.

    Raises
    ------
    FileError
        It is a folder or a device, or can't be written.
    """
    make_folder(path.parent)
    if os.path.lexists(path) and not os.path.isfile(path):  # noqa: PTH113 - Path's may raise
        raise FileError(f"{path}: expected a file for records, found a folder or device")
    try:
        with path.open("ab"):
            pass
    except OSError as error:
        raise FileError(f"{path}: can't be written: {error.strerror}; choose another") from error


def make_folder(folder: Path) -> None:
    """Make the folder of a command's output, before the command's work rather than after it.

    Raises
    ------
    FileError
        It can't be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(
            f"{folder}: can't make this folder: {error.strerror}; give another"
        ) from error


def find_machine(name: str, folder: Path, device: str = "cpu") -> Machine:
    """Load a machine by its shipped name or its file's path; ``here`` is this one, calibrated.

    Its calibration is kept in ``folder``, and made if there is none: see
    :func:`lorabench.calibrate.here`.
    """
    if name != "here":
        return load_machine(name)
    from lorabench.calibrate import here  # imports torch

    return here(folder, device)
