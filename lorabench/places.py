"""Where in a base the modules are that adapters name in ways of their own.

A path may begin with the names of wrappers around the model, may be flattened (dots turned into
underscores, as kohya's scripts do), may lack a ``.0`` that the base has, or have one too many, and
may speak of a projection that the base holds fused with others, or of a fused one that it holds
split. A flattened path is looked up among the base's flattened names: the underscores can't be
turned back.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from lorabench.geometry import TensorSpec

WRAPPERS = frozenset(
    ("base_model", "model", "diffusion_model", "transformer", "unet", "module", "_orig_mod")
)
"""First segments of a path that may name what is around a model rather than a part of it."""

FLAT_PREFIXES = ("lora_unet_", "lora_transformer_", "lycoris_")
"""What flattened paths begin with."""

TEXT_ENCODERS = (
    *(f"text_encoder{number}." for number in ("", "_1", "_2", "_3", "_4", "s")),
    *(f"lora_te{number}_" for number in ("", "1", "2", "3")),
    *("text_model.", "cond_stage_model.", "conditioner."),
)
"""What paths into a text encoder begin with."""

_INNER = ("0", "base_layer", "linear")
"""Last segments that a module may be wrapped in alone."""

_FUSED = (
    (
        ("to_qkv", "qkv", "qkv_proj", "in_proj", "Wqkv"),
        (
            ("to_q", "to_k", "to_v"),
            ("q_proj", "k_proj", "v_proj"),
            ("q", "k", "v"),
            ("query", "key", "value"),
        ),
    ),
    (
        ("to_added_qkv", "add_qkv_proj"),
        (("add_q_proj", "add_k_proj", "add_v_proj"),),
    ),
    (
        ("to_kv", "kv", "kv_proj"),
        (("to_k", "to_v"), ("k_proj", "v_proj"), ("k", "v"), ("key", "value")),
    ),
    (
        ("gate_up_proj", "gate_up", "w13"),
        (("gate_proj", "up_proj"), ("gate", "up"), ("w1", "w3")),
    ),
)
"""Names of fused projections, and the names under which their parts go, in their rows' order."""


class Place(NamedTuple):
    """What of a base an adapter's module means.

    One module as it is; the rows of several, one after another (``modules``); or the rows of part
    ``part`` of a fused one, whose parts are called ``parts``.
    """

    modules: tuple[str, ...]
    part: int = 0
    parts: tuple[str, ...] = ()


class Places:
    """A base's modules, by every name that means one of them."""

    def __init__(self, base: Iterable[TensorSpec]) -> None:
        self._specs = {spec.name: spec for spec in base}
        names = (name.rpartition(".") for name in self._specs)
        modules = dict.fromkeys(m for m, _, last in names if m and last in ("weight", "bias"))
        self._modules = tuple(modules)
        self._tiers = (_Index(), _Index(), _Index())
        exact, wrapped, fused = self._tiers
        for module in modules:
            exact.add(module, Place((module,)))
        children = defaultdict(set)
        for module in modules:
            children[module.rpartition(".")[0]].add(module)
        for parent, inside in children.items():
            if parent and parent not in modules and len(inside) == 1:
                [child] = inside
                if child.rpartition(".")[2] in _INNER:
                    wrapped.add(parent, Place((child,)))
        for module in modules:
            for inner in _INNER:
                wrapped.add(f"{module}.{inner}", Place((module,)))
        for parent, inside in children.items():
            for name, place in _fused_names(parent, inside):
                fused.add(name, place)

    def find(self, path: str) -> tuple[Place, ...]:
        """Return what a path may mean: nothing, one place, or several that it can't tell apart."""
        for index in self._tiers:
            if found := index.find(path):
                return found
        return ()

    def weight(self, module: str) -> TensorSpec | None:
        """Return a module's weight."""
        return self._specs.get(f"{module}.weight")

    def bias(self, module: str) -> TensorSpec | None:
        """Return a module's bias."""
        return self._specs.get(f"{module}.bias")

    @property
    def modules(self) -> tuple[str, ...]:
        """Every module that has a weight or a bias."""
        return self._modules


class _Index:
    """Places by dotted names and by flattened ones, each with and without wrappers before it."""

    def __init__(self) -> None:
        self._dotted: defaultdict[str, dict[Place, int]] = defaultdict(dict)
        self._flat: defaultdict[str, dict[Place, None]] = defaultdict(dict)

    def add(self, name: str, place: Place) -> None:
        for taken_off, form in enumerate(forms(name)):
            self._dotted[form].setdefault(place, taken_off)
            self._flat[form.replace(".", "_")][place] = None

    def find(self, path: str) -> tuple[Place, ...]:
        for form in forms(path):
            if found := self._dotted.get(form):
                exact = tuple(place for place, taken_off in found.items() if not taken_off)
                return exact or tuple(found)
        if "." in path:
            return ()
        prefix = next((p for p in FLAT_PREFIXES if path.startswith(p)), "")
        for form in _flat_forms(path.removeprefix(prefix)):
            if found := self._flat.get(form):
                return tuple(found)  # two names that flatten to one are told apart by nothing
        return ()


def forms(path: str) -> Iterator[str]:
    """Give a dotted path, then without its first wrapper, and so on."""
    yield path
    first, _, rest = path.partition(".")
    while rest and first in WRAPPERS:
        yield rest
        first, _, rest = rest.partition(".")


def _flat_forms(path: str) -> Iterator[str]:
    """Give a flattened path, then without a wrapper before it, and so on (diffusers keeps them)."""
    yield path
    for wrapper in sorted(WRAPPERS):
        if path.startswith(f"{wrapper}_"):
            yield from _flat_forms(path.removeprefix(f"{wrapper}_"))


def is_text_encoders(path: str) -> bool:
    """Return whether a path leads into a text encoder."""
    return any(form.startswith(TEXT_ENCODERS) for form in forms(path))


def _fused_names(parent: str, inside: set[str]) -> Iterator[tuple[str, Place]]:
    """Give the names that a parent's modules don't have, and would, were they fused or split."""
    dot = f"{parent}." if parent else ""
    for fused, namings in _FUSED:
        for parts in namings:
            split = tuple(f"{dot}{part}" for part in parts)
            if inside.issuperset(split):
                yield from ((f"{dot}{name}", Place(split)) for name in fused)
            for whole in fused:
                if f"{dot}{whole}" in inside:
                    for i, name in enumerate(split):
                        yield name, Place((f"{dot}{whole}",), i, parts)
