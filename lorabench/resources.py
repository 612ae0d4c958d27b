"""Model templates, recipes and claims: where the shipped ones live, and how any is read."""

import os
import tomllib
from pathlib import Path
from typing import Any

from lorabench.errors import ConfigError

MAX_TOML_BYTES = 1_000_000


def data_folder(kind: str) -> Path:
    """Return the folder of shipped TOML files: ``kind`` is ``models`` or ``recipes``.

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
