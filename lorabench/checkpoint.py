"""Safetensors files: headers parsed, tensors read and written.

This is the one place that knows the format (https://github.com/huggingface/safetensors#format):
eight bytes of header length, a JSON header, then the tensors' bytes without gaps. Opening a file
reads its header and nothing else; torch is imported only when a tensor is.
"""

import hashlib
import json
import os
import reprlib
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lorabench.errors import FileError
from lorabench.geometry import DTYPE_BYTES, TensorSpec

if TYPE_CHECKING:
    import torch

MAX_HEADER_BYTES = 100_000_000
"""The format's own limit on a header."""

MAX_DIMENSIONS = 64
"""As many as torch can hold."""

_NOT_SAFETENSORS = (
    (b"version https://git-lfs", "a Git LFS pointer, not the file itself; run 'git lfs pull'"),
    (b"PK\x03\x04", "a pickled PyTorch file; convert it to safetensors (pickles can run code)"),
    (b"\x80", "a pickle; convert it to safetensors (pickles can run code)"),
    (b"GGUF", "a GGUF file; give the safetensors checkpoint it was made from"),
    (b"<", "a web page or XML, saved in the model's place; download the file again"),
)


Stamp = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor in a file: what it is, and where its bytes begin, counted from the file's start."""

    spec: TensorSpec
    file: Path
    offset: int


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
        entries, metadata = _read_header(path)
        return cls(path, entries, metadata, {path: stamp})

    @classmethod
    def _open_shards(cls, index: Path) -> "Checkpoint":
        try:
            weight_map: dict[str, str] = _parse_json(index.read_bytes(), index)["weight_map"]
            shards = {name: index.parent / shard for name, shard in weight_map.items()}
        except OSError as error:
            raise FileError(f"{index}: can't be read: {error.strerror}") from error
        except (KeyError, TypeError, AttributeError) as error:
            raise FileError(
                f"{index}: expected an object 'weight_map' of tensor names to shard files, "
                f"as 'save_pretrained' writes it"
            ) from error
        headers, stamps = {}, {}
        for shard in dict.fromkeys(shards.values()):
            try:
                stamps[shard] = _stamp(shard)
                headers[shard] = _read_header(shard)
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
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for spec in specs:
        if spec.name in header or spec.name == "__metadata__":
            raise FileError(f"{path}: can't hold a tensor '{spec.name}': the name is taken")
        header[spec.name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [end, end := end + spec.nbytes],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    total = 8 + len(text) + end
    with replacing(path, total) as partial, partial.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
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
        check_room(path, nbytes)
        path.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        partial.replace(path)
    except OSError as error:
        raise FileError(f"{path}: can't be written: {error.strerror or error}") from error
    finally:
        with suppress(OSError):  # what can't be removed now was never made, or has been renamed
            partial.unlink()


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
    return status.st_size, status.st_mtime_ns, status.st_ino


def _only_checkpoint_in(folder: Path) -> Path:
    for pattern in ("*.safetensors.index.json", "*.safetensors"):
        found = sorted(folder.glob(pattern))
        if len(found) == 1:
            return found[0]
        if found:
            names = ", ".join(f.name for f in found)
            raise FileError(f"{folder}: holds several checkpoints ({names}); name one of them")
    raise FileError(f"{folder}: holds no .safetensors file and no .safetensors.index.json")


def _read_header(path: Path) -> tuple[dict[str, Entry], dict[str, str]]:
    status = _stat(path)
    assert status is not None
    try:
        with path.open("rb") as stream:
            start = stream.read(24)
            for magic, what in _NOT_SAFETENSORS:
                # A header length may begin with any byte, but no header is followed by less
                # than an opening brace.
                if start.startswith(magic) and start[8:9] != b"{":
                    raise FileError(f"{path}: is {what}")
            length = int.from_bytes(start[:8], "little")
            if len(start) < 10 or length > status.st_size - 8 or length > MAX_HEADER_BYTES:
                raise FileError(
                    f"{path}: is no safetensors file or is truncated: {status.st_size:,} bytes, "
                    f"whose first eight announce a header of {length:,}; download it again"
                )
            stream.seek(8)
            header = _parse_json(stream.read(length), path)
    except OSError as error:
        raise FileError(f"{path}: can't be read: {error.strerror}") from error

    metadata = header.pop("__metadata__", None)
    if metadata is None:
        metadata = {}
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise FileError(f"{path}: '__metadata__' must map names to strings")
    entries = {}
    for name, value in header.items():
        spec, begin = _parse_entry(path, name, value)
        entries[name] = Entry(spec, path, 8 + length + begin)
    _check_layout(path, entries.values(), 8 + length, status.st_size)
    return entries, metadata


def _parse_json(text: bytes, path: Path) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        for key, value in pairs:
            if key in seen:
                raise FileError(f"{path}: the header names '{key}' twice; the file is damaged")
            key.encode()  # a ValueError, where an escape stands for half a character
            seen[key] = value
        return seen

    try:
        parsed = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path}: the header is not JSON in UTF-8 ({error})") from error
    if not isinstance(parsed, dict):
        raise FileError(f"{path}: the header must be a JSON object")
    return parsed


def _parse_entry(path: Path, name: str, value: Any) -> tuple[TensorSpec, int]:
    def whole(number: Any) -> bool:
        return type(number) is int and 0 <= number < 2**63

    malformed = FileError(
        f"{path}: tensor '{name}': expected dtype, shape and data_offsets, found "
        f"{reprlib.repr(value)}"
    )
    try:
        dtype, shape, (begin, end) = value["dtype"], value["shape"], value["data_offsets"]
    except (TypeError, KeyError, ValueError):
        raise malformed from None
    if not (
        isinstance(dtype, str)
        and isinstance(shape, list)
        and len(shape) <= MAX_DIMENSIONS
        and all(map(whole, [*shape, begin, end]))
        and whole(prod(max(size, 1) for size in shape))
    ):
        raise malformed
    if dtype not in DTYPE_BYTES:
        raise FileError(
            f"{path}: tensor '{name}': dtype '{dtype}' is not supported; "
            f"known: {', '.join(DTYPE_BYTES)}"
        )
    spec = TensorSpec(name, tuple(shape), dtype)
    if end - begin != spec.nbytes:
        raise FileError(
            f"{path}: tensor '{name}': {dtype} {list(shape)} takes {spec.nbytes:,} bytes, "
            f"but data_offsets [{begin}, {end}] hold {end - begin:,}"
        )
    return spec, begin


def _check_layout(path: Path, entries: Iterable[Entry], start: int, size: int) -> None:
    """Check that the tensors fill the file: no gap, no overlap, nothing missing or left over."""
    at = start
    for entry in sorted(entries, key=lambda e: (e.offset, e.spec.nbytes)):
        if entry.offset != at:
            raise FileError(
                f"{path}: tensor '{entry.spec.name}' begins at byte {entry.offset:,}, but the one "
                f"before it ends at {at:,}; the header is damaged"
            )
        at += entry.spec.nbytes
    if at != size:
        what = "is truncated" if at > size else "has bytes that no tensor owns"
        raise FileError(
            f"{path}: {what}: the header describes {at:,} bytes, found {size:,}; download it again"
        )
