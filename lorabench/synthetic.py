"""Seeded base and adapter files with the real names, shapes, dtypes and metadata.

A tensor's values depend on the seed, the tensor's name and its shape alone, so that a cut to two
blocks holds the same weights as the first two blocks of the whole.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lorabench.checkpoint import Checkpoint, check_room, torch_dtype, write_checkpoint
from lorabench.errors import ConfigError, FileError, UnavailableError, did_you_mean
from lorabench.geometry import Geometry, TensorSpec, load_geometry
from lorabench.machine import available_bytes
from lorabench.progress import progress

if TYPE_CHECKING:
    import torch

WEIGHT_STD = 0.02
"""Standard deviation of every base tensor."""

SEED, RATIO = 0, 0.05
"""What weights are written with, unless it is told otherwise."""


@dataclass(frozen=True)
class Files:
    """A base and its adapters by name, as :func:`synthesize` lays them in a folder."""

    base: Path
    adapters: dict[str, Path]

    @classmethod
    def inside(cls, folder: str | Path, adapters: Sequence[str]) -> "Files":
        """Name the files without looking for them."""
        folder = Path(folder)
        return cls(
            folder / "base.safetensors",
            {name: folder / f"{name}.safetensors" for name in adapters},
        )


def synthesize(
    folder: str | Path,
    geometry: Geometry,
    adapters: Sequence[str] = ("distilled",),
    *,
    seed: int = SEED,
    ratio: float = RATIO,
    overwrite: bool = False,
) -> Files:
    """Write ``base.safetensors`` and an adapter file for each name, holding one tensor at a time.

    Parameters
    ----------
    adapters
        Names; each adapter touches every target at the geometry's rank.
    ratio
        Standard deviation of the delta at strength 1 over that of the weight.

    Raises
    ------
    ConfigError
        A name that can't be a file's, twice the same, or a ratio that isn't positive.
    FileError
        A file exists already or the disk has no room for all (nothing is written then), or a file
        can't be written.
    """
    if not 0 < ratio <= 100:
        raise ConfigError(f"ratio must be a positive number, 100 at most, found {ratio}")
    for name in adapters:
        if not name.isidentifier() or name == "base" or list(adapters).count(name) > 1:
            raise ConfigError(
                f"adapter name '{name}' must be an identifier other than 'base', and given once"
            )
    files = Files.inside(folder, adapters)
    paths = [files.base, *files.adapters.values()]
    if not overwrite and (existing := [path for path in paths if path.exists()]):
        raise FileError(f"{existing[0]}: exists already; choose another folder or --overwrite")
    check_room(files.base, _tensor_bytes(geometry, adapters))
    _write(files, paths, geometry, seed, ratio, overwrite=overwrite)
    return files


def _write(
    files: Files,
    paths: Sequence[Path],
    geometry: Geometry,
    seed: int,
    ratio: float,
    *,
    overwrite: bool,
) -> None:
    """Write those of the files that are among ``paths``."""
    wanted = [path for path in paths if path != files.base]
    pairs = list(geometry.adapter_tensors()) if wanted else []  # raises before anything is written

    def write(path: Path, specs: Sequence[TensorSpec], std: float | None, **metadata: str) -> None:
        def make(spec: TensorSpec) -> "torch.Tensor":
            return _normal(spec, f"{seed}/{path.stem}", std or _factor_std(spec, ratio))

        write_checkpoint(
            path,
            specs,
            make,
            metadata=metadata,
            overwrite=overwrite,
            each=lambda specs: progress(
                specs,
                label=f"write {path.name}",
                total=sum(s.nbytes for s in specs),
                unit="B",
                size=lambda s: s.nbytes,
            ),
        )

    if files.base in paths:
        write(files.base, geometry.tensors, WEIGHT_STD, geometry=geometry.name, seed=str(seed))
    rank = str(geometry.rank)
    for path in wanted:
        write(path, pairs, None, lora_rank=rank, lora_alpha=rank, seed=str(seed))


@dataclass(frozen=True)
class Size:
    """How much of LTX-2.5 to work on."""

    blocks: int
    shrink: int
    note: str


SIZES = {
    "tiny": Size(2, 16, "two blocks at a 16th of the width: seconds, for tests"),
    "small": Size(2, 4, "two blocks at a quarter of the width: a scalar pass of half a minute"),
    "laptop": Size(2, 1, "two blocks at the real width: minutes, 8 GB of memory"),
    "full": Size(48, 1, "all 48 blocks, without the connectors: 47 GB on disk and in memory"),
}


def sample_weights(
    folder: str | Path, size: str, adapters: Sequence[str] = ("distilled",), *, held: bool = True
) -> Files:
    """Give LTX-2.5 weights of a size in a folder of their own, written on the first call.

    Parameters
    ----------
    held
        Whether they are to be held in memory, and so have to fit.

    Raises
    ------
    ConfigError
        No such size.
    FileError
        The disk has no room, or the folder holds other weights under these names.
    UnavailableError
        The machine's free memory can't hold them; nothing is written.
    """
    if size not in SIZES:
        raise ConfigError(
            f"size '{size}'{did_you_mean(size, SIZES)}: choose from {', '.join(SIZES)}"
        )
    geometry = load_geometry("ltx-2.5-22b", shrink=SIZES[size].shrink).cut(SIZES[size].blocks)
    folder = Path(folder) / f"{geometry.name}-{size}"
    files = Files.inside(folder, adapters)
    if files.base.exists() and Checkpoint.open(files.base).tensors != geometry.tensors:
        raise FileError(f"{files.base}: holds other weights than size '{size}'; remove {folder}")
    need, have = _tensor_bytes(geometry, adapters), available_bytes()
    if held and have is not None and need > have:
        raise UnavailableError(
            f"size '{size}' needs {need:,} bytes of memory, {have:,} are free; choose a smaller "
            f"size"
        )
    # What is there stays: a base that is written again is another file to records and resumes.
    missing = [path for path in (files.base, *files.adapters.values()) if not path.exists()]
    if files.base in missing:
        check_room(files.base, _tensor_bytes(geometry, adapters))
    _write(files, missing, geometry, SEED, RATIO, overwrite=False)
    return files


def _tensor_bytes(geometry: Geometry, adapters: Sequence[str]) -> int:
    counts = geometry.counts()
    return counts.tensor_bytes + len(adapters) * (counts.adapter_tensor_bytes or 0)


def _factor_std(spec: TensorSpec, ratio: float) -> float:
    """Return the std of both factors for which std(B @ A) = sqrt(rank)·std² is as asked."""
    rank = spec.shape[0 if spec.name.endswith("lora_A.weight") else 1]
    return (ratio * WEIGHT_STD / rank**0.5) ** 0.5


def _normal(spec: TensorSpec, seed: str, std: float) -> "torch.Tensor":
    import numpy as np
    import torch

    key = hashlib.blake2b(f"{seed}/{spec.name}".encode(), digest_size=8).digest()
    generator = np.random.Generator(np.random.SFC64(int.from_bytes(key, "little")))
    values = generator.standard_normal(spec.shape, dtype=np.float32)
    values *= np.float32(std)
    return torch.from_numpy(values).to(torch_dtype(spec.dtype))
