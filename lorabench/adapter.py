"""An adapter held against a base: which rows of which weight each of its factors belongs to.

An adapter is applied exactly as its file says, or refused with the reason: a module that is skipped
in silence is a wrong picture later.
"""

import os
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from math import prod
from pathlib import Path

from lorabench.adapter_file import AdapterFile, Module, few, ranks_of, refuse, scales_of
from lorabench.checkpoint import Checkpoint
from lorabench.errors import AdapterError, did_you_mean
from lorabench.geometry import DTYPE_BYTES, Target, TensorSpec
from lorabench.header import Entry
from lorabench.keys import Refused
from lorabench.places import Place, Places, bare, is_text_encoders
from lorabench.scales import Scale

WEIGHT_DTYPES = ("BF16", "F16", "F32")

_GUESSED = 5000  # modules that a name may have been meant for; guessing takes long

_QUANTISED = {
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0"), "fp8"),
    **dict.fromkeys(("I8", "U8"), "int8, or packed (nvfp4, mxfp4, nf4)"),
}


@dataclass(frozen=True, slots=True)
class PairEntry:
    """Where the factors of one module lie, and which rows of which weight they belong to.

    Without A, B is the delta itself, of the shape of its rows.
    """

    module: str
    weight: TensorSpec  # in the base: [out, in], or [n] where there is no A
    a: Entry | None  # [rank, in]
    b: Entry  # [rows, rank], [rows, in] or [n]; may be some rows of a tensor in the file
    scale: float
    top: int = 0  # the first row of the weight that is touched

    @property
    def rank(self) -> int:
        """Rows of A; 0 where there is none."""
        return self.a.spec.shape[0] if self.a else 0

    @property
    def rows(self) -> range:
        """The rows of the weight that are touched."""
        return range(self.top, self.top + self.b.spec.shape[0])


@dataclass(frozen=True)
class Adapter:
    """An adapter held against a base, by headers alone.

    Attributes
    ----------
    modules
        The file's modules that the base has.
    pairs
        What is added where; several for a module, or for a weight, where the base holds
        projections fused or split that the adapter doesn't.
    unmatched
        Modules that the adapter names and the base lacks.
    text_encoders
        Modules of text encoders, which no base of ours has.
    skipped
        Tensors of a kind that isn't applied.
    """

    file: Checkpoint
    modules: tuple[Module, ...] = field(repr=False)
    pairs: tuple[PairEntry, ...] = field(repr=False)
    unmatched: tuple[str, ...] = field(repr=False)
    text_encoders: tuple[str, ...] = field(repr=False)
    skipped: tuple[Refused, ...] = field(repr=False)

    @classmethod
    def open(
        cls,
        path: str | Path,
        base: Iterable[TensorSpec],
        *,
        allow_unmatched: bool = False,
        allow_skip: bool = False,
        alpha: float | None = None,
    ) -> "Adapter":
        """Open an adapter file and find its weights among a base's tensors.

        Parameters
        ----------
        allow_unmatched
            Accept modules that the base lacks, as when a base is cut to a few blocks; they are
            listed in ``unmatched``.
        allow_skip, alpha
            As for :meth:`AdapterFile.open`.

        Raises
        ------
        FileError
            The file can't be read as safetensors.
        AdapterError
            What :meth:`AdapterFile.open` refuses; a name may mean several modules of the base; a
            shape or dtype doesn't fit; a module (without ``allow_unmatched``), or every module, is
            not in the base.
        """
        held = AdapterFile.open(path, allow_skip=allow_skip, alpha=alpha)
        if not held.modules:
            kinds = dict.fromkeys(key.kind for key in held.skipped if key.remedy)
            raise AdapterError(
                f"{held.file.path}: nothing in it can be applied: of {len(held.file.entries)} "
                f"tensors none is lora_A / lora_B, lora_down / lora_up, lora.down / lora.up or diff"
                + (f"; it holds {few(kinds)}" if kinds else "")
            )
        places = Places(base)
        if not allow_skip:  # a text encoder's, that the base has after all
            refuse(held.file.path, (key for key in held.skipped if places.find(key.path)))
        found: list[tuple[Module, Place]] = []
        unmatched, text_encoders = [], []
        for module in held.modules:
            if place := _place(held.file.path, module, places):
                found.append((module, place))
            else:
                (text_encoders if is_text_encoders(module.path) else unmatched).append(module.path)
        if not found or (unmatched and not allow_unmatched):
            raise AdapterError(_lacking(held, len(found), unmatched, text_encoders, places))
        pairs = tuple(_pairs(held.file.path, found, places))
        _check_apart(held.file.path, pairs)
        modules = tuple(module for module, _ in found)
        return cls(held.file, modules, pairs, tuple(unmatched), tuple(text_encoders), held.skipped)

    @property
    def ranks(self) -> dict[int, int]:
        """How many modules have which rank: see `ranks_of`."""
        return ranks_of(self.modules)

    @property
    def scales(self) -> dict[Scale, int]:
        """How many modules have which scale: see `scales_of`."""
        return scales_of(self.modules)

    @property
    def targets(self) -> tuple[Target, ...]:
        """The weights that the adapter touches, with its rank there."""
        return tuple(
            Target(p.module, p.weight, p.rank, p.rows if len(p.rows) < p.weight.shape[0] else None)
            for p in self.pairs
        )

    @property
    def factor_bytes(self) -> int:
        """Bytes of the matched modules' factors in the file."""
        return sum(p.b.spec.nbytes + (p.a.spec.nbytes if p.a else 0) for p in self.pairs)


def check_base(base: Checkpoint, adapters: Mapping[str, Adapter]) -> None:
    """Raise :class:`AdapterError` if one was opened against another base: it would not fit here.

    Warns where two are one file: their deltas add up.
    """
    for role, adapter in adapters.items():
        for pair in adapter.pairs:
            mine = base.entries.get(pair.weight.name)
            if mine is None or mine.spec != pair.weight:
                raise AdapterError(
                    f"{adapter.file.path}: adapter '{role}' was opened against another base than "
                    f"{base.path}: weight '{pair.weight.name}' is "
                    f"{mine.spec.dtype if mine else 'missing'} "
                    f"{list(mine.spec.shape) if mine else ''} here; open it with "
                    f"Adapter.open(path, base.tensors)"
                )
    roles: dict[str, str] = {}
    for role, adapter in adapters.items():
        file = os.path.realpath(adapter.file.path)
        if (twin := roles.setdefault(file, role)) != role:
            warnings.warn(
                f"{adapter.file.path}: adapters '{twin}' and '{role}' are this one file; in a "
                f"state with both, it is added twice",
                stacklevel=2,
            )


def _place(path: Path, module: Module, places: Places) -> Place | None:
    """Return what of the base a module means, if anything."""
    found = places.find(module.path)
    if len(found) > 1:
        meanings = few((" + ".join(place.modules) for place in found), limit=4)
        raise AdapterError(
            f"{path}: module '{module.path}' may mean {meanings} of the base, and nothing tells "
            f"which; rename it to the base's own name"
        )
    return found[0] if found else None


def _lacking(
    held: AdapterFile,
    matched: int,
    unmatched: list[str],
    text_encoders: list[str],
    places: Places,
) -> str:
    """Say that the base lacks modules."""
    path, count = held.file.path, len(held.modules)
    if not unmatched:
        return (
            f"{path}: all {len(text_encoders)} modules are of text encoders "
            f"({few(text_encoders)}); there is nothing in it for this base"
        )
    many = f"only {matched} of {count}" if matched else "no"
    return (
        f"{path}: {many} modules match the base; it lacks {few(unmatched)}"
        f"{did_you_mean(bare(unmatched[0]), map(bare, places.modules[:_GUESSED]))}; is this "
        f"adapter for another model, or the base cut to fewer blocks?"
        + (" --allow-unmatched applies the rest" if matched else "")
    )


def _pairs(
    path: Path, found: Iterable[tuple[Module, Place]], places: Places
) -> Iterator[PairEntry]:
    """Give what each module adds, and where."""
    found = list(found)
    siblings: defaultdict[str, dict[int, Module]] = defaultdict(dict)
    for module, place in found:
        if place.parts:
            if twin := siblings[place.modules[0]].get(place.part):
                raise AdapterError(
                    f"{path}: modules '{twin.path}' and '{module.path}' are both for part "
                    f"'{place.parts[place.part]}' of '{place.modules[0]}'; keep one of them"
                )
            siblings[place.modules[0]][place.part] = module
    for module, place in found:
        where = f"{path}: module '{module.path}'"
        if place.parts:
            [whole] = place.modules
            top = _tops(where, whole, place.parts, siblings[whole], places)[place.part]
            yield from _entries(where, module, whole, range(module.rows), top, places)
            continue
        outs = [_outs(where, name, places) for name in place.modules]
        if sum(outs) != module.rows:
            held = " + ".join(f"'{n}' {o}" for n, o in zip(place.modules, outs, strict=True))
            raise AdapterError(
                f"{where}: has {module.rows} outputs, but the base's {held}; the adapter was "
                f"trained on another model"
            )
        for name, (begin, end) in zip(place.modules, pairwise([0, *accumulate(outs)]), strict=True):
            yield from _entries(where, module, name, range(begin, end), 0, places)


def _outs(where: str, module: str, places: Places) -> int:
    """Return the outputs of a module of the base."""
    spec = places.weight(module) or places.bias(module)
    if spec is None or not spec.shape:
        raise AdapterError(f"{where}: the base's '{module}' is a single number, and no layer")
    return spec.shape[0]


def _tops(
    where: str, whole: str, parts: tuple[str, ...], mine: Mapping[int, Module], places: Places
) -> dict[int, int]:
    """Return the first row of each part of a fused projection that the adapter has."""
    outs = _outs(where, whole, places)
    rows = {part: module.rows for part, module in mine.items()}
    if len(rows) == len(parts):
        in_order = [rows[part] for part in range(len(parts))]
        if sum(in_order) == outs:
            return dict(enumerate([0, *accumulate(in_order)][:-1]))
    elif all(count * len(parts) == outs for count in rows.values()):
        return {part: part * outs // len(parts) for part in rows}
    has = ", ".join(f"{parts[part]} {count}" for part, count in sorted(rows.items()))
    raise AdapterError(
        f"{where}: the base holds it in '{whole}' of {outs} rows, as {', '.join(parts)}; the "
        f"adapter has {has}, which don't tell the rows of each"
    )


def _entries(
    where: str, module: Module, name: str, rows: range, top: int, places: Places
) -> Iterator[PairEntry]:
    """Give what some rows of a module add to a module of the base, from its row ``top`` on."""
    parts, scale = module.parts, module.scale.value
    label = bare(name)
    if "B" in parts or "diff" in parts:
        a, b = parts.get("A"), parts["B" if "B" in parts else "diff"]
        weight = _fitting(where, places.weight(name), f"{name}.weight", a, b)
        yield PairEntry(label, weight, a, _cut(b, rows), scale if a else 1.0, top)
    for role, factor in (("bias", scale), ("diff_b", 1.0)):
        if delta := parts.get(role):
            bias = _fitting(where, places.bias(name), f"{name}.bias", None, delta)
            if bias.shape[0] != (outs := _outs(where, name, places)):
                raise AdapterError(
                    f"{where}: the base's '{bias.name}' is {list(bias.shape)}, but its weight has "
                    f"{outs} rows; the base is damaged"
                )
            yield PairEntry(f"{label}.bias", bias, None, _cut(delta, rows), factor, top)


def _fitting(
    where: str, spec: TensorSpec | None, name: str, a: Entry | None, b: Entry
) -> TensorSpec:
    """Return a base's tensor, or raise if a delta can't be added to it."""
    if spec is None:
        raise AdapterError(
            f"{where}: has '{b.spec.name}', but the base has no '{name}'; the adapter was trained "
            f"on another model"
        )
    if spec.dtype not in WEIGHT_DTYPES:
        what = _QUANTISED.get(spec.dtype, spec.dtype)
        raise AdapterError(
            f"{where}: the base's '{name}' is {spec.dtype}: {what}; weights of "
            f"{', '.join(WEIGHT_DTYPES)} can be fused, so give the base in one of these"
        )
    delta = (b.spec.shape[0], a.spec.shape[1]) if a else b.spec.shape
    if len(spec.shape) > 2:
        raise AdapterError(
            f"{where}: the base's '{name}' {list(spec.shape)} is a convolution's; only linear "
            f"layers are fused, so save the adapter without it"
        )
    if len(delta) != len(spec.shape) or delta[1:] != spec.shape[1:]:
        raise AdapterError(
            f"{where}: its delta is {list(delta)}, but the base's '{name}' is "
            f"{list(spec.shape)}; the adapter was trained on another model"
        )
    return spec


def _cut(entry: Entry, rows: range) -> Entry:
    """Return some rows of a tensor in a file."""
    spec = entry.spec
    begin = rows.start * prod(spec.shape[1:]) * DTYPE_BYTES[spec.dtype]
    shape = (len(rows), *spec.shape[1:])
    return Entry(TensorSpec(spec.name, shape, spec.dtype), entry.file, entry.offset + begin)


def _check_apart(path: Path, pairs: Iterable[PairEntry]) -> None:
    """Raise :class:`AdapterError` if two of a file's modules are for the same rows."""
    by_weight: defaultdict[str, list[PairEntry]] = defaultdict(list)
    for pair in pairs:
        by_weight[pair.weight.name].append(pair)
    for name, mine in by_weight.items():
        for one, other in pairwise(sorted(mine, key=lambda pair: pair.top)):
            if one.rows.stop > other.rows.start:
                raise AdapterError(
                    f"{path}: '{one.b.spec.name}' and '{other.b.spec.name}' are both for the "
                    f"base's '{name}'; keep one of them"
                )
