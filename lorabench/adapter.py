"""LoRA files: from names in a header to pairs of factors for the weights of a base.

Understood is the shipped form: ``<module>.lora_A.weight [rank, in]`` and
``<module>.lora_B.weight [out, rank]``, with or without a ``diffusion_model.`` prefix, and one
``lora_alpha`` / ``lora_rank`` in the metadata for all modules. Whatever else a file holds is
refused by name: a key that is skipped in silence is a wrong picture later.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING

from lorabench.checkpoint import Checkpoint
from lorabench.errors import AdapterError
from lorabench.geometry import Target, TensorSpec
from lorabench.header import Entry

if TYPE_CHECKING:
    import torch

    from lorabench.fuse import Pair

FACTOR_DTYPES = ("BF16", "F16", "F32")
WEIGHT_DTYPES = ("BF16", "F32")

_PREFIX = re.compile(r"^(?:model\.)?diffusion_model\.")
_FACTOR = re.compile(r"(?P<module>.+)\.lora_(?P<half>[AB])\.weight")


def _ignore(name: str) -> None:
    """Do nothing after a pair."""


@dataclass(frozen=True, slots=True)
class PairEntry:
    """Where the two factors of one module lie, and which weight they belong to."""

    module: str
    weight: TensorSpec  # in the base
    a: Entry
    b: Entry

    @property
    def rank(self) -> int:
        """Rows of A, columns of B."""
        return self.a.spec.shape[0]


@dataclass(frozen=True)
class Adapter:
    """An adapter held against a base, by headers alone.

    Attributes
    ----------
    pairs
        The pairs whose weight the base has.
    unmatched
        Modules that the adapter names and the base lacks.
    scale
        alpha / rank, the same for every module.
    scale_source
        Where the scale comes from, for people.
    """

    file: Checkpoint
    pairs: tuple[PairEntry, ...] = field(repr=False)
    unmatched: tuple[str, ...] = field(repr=False)
    scale: float
    scale_source: str

    @classmethod
    def open(
        cls, path: str | Path, base: Iterable[TensorSpec], *, allow_unmatched: bool = False
    ) -> "Adapter":
        """Open an adapter file and find its weights among a base's tensors.

        Parameters
        ----------
        allow_unmatched
            Accept modules that the base lacks, as when a base is cut to a few blocks; they are
            listed in ``unmatched``.

        Raises
        ------
        FileError
            The file can't be read as safetensors.
        AdapterError
            A key is not understood, half of a pair is missing, a shape or dtype doesn't fit, or
            a module (without ``allow_unmatched``), or every module, is not in the base.
        """
        file = Checkpoint.open(path)
        scale, scale_source = _scale(file)
        halves = _halves(file)
        weights = _weights_by_module(base)
        unmatched = tuple(module for module in halves if module not in weights)
        pairs = tuple(
            _pair(file.path, module, halves[module], weights[module])
            for module in halves
            if module in weights
        )
        if not pairs or (unmatched and not allow_unmatched):
            many = f"only {len(pairs)} of {len(halves)}" if pairs else "no"
            raise AdapterError(
                f"{file.path}: {many} modules match the base; it lacks {_few(unmatched)}; "
                f"names are expected with the prefix 'diffusion_model.' or none; is this adapter "
                f"for another model, or the base cut to fewer blocks?"
            )
        return cls(file, pairs, unmatched, scale, scale_source)

    @property
    def ranks(self) -> dict[int, int]:
        """How many pairs have which rank, highest first."""
        return dict(sorted(Counter(p.rank for p in self.pairs).items(), reverse=True))

    @property
    def targets(self) -> tuple[Target, ...]:
        """The weights that the adapter touches, with its rank there."""
        return tuple(Target(p.module, p.weight, p.rank) for p in self.pairs)

    @property
    def factor_bytes(self) -> int:
        """Bytes of the matched pairs' factors in the file."""
        return sum(p.a.spec.nbytes + p.b.spec.nbytes for p in self.pairs)

    def load(
        self, device: "torch.device | str" = "cpu", after_pair: Callable[[str], None] = _ignore
    ) -> "dict[str, Pair]":
        """Read the factors onto a device; give a pair for each touched weight's name.

        ``after_pair`` is called with that name when both factors are there.

        Raises
        ------
        AdapterError
            A factor holds NaN or infinity.
        """
        from lorabench.fuse import Pair

        pairs = {}
        for pair in self.pairs:
            a, b = (self._factor(factor.spec.name, device) for factor in (pair.a, pair.b))
            pairs[pair.weight.name] = Pair(a, b, self.scale)
            after_pair(pair.weight.name)
        return pairs

    def _factor(self, name: str, device: "torch.device | str") -> "torch.Tensor":
        factor = self.file.read(name)
        if bad := int((~factor.isfinite()).sum()):
            raise AdapterError(
                f"{self.file.path}: tensor '{name}': {bad:,} of {factor.numel():,} values are not "
                f"finite; the adapter is damaged or its training diverged"
            )
        return factor.to(device)


def check_base(base: Checkpoint, adapters: Mapping[str, Adapter]) -> None:
    """Raise :class:`AdapterError` if one was opened against another base: it would not fit here."""
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


def implied_weights(file: Checkpoint) -> tuple[TensorSpec, ...]:
    """Return the weights ``[out, in]`` that an adapter's pairs fit, for want of a base.

    Raises
    ------
    AdapterError
        A key is not understood, or half of a pair is missing.
    """
    return tuple(
        TensorSpec(f"{module}.weight", (half["B"].spec.shape[0], half["A"].spec.shape[1]), "BF16")
        for module, half in _halves(file).items()
    )


def _scale(file: Checkpoint) -> tuple[float, str]:
    """Return alpha / rank from the metadata; both are one ratio, capped ranks included."""
    found = {key: file.metadata[key] for key in ("lora_alpha", "lora_rank") if key in file.metadata}
    strange = [key for key in file.metadata if "alpha" in key.lower() and key != "lora_alpha"]
    if strange:
        raise AdapterError(
            f"{file.path}: metadata '{strange[0]}' speaks of an alpha in a form that is not "
            f"understood; expected lora_alpha and lora_rank, one ratio for all modules"
        )
    if not found:
        return 1.0, "assumed: no alpha in the metadata, so alpha = rank"
    try:
        alpha, rank = (float(file.metadata[key]) for key in ("lora_alpha", "lora_rank"))
        if not (isfinite(alpha) and isfinite(rank) and rank > 0 and isfinite(alpha / rank)):
            raise ValueError
    except (KeyError, ValueError):
        raise AdapterError(
            f"{file.path}: metadata must hold lora_alpha and lora_rank as two finite numbers, "
            f"rank above 0; found {found}"
        ) from None
    return alpha / rank, f"metadata lora_alpha {alpha:g} / lora_rank {rank:g}"


def _halves(file: Checkpoint) -> dict[str, dict[str, Entry]]:
    """Group a file's tensors by module; refuse what is no factor."""
    halves: dict[str, dict[str, Entry]] = defaultdict(dict)
    strange = []
    for name, entry in file.entries.items():
        if factor := _FACTOR.fullmatch(_PREFIX.sub("", name)):
            if factor["half"] in halves[factor["module"]]:
                raise AdapterError(
                    f"{file.path}: module '{factor['module']}' has two lora_{factor['half']}, "
                    f"under two prefixes; keep one of them"
                )
            halves[factor["module"]][factor["half"]] = entry
        else:
            strange.append(name)
    if strange:
        raise AdapterError(
            f"{file.path}: {len(strange)} keys are not understood: {_few(strange)}; expected "
            f"'<module>.lora_A.weight' and '<module>.lora_B.weight' only"
        )
    if not halves:
        raise AdapterError(f"{file.path}: holds no lora_A / lora_B tensors")
    for module, half in halves.items():
        _check_pair(file.path, module, half)
    return halves


def _weights_by_module(base: Iterable[TensorSpec]) -> dict[str, TensorSpec]:
    weights: dict[str, TensorSpec] = {}
    for spec in base:
        if spec.name.endswith(".weight"):
            module = _PREFIX.sub("", spec.name).removesuffix(".weight")
            if module in weights:
                raise AdapterError(
                    f"the base names module '{module}' twice: '{weights[module].name}' and "
                    f"'{spec.name}'; an adapter for it would be ambiguous"
                )
            weights[module] = spec
    return weights


def _check_pair(path: Path, module: str, half: Mapping[str, Entry]) -> None:
    if len(half) != 2:
        has, lacks = ("A", "B") if "A" in half else ("B", "A")
        raise AdapterError(
            f"{path}: module '{module}' has lora_{has} but no lora_{lacks}; the file is incomplete"
        )
    a, b = half["A"].spec, half["B"].spec
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != b.shape[1] or not a.shape[0]:
        raise AdapterError(
            f"{path}: module '{module}': expected A [rank, in] and B [out, rank] of one rank, "
            f"found A {list(a.shape)} and B {list(b.shape)}"
        )
    for factor in (a, b):
        if factor.dtype not in FACTOR_DTYPES:
            raise AdapterError(
                f"{path}: tensor '{factor.name}': dtype {factor.dtype} is not supported for a "
                f"factor; convert it to one of {', '.join(FACTOR_DTYPES)}"
            )


def _pair(path: Path, module: str, half: Mapping[str, Entry], weight: TensorSpec) -> PairEntry:
    a, b = half["A"], half["B"]
    delta = (b.spec.shape[0], a.spec.shape[1])
    if weight.shape != delta:
        raise AdapterError(
            f"{path}: module '{module}': B @ A is {list(delta)}, but the base's '{weight.name}' is "
            f"{list(weight.shape)}; the adapter was trained on another model"
        )
    if weight.dtype not in WEIGHT_DTYPES:
        raise AdapterError(
            f"{path}: module '{module}': the base's '{weight.name}' is {weight.dtype}; weights of "
            f"{' and '.join(WEIGHT_DTYPES)} can be fused, so give a base of one of these"
        )
    return PairEntry(module, weight, a, b)


def _few(names: Iterable[str], limit: int = 3) -> str:
    names = list(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(f"'{n}'" for n in names[:limit]) + more
