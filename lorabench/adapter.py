"""An adapter held against a base.

An adapter is applied exactly as its file says, or refused with the reason: a module that is skipped
in silence is a wrong picture later.
"""

import os
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lorabench.adapter_file import AdapterFile, Module, few, ranks_of, refuse, scales_of
from lorabench.checkpoint import Checkpoint
from lorabench.errors import AdapterError, did_you_mean
from lorabench.geometry import Target, TensorSpec
from lorabench.keys import Refused
from lorabench.pairing import PairEntry, pairs_of
from lorabench.places import Place, Places, bare, is_text_encoders
from lorabench.scales import Scale

_GUESSED = 5000  # modules that a name may have been meant for; guessing takes long


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
        pairs = pairs_of(held.file.path, found, places)
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
