"""The safetensors format's headers, parsed and written.

The one place that knows the format (https://github.com/huggingface/safetensors#format): eight bytes
of header length, a JSON header, then the tensors' bytes without gaps.
"""

import json
import reprlib
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from lorabench.errors import FileError
from lorabench.foreign import other_format
from lorabench.geometry import DTYPE_BYTES, TensorSpec

MAX_HEADER_BYTES = 100_000_000
"""The format's own limit on a header."""

MAX_DIMENSIONS = 64
"""As many as torch can hold."""

MAX_NAME = 1_000
"""Characters of a tensor's name; what reads names takes time that grows with their square."""

MAX_JSON_BYTES = 32_000_000
"""Of a JSON file beside tensors: an index of shards, a configuration."""


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
            head = stream.read(512)
            length = _header_length(path, head, size)
            stream.seek(8)
            header = parse_json(stream.read(length), f"{path}: the header")
    except OSError as error:
        raise FileError(f"{path}: can't be read: {error.strerror}") from error

    metadata = header.pop("__metadata__", None)
    if metadata is None:
        metadata = {}
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise FileError(
            f"{path}: '__metadata__' must map names to strings, found {reprlib.repr(metadata)}; "
            f"save the file again with what wrote it"
        )
    entries = {}
    for name, value in header.items():
        if len(name) > MAX_NAME:
            raise FileError(
                f"{path}: the name of tensor {reprlib.repr(name)} has {len(name):,} characters, "
                f"and {MAX_NAME:,} is the most that is read; the header is damaged"
            )
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


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that holds a JSON object.

    Raises
    ------
    FileError
        It can't be read, is no regular file, is larger than any such file, or isn't JSON.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise FileError(f"{path}: expected a JSON file, found a folder or device")
        if status.st_size > MAX_JSON_BYTES:
            raise FileError(
                f"{path}: expected a JSON file of {MAX_JSON_BYTES:,} bytes at most, found "
                f"{status.st_size:,}; is it what its name says?"
            )
        text = path.read_bytes()
    except OSError as error:
        raise FileError(f"{path}: can't be read: {error.strerror}") from error
    return parse_json(text, f"{path}: the file")


def parse_json(text: bytes, where: str) -> dict[str, Any]:
    """Parse a JSON object, no name in it twice; raise :class:`FileError` else.

    ``where`` is what messages begin with: the file, and what of it the text is.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        for key, value in pairs:
            if key in seen:
                raise FileError(f"{where} names '{key}' twice; the file is damaged")
            key.encode()  # a ValueError, where an escape stands for half a character
            if isinstance(value, str):
                value.encode()
            seen[key] = value
        return seen

    try:
        parsed = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise FileError(f"{where} is not JSON in UTF-8 ({error}); download it again") from error
    if not isinstance(parsed, dict):
        raise FileError(f"{where} must be a JSON object, found {reprlib.repr(parsed)}")
    return parsed


def _header_length(path: Path, head: bytes, size: int) -> int:
    """Return how long a header is, once a file's size and beginning make it believable."""
    if not head:
        raise FileError(f"{path}: is empty, 0 bytes; download it again")
    # A length may begin with any byte, but ends with a zero, and a brace comes after it.
    if head[7:9] != b"\0{" and (what := other_format(path, head)):
        raise FileError(f"{path}: is {what}")
    length = int.from_bytes(head[:8], "little")
    if length > MAX_HEADER_BYTES:
        raise FileError(
            f"{path}: is no safetensors file: its first eight bytes announce a header of "
            f"{length:,}, and the format allows {MAX_HEADER_BYTES:,}; download it again"
        )
    if len(head) < 10 or length > size - 8:
        raise FileError(
            f"{path}: is truncated: {size:,} bytes, whose first eight announce a header of "
            f"{length:,}; download it again"
        )
    if head[8:9] != b"{":
        raise FileError(
            f"{path}: the header is not JSON: it begins with {head[8:16]!r}, where the format "
            f"has '{{'; download it again"
        )
    return length


def _parse_entry(path: Path, name: str, value: Any) -> tuple[TensorSpec, int]:
    def whole(number: Any) -> bool:
        return type(number) is int and 0 <= number < 2**63

    def malformed() -> FileError:
        return FileError(
            f"{path}: tensor '{name}': expected dtype, shape and data_offsets, found "
            f"{reprlib.repr(value)}"
        )

    try:
        dtype, shape, (begin, end) = value["dtype"], value["shape"], value["data_offsets"]
    except (TypeError, KeyError, ValueError):
        raise malformed() from None
    if not (
        isinstance(dtype, str)
        and isinstance(shape, list)
        and len(shape) <= MAX_DIMENSIONS
        and all(map(whole, [*shape, begin, end]))
        and whole(prod(max(size, 1) for size in shape))
    ):
        raise malformed()
    if dtype not in DTYPE_BYTES:
        raise FileError(
            f"{path}: tensor '{name}': dtype {reprlib.repr(dtype)} is not supported; "
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
            what = "leaves bytes to no tensor" if entry.offset > at else "overlaps another"
            raise FileError(
                f"{path}: tensor '{entry.spec.name}' {what}: it begins at byte {entry.offset:,}, "
                f"and what lies before it ends at {at:,}; the header is damaged"
            )
        at += entry.spec.nbytes
    if at != size:
        what = "is truncated" if at > size else "has bytes that no tensor owns"
        raise FileError(
            f"{path}: {what}: the header describes {at:,} bytes, found {size:,}; download it again"
        )
