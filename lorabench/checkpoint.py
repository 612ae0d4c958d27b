"""Safetensors checkpoints, in one file or in shards: tensors read and written.

Opening one reads its headers and nothing else; torch is imported only when a tensor is.
"""

import hashlib
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from lorabench.errors import FileError
from lorabench.foreign import other_format
from lorabench.geometry import TensorSpec
from lorabench.header import Entry, encode_header, read_header, read_json

if TYPE_CHECKING:
    import torch

Stamp = tuple[int, int, int]


@dataclass(frozen=True)
class Checkpoint:
    """A model or adapter on disk, in one file or in shards, known by its headers.

    Attributes
    ----------
    path
        What was opened.
    entries
        Every tensor by name, in the file's order.
    metadata
        The first file's ``__metadata__``.
    stamps
        Size, change time and inode of each file when it was opened; reading checks them.
    """

    path: Path
    entries: Mapping[str, Entry] = field(repr=False)
    metadata: Mapping[str, str] = field(repr=False)
    stamps: Mapping[Path, Stamp] = field(repr=False)

    @classmethod
    def open(cls, path: str | Path) -> "Checkpoint":
        """Open a ``.safetensors`` file, an ``.index.json`` of shards, or a folder with either.

        Raises
        ------
        FileError
            A file is missing, damaged or no safetensors file, or index and shards disagree.
        """
        path = Path(path)
        if _stat(path, folder=True) is None:
            path = _only_checkpoint_in(path)
        _stat(path)
        if path.suffix == ".json":
            return cls._open_shards(path)
        stamp = _stamp(path)  # before the header is read, so that a later change shows
        entries, metadata = read_header(path, stamp[0])
        return cls(path, entries, metadata, {path: stamp})

    @classmethod
    def _open_shards(cls, index: Path) -> "Checkpoint":
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(
            isinstance(shard, str) for shard in weight_map.values()
        ):
            raise FileError(
                f"{index}: expected an object 'weight_map' of tensor names to shard files, "
                f"as 'save_pretrained' writes it"
            )
        for name, shard in weight_map.items():
            if PurePath(shard).is_absolute() or ".." in PurePath(shard).parts:
                raise FileError(
                    f"{index}: places tensor '{name}' in '{shard}', outside the index's folder; "
                    f"put the shards beside the index"
                )
        shards = {name: index.parent / shard for name, shard in weight_map.items()}
        headers, stamps = {}, {}
        for shard in dict.fromkeys(shards.values()):
            try:
                stamps[shard] = _stamp(shard)
                headers[shard] = read_header(shard, stamps[shard][0])
            except FileError as error:
                raise FileError(f"{error}; {index.name} names it as a shard") from error
        entries = {}
        for name, shard in shards.items():
            if name not in headers[shard][0]:
                raise FileError(
                    f"{shard}: {index.name} places tensor '{name}' here, but the shard lacks it; "
                    f"index and shards are not of one model"
                )
            entries[name] = headers[shard][0][name]
        for shard, (held, _) in headers.items():
            if strays := [name for name in held if shards.get(name) != shard]:
                raise FileError(
                    f"{shard}: holds tensor '{strays[0]}', which {index.name} doesn't place here; "
                    f"index and shards are not of one model"
                )
        metadata = next(iter(headers.values()))[1] if headers else {}
        return cls(index, entries, metadata, stamps)

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """Every tensor's name, shape and dtype."""
        return tuple(entry.spec for entry in self.entries.values())

    @property
    def identity(self) -> str:
        """A short text that differs for other headers, and for files of another size or time."""
        told = (list(self.stamps.values()), list(self.tensors), sorted(self.metadata.items()))
        return hashlib.blake2b(repr(told).encode(), digest_size=6).hexdigest()

    def check_unchanged(self) -> None:
        """Raise :class:`FileError` if a file was changed or removed since it was opened."""
        for file, stamp in self.stamps.items():
            if _stamp(file) != stamp:
                raise FileError(f"{file}: changed since it was opened; open it again")

    def read(self, name: str) -> "torch.Tensor":
        """Read a tensor into fresh memory."""
        import torch

        spec = self.entries[name].spec
        tensor = torch.empty(spec.shape, dtype=torch_dtype(spec.dtype), device="cpu")
        self.read_into(name, tensor)
        return tensor

    def read_into(self, name: str, tensor: "torch.Tensor") -> None:
        """Read a tensor's bytes into a contiguous tensor of its shape and dtype, on any device.

        Raises
        ------
        FileError
            The file changed since it was opened, ended early, or can't be read.
        """
        import torch

        spec, file, offset = (entry := self.entries[name]).spec, entry.file, entry.offset
        assert tensor.shape == spec.shape
        assert tensor.dtype == torch_dtype(spec.dtype)
        assert tensor.is_contiguous()
        if tensor.device.type != "cpu":
            tensor.copy_(self.read(name))
            return
        view = tensor.detach().reshape(-1).view(torch.uint8).numpy().data
        if _stamp(file) != self.stamps[file]:
            raise FileError(f"{file}: changed since it was opened; open it again")
        try:
            with file.open("rb", buffering=0) as stream:
                stream.seek(offset)
                while view:
                    if not (count := stream.readinto(view)):
                        raise FileError(
                            f"{file}: ended inside tensor '{name}'; the file is truncated"
                        )
                    view = view[count:]
        except OSError as error:
            raise FileError(f"{file}: tensor '{name}' can't be read: {error.strerror}") from error


def write_checkpoint(
    path: str | Path,
    specs: Sequence[TensorSpec],
    make: Callable[[TensorSpec], "torch.Tensor"],
    *,
    metadata: Mapping[str, str] | None = None,
    overwrite: bool = False,
    each: Callable[[Iterable[TensorSpec]], Iterable[TensorSpec]] = iter,
) -> int:
    """Write a safetensors file tensor by tensor, so that memory is bounded by one tensor.

    The file appears under its own name only when it is complete.

    Parameters
    ----------
    make
        Gives the tensor of a spec, on the CPU; called once for each, in order.
    each
        Wraps the walk over the specs (a progress bar).

    Returns
    -------
    int
        Bytes of the file.

    Raises
    ------
    FileError
        The file exists and ``overwrite`` is False, two tensors have one name, the disk has too
        little room, or can't be written.
    """
    path = Path(path)
    if os.path.exists(path) and not overwrite:  # noqa: PTH110 - Path.exists may raise
        raise FileError(f"{path}: exists already; choose another name or ask to overwrite it")
    begins = [0, *accumulate(spec.nbytes for spec in specs)]
    header = encode_header(path, zip(specs, begins, strict=False), metadata)
    total = len(header) + begins[-1]
    with replacing(path, total) as partial, partial.open("wb") as stream:
        stream.write(header)
        for spec in each(specs):
            tensor = make(spec)
            assert tensor.shape == spec.shape
            assert tensor.dtype == torch_dtype(spec.dtype)
            stream.write(_bytes_of(tensor))
            del tensor  # before the next is made
        stream.flush()
        os.fsync(stream.fileno())
    return total


def check_room(path: Path, nbytes: int) -> None:
    """Raise :class:`FileError` if the disk that ``path`` is to be on has no room for ``nbytes``."""
    folder = next(parent for parent in path.absolute().parents if os.path.isdir(parent))  # noqa: PTH112 - Path.is_dir may raise
    free = shutil.disk_usage(folder).free
    if nbytes > free:
        raise FileError(
            f"{path}: needs {nbytes:,} bytes, but the disk has {free:,} free; "
            f"make room or write elsewhere"
        )


@contextmanager
def replacing(path: Path, nbytes: int) -> Iterator[Path]:
    """Give a temporary name beside ``path``; rename it to ``path`` on success, else remove it.

    Raises
    ------
    FileError
        The folder can't be written, or has less than ``nbytes`` of room.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with told_of(path):
            check_room(path, nbytes)
            path.parent.mkdir(parents=True, exist_ok=True)
            yield partial
            partial.replace(path)
    finally:
        with suppress(OSError):  # what can't be removed now was never made, or has been renamed
            partial.unlink()


@contextmanager
def told_of(out: Path) -> Iterator[None]:
    """Tell what the system refuses as a :class:`FileError` about the file to be written."""
    try:
        yield
    except OSError as error:
        raise FileError(f"{out}: can't be written: {error.strerror or error}") from error


def torch_dtype(dtype: str) -> "torch.dtype":
    """Return the torch dtype of a safetensors dtype name."""
    import torch

    return {
        "F64": torch.float64,
        "F32": torch.float32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "I64": torch.int64,
        "I32": torch.int32,
        "I16": torch.int16,
        "I8": torch.int8,
        "U8": torch.uint8,
        "BOOL": torch.bool,
        "U64": torch.uint64,
        "U32": torch.uint32,
        "U16": torch.uint16,
        "C64": torch.complex64,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E5M2": torch.float8_e5m2,
        "F8_E8M0": torch.float8_e8m0fnu,
    }[dtype]


def _bytes_of(tensor: "torch.Tensor") -> memoryview:
    import torch

    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


def _stat(path: Path, *, folder: bool = False) -> os.stat_result | None:
    """Stat a regular file; give None for a folder where one will do."""
    try:
        status = path.stat()
    except OSError as error:
        raise FileError(f"{path}: can't be opened: {error.strerror}") from error
    except ValueError as error:  # a NUL or half a character in the name
        raise FileError(f"{str(path)!r}: can't be a file's name: {error}") from error
    if folder and stat.S_ISDIR(status.st_mode):
        return None
    if not stat.S_ISREG(status.st_mode):
        raise FileError(f"{path}: expected a safetensors file, found a folder or device")
    return status


def _stamp(path: Path) -> Stamp:
    status = _stat(path)
    assert status is not None
    return stamp_of(status)


def stamp_of(status: os.stat_result) -> Stamp:
    """Return what tells a file from a later one of its name: size, change time and inode."""
    return status.st_size, status.st_mtime_ns, status.st_ino


def _only_checkpoint_in(folder: Path) -> Path:
    try:
        inside = sorted(folder.iterdir())
    except OSError as error:
        raise FileError(f"{folder}: can't be read: {error.strerror}") from error
    for suffix in (".safetensors.index.json", ".safetensors"):
        found = [file for file in inside if file.name.endswith(suffix)]
        if len(found) == 1:
            return found[0]
        if found:
            names = ", ".join(f.name for f in found)
            raise FileError(f"{folder}: holds several checkpoints ({names}); name one of them")
    others = (f"; {file.name} is {what}" for file in inside if (what := other_format(file)))
    raise FileError(
        f"{folder}: holds no .safetensors file and no .safetensors.index.json{next(others, '')}"
    )
