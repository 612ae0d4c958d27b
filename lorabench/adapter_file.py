"""An adapter's file by itself: its modules and what is told of each, from its header.

Nothing is skipped in silence: what isn't understood is refused by name.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lorabench.checkpoint import Checkpoint
from lorabench.errors import AdapterError
from lorabench.header import Entry
from lorabench.keys import WHOLE, Part, Refused, is_adapters, parse_key
from lorabench.places import bare, is_text_encoders
from lorabench.scales import Scale, Scales

FACTOR_DTYPES = ("BF16", "F16", "F32")

_RANKLESS = Scale(1.0, "full deltas have none")

_HALVES = frozenset("AB")


@dataclass(frozen=True)
class Module:
    """What a file holds for one module.

    Attributes
    ----------
    parts
        Its tensors by their roles: A ``[rank, in]`` and B ``[out, rank]``, bias ``[out]`` (of B),
        diff ``[out, in]`` or ``[n]``, diff_b ``[out]``.
    scale
        Of B @ A and B's bias.
    """

    path: str
    parts: Mapping[str, Entry]
    scale: Scale

    @property
    def kinds(self) -> tuple[str, ...]:
        """What it is made of."""
        named = {"A": "LoRA", "bias": "LoRA bias", "diff": "full delta", "diff_b": "bias delta"}
        return tuple(kind for role, kind in named.items() if role in self.parts)

    @property
    def rank(self) -> int:
        """Rows of A; 0 where there is none."""
        return self.parts["A"].spec.shape[0] if "A" in self.parts else 0

    @property
    def flops(self) -> int:
        """Operations of B @ A; one multiply-accumulate is two."""
        if "A" not in self.parts:
            return 0
        return 2 * self.parts["A"].spec.params * self.rows

    @property
    def nbytes(self) -> int:
        """Bytes of the factors and deltas."""
        return sum(e.spec.nbytes for role, e in self.parts.items() if role != "alpha")

    @property
    def rows(self) -> int:
        """Outputs that it speaks of."""
        role = next(role for role in ("B", "diff", "bias", "diff_b") if role in self.parts)
        return self.parts[role].spec.shape[0]


@dataclass(frozen=True)
class AdapterFile:
    """A file's modules, and what is left of it.

    Attributes
    ----------
    modules
        In the file's order; none, where nothing in the file can be applied.
    skipped
        Tensors of modules of a kind that isn't applied.
    styles
        How the file's factors are called.
    """

    file: Checkpoint
    modules: tuple[Module, ...] = field(repr=False)
    skipped: tuple[Refused, ...] = field(repr=False)
    styles: tuple[str, ...]

    @classmethod
    def open(
        cls, path: str | Path, *, allow_skip: bool = False, alpha: float | None = None
    ) -> "AdapterFile":
        """Open a file and read its header, its metadata and its alphas.

        Parameters
        ----------
        allow_skip
            Leave out modules of a kind that isn't applied; they are listed in ``skipped``. What is
            of a text encoder is left out in any case.
        alpha
            The alpha of modules of which nothing is said, instead of their rank.

        Raises
        ------
        FileError
            The file can't be read as safetensors.
        AdapterError
            A tensor isn't understood or of a kind that isn't applied, a module is incomplete, a
            shape or dtype doesn't fit, or the scale of a module is unclear.
        """
        file = Checkpoint.open(path)
        keys = [parse_key(name) for name in file.entries]
        grouped, refused = _grouped(file, keys)
        if not grouped and refused and not any(map(is_adapters, file.entries)):
            raise AdapterError(
                f"{file.path}: no tensor is an adapter's ({few(file.entries)}); is it a base, "
                f"given in an adapter's place?"
            )
        if not allow_skip:
            refuse(file.path, (key for key in refused if not is_text_encoders(key.path)))
        for path_, parts in grouped.items():
            _check(file.path, path_, parts)
        alphas = {p: parts["alpha"] for p, parts in grouped.items() if "alpha" in parts}
        scales = Scales.read(file, alphas, alpha, allow_skip=allow_skip)
        modules = tuple(
            Module(path_, parts, _scale(scales, path_, parts)) for path_, parts in grouped.items()
        )
        styles = dict.fromkeys(key.style for key in keys if isinstance(key, Part) and key.style)
        return cls(file, modules, refused, tuple(styles))


def _grouped(
    file: Checkpoint, keys: Iterable[Part | Refused]
) -> tuple[dict[str, dict[str, Entry]], tuple[Refused, ...]]:
    """Group tensors by module; leave out modules that hold something of a refused kind."""
    modules: defaultdict[str, dict[str, Entry]] = defaultdict(dict)
    refused: list[Refused] = []
    infixes: dict[str, None] = {}
    for key, (name, entry) in zip(keys, file.entries.items(), strict=True):
        if isinstance(key, Part) and (why := _kind_by_tensor(entry, key.role)):
            key = Refused(name, key.path, *why)
        if isinstance(key, Refused):
            refused.append(key)
            continue
        if key.infix:
            infixes[key.infix] = None
        if len(infixes) > 1:  # else two of a name would be all that is told
            raise AdapterError(
                f"{file.path}: holds several adapters, {few(infixes)}; save one to a file"
            )
        if twin := modules[key.path].get(key.role):
            raise AdapterError(
                f"{file.path}: module '{key.path}' has two {_called(key.role)}, "
                f"'{twin.spec.name}' and '{name}'; keep one of them"
            )
        modules[key.path][key.role] = entry
    refused = [key._replace(path=_owner(key, modules)) for key in refused]
    kinds: dict[str, Refused] = {}
    for key in sorted(refused, key=lambda key: key.kind == WHOLE):
        kinds.setdefault(key.path, key)
    # IA3's vectors are called 'weight' too: it is what is beside it that tells.
    refused = [
        kinds[key.path]._replace(name=key.name) if key.kind == WHOLE else key for key in refused
    ]
    left_out = {bare(path): key.kind for path, key in kinds.items()}
    for path in [path for path in modules if bare(path) in left_out]:
        for role, entry in modules.pop(path).items():
            beside = f"{_called(role)} beside {left_out[bare(path)]}"
            refused.append(Refused(entry.spec.name, path, beside, ""))
    return modules, tuple(refused)


def _owner(key: Refused, modules: Mapping[str, object]) -> str:
    """Return the path of a refused tensor's module.

    Of one that isn't understood, and of a whole weight, it is the nearest above it.
    """
    if key.path != key.name and key.kind != WHOLE:
        return key.path
    path = key.name
    while path and path not in modules:
        path = path.rpartition(".")[0]
    return path or key.path


def _kind_by_tensor(entry: Entry, role: str) -> tuple[str, str] | None:
    """Return the kind and the remedy of a tensor whose shape or dtype isn't applied."""
    spec = entry.spec
    if role == "alpha":
        return None
    if spec.dtype not in FACTOR_DTYPES:
        return (
            f"a factor of dtype {spec.dtype}",
            f"save the adapter in one of {', '.join(FACTOR_DTYPES)}",
        )
    if role in ("A", "B", "diff") and len(spec.shape) > 2:
        return (
            "a convolution's factor",
            "merge it into a base with the library that wrote it",
        )
    return None


def _check(path: Path, module: str, parts: Mapping[str, Entry]) -> None:
    """Raise :class:`AdapterError` unless a module's tensors belong together."""
    where = f"{path}: module '{module}'"
    if len(halves := _HALVES & parts.keys()) == 1:
        [has] = halves
        [lacks] = _HALVES - halves
        raise AdapterError(
            f"{where} has '{parts[has].spec.name}' but no lora_{lacks} (lora_"
            f"{'down' if lacks == 'A' else 'up'}); the file is incomplete"
        )
    if not halves:
        for role in ("alpha", "bias"):
            if role in parts:
                raise AdapterError(
                    f"{where} has '{parts[role].spec.name}' but no factors; the file is incomplete"
                )
    for one, other in (("A", "diff"), ("bias", "diff_b")):
        if one in parts and other in parts:
            raise AdapterError(
                f"{where} has '{parts[one].spec.name}' and '{parts[other].spec.name}', and no "
                f"writer documents what both mean together; keep one of them"
            )
    shapes = {role: entry.spec.shape for role, entry in parts.items()}
    a, b = shapes.get("A"), shapes.get("B")
    if a is not None and b is not None:
        if len(a) != 2 or len(b) != 2 or a[0] != b[1] or not a[0]:
            raise AdapterError(
                f"{where}: expected A [rank, in] and B [out, rank] of one rank, "
                f"found A {list(a)} and B {list(b)}"
            )
    outs = {role: shape[:1] for role, shape in shapes.items() if role not in ("A", "alpha")}
    vectors = [role for role in ("bias", "diff_b") if role in parts and len(shapes[role]) != 1]
    if vectors or len(set(outs.values())) != 1 or () in outs.values():
        found = ", ".join(f"'{parts[role].spec.name}' {list(shapes[role])}" for role in outs)
        raise AdapterError(f"{where}: expected tensors of one number of outputs, found {found}")


def _scale(scales: Scales, path: str, parts: Mapping[str, Entry]) -> Scale:
    return scales.of(path, parts["A"].spec.shape[0]) if "A" in parts else _RANKLESS


def refuse(path: Path, refused: Iterable[Refused]) -> None:
    """Raise :class:`AdapterError` for what isn't applied, if there is anything of it.

    Each kind is told once, with its first tensors and what to do.
    """
    kinds: defaultdict[str, list[Refused]] = defaultdict(list)
    for key in refused:
        if key.remedy:
            kinds[key.kind].append(key)
    if not kinds:
        return
    told = (
        f"{kind} ({few(key.name for key in keys)}): {keys[0].remedy}"
        for kind, keys in kinds.items()
    )
    raise AdapterError(
        f"{path}: holds what isn't applied: {'; '.join(told)}; 'inspect' and 'fuse' leave out the "
        f"modules that have such tensors with --allow-skip, Adapter.open with allow_skip=True"
    )


def _called(role: str) -> str:
    return {"A": "lora_A", "B": "lora_B", "bias": "lora_B bias"}.get(role, role)


def ranks_of(modules: Iterable[Module]) -> dict[int, int]:
    """Count modules by rank, the highest first; those without factors aren't counted."""
    return dict(sorted(Counter(m.rank for m in modules if m.rank).items(), reverse=True))


def scales_of(modules: Iterable[Module]) -> dict[Scale, int]:
    """Count modules by scale, the most frequent first; those without factors aren't counted."""
    return dict(Counter(m.scale for m in modules if m.rank).most_common())


def few(names: Iterable[str], limit: int = 3) -> str:
    """Name the first of many."""
    names = list(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(f"'{n}'" for n in names[:limit]) + more
