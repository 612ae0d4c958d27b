"""The safetensors format's headers, parsed and written.

The one place that knows the format (https://github.com/huggingface/safetensors#format): eight bytes
of header length, a JSON header, then the tensors' bytes without gaps.
"""

import json
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from lorabench.errors import FileError
from lorabench.geometry import DTYPE_BYTES, TensorSpec

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


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor in a file: what it is, and where its bytes begin, counted from the file's start."""

    spec: TensorSpec
    file: Path
    offset: int


def read_header(path: Path, size: int) -> tuple[dict[str, Entry], dict[str, str]]:
    """Read a file's tensors, in the header's order, and its metadata.

    Parameters
    ----------
    size
        Bytes of the file; the tensors must fill it.

    Raises
    ------
    FileError
        The file can't be read, isn't of this format, or is damaged.
    """
    try:
        with path.open("rb") as stream:
            start = stream.read(24)
            for magic, what in _NOT_SAFETENSORS:
                # A header length may begin with any byte, but no header is followed by less
                # than an opening brace.
                if start.startswith(magic) and start[8:9] != b"{":
                    raise FileError(f"{path}: is {what}")
            length = int.from_bytes(start[:8], "little")
            if len(start) < 10 or length > size - 8 or length > MAX_HEADER_BYTES:
                raise FileError(
                    f"{path}: is no safetensors file or is truncated: {size:,} bytes, "
                    f"whose first eight announce a header of {length:,}; download it again"
                )
            stream.seek(8)
            header = parse_json(stream.read(length), path)
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
    _check_layout(path, entries.values(), 8 + length, size)
    return entries, metadata


def encode_header(
    path: Path,
    placed: Iterable[tuple[TensorSpec, int]],
    metadata: Mapping[str, str] | None,
    *,
    ends_at: int = 0,
    of: int = 8,
) -> bytes:
    """Return the bytes that a file begins with, up to its first tensor.

    Parameters
    ----------
    placed
        Each tensor, and where its bytes begin, counted from the first tensor's.
    ends_at, of
        The header is padded until its length is ``ends_at`` modulo ``of``.

    Raises
    ------
    FileError
        Two tensors have one name.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    for spec, begin in placed:
        if spec.name in header or spec.name == "__metadata__":
            raise FileError(f"{path}: can't hold a tensor '{spec.name}': the name is taken")
        header[spec.name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [begin, begin + spec.nbytes],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * ((ends_at - 8 - len(text)) % of)
    return len(text).to_bytes(8, "little") + text


def parse_json(text: bytes, path: Path) -> dict[str, Any]:
    """Parse a JSON object from a file, no name in it twice; raise :class:`FileError` else."""

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
