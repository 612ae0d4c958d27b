"""Safetensors files: read and written bit for bit, refused when damaged, never half written."""

import errno
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import bits, shard
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

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

DAMAGED = {
    "empty": (b"", "0 bytes"),
    "shorter than a length": (GOOD[:7], "7 bytes"),
    "cut inside the header": (GOOD[:50], "no safetensors file or is truncated"),
    "cut inside the data": (GOOD[:-1], "is truncated: the header describes"),
    "header longer than the file": (raw({}, length=1 << 40), "a header of 1,099,511,627,776"),
    "empty header": (raw(b"", b"  "), "not JSON"),
    "header not JSON": (raw(b'{"w": '), "not JSON"),
    "header nested without end": (raw(b"[" * 100_000), "not JSON"),
    "header not UTF-8": (raw(b'{"\xff": 1}'), "not JSON in UTF-8"),
    "header with half a character": (raw(b'{"\\ud800": 1}'), "not JSON in UTF-8"),
    "header not an object": (raw([1, 2]), "must be a JSON object"),
    "a name twice": (
        raw(b'{"w":' + json.dumps(W).encode() + b',"w":' + json.dumps(W).encode() + b"}", DATA),
        "names 'w' twice",
    ),
    "metadata no mapping": (raw({"__metadata__": [], "w": W}, DATA[:8]), "'__metadata__'"),
    "metadata not text": (raw({"__metadata__": {"a": 1}, "w": W}, DATA[:8]), "'__metadata__'"),
    "entry no object": (raw({"w": 3}), "tensor 'w': expected dtype, shape and data_offsets"),
    "entry without dtype": (raw({"w": {"shape": [], "data_offsets": [0, 4]}}), "tensor 'w'"),
    "dtype no text": (raw({"w": described([], [2], 0, 8)}, DATA[:8]), "tensor 'w'"),  # type: ignore[arg-type]
    "dtype unknown": (raw({"w": described("F3", [2], 0, 8)}, DATA[:8]), "tensor 'w': dtype 'F3'"),
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
    "gap": (raw({"w": W, "v": described("U8", [3], 9, 12)}, DATA), "tensor 'v' begins at byte"),
    "gap at the start": (raw({"v": V}, DATA), "tensor 'v' begins at byte"),
    "overlap": (raw({"w": W, "v": described("U8", [4], 7, 11)}, DATA[:11]), "tensor 'v' begins"),
    "left-over bytes": (GOOD + b"x", "bytes that no tensor owns"),
    "Git LFS pointer": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 42018190584\n",
        "Git LFS pointer.*git lfs pull",
    ),
    "web page": (b"<!DOCTYPE html><html>not found</html>", "web page"),
    "pickle": (b"\x80\x02}q\x00(X\x01\x00\x00\x00w", "a pickle; convert it"),
    "zipped pickle": (b"PK\x03\x04\x00\x00\x08\x08" + bytes(30), "a pickled PyTorch file"),
    "GGUF": (b"GGUF\x03\x00\x00\x00" + bytes(20), "a GGUF file"),
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


@pytest.mark.parametrize("first", [b"\x80", b"<"])
def test_a_header_whose_length_begins_as_another_format_does_is_a_header(tmp_path, first):
    path = tmp_path / "m.safetensors"
    path.write_bytes(raw(b"{}".ljust(first[0])))
    assert path.read_bytes().startswith(first)
    assert Checkpoint.open(path).entries == {}


def test_a_header_beyond_the_formats_limit_is_not_read(tmp_path):
    path = tmp_path / "m.safetensors"
    with path.open("wb") as stream:
        stream.write(raw(b"{}", length=MAX_HEADER_BYTES + 1))
        stream.truncate(MAX_HEADER_BYTES + 100)
    with pytest.raises(FileError, match="a header of 100,000,001"):
        Checkpoint.open(path)


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
        ({"w": 1}, "m.safetensors.index.json", "'weight_map' of tensor names to shard files"),
        (["w"], "m.safetensors.index.json", "'weight_map' of tensor names to shard files"),
        (None, "m.safetensors.index.json", "'weight_map' of tensor names to shard files"),
    ],
)
def test_an_index_and_shards_that_disagree_are_refused(tmp_path, weight_map, file, message):
    two_shards(tmp_path)
    (tmp_path / "both.safetensors").write_bytes(GOOD)
    (tmp_path / "bad.safetensors").write_bytes(raw({"w": 3}))
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
