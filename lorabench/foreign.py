"""What a file is that should be safetensors and isn't, told by how it begins and what it is named.

What models are kept in otherwise, and what download tools leave in a model's place.
"""

from pathlib import Path

_UNPACK = "unpack it, and give the safetensors file that is in it"
_PICKLE = (
    "a pickle, which can run code when it is read; where you trust it, convert it to safetensors: "
    "save_file(torch.load(path, weights_only=True), ...)"
)

_ZIP = b"PK\x03\x04"

_MAGIC = (
    (0, _ZIP, f"a zip archive; {_UNPACK}"),
    (0, b"\x1f\x8b", f"compressed by gzip; {_UNPACK}"),
    (0, b"\x28\xb5\x2f\xfd", f"compressed by zstd; {_UNPACK}"),
    (0, b"\xfd7zXZ", f"compressed by xz; {_UNPACK}"),
    (0, b"BZh", f"compressed by bzip2; {_UNPACK}"),
    (0, b"7z\xbc\xaf", f"a 7z archive; {_UNPACK}"),
    (257, b"ustar", f"a tar archive; {_UNPACK}"),
    (0, b"GGUF", "a GGUF file; give the safetensors checkpoint that it was made from"),
    (0, b"\x89HDF", "an HDF5 file; give the model as safetensors"),
    *((0, b"\x80%c" % protocol, _PICKLE) for protocol in range(1, 6)),
)
"""How files of other formats begin: where, with what, and what they are."""

_TEXTS = (
    (b"version https://git-lfs", "a Git LFS pointer, not the file itself; run 'git lfs pull'"),
    (b"<", "a web page or XML, saved in the model's place; download the file again"),
    (b"{", "JSON, as a server's message is, saved in the model's place; download the file again"),
    (b"[", "JSON, as a server's message is, saved in the model's place; download the file again"),
)
_OTHER_TEXT = "text, as a server's message is, saved in the model's place; download the file again"

_SUFFIXES = {
    **dict.fromkeys((".bin", ".ckpt", ".pickle", ".pkl", ".pt", ".pth"), _PICKLE),
    ".onnx": "an ONNX model; give the safetensors checkpoint that it was made from",
}
"""What files are that don't tell it by how they begin."""

_BINARY = bytes(byte for byte in range(32) if byte not in b"\t\n\f\r\x1b")
"""Bytes that are in no text."""


def other_format(path: Path, head: bytes = b"") -> str | None:
    """Say what a file is, and what to do about it; None for what isn't known here.

    Parameters
    ----------
    head
        What the file begins with, 512 bytes where it has as many; without, its name tells.
    """
    named = _SUFFIXES.get(path.suffix.lower())
    if head.startswith(_ZIP) and (b"/data.pkl" in head or named == _PICKLE):
        return _PICKLE  # as torch.save writes it
    for at, magic, what in _MAGIC:
        if head.startswith(magic, at):
            return what
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if not text or text.translate(None, _BINARY) != text:
        return named
    return next((what for start, what in _TEXTS if text.startswith(start)), named or _OTHER_TEXT)
