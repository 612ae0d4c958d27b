"""The scale of an adapter's pairs: alpha / rank, or what the file says instead.

A module's own alpha goes with its own rank, and stands above all else. Without one, a module's
scale is told by PEFT's ``adapter_config.json``, by the same as diffusers keeps it in the metadata,
or by one pair ``lora_alpha`` / ``lora_rank`` in the metadata, which is one ratio for all modules;
where several tell it they must agree. Where nothing does, alpha is assumed to be the rank.
"""

import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import isfinite, sqrt
from pathlib import Path
from typing import NamedTuple

from lorabench.checkpoint import Checkpoint
from lorabench.errors import AdapterError, FileError
from lorabench.header import Entry
from lorabench.peft_config import DIFFUSERS_KEY, Config, read_configs
from lorabench.places import is_text_encoders

_PAIR = ("lora_alpha", "lora_rank")
"""What the shipped adapters say of all modules in the metadata."""

_KOHYA_PAIR = ("ss_network_alpha", "ss_network_dim")
"""What kohya's scripts asked for; they write each module's alpha besides."""

_KNOWN = frozenset((*_PAIR, *_KOHYA_PAIR, DIFFUSERS_KEY))

_LARGEST_F32 = 3.4028235e38

_NUMPY = {
    **{"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"},
    **{"I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U8": "u1"},
    **{"U64": "<u8", "U32": "<u4", "U16": "<u2"},
}


_ASSUMED = "assumed: nothing tells an alpha, so alpha = rank"


class Scale(NamedTuple):
    """A factor on B @ A, and where it comes from."""

    value: float
    source: str

    @property
    def is_assumed(self) -> bool:
        """Whether nothing tells it."""
        return self.source == _ASSUMED


@dataclass(frozen=True)
class Scales:
    """An adapter file's scales.

    Attributes
    ----------
    alphas
        The alpha of each module that has its own, by the module's path.
    ratio
        What the metadata says of all modules.
    doubt
        Why nothing may be assumed of modules of which nothing is said.
    assumed
        The alpha of modules of which nothing is said; None is their rank.
    """

    path: Path
    alphas: Mapping[str, float] = field(repr=False)
    configs: tuple[Config, ...]
    ratio: Scale | None
    doubt: str | None
    assumed: float | None

    @classmethod
    def read(
        cls,
        file: Checkpoint,
        alphas: Mapping[str, Entry],
        assumed: float | None = None,
        *,
        allow_skip: bool = False,
    ) -> "Scales":
        """Read what a file, its metadata and the configuration beside it say.

        Parameters
        ----------
        alphas
            The tensors that hold a module's alpha, by the module's path.
        assumed
            The alpha of modules of which nothing is said, instead of their rank.
        allow_skip
            Whole weights, which PEFT saves beside its factors, are left out.

        Raises
        ------
        FileError
            A file can't be read.
        AdapterError
            An alpha isn't one finite number, or the configuration says what can't be applied.
        """
        if assumed is not None and not isfinite(assumed):
            raise AdapterError(f"{file.path}: --alpha {assumed}: expected a finite number")
        configs = read_configs(file, allow_skip=allow_skip)
        ratio = _ratio(file)
        for key in file.metadata:
            if "alpha" in key.lower() and key not in _KNOWN:
                raise AdapterError(
                    f"{file.path}: metadata '{key}' speaks of an alpha in a form that is not "
                    f"understood; expected {' and '.join(_PAIR)}, one ratio for all modules"
                )
        own = _read_alphas(file, alphas)
        return cls(file.path, own, configs, ratio, _doubt(file), assumed)

    def of(self, path: str, rank: int) -> Scale:
        """Return the scale of a module's pair, by its path in the file and its rank.

        Raises
        ------
        AdapterError
            Two sources contradict each other, the configuration knows another rank, or nothing
            may be assumed.
        """
        scale = self._of(path, rank)
        if abs(scale.value) > _LARGEST_F32:
            raise AdapterError(
                f"{self.path}: module '{path}': its scale is {scale.value:g}, by {scale.source}; "
                f"that is no f32; the file is damaged"
            )
        return scale

    def _of(self, path: str, rank: int) -> Scale:
        told = [*self._told(path, rank)]
        if not told:
            if self.assumed is not None:
                return Scale(self.assumed / rank, f"given: alpha {self.assumed:g}")
            if self.doubt is not None:
                raise AdapterError(f"{self.path}: module '{path}': {self.doubt}")
            if self.configs and not is_text_encoders(path):
                config = self.configs[0]
                raise AdapterError(
                    f"{self.path}: module '{path}': {config.where} tells the scale of modules of "
                    f"'{config.prefix}', and nothing of this one; were they renamed? give their "
                    f"names that prefix, or --alpha"
                )
            return Scale(1.0, _ASSUMED)
        if self.assumed is not None:
            raise AdapterError(
                f"{self.path}: module '{path}': alpha {self.assumed:g} was given, but the file "
                f"tells its scale, {told[0].value:g} ({told[0].source}); leave the given one away"
            )
        if other := [scale for scale in told[1:] if scale.value != told[0].value]:
            raise AdapterError(
                f"{self.path}: module '{path}': its scale is {told[0].value:g} by "
                f"{told[0].source}, but {other[0].value:g} by {other[0].source}; save the adapter "
                f"with one of them"
            )
        return told[0]

    def _told(self, path: str, rank: int) -> Iterable[Scale]:
        """Give what speaks of a module, the nearest first."""
        if path in self.alphas:
            yield Scale(self.alphas[path] / rank, "each module's own alpha / its rank")
            return  # the others tell what the trainer was asked for, of modules without their own
        for config in self.configs:
            if (found := config.of(path)) is None:
                continue
            alpha, said = found
            if said != rank:
                raise AdapterError(
                    f"{self.path}: module '{path}': its factors are of rank {rank}, but "
                    f"{config.where} says {said:g}; file and configuration aren't of one adapter"
                )
            if config.rslora:
                yield Scale(alpha / sqrt(rank), f"{config.where}: lora_alpha / sqrt(r), rsLoRA")
            else:
                yield Scale(alpha / rank, f"{config.where}: lora_alpha / r")
        if self.ratio is not None:
            yield self.ratio


def _ratio(file: Checkpoint) -> Scale | None:
    """Return alpha / rank of all modules from the metadata, capped ranks included."""
    found = {key: file.metadata[key] for key in _PAIR if key in file.metadata}
    if not found:
        return None
    try:
        alpha, rank = (float(file.metadata[key]) for key in _PAIR)
        if not (isfinite(alpha) and isfinite(rank) and rank > 0 and isfinite(alpha / rank)):
            raise ValueError
    except (KeyError, ValueError):
        raise AdapterError(
            f"{file.path}: metadata must hold {' and '.join(_PAIR)} as two finite numbers, "
            f"rank above 0; found {reprlib.repr(found)}"
        ) from None
    return Scale(alpha / rank, f"metadata {_PAIR[0]} {alpha:g} / {_PAIR[1]} {rank:g}")


def _doubt(file: Checkpoint) -> str | None:
    """Return why a module of kohya's without an alpha isn't one with alpha = rank."""
    asked = [file.metadata.get(key) for key in _KOHYA_PAIR]
    try:
        if asked[0] is None or float(asked[0]) == float(asked[1] or "nan"):
            return None
    except ValueError:
        return None  # 'Dynamic' and the like
    return (
        f"metadata {_KOHYA_PAIR[0]} {asked[0]} / {_KOHYA_PAIR[1]} {asked[1]} says that it was "
        f"trained with another scale than 1, but it has no alpha; some converters drop it once the "
        f"factors are scaled; give --alpha"
    )


def _read_alphas(file: Checkpoint, alphas: Mapping[str, Entry]) -> dict[str, float]:
    """Read numbers straight from the file: thousands of them, and none worth torch's import."""
    import numpy as np

    found = {}
    file.check_unchanged()
    streams = {}
    try:
        for path, entry in alphas.items():
            spec = entry.spec
            if spec.params != 1 or len(spec.shape) > 1 or spec.dtype not in _NUMPY:
                raise AdapterError(
                    f"{file.path}: tensor '{spec.name}': expected an alpha, one number; found "
                    f"{spec.dtype} {list(spec.shape)}"
                )
            if entry.file not in streams:
                streams[entry.file] = entry.file.open("rb")
            streams[entry.file].seek(entry.offset)
            raw = np.frombuffer(streams[entry.file].read(spec.nbytes), _NUMPY[spec.dtype])
            if spec.dtype == "BF16":
                raw = (raw.astype(np.uint32) << 16).view(np.float32)
            value = float(raw[0])
            if not isfinite(value):
                raise AdapterError(
                    f"{file.path}: tensor '{spec.name}': the alpha is {value}; the file is damaged"
                )
            found[path] = value
    except (OSError, ValueError, IndexError) as error:
        raise FileError(f"{file.path}: an alpha can't be read: {error}") from error
    finally:
        for stream in streams.values():
            stream.close()
    return found
