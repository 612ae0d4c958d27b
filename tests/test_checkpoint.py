"""Safetensors files: read and written bit for bit, refused when damaged, never half written."""

import bz2
import errno
import gzip
import io
import json
import lzma
import os
import pickle
import shutil
import subprocess
import sys
import tarfile
import zipfile
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from conftest import bits, shard
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from lorabench.adapter_file import AdapterFile
from lorabench.checkpoint import Checkpoint, torch_dtype, write_checkpoint
from lorabench.errors import FileError
from lorabench.geometry import DTYPE_BYTES, TensorSpec, from_tensors, load_geometry
from lorabench.header import MAX_HEADER_BYTES

SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)
NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(
    lambda name: name != "__metadata__"
)
METADATA = st.dictionaries(st.text("abé\n", min_size=1), st.text('x"é'), max_size=3)
MODELS = st.dictionaries(NAMES, st.tuples(st.sampled_from(sorted(DTYPE_BYTES)), SHAPES), max_size=5)


def random_tensors(model: dict[str, tuple[str, tuple[int, ...]]]) -> dict[str, torch.Tensor]:
    """Tensors of any bits, NaN payloads among them."""
    tensors = {}
    for name, (dtype, shape) in model.items():
        spec = TensorSpec(name, shape, dtype)
        high = 2 if dtype == "BOOL" else 256
        flat = torch.randint(high, (spec.nbytes,), dtype=torch.uint8)
        tensors[name] = flat.view(torch_dtype(dtype)).reshape(shape)
    return tensors


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have one shape, dtype and bits."""
    return (
        one.shape == other.shape
        and one.dtype == other.dtype
        and torch.equal(bits(one), bits(other))
    )


@settings(max_examples=50)
@given(model=MODELS, metadata=METADATA)
def test_what_the_safetensors_library_writes_is_read_bit_for_bit(tmp_path_factory, model, metadata):
    path = tmp_path_factory.mktemp("theirs") / "m.safetensors"
    tensors = random_tensors(model)
    save_file(tensors, path, metadata or None)
    file = Checkpoint.open(path)
    assert file.metadata == metadata
    assert {t.name: (t.dtype, t.shape) for t in file.tensors} == model
    assert all(same(file.read(name), tensor) for name, tensor in tensors.items())


@settings(max_examples=50)
@given(model=MODELS, metadata=METADATA)
def test_what_is_written_is_read_bit_for_bit_by_the_safetensors_library(
    tmp_path_factory, model, metadata
):
    path = tmp_path_factory.mktemp("ours") / "m.safetensors"
    tensors = random_tensors(model)
    specs = [TensorSpec(name, shape, dtype) for name, (dtype, shape) in model.items()]
    total = write_checkpoint(path, specs, lambda spec: tensors[spec.name], metadata=metadata)
    assert total == path.stat().st_size
    with safe_open(path, "pt") as file:
        assert (file.metadata() or {}) == metadata
    found = load_file(path)
    assert found.keys() == tensors.keys()
    assert all(same(found[name], tensor) for name, tensor in tensors.items())
    again = Checkpoint.open(path)
    assert again.tensors == tuple(specs)
    assert all(same(again.read(name), tensor) for name, tensor in tensors.items())


def test_a_tensor_is_written_from_any_strides(tmp_path):
    path, tensor = tmp_path / "m.safetensors", torch.arange(6.0).view(2, 3).T
    write_checkpoint(path, [TensorSpec("w", (3, 2), "F32")], lambda spec: tensor)
    assert torch.equal(load_file(path)["w"], tensor)


@pytest.mark.parametrize("shards", [1, 2, 5])
@pytest.mark.parametrize("by", ["index", "folder"])
def test_shards_open_as_the_single_file_does(base, tmp_path, shards, by):
    index = shard(base, tmp_path, shards)
    sharded = Checkpoint.open(index if by == "index" else tmp_path)
    assert set(sharded.tensors) == set(base.tensors)
    assert all(same(sharded.read(name), base.read(name)) for name in base.entries)


def test_a_folder_with_one_checkpoint_opens_as_it(files, base, tmp_path):
    shutil.copy(files.base, tmp_path)
    assert Checkpoint.open(tmp_path).tensors == base.tensors


def test_a_folder_with_none_or_several_checkpoints_is_refused(files, tmp_path):
    with pytest.raises(FileError, match=r"holds no \.safetensors file"):
        Checkpoint.open(tmp_path)
    shutil.copy(files.base, tmp_path / "a.safetensors")
    shutil.copy(files.base, tmp_path / "b.safetensors")
    with pytest.raises(FileError, match=r"several checkpoints \(a.safetensors, b.safetensors\)"):
        Checkpoint.open(tmp_path)


@pytest.fixture(scope="module")
def whole_model(tmp_path_factory):
    """A file of the full LTX-2.5 and its size, 42 GB of which only the header takes room."""
    path, at = tmp_path_factory.mktemp("whole") / "ltx.safetensors", 0
    header = {}
    for spec in load_geometry("ltx-2.5-22b").tensors:
        header[spec.name] = described(spec.dtype, list(spec.shape), at, at := at + spec.nbytes)
    text = json.dumps(header).encode()
    with path.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + at)
    return path, 8 + len(text)


def test_opening_the_whole_model_reads_its_header_and_no_more(whole_model, monkeypatch):
    path, header_bytes = whole_model
    read = []

    class Counting(io.FileIO):
        def readinto(self, buffer):
            read.append(count := super().readinto(buffer))
            return count

        def readall(self):
            raise AssertionError("reads the whole file")

    monkeypatch.setattr(Path, "open", lambda path, mode: io.BufferedReader(Counting(path, mode)))
    file = Checkpoint.open(path)
    assert len(file.entries) == 4349
    # What a buffer holds beyond is the only excess.
    assert header_bytes <= sum(read) <= header_bytes + 2 * io.DEFAULT_BUFFER_SIZE


def test_the_header_of_the_whole_model_is_its_geometry(whole_model):
    path, _ = whole_model
    geometry = from_tensors("ltx", Checkpoint.open(path).tensors, rank=450)
    template = load_geometry("ltx-2.5-22b")
    assert geometry.counts() == template.counts()
    assert geometry.cut(2).counts() == template.cut(2).counts()


def test_opening_a_file_does_not_import_torch(whole_model):
    code = (
        "import sys; from lorabench.checkpoint import Checkpoint; "
        "print(len(Checkpoint.open(sys.argv[1]).entries), 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, whole_model[0]], capture_output=True, text=True, check=True
    )
    assert done.stdout == "4349 False\n"


def described(dtype: str, shape: object, begin: object, end: object) -> dict[str, object]:
    """An entry of a header."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def raw(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    """A safetensors file of any header, true or not."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    length = len(text) if length is None else length
    return length.to_bytes(8, "little") + text + data


W, V = described("F32", [2], 0, 8), described("U8", [4], 8, 12)
DATA = bytes(12)
GOOD = raw({"w": W, "v": V}, DATA)
HUGE = described("F32", [2**62] * 3000, 0, 8)
NOTHING = described("F32", [0, 4], 8, 8)
PICKLE = "is a pickle, which can run code .* convert it .*weights_only=True"
PAGE = b"<!DOCTYPE html><html><body>Not found</body></html>"


def saved_by_torch() -> bytes:
    """What torch.save writes: a zip archive with a pickle in it."""
    torch.save({"w": torch.zeros(2)}, stream := io.BytesIO())
    return stream.getvalue()


def tarred() -> bytes:
    with tarfile.open(fileobj=(stream := io.BytesIO()), mode="w") as archive:
        archive.addfile(tarfile.TarInfo("m.safetensors"))
    return stream.getvalue()


def zipped() -> bytes:
    with zipfile.ZipFile(stream := io.BytesIO(), "w") as archive:
        archive.writestr("m.safetensors", GOOD)
    return stream.getvalue()


DAMAGED = {
    "empty": (b"", "is empty, 0 bytes; download it again"),
    "shorter than a length": (GOOD[:7], "is truncated: 7 bytes"),
    "cut inside the header": (
        GOOD[:50],
        "is truncated: 50 bytes, whose first eight announce a header of 122; download it again",
    ),
    "cut inside the data": (GOOD[:-1], "is truncated: the header describes"),
    "header longer than the file": (raw({}, length=3), "is truncated.* a header of 3; download"),
    "header longer than may be": (
        raw({}, length=1 << 40),
        "is no safetensors file: .* a header of 1,099,511,627,776, and the format allows 100,000,",
    ),
    "empty header": (raw(b"", b"  "), "the header is not JSON: it begins with b'  '"),
    "header not JSON": (raw(b'{"w": '), "not JSON"),
    "header nested without end": (raw(b"[" * 100_000), "not JSON"),
    "header not UTF-8": (raw(b'{"\xff": 1}'), "not JSON in UTF-8"),
    "header with half a character": (raw(b'{"\\ud800": 1}'), "not JSON in UTF-8"),
    "metadata with half a character": (
        raw(b'{"__metadata__": {"a": "\\ud800"}}'),
        "not JSON in UTF-8 .*surrogates",
    ),
    "number of more digits than are read": (
        raw(b'{"w": ' + b"9" * 5000 + b"}"),
        "not JSON in UTF-8 .*4300 digits",
    ),
    "header not an object": (raw([1, 2]), "the header is not JSON: it begins with b'\\[1, 2\\]'"),
    "header with a mark before it": (raw(b"\xef\xbb\xbf{}"), "not JSON: it begins with b'.xef"),
    "a name twice": (
        raw(b'{"w":' + json.dumps(W).encode() + b',"w":' + json.dumps(W).encode() + b"}", DATA),
        "names 'w' twice",
    ),
    "metadata no mapping": (
        raw({"__metadata__": [], "w": W}, DATA[:8]),
        r"'__metadata__' must map names to strings, found \[\]; save the file again",
    ),
    "metadata not text": (
        raw({"__metadata__": {"a": 1}, "w": W}, DATA[:8]),
        "'__metadata__' must map names to strings, found {'a': 1}; save the file again",
    ),
    "metadata twice": (
        raw(b'{"__metadata__": {}, "__metadata__": {}}'),
        "names '__metadata__' twice; the file is damaged",
    ),
    "a name too long to be one": (
        raw({"w" * 1001: W}, DATA[:8]),
        "the name of tensor 'www.*www' has 1,001 characters, and 1,000 is the most",
    ),
    "entry no object": (raw({"w": 3}), "tensor 'w': expected dtype, shape and data_offsets"),
    "entry without dtype": (raw({"w": {"shape": [], "data_offsets": [0, 4]}}), "tensor 'w'"),
    "dtype no text": (raw({"w": described([], [2], 0, 8)}, DATA[:8]), "tensor 'w'"),  # type: ignore[arg-type]
    "dtype unknown": (
        raw({"w": described("F3", [2], 0, 8)}, DATA[:8]),
        "tensor 'w': dtype 'F3' is not supported; known: F64, ",
    ),
    "shape negative": (raw({"w": described("F32", [-2], 0, 8)}, DATA[:8]), "tensor 'w'"),
    "shape not whole": (raw({"w": described("F32", [2.0], 0, 8)}, DATA[:8]), "tensor 'w'"),
    "shape of truths": (raw({"w": described("U8", [True], 0, 1)}, DATA[:1]), "tensor 'w'"),
    "shape no list": (raw({"w": described("F32", "", 0, 4)}, DATA[:4]), "tensor 'w'"),
    "shape too large to be": (raw({"w": HUGE}, DATA[:8]), "tensor 'w'"),
    "offsets not two": (
        raw({"w": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1, 2]}}, b"x"),
        "tensor 'w'",
    ),
    "offsets reversed": (raw({"w": described("F32", [2], 8, 0)}, DATA[:8]), "tensor 'w'.* hold -8"),
    "offsets negative": (raw({"w": described("U8", [1], -1, 0)}), "tensor 'w'"),
    "offsets of another size": (
        raw({"w": described("F32", [2], 0, 7)}, DATA[:7]),
        r"tensor 'w': F32 \[2\] takes 8 bytes, but data_offsets \[0, 7\] hold 7",
    ),
    "gap": (
        raw({"w": W, "v": described("U8", [3], 9, 12)}, DATA),
        "tensor 'v' leaves bytes to no tensor: it begins at byte 139, and .* ends at 138",
    ),
    "gap at the start": (raw({"v": V}, DATA), "tensor 'v' leaves bytes to no tensor"),
    "overlap": (
        raw({"w": W, "v": described("U8", [4], 7, 11)}, DATA[:11]),
        "tensor 'v' overlaps another: it begins at byte 137, and .* ends at 138",
    ),
    "two at one place": (
        raw({"w": W, "v": described("U8", [8], 0, 8)}, DATA[:8]),
        "tensor 'v' overlaps another",
    ),
    "one of no bytes inside another": (
        raw({"w": W, "v": described("U8", [0], 4, 4)}, DATA[:8]),
        "tensor 'v' overlaps another",
    ),
    "left-over bytes": (
        GOOD + b"x",
        "has bytes that no tensor owns: the header describes 142 bytes, found 143",
    ),
    "Git LFS pointer": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 42018190584\n",
        "is a Git LFS pointer, not the file itself; run 'git lfs pull'",
    ),
    "web page": (PAGE, "is a web page or XML, saved in the model's place; download the file again"),
    "web page after a line": (b"\n<!doctype html>", "is a web page or XML, saved in the model's"),
    "web page after a mark": (b"\xef\xbb\xbf\r\n" + PAGE, "is a web page or XML, saved in the"),
    "XML": (b"<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>", "is a web page or"),
    "JSON": (b'{"error": "Repository not found"}', "is JSON, as a server's message is, saved in"),
    "JSON with a brace where a header has one": (b'{"a": [1{"b": 2}]}', "is JSON, as a server's"),
    "JSON list": (b"[null, null, null]", "is JSON, as a server's message is, saved in"),
    "text": (b"Invalid username or password.", "is text, as a server's message is, saved in"),
    "short text": (b"404", "is text, as a server's message is, saved in"),
    "pickle": (pickle.dumps({"w": [1.0]}), PICKLE),
    "pickle of an old protocol": (pickle.dumps({"w": [1.0]}, protocol=2), PICKLE),
    "zipped pickle": (saved_by_torch(), PICKLE),
    "GGUF": (b"GGUF\x03\x00\x00\x00" + bytes(20), "is a GGUF file; give the safetensors"),
    "HDF5": (b"\x89HDF\r\n\x1a\n" + bytes(20), "is an HDF5 file; give the model as safetensors"),
    "zip": (zipped(), "is a zip archive; unpack it"),
    "gzip": (gzip.compress(GOOD), "is compressed by gzip; unpack it"),
    "xz": (lzma.compress(GOOD), "is compressed by xz; unpack it"),
    "bzip2": (bz2.compress(GOOD), "is compressed by bzip2; unpack it"),
    "zstd": (b"\x28\xb5\x2f\xfd\x24" + bytes(20), "is compressed by zstd; unpack it"),
    "tar": (tarred(), "is a tar archive; unpack it"),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_file_is_refused_with_its_path_and_what_is_wrong(tmp_path, damage):
    content, message = DAMAGED[damage]
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)
    with pytest.raises(FileError, match=f"^{path}: .*{message}"):
        Checkpoint.open(path)


def test_the_undamaged_file_of_these_opens(tmp_path):
    path = tmp_path / "m.safetensors"
    path.write_bytes(GOOD)
    assert [t.name for t in Checkpoint.open(path).tensors] == ["w", "v"]


@pytest.mark.parametrize("suffix", [".bin", ".ckpt", ".pkl", ".pt", ".PTH"])
def test_what_is_named_as_a_pickle_is_refused_as_one_where_it_does_not_show_otherwise(
    tmp_path, suffix
):
    path = tmp_path / f"m{suffix}"
    for content in (pickle.dumps({"w": [1.0]}, protocol=0), zipped(), b"\x01\x02\x03" * 9):
        path.write_bytes(content)
        with pytest.raises(FileError, match=f"^{path}: {PICKLE}"):
            Checkpoint.open(path)
    path.write_bytes(PAGE)
    with pytest.raises(FileError, match=f"^{path}: is a web page"):
        Checkpoint.open(path)
    path.write_bytes(GOOD)  # nothing in it can run
    assert len(Checkpoint.open(path).entries) == 2


def test_an_onnx_model_is_refused_as_one(tmp_path):
    path = tmp_path / "m.onnx"
    path.write_bytes(b"\x08\x07\x12\x07pytorch\x1a\x052.0.0" + bytes(50))
    with pytest.raises(FileError, match=f"^{path}: is an ONNX model; give the safetensors"):
        Checkpoint.open(path)


def test_a_folder_with_pickles_alone_is_refused_and_says_so(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(saved_by_torch())
    message = rf"^{tmp_path}: holds no \.safetensors .*; pytorch_model\.bin {PICKLE}"
    with pytest.raises(FileError, match=message):
        Checkpoint.open(tmp_path)


def test_odd_headers_that_are_right_are_read(tmp_path):
    path = tmp_path / "m.safetensors"
    between = described("F32", [3, 0], 0, 0)
    for content, names in [
        (raw({"__metadata__": {}, "w": W, "v": V}, DATA), ["w", "v"]),
        (raw({"__metadata__": None, "w": W, "v": V}, DATA), ["w", "v"]),
        (raw({"v": V, "w": W}, DATA), ["v", "w"]),
        (raw({"w": W, "nothing": NOTHING, "v": V}, DATA), ["w", "nothing", "v"]),
        (raw({"nothing": between, "": described("U8", [], 0, 1)}, b"x"), ["nothing", ""]),
        (raw(b"{}      "), []),
        (raw({"w": W | {"note": "of a later version"}}, DATA[:8]), ["w"]),
        (raw({"w" * 1000: W}, DATA[:8]), ["w" * 1000]),
    ]:
        path.write_bytes(content)
        file = Checkpoint.open(path)
        assert list(file.entries) == names
        assert file.metadata == {}
        assert all(file.read(name).numel() == file.entries[name].spec.params for name in names)


@pytest.mark.parametrize("first", [b"\x80", b"<"])
def test_a_header_whose_length_begins_as_another_format_does_is_a_header(tmp_path, first):
    path = tmp_path / "m.safetensors"
    path.write_bytes(raw(b"{}".ljust(first[0])))
    assert path.read_bytes().startswith(first)
    assert Checkpoint.open(path).entries == {}


@pytest.mark.parametrize(
    ("length", "begin", "message"),
    [
        (MAX_HEADER_BYTES + 1, b"{", "a header of 100,000,001, and the format allows 100,000,000"),
        (2**64 - 1, b"{", "a header of 18,446,744,073,709,551,615, and the format allows"),
        (MAX_HEADER_BYTES, b"{", "is truncated: 50,000,000 bytes.* a header of 100,000,000"),
        (40_000_000, b"\0", "the header is not JSON: it begins with b'.x00"),
    ],
)
def test_no_more_than_a_beginning_is_read_of_a_header_that_can_not_be_one(
    tmp_path, monkeypatch, length, begin, message
):
    path = tmp_path / "m.safetensors"
    with path.open("wb") as stream:
        stream.write(length.to_bytes(8, "little") + begin)
        stream.truncate(50_000_000)
    with few_bytes_read(monkeypatch), pytest.raises(FileError, match=f"^{path}: .*{message}"):
        Checkpoint.open(path)


@pytest.mark.parametrize("name", ["m.safetensors.index.json", "adapter_config.json"])
def test_a_json_file_as_large_as_a_model_is_not_read(tmp_path, monkeypatch, name):
    (tmp_path / "adapter_model.safetensors").write_bytes(raw({}))
    with (tmp_path / name).open("wb") as stream:
        stream.truncate(50_000_000_000)
    message = f"^{tmp_path / name}: expected a JSON file of 32,000,000 bytes at most, found 50,0"
    with few_bytes_read(monkeypatch), pytest.raises(FileError, match=message):
        AdapterFile.open(tmp_path / name if "index" in name else tmp_path)


@contextmanager
def few_bytes_read(monkeypatch):
    """Check that no more than a buffer is read of any file, or asked for."""

    class Few(io.FileIO):
        def readinto(self, buffer):
            assert len(buffer) <= io.DEFAULT_BUFFER_SIZE
            return super().readinto(buffer)

        def readall(self):
            raise AssertionError("reads the whole file")

    def opened(path, mode="r", *args, **kwargs):
        assert mode == "rb"
        return io.BufferedReader(Few(path, mode))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", opened)
        patch.setattr(Path, "read_bytes", lambda path: opened(path, "rb").read())
        yield


def test_what_is_no_regular_file_is_refused_with_its_path(tmp_path):
    missing, loop, pipe, below = (tmp_path / n for n in ("missing", "loop", "pipe", "pipe/below"))
    loop.symlink_to(loop)
    os.mkfifo(pipe)
    for path, message in [
        (missing, "No such file"),
        (loop, "symbolic links"),
        (pipe, "folder or device"),
        (below, "Not a directory"),
    ]:
        with pytest.raises(FileError, match=f"^{path}: .*{message}"):
            Checkpoint.open(path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read and write anything")
def test_what_one_may_not_read_or_write_is_refused_with_its_path(tmp_path):
    path, folder = tmp_path / "m.safetensors", tmp_path / "closed"
    path.write_bytes(GOOD)
    path.chmod(0)
    with pytest.raises(FileError, match=f"^{path}: .*Permission denied"):
        Checkpoint.open(path)
    folder.mkdir()
    write_index(tmp_path, {"w": "closed/1.safetensors"})
    folder.chmod(0)
    try:
        with pytest.raises(FileError, match=f"^{folder}.*Permission denied"):
            Checkpoint.open(tmp_path)
        with pytest.raises(FileError, match=f"^{folder}.*Permission denied"):
            write_checkpoint(folder / "m.safetensors", SPECS, lambda spec: torch.zeros(spec.shape))
    finally:
        folder.chmod(0o700)


def two_shards(folder: Path) -> Path:
    """Shard 1 holds ``w``, shard 2 holds ``v``; give the index."""
    (folder / "1.safetensors").write_bytes(raw({"w": W}, DATA[:8]))
    (folder / "2.safetensors").write_bytes(raw({"v": described("U8", [4], 0, 4)}, DATA[:4]))
    return write_index(folder, {"w": "1.safetensors", "v": "2.safetensors"})


def write_index(folder: Path, weight_map: object) -> Path:
    index = folder / "m.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    return index


@pytest.mark.parametrize(
    ("weight_map", "file", "message"),
    [
        (
            {"w": "1.safetensors", "v": "3.safetensors"},
            "3.safetensors",
            "No such .*index.json names it",
        ),
        ({"w": "1.safetensors", "x": "2.safetensors"}, "2.safetensors", "places tensor 'x' here"),
        ({"w": "2.safetensors", "v": "2.safetensors"}, "2.safetensors", "places tensor 'w' here"),
        ({"w": "1.safetensors", "v": "both.safetensors"}, "both.safetensors", "holds tensor 'w'"),
        ({"w": "bad.safetensors"}, "bad.safetensors", "tensor 'w'"),
        ({"w": "lost.safetensors"}, "lost.safetensors", "Git LFS pointer"),
        (
            {"w": "../1.safetensors"},
            "m.safetensors.index.json",
            r"places tensor 'w' in '\.\./1\.safetensors', outside the index's folder; put the",
        ),
        ({"w": "a/../1.safetensors"}, "m.safetensors.index.json", "outside the index's folder"),
        ({"w": "/etc/passwd"}, "m.safetensors.index.json", "'/etc/passwd', outside the index's"),
        ({"w": "inside"}, "inside", "found a folder or device; .*index.json names it as a shard"),
        ({"w": ""}, "", "found a folder or device; .*index.json names it as a shard"),
        ({"w": "1.safetensors", "v": "old.bin"}, "old.bin", f"{PICKLE}.*index.json names it as"),
        ({"w": 1}, "m.safetensors.index.json", "'weight_map' of tensor names to shard files"),
        (["w"], "m.safetensors.index.json", "'weight_map' of tensor names to shard files"),
        (None, "m.safetensors.index.json", "'weight_map' of tensor names to shard files"),
    ],
)
def test_an_index_and_shards_that_disagree_are_refused(tmp_path, weight_map, file, message):
    two_shards(tmp_path)
    (tmp_path / "both.safetensors").write_bytes(GOOD)
    (tmp_path / "bad.safetensors").write_bytes(raw({"w": 3}))
    (tmp_path / "old.bin").write_bytes(saved_by_torch())
    (tmp_path / "inside").mkdir()
    (tmp_path / "lost.safetensors").write_bytes(DAMAGED["Git LFS pointer"][0])
    index = write_index(tmp_path, weight_map)
    with pytest.raises(FileError, match=f"^{tmp_path / file}: .*{message}"):
        Checkpoint.open(index)


@pytest.mark.parametrize("content", [b"{", b"\xff", b"[]", b'{"a": 1, "a": 2}', b'{"config": 1}'])
def test_an_index_that_is_none_is_refused_with_its_path(tmp_path, content):
    index = tmp_path / "m.safetensors.index.json"
    index.write_bytes(content)
    with pytest.raises(FileError, match=f"^{index}: "):
        Checkpoint.open(index)


def test_an_index_that_names_what_can_be_no_file_is_refused(tmp_path):
    index = write_index(tmp_path, {"w": "1\0.safetensors"})
    with pytest.raises(
        FileError, match=r"1.x00\.safetensors': can't be a file's name.*index\.json"
    ):
        Checkpoint.open(index)


def test_shards_that_an_index_does_not_name_are_left_alone(tmp_path):
    index = two_shards(tmp_path)
    (tmp_path / "stale.safetensors").write_bytes(raw({"w": W}, b"\xff" * 8))
    (tmp_path / "damaged.safetensors").write_bytes(PAGE)
    for path in (index, tmp_path):
        file = Checkpoint.open(path)
        assert list(file.entries) == ["w", "v"]
        assert file.read("w").tolist() == [0, 0]
        assert [stamped.name for stamped in file.stamps] == ["1.safetensors", "2.safetensors"]


def test_a_shard_may_lie_below_the_index_or_be_linked_to_elsewhere(tmp_path):
    (tmp_path / "cache").mkdir()
    (tmp_path / "model" / "part").mkdir(parents=True)
    (tmp_path / "cache" / "blob").write_bytes(GOOD)
    (tmp_path / "model" / "part" / "1.safetensors").symlink_to(tmp_path / "cache" / "blob")
    index = write_index(tmp_path / "model", {"w": "part/1.safetensors", "v": "part/1.safetensors"})
    assert list(Checkpoint.open(index).entries) == ["w", "v"]


def change_size(path: Path) -> None:
    path.write_bytes(GOOD + b"x")


def change_content(path: Path) -> None:
    path.write_bytes(GOOD)
    os.utime(path, ns=(0, 0))


def replace_file(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(GOOD)
    os.utime(other, ns=(0, 0))
    other.replace(path)


@pytest.mark.parametrize("change", [change_size, change_content, replace_file, Path.unlink])
@pytest.mark.parametrize("sharded", [False, True])
def test_a_file_that_changed_after_it_was_opened_is_not_read(tmp_path, change, sharded):
    path = tmp_path / ("1.safetensors" if sharded else "m.safetensors")
    path.write_bytes(GOOD)
    file = Checkpoint.open(two_shards(tmp_path) if sharded else path)
    change(path)
    with pytest.raises(FileError, match=f"^{path}: "):
        file.check_unchanged()
    with pytest.raises(FileError, match=f"^{path}: "):
        file.read("w")


def test_a_read_that_the_system_fails_names_the_file_and_the_tensor(tmp_path, monkeypatch):
    path = tmp_path / "m.safetensors"
    path.write_bytes(GOOD)
    file = Checkpoint.open(path)

    class Broken(io.FileIO):
        def readinto(self, buffer):
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Path, "open", lambda path, *args, **kwargs: Broken(path))
    with pytest.raises(FileError, match=f"^{path}: tensor 'w' .*Input/output error"):
        file.read("w")


def test_reading_into_a_tensor_changes_it_and_nothing_beside_it(tmp_path):
    path = tmp_path / "m.safetensors"
    save_file({"w": torch.tensor([1.0, 2.0])}, path)
    memory = torch.zeros(4)
    Checkpoint.open(path).read_into("w", memory[1:3])
    assert memory.tolist() == [0, 1, 2, 0]


SPECS = [TensorSpec(name, (64, 64), "F32") for name in "abc"]


class FullDisk(io.FileIO):
    """A file on a disk that is full after 20,000 bytes."""

    def write(self, data):
        if self.tell() + len(memoryview(data).cast("B")) > 20_000:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(data)


def raise_at_b(error: BaseException):
    def make(spec: TensorSpec) -> torch.Tensor:
        if spec.name == "b":
            raise error
        return torch.zeros(spec.shape)

    return make


def fail_in_make(error: BaseException):
    return lambda patch: raise_at_b(error)


def fail_in_write(patch: pytest.MonkeyPatch):
    patch.setattr(Path, "open", lambda path, mode: io.BufferedWriter(FullDisk(path, mode)))
    return lambda spec: torch.zeros(spec.shape)


def fail_in(owner: object, name: str, error: BaseException):
    def fail(*args: object, **kwargs: object):
        raise error

    def patch_it(patch: pytest.MonkeyPatch):
        patch.setattr(owner, name, fail)
        return lambda spec: torch.zeros(spec.shape)

    return patch_it


def too_little_room(patch: pytest.MonkeyPatch):
    usage = shutil.disk_usage("/")._replace(free=10_000)
    patch.setattr(shutil, "disk_usage", lambda path: usage)
    return lambda spec: pytest.fail("made a tensor although the disk is known to be full")


FAILURES = {
    "maker raises": (fail_in_make(RuntimeError("broken")), RuntimeError, "broken"),
    "Ctrl-C": (fail_in_make(KeyboardInterrupt()), KeyboardInterrupt, None),
    "out of memory": (fail_in_make(MemoryError()), MemoryError, None),
    "known to be too full": (too_little_room, FileError, "needs 49,.*has 10,000 free"),
    "disk full": (fail_in_write, FileError, "No space left on device"),
    "sync fails": (fail_in(os, "fsync", OSError(errno.EIO, "Broken")), FileError, "Broken"),
    "Ctrl-C in sync": (fail_in(os, "fsync", KeyboardInterrupt()), KeyboardInterrupt, None),
    "rename fails": (fail_in(Path, "replace", OSError(errno.EACCES, "No")), FileError, "No"),
}


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("old", [None, b"what was there"])
def test_a_failed_write_leaves_the_folder_as_it_was(tmp_path, failure, old):
    path = tmp_path / "m.safetensors"
    if old is not None:
        path.write_bytes(old)
    prepare, error, message = FAILURES[failure]
    with pytest.MonkeyPatch.context() as patch:
        make = prepare(patch)
        with pytest.raises(error, match=message) as raised:
            write_checkpoint(path, SPECS, make, overwrite=True)
    assert [p.name for p in tmp_path.iterdir()] == ([] if old is None else [path.name])
    assert old is None or path.read_bytes() == old
    if error is FileError:
        assert str(path) in str(raised.value)


def test_a_file_has_its_name_only_when_it_is_whole(tmp_path):
    path = tmp_path / "new" / "m.safetensors"
    seen = []

    def make(spec: TensorSpec) -> torch.Tensor:
        seen.append(path.exists())
        return torch.zeros(spec.shape)

    write_checkpoint(path, SPECS, make)
    assert seen == [False, False, False]
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_an_existing_file_is_overwritten_only_when_asked(tmp_path):
    path = tmp_path / "m.safetensors"
    path.write_bytes(b"precious")
    with pytest.raises(FileError, match=f"^{path}: exists already"):
        write_checkpoint(path, SPECS, lambda spec: torch.zeros(spec.shape))
    assert path.read_bytes() == b"precious"
    write_checkpoint(path, SPECS, lambda spec: torch.zeros(spec.shape), overwrite=True)
    assert Checkpoint.open(path).tensors == tuple(SPECS)


def test_a_place_that_can_not_hold_a_file_is_refused_with_its_path(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "file" / "m.safetensors", tmp_path / "folder"):
        with pytest.raises(FileError, match=f"^{path}: "):
            write_checkpoint(path, SPECS, lambda spec: torch.zeros(spec.shape), overwrite=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder"]


@pytest.mark.parametrize("names", [["w", "w"], ["__metadata__"]])
def test_names_that_a_header_can_not_hold_are_refused(tmp_path, names):
    specs = [TensorSpec(name, (1,), "F32") for name in names]
    with pytest.raises(FileError, match=names[0]):
        write_checkpoint(tmp_path / "m.safetensors", specs, lambda spec: torch.zeros(1))
    assert not list(tmp_path.iterdir())
