"""Where the shipped model templates and recipes live."""

from pathlib import Path

from lorabench.errors import ConfigError


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
