"""Where in a base the modules are that adapters name in ways of their own.

A path may begin with the names of wrappers around the model, may be flattened (dots turned into
underscores, as kohya's scripts do), may lack a ``.0`` that the base has, or have one too many, and
may speak of a projection that the base holds fused with others, or of a fused one that it holds
split. A flattened path is looked up among the base's flattened names: the underscores can't be
turned back.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Set
from typing import NamedTuple

from lorabench.geometry import TensorSpec

PEFT_PREFIX = "base_model.model."
"""What PEFT puts before every name."""

WRAPPERS = frozenset(
    ("base_model", "model", "diffusion_model", "transformer", "unet", "module", "_orig_mod")
)
"""First segments of a path that may name what is around a model rather than a part of it."""

_MOST_WRAPPERS = 8
"""More than any stack of wrappers has."""

_FLAT_WRAPPERS = ("base_model_model_", "model_diffusion_model_", "diffusion_model_", "unet_")
"""What of wrappers may be left before a flattened path and can't be a part of a module's name."""

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
        own = {bare(module).partition(".")[0] for module in modules}
        own = {f"{name}_" for name in own if name.startswith("transformer_")}
        self._tiers = (_Index(own), _Index(own), _Index(own))
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

    def __init__(self, own: Set[str]) -> None:
        self._own = (
            own  # how the base's own flattened names begin that seem to begin with a wrapper
        )
        self._dotted: defaultdict[str, dict[Place, int]] = defaultdict(dict)
        self._flat: defaultdict[str, dict[Place, None]] = defaultdict(dict)

    def add(self, name: str, place: Place) -> None:
        for taken_off, form in enumerate(forms(name)):
            self._dotted[form].setdefault(place, taken_off)
            self._flat[form.replace(".", "_")][place] = None

    def find(self, path: str) -> tuple[Place, ...]:
        # PEFT's prefix is no part of a name; what is left may be the base's own.
        path = path.removeprefix(PEFT_PREFIX)
        if own := [place for place, off in self._dotted.get(path, {}).items() if not off]:
            return tuple(own)
        found = {place: None for form in forms(path) for place in self._dotted.get(form, ())}
        if found or "." in path:
            return tuple(found)
        prefix = next((p for p in FLAT_PREFIXES if path.startswith(p)), "")
        for form in self._flat_forms(path.removeprefix(prefix)):
            if flat := self._flat.get(form):
                return tuple(flat)  # two names that flatten to one are told apart by nothing
        return ()

    def _flat_forms(self, path: str) -> Iterator[str]:
        """Give a flattened path, then without wrappers before it, which diffusers keeps.

        Of a model that has ``transformer_blocks`` the wrapper ``transformer_`` is known by what
        follows it; elsewhere it may be a part of a name.
        """
        yield path
        for wrapper in _FLAT_WRAPPERS:
            if path.startswith(wrapper):
                yield from self._flat_forms(path.removeprefix(wrapper))
        if self._own and path.startswith("transformer_") and not path.startswith(tuple(self._own)):
            yield path.removeprefix("transformer_")


def forms(path: str) -> Iterator[str]:
    """Give a dotted path, then without its first wrapper, and so on."""
    yield path
    for _ in range(_MOST_WRAPPERS):
        first, _, rest = path.partition(".")
        if not rest or first not in WRAPPERS:
            return
        path = rest
        yield path


def bare(path: str) -> str:
    """Return a dotted path without the wrappers before it."""
    return [*forms(path)][-1]


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
