"""Which rows of which of a base's weights a module's factors and deltas belong to."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod
from pathlib import Path

from lorabench.adapter_file import Module, few
from lorabench.errors import AdapterError
from lorabench.geometry import DTYPE_BYTES, TensorSpec
from lorabench.header import Entry
from lorabench.places import Place, Places, bare

WEIGHT_DTYPES = ("BF16", "F16", "F32")

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


def pairs_of(
    path: Path, found: Sequence[tuple[Module, Place]], places: Places
) -> tuple[PairEntry, ...]:
    """Return what a file's modules add, and where.

    Raises
    ------
    AdapterError
        A shape or dtype doesn't fit, the rows of a part of a fused projection can't be told, or two
        modules are for the same rows.
    """
    pairs = tuple(_pairs(path, found, _apart(path, found), places))
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
    return pairs


def _apart(
    path: Path, found: Sequence[tuple[Module, Place]]
) -> dict[tuple[str, ...], dict[int, Module]]:
    """Group the parts of fused projections; raise if two modules are for one place."""
    places: dict[tuple[tuple[str, ...], int, bool], Module] = {}
    siblings: defaultdict[tuple[str, ...], dict[int, Module]] = defaultdict(dict)
    for module, place in found:
        key = place.modules, place.part, bool(place.parts)
        if (twin := places.setdefault(key, module)) is not module:
            part = f"part '{place.parts[place.part]}' of " if place.parts else "the base's "
            raise AdapterError(
                f"{path}: modules '{twin.path}' and '{module.path}' are both for {part}"
                f"{few(place.modules)}; keep one of them"
            )
        if place.parts:
            siblings[place.modules][place.part] = module
    return siblings


def _pairs(
    path: Path,
    found: Sequence[tuple[Module, Place]],
    siblings: Mapping[tuple[str, ...], Mapping[int, Module]],
    places: Places,
) -> Iterator[PairEntry]:
    """Give what each module adds, and where."""
    for module, place in found:
        where = f"{path}: module '{module.path}'"
        if place.parts:
            [whole] = place.modules
            top = _tops(where, whole, place.parts, siblings[place.modules], places)[place.part]
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
