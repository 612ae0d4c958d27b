"""Models, recipes, machines and claims as TOML: where the shipped ones live, how any is read."""

import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lorabench.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from pydantic import ValidationError

MAX_TOML_BYTES = 1_000_000


def data_folder(kind: str) -> Path:
    """Return the folder of shipped TOML files: ``kind`` is ``models``, ``recipes`` or ``machines``.

    An installed wheel carries them inside the package; a checkout keeps them in ``data/``.

    Raises
    ------
    ConfigError
        Neither place has the folder: the installation is damaged.
    """
    package = Path(__file__).parent
    for folder in (package / "data" / kind, package.parent / "data" / kind):
        if folder.is_dir():
            return folder
    raise ConfigError(
        f"shipped data folder '{kind}' not found beside {package}; reinstall lorabench"
    )


def data_file(name: str) -> Path:
    """Return a shipped file that stands beside those folders, as ``claims.toml``.

    Raises
    ------
    ConfigError
        Neither place has the file: the installation is damaged.
    """
    package = Path(__file__).parent
    for file in (package / "data" / name, package.parent / "data" / name):
        if file.is_file():
            return file
    raise ConfigError(f"shipped file '{name}' not found beside {package}; reinstall lorabench")


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file that a person wrote.

    Raises
    ------
    ConfigError
        It is no regular file, can't be read, is larger than a person would write, or isn't TOML
        in UTF-8.
    """
    try:
        if os.path.lexists(path) and not os.path.isfile(path):  # noqa: PTH113 - Path's may raise
            raise ConfigError(f"{path}: expected a TOML file, found a folder or device")
        if path.stat().st_size > MAX_TOML_BYTES:
            raise ConfigError(f"{path}: larger than {MAX_TOML_BYTES:,} bytes; expected a TOML file")
        return tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: can't be read: {error.strerror}; correct the path") from error
    except (ValueError, RecursionError, OverflowError) as error:  # not UTF-8, or not TOML
        raise ConfigError(f"{path}: is not TOML in UTF-8: {error}; correct the file") from error


def toml_problems(
    error: "ValidationError", keys: Mapping[tuple[str, ...], Sequence[str]]
) -> list[str]:
    """Tell everything that pydantic found wrong in a file's tables, a line each.

    ``keys`` are those of tables by their place, numbers left out of it: they are told where a key
    is unknown.
    """
    problems = []
    for found in error.errors(include_url=False):
        *parents, key = map(str, found["loc"])
        where = ".".join([*parents, key])
        if found["type"] == "missing":
            problems.append(f"{where}: required, but missing")
        elif found["type"] == "extra_forbidden":
            known = keys.get(tuple(part for part in parents if not part.isdigit()), ())
            told = f"; keys here: {', '.join(known)}" if known else ""
            problems.append(f"{where}: unknown key{did_you_mean(key, known)}{told}")
        else:
            problems.append(f"{where}: {found['msg']}, found {found['input']!r}")
    return problems
