"""Measure what it costs a video diffusion engine to bind LoRA adapters phase by phase.

Importing this package loads no torch: what needs it is imported when it is first named.
"""

from importlib import import_module, metadata
from typing import TYPE_CHECKING

# These two modules are pure data, and quick. They must be loaded here and not when named: loading
# lorabench.plan later would put the module in the place of the function of the same name.
from lorabench.plan import STRATEGIES, Strategy, plan
from lorabench.recipe import BASE, State, load_recipe

if TYPE_CHECKING:
    from lorabench.adapter import Adapter
    from lorabench.checkpoint import Checkpoint
    from lorabench.fusedfile import fuse_file
    from lorabench.geometry import load_geometry
    from lorabench.planner import advise
    from lorabench.rates import load_machine
    from lorabench.resident import ResidentWeights
    from lorabench.setting import Pricings, Setting
    from lorabench.streamed import StreamedWeights
    from lorabench.synthetic import synthesize

    __version__: str

__all__ = [
    "BASE",
    "STRATEGIES",
    "Adapter",
    "Checkpoint",
    "Pricings",
    "ResidentWeights",
    "Setting",
    "State",
    "Strategy",
    "StreamedWeights",
    "__version__",
    "advise",
    "fuse_file",
    "load_geometry",
    "load_machine",
    "load_recipe",
    "plan",
    "synthesize",
]

_HOMES = {
    "Adapter": "adapter",
    "Checkpoint": "checkpoint",
    "Pricings": "setting",
    "ResidentWeights": "resident",
    "Setting": "setting",
    "StreamedWeights": "streamed",
    "advise": "planner",
    "fuse_file": "fusedfile",
    "load_geometry": "geometry",
    "load_machine": "rates",
    "synthesize": "synthetic",
}


def __getattr__(name: str) -> object:
    if name == "__version__":
        try:
            return metadata.version("lorabench")
        except metadata.PackageNotFoundError:  # a checkout on the path, not installed
            return "unknown"
    if name in _HOMES:
        return getattr(import_module(f"lorabench.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'lorabench' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
