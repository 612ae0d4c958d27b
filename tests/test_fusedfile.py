"""A base fused into a new file: resident weights' bits, all there or none, resumed after a kill."""

import errno
import itertools
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from concurrent.futures import wait
from contextlib import contextmanager, suppress
from functools import partial as partial_of
from pathlib import Path

import pytest
import torch
from conftest import bits, shard
from odd import (
    PREFIX,
    STATES,
    Model,
    at_most,
    failing,
    folder_bytes,
    nothing_left,
    write_adapter,
    write_base,
    write_model,
    write_raw,
)
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from lorabench import directio, fusedfile, streamed
from lorabench import journal as journaling
from lorabench.adapter import Adapter
from lorabench.alone import alone
from lorabench.checkpoint import Checkpoint
from lorabench.errors import AdapterError, ConfigError, FileError, UnavailableError
from lorabench.fuse import RULES, Term
from lorabench.fusedfile import STATE_KEY, fuse_file
from lorabench.kernels import Scratch, gemm, get_kernel, one_nan
from lorabench.loading import read_factors
from lorabench.measure import Observer
from lorabench.recipe import BASE, State
from lorabench.segments import lay_out
from lorabench.stream import BUFFERS
from lorabench.streamed import StreamedWeights

STATE = STATES[-1]
SMALL = {"segment_bytes": 4096, "sync_bytes": 1}


@pytest.fixture(autouse=True)
def _syncs_end_at_once(monkeypatch):
    """Let every sync end before the next segment, so that runs make the same journal entries."""
    begin = directio.Writer.begin_sync

    def begin_and_wait(writer):
        wait([future := begin(writer)])
        return future

    monkeypatch.setattr(directio.Writer, "begin_sync", begin_and_wait)


@pytest.fixture(autouse=True)
def _no_deadlock():
    with at_most(45):
        yield


@pytest.fixture
def out(request, tmp_path):
    """A name for the output, alone in its folder."""
    (tmp_path / "out").mkdir()
    in_shards = "either" in request.fixturenames and "shards" in request.node.callspec.id
    return tmp_path / "out" / ("fused" if in_shards else "fused.safetensors")


@pytest.fixture
def small_tiles(monkeypatch):
    monkeypatch.setattr(gemm, "TILE", 700)


def partial(out: Path) -> Path:
    return out.with_name(f".{out.name}.partial")


def assert_fused(model: Model, state: State, out: Path) -> None:
    """Check a whole output: its tensors and nothing beside it."""
    fused, expected = Checkpoint.open(out), model.expected(state)
    assert fused.tensors == model.base.tensors
    for name, tensor in expected.items():
        assert torch.equal(bits(fused.read(name)), bits(tensor)), name
    assert [path.name for path in out.parent.iterdir()] == [out.name]


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("tile", [700, gemm.TILE])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("segment_bytes", [4096, 20_001, 1 << 30])
def test_a_fused_file_has_the_bits_of_resident_weights(
    either, out, monkeypatch, state, tile, threads, segment_bytes
):
    monkeypatch.setattr(gemm, "TILE", tile)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        done = fuse_file(
            either.base, either.adapters, state, out, segment_bytes=segment_bytes, sync_bytes=9000
        )
        assert_fused(either, state, out)
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    files = [out] if out.is_file() else list(out.rglob("*.safetensors"))
    assert done.nbytes == sum(file.stat().st_size for file in files)
    assert (done.path, done.resumed_bytes) == (out, 0)
    pairs = [pair for role in state for pair in either.adapters[role].pairs]
    assert done.work.flops == sum(2 * pair.weight.params * pair.rank for pair in pairs)


@pytest.mark.parametrize("shards", [1, 3])
def test_ltx_in_equal_shards_and_an_adapter_in_shards_fuse_as_single_files_do(
    base, adapters, files, tmp_path, shards
):
    (tmp_path / "base").mkdir()
    (tmp_path / "user").mkdir()
    index = shard(base, tmp_path / "base", shards)
    user = Adapter.open(shard(adapters["user"].file, tmp_path / "user", shards), base.tensors)
    pieces = Model(Checkpoint.open(index), {**adapters, "user": user})
    state, out = State(user=0.8, distilled=-1.0), tmp_path / "out" / "fused"
    fuse_file(pieces.base, pieces.adapters, state, out, segment_bytes=1 << 18)
    assert_fused(Model(pieces.base, adapters), state, out)
    assert json.loads((out / index.name).read_text()) == json.loads(index.read_text())


@pytest.mark.parametrize("lack", ["no such flag", "not on this file system"])
def test_a_file_system_without_direct_io_gives_the_same_bits(either, out, monkeypatch, lack):
    def open_without_direct(path, flags, *args, open_file=os.open, **kwargs):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return open_file(path, flags, *args, **kwargs)

    if lack == "no such flag":
        monkeypatch.setattr(directio, "_DIRECT", 0)
    else:
        monkeypatch.setattr(os, "open", open_without_direct)
    fuse_file(either.base, either.adapters, STATE, out, **SMALL)
    assert_fused(either, STATE, out)


def test_every_shift_of_the_tensors_against_blocks_gives_the_same_bits(model, tmp_path):
    data = {name: model.base.read(name) for name in model.base.entries}
    for length in (0, 1, 2, 7, 1000, 4096 - 700):
        folder = tmp_path / str(length)
        write_raw(folder / "base.safetensors", data, {"pad": "x" * length})
        moved, out = model.on(folder / "base.safetensors"), folder / "out" / "fused.safetensors"
        fuse_file(moved.base, moved.adapters, STATES[0], out, **SMALL)
        assert_fused(moved, STATES[0], out)


def test_the_library_opens_it_with_the_same_tensors_in_the_same_order(model, out):
    fuse_file(model.base, model.adapters, STATE, out, **SMALL)
    with safe_open(out, "pt") as ours, safe_open(model.base.path, "pt") as theirs:
        assert list(ours.keys()) == list(theirs.keys())
    for name, tensor in load_file(out).items():
        spec = model.base.entries[name].spec
        assert tensor.shape == spec.shape
        assert tensor.dtype == model.base.read(name).dtype
    assert list(Checkpoint.open(out).entries) == list(model.base.entries)


def test_metadata_are_kept_and_the_state_and_its_adapters_told(either, out):
    state = State(distilled=-0.5, user=0.1)
    fuse_file(either.base, either.adapters, state, out)
    for source in either.base.stamps:
        name = out if out.is_file() else out / source.relative_to(either.base.path.parent)
        old, new = Checkpoint.open(source).metadata, Checkpoint.open(name).metadata
        assert {key: new[key] for key in old} == old
        assert new[STATE_KEY] == "distilled@-0.5 + user@0.1"
        distilled, user = json.loads(new["lorabench.adapters"])
        assert (user["role"], user["strength"], user["scales"]) == ("user", 0.1, [1.0])
        assert (distilled["file"], distilled["scales"]) == ("distilled.safetensors", [0.5])
        assert distilled["metadata"] == {"lora_alpha": "2", "lora_rank": "4"}


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_is_followed_and_told(model, out, rule):
    state = State(distilled=0.8, user=0.3)
    fuse_file(model.base, model.adapters, state, out, rule=rule, **SMALL)
    fused = Checkpoint.open(out)
    assert fused.metadata["lorabench.rule"] == f"{rule}, that of {RULES[rule]}"
    factors = {role: read_factors(model.adapters[role]) for role in state}
    kernel = get_kernel("gemm", torch.device("cpu"), rule)
    for name in factors["distilled"]:
        weight = model.base.read(name)
        terms = [Term(p, s) for role, s in state.items() for p in factors[role].get(name, ())]
        kernel(weight, terms, Scratch())
        one_nan(weight)
        assert torch.equal(bits(fused.read(name)), bits(weight)), name


def test_a_rule_that_there_isnt_is_refused(model, out):
    with pytest.raises(UnavailableError, match="no rounding rule 'R5'; choose from R1, R2, R3, R4"):
        fuse_file(model.base, model.adapters, STATE, out, rule="R5")
    assert not list(out.parent.iterdir())


def test_a_base_that_is_fused_already_is_refused(either, out):
    fuse_file(either.base, either.adapters, STATE, out)
    fused = Checkpoint.open(out)
    again = out.parent.parent / f"again{out.suffix}"
    with pytest.raises(ConfigError, match=rf"^{fused.path}: is fused already, .*'detailing@1 \+ "):
        fuse_file(fused, either.adapters, STATE, again)
    assert_fused(either, STATE, out)


@pytest.mark.parametrize("state", [BASE, {"user": 0.0, "distilled": 0}])
def test_a_state_without_strength_is_refused(model, out, state):
    with pytest.raises(ConfigError, match=f"^{model.base.path}: every strength is 0"):
        fuse_file(model.base, model.adapters, state, out)
    with pytest.raises(ConfigError, match="needs adapter 'other'"):
        fuse_file(model.base, model.adapters, {"other": 1.0}, out)
    assert not list(out.parent.iterdir())


def existing(out: Path, model: Model) -> tuple[Path, type[Exception], str]:
    out.write_bytes(b"precious")
    return out, FileError, "exists already"


def dangling(out: Path, model: Model) -> tuple[Path, type[Exception], str]:
    out.symlink_to("nowhere")
    return out, FileError, "exists already"


def folder(out: Path, model: Model) -> tuple[Path, type[Exception], str]:
    out.mkdir()
    return out, FileError, "folder that holds something"


def other_suffix(out: Path, model: Model) -> tuple[Path, type[Exception], str]:
    return out.with_suffix(".bin"), ConfigError, "ends in .safetensors"


def no_suffix(out: Path, model: Model) -> tuple[Path, type[Exception], str]:
    return out.with_suffix(""), ConfigError, "ends in .safetensors"


def below_a_file(out: Path, model: Model) -> tuple[Path, type[Exception], str]:
    (out.parent / "file").write_bytes(b"precious")
    return out.parent / "file" / out.name, FileError, "can't be written: Not a directory"


def name_too_long(out: Path, model: Model) -> tuple[Path, type[Exception], str]:
    return out.with_name("x" * 240 + ".safetensors"), FileError, "can't be written: .*too long"


REFUSED = [existing, dangling, folder, other_suffix, no_suffix, below_a_file, name_too_long]


@pytest.mark.parametrize("refused", REFUSED)
def test_a_place_that_the_file_can_not_take_is_refused_with_nothing_changed(model, out, refused):
    place, error, message = refused(out, model)
    before = (sorted(out.parent.rglob("*")), folder_bytes(out.parent))
    with pytest.raises(error, match=f"^{place}: .*{message}"):
        fuse_file(model.base, model.adapters, STATE, place)
    assert (sorted(out.parent.rglob("*")), folder_bytes(out.parent)) == before


def test_shards_go_to_a_folder_that_is_new_or_empty(sharded, tmp_path, monkeypatch):
    parent = tmp_path / "out"
    full, empty, link = parent / "full", parent / "empty", parent / "link"
    for made in (full, empty):
        made.mkdir(parents=True)
    (full / "x").write_bytes(b"precious")
    link.symlink_to(empty)
    (parent / "file").write_bytes(b"precious")
    monkeypatch.chdir(empty)
    for place, error, message in [
        (full, FileError, "folder that holds something"),
        (link, FileError, "link to a folder"),
        (parent / "file", FileError, "exists already"),
        (sharded.base.path.parent, FileError, "folder that holds something"),
        (parent / "x.safetensors", ConfigError, "7 shards, .* give a folder's name"),
        (parent / "x.json", ConfigError, "give a folder's name"),
        (Path(), ConfigError, "give a folder's name"),
    ]:
        for overwrite in (False, True):
            before = (sorted(tmp_path.rglob("*")), folder_bytes(tmp_path))
            with pytest.raises(error, match=f"^{place}: .*{message}"):
                fuse_file(sharded.base, sharded.adapters, STATE, place, overwrite=overwrite)
            assert (sorted(tmp_path.rglob("*")), folder_bytes(tmp_path)) == before
    fuse_file(sharded.base, sharded.adapters, STATE, empty)
    assert folder_bytes(empty).keys() == folder_bytes(sharded.base.path.parent).keys()
    assert not partial(empty).exists()


@pytest.mark.parametrize("which", ["base", "user", "detailing"])  # the last isn't in the state
@pytest.mark.parametrize("how", ["path", "symlink", "hard link"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_an_input_is_never_overwritten(tmp_path, which, how, overwrite):
    model = write_model(tmp_path)
    path = model.base.path if which == "base" else model.adapters[which].file.path
    out = path if how == "path" else tmp_path / "new.safetensors"
    if how == "symlink":
        out.symlink_to(path)
    elif how == "hard link":
        out.hardlink_to(path)
    before = folder_bytes(tmp_path)
    with pytest.raises(FileError, match=f"^{out}: is an input"):
        fuse_file(model.base, model.adapters, State(user=1.0), out, overwrite=overwrite)
    assert folder_bytes(tmp_path) == before


def test_an_input_in_the_folder_that_the_output_is_made_in_is_never_cleared_away(tmp_path):
    out = tmp_path / "new.safetensors"
    model = write_model(folder := partial(out))
    (folder / "lock").touch()  # as if it were a run's
    before = folder_bytes(folder)
    with pytest.raises(FileError, match=f"lies in {folder}, where {out} will be made"):
        fuse_file(model.base, model.adapters, State(user=1.0), out)
    assert folder_bytes(folder) == before


def test_an_old_file_is_whole_until_the_new_one_is(model, out, monkeypatch):
    out.write_bytes(b"old")
    replaced, seen = Path.replace, []

    def replace(path, target):
        seen.append((target, out.read_bytes()))
        return replaced(path, target)

    monkeypatch.setattr(Path, "replace", replace)
    fuse_file(model.base, model.adapters, STATE, out, overwrite=True, **SMALL)
    assert len(seen) > 5
    assert {content for _, content in seen} == {b"old"}
    assert seen[-1][0] == out  # the whole file comes by this alone
    assert_fused(model, STATE, out)


def test_what_comes_to_be_at_its_place_meanwhile_is_not_overwritten(either, out, monkeypatch):
    checked = Checkpoint.check_unchanged

    def check(checkpoint):
        out.mkdir() if out.suffix == "" else out.write_bytes(b"precious")
        if out.is_dir():
            (out / "x").write_bytes(b"precious")
        monkeypatch.setattr(Checkpoint, "check_unchanged", checked)

    monkeypatch.setattr(Checkpoint, "check_unchanged", check)
    with pytest.warns(UserWarning, match="broken off"), pytest.raises(FileError, match=f"^{out}: "):
        fuse_file(either.base, either.adapters, STATE, out, **SMALL)
    assert b"precious" in folder_bytes(out.parent).values()
    shutil.rmtree(out) if out.is_dir() else out.unlink()
    done = fuse_file(either.base, either.adapters, STATE, out, **SMALL)
    assert done.work.fused_params == 0  # all was there
    assert_fused(either, STATE, out)


def fuse_failing(
    model: Model, out: Path, error: type[BaseException], match: str | None = None, **sizes: int
) -> bool:
    """Fuse and expect a failure that leaves no output; say whether it can be resumed."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with nothing_left():
            with pytest.raises(error, match=match) as raised:
                fuse_file(model.base, model.adapters, STATE, out, **{**SMALL, **sizes})
            if issubclass(error, FileError):
                assert str(raised.value).startswith(f"{out}: ")
            del raised
    assert not out.exists()
    assert bool(told) == partial(out).exists()
    for warning in told:
        assert f"{out}: broken off; the same command goes on" in str(warning.message)
    return bool(told)


def resume(model: Model, out: Path) -> int:
    """Fuse in peace; check what comes out, and give the bytes that didn't have to be done again."""
    done = fuse_file(model.base, model.adapters, STATE, out, **SMALL)
    assert_fused(model, STATE, out)
    return done.resumed_bytes


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize(
    ("where", "n", "resumes"),
    [
        ("pwritev", 1, False), ("pwritev", 8, True), ("pwritev", 20, True), ("pwritev", 30, True),
        ("fsync", 1, False), ("fsync", 2, False), ("fsync", 7, True), ("fsync", 8, True),
        ("ftruncate", 1, True),
    ],
)  # fmt: skip
def test_a_run_that_is_broken_off_leaves_no_file_and_goes_on_later(
    either, out, small_tiles, error, where, n, resumes
):
    broken = OSError(errno.ENOSPC, "No space left") if error is OSError else error()
    if where == "ftruncate" and out.suffix == "":
        resumes = False  # the first shard's, which is the first file
    with failing(os, where, n, broken):
        expected = FileError if error is OSError else error
        message = "can't be written: No space left" if error is OSError else None
        assert fuse_failing(either, out, expected, message) == resumes
    assert (resume(either, out) > 0) == resumes


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt, MemoryError])
def test_a_run_whose_input_cant_be_read_goes_on_later(either, out, small_tiles, error):
    broken = OSError(errno.EIO, "Broken") if error is OSError else error()
    expected = FileError if error is OSError else error
    with failing(os, "preadv", 70, broken), pytest.warns(UserWarning, match="broken off"):
        with pytest.raises(expected, match="can't be read: Broken" if error is OSError else None):
            fuse_file(either.base, either.adapters, STATE, out, **SMALL)
    assert not out.exists()
    assert resume(either, out) > 0


def test_ctrl_c_ends_a_run_wherever_it_comes(model, out, small_tiles, monkeypatch):
    resumed = []
    for n in (5, 15, 10):
        calls = itertools.count(1)

        def pwritev(*args, calls=calls, n=n, write=os.pwritev):
            if next(calls) == n:
                signal.raise_signal(signal.SIGINT)
            return write(*args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "pwritev", pwritev)
            resumed.append(fuse_failing(model, out, KeyboardInterrupt))
    assert resumed == [True] * 3
    assert resume(model, out) > 0


def test_ctrl_c_ends_a_run_that_waits_for_the_disk(model, out, small_tiles, monkeypatch):
    calls = itertools.count(1)

    def preadv(*args, read=os.preadv):
        if next(calls) == 80:
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
            time.sleep(0.4)
        return read(*args)

    monkeypatch.setattr(os, "preadv", preadv)
    with nothing_left(), pytest.warns(UserWarning, match="broken off"):
        with pytest.raises(KeyboardInterrupt):
            fuse_file(model.base, model.adapters, STATE, out, **SMALL)
    assert not out.exists()
    assert resume(model, out) > 0


KILLED = """
import json, os, random, signal, sys, time, traceback
from pathlib import Path
import torch
torch.set_num_threads(1)
from lorabench.adapter import Adapter
from lorabench.checkpoint import Checkpoint
from lorabench.fusedfile import fuse_file
from lorabench.recipe import State

path, out, *files = map(Path, sys.argv[1:])
base = Checkpoint.open(path)
adapters = {file.stem: Adapter.open(file, base.tensors) for file in files}

def fuse():
    return fuse_file(
        base, adapters, State(user=0.8, distilled=1.0), out, segment_bytes=1 << 13, sync_bytes=9000
    )

def written(folder=out.with_name(f".{out.name}.partial")):
    try:
        journal = json.loads((folder / "journal.json").read_text())["steps"]
        return journal, sum(p.stat().st_size for p in folder.rglob("*.safetensors"))
    except FileNotFoundError:
        return 0, 0

moments = random.Random(5)
write = os.pwritev
journals = []
for attempt in range(60):
    if len(journals) == 11 or out.exists():
        break
    before = written()
    if not (child := os.fork()):
        os.pwritev = lambda *args: (time.sleep(0.01), write(*args))[1]  # a slow disk
        try:
            fuse()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    started = time.monotonic()
    while written() == before and time.monotonic() < started + 2:
        time.sleep(0.001)
    time.sleep(moments.uniform(0, 0.03))
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status) and written()[0]:
        journals.append(written()[0])
resumed = fuse().resumed_bytes
print(json.dumps([journals, resumed]))
"""


@pytest.mark.parametrize("layout", ["file", "shards"])
def test_killed_at_ten_random_moments_and_resumed_it_has_the_same_bits(
    files, base, adapters, tmp_path, layout
):
    roles = ("user", "distilled")
    path = files.base
    if layout == "shards":
        (tmp_path / "in").mkdir()
        path = shard(base, tmp_path / "in", 3)
    out = tmp_path / "out" / ("fused.safetensors" if layout == "file" else "fused")
    out.parent.mkdir()
    inputs = [str(files.adapters[role]) for role in roles]
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(path), str(out), *inputs],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    journals, resumed = json.loads(done.stdout)
    assert len(journals) >= 10
    assert journals == sorted(journals)  # none lost what another had done
    assert len(set(journals)) > 5
    assert resumed > 0
    bound = {role: adapters[role] for role in roles}
    assert_fused(Model(Checkpoint.open(path), bound), State(user=0.8, distilled=1.0), out)


@contextmanager
def mounted(folder: Path, kind: str, nbytes: int):
    """A file system of a few MB, where this machine lets one be mounted."""
    folder.mkdir()
    if kind == "ext4":
        image = folder.with_suffix(".img")
        with image.open("wb") as file:
            file.truncate(nbytes)
        commands = [["mkfs.ext4", "-q", "-m", "0", image], ["mount", "-o", "loop", image, folder]]
    else:
        commands = [["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "lorabench", folder]]
    for command in commands:
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"can't mount a {kind}: {error}")
    try:
        yield
    finally:
        subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_a_disk_that_fills_up_meanwhile_is_told_and_the_run_goes_on_once_there_is_room(
    model, tmp_path, small_tiles, monkeypatch, kind
):
    with mounted(tmp_path / "disk", kind, 4 << 20):
        out = tmp_path / "disk" / "out" / "fused.safetensors"
        filler = tmp_path / "disk" / "filler"
        save = journaling._save

        def save_and_fill(*args) -> None:
            save(*args)
            if not filler.exists():
                with filler.open("wb", buffering=0) as file, suppress(OSError):
                    while file.write(bytes(4096)):
                        pass

        monkeypatch.setattr(journaling, "_save", save_and_fill)
        message = "can't be written: No space left on device"
        assert fuse_failing(model, out, FileError, message)
        assert fuse_failing(model, out, FileError, "needs .* bytes, but the disk has")
        filler.unlink()
        monkeypatch.setattr(journaling, "_save", save)
        assert resume(model, out) > 0


def test_a_file_beyond_the_systems_limit_is_told(model, out, small_tiles):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, hard))  # Python ignores the signal
    try:
        assert fuse_failing(model, out, FileError, "can't be written: File too large")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert resume(model, out) > 0


def test_a_disk_without_room_is_refused_before_anything_is_written(either, out, monkeypatch):
    usage = shutil.disk_usage("/")._replace(free=10_000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage)
        patch.setattr(os, "pwritev", lambda *args: pytest.fail("wrote"))
        assert not fuse_failing(either, out, FileError, "needs .* bytes.* 10,000 free; make room")
    assert not list(out.parent.iterdir())


def test_what_was_written_already_needs_no_room_again(model, out, small_tiles, monkeypatch):
    with failing(fusedfile, "_publish", 1, OSError(errno.EIO, "Broken")):
        assert fuse_failing(model, out, FileError, "Broken")
    usage = shutil.disk_usage("/")._replace(free=10_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    assert resume(model, out) > 0


@pytest.fixture
def broken_off(either, out, small_tiles):
    """A run that was broken off near its end."""
    broken = OSError(errno.ENOSPC, "No space left")
    with failing(journaling, "_save", 12, broken):
        assert fuse_failing(either, out, FileError)
    return partial(out)


def journal(folder: Path, **changes: object) -> bytes:
    return json.dumps({**json.loads((folder / "journal.json").read_text()), **changes}).encode()


DAMAGED = {
    "nothing": lambda folder: b"",
    "half": lambda folder: journal(folder)[:20],
    "no text": lambda folder: b"\xff\xfe\x00",
    "no depth": lambda folder: b"[" * 100_000,
    "no object": lambda folder: b"[1, 2]",
    "no task": lambda folder: b'{"steps": 3}',
    "no count": lambda folder: journal(folder).replace(b"steps", b"stops"),
    "text": lambda folder: journal(folder, steps="3"),
    "yes": lambda folder: journal(folder, steps=True),
    "below 0": lambda folder: journal(folder, steps=-2),
    "a fraction": lambda folder: journal(folder, steps=1.5),
    "no end": lambda folder: journal(folder, steps=1e999),
    "too many": lambda folder: journal(folder, steps=10**6),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_journal_is_told_and_the_run_begins_anew(either, out, broken_off, damage):
    (broken_off / "journal.json").write_bytes(DAMAGED[damage](broken_off))
    with pytest.warns(UserWarning, match=f"{out}: .* cleared away: its journal is damaged"):
        assert resume(either, out) == 0


@pytest.mark.parametrize("damage", ["claims all", "last is short", "first is short", "last gone"])
def test_a_journal_that_claims_more_than_the_files_hold_is_not_believed(
    either, out, broken_off, damage
):
    written = sorted(broken_off.rglob("*.safetensors"), key=lambda file: file.stat().st_mtime_ns)
    if damage == "claims all":
        used = {role: either.adapters[role] for role in STATE}
        count = len(lay_out(either.base, used, STATE, limit=4096))
        (broken_off / "journal.json").write_bytes(journal(broken_off, steps=count))
    elif damage == "last gone":
        written[-1].unlink()
    else:
        file = written[-1 if damage == "last is short" else 0]
        os.truncate(file, file.stat().st_size // 2)
    with pytest.warns(UserWarning, match="cleared away: its files are shorter than its journal"):
        assert resume(either, out) == 0


def test_a_journal_that_was_never_written_is_no_damage(either, out, broken_off):
    (broken_off / "journal.json").unlink()
    assert resume(either, out) == 0


def test_an_intact_journal_saves_what_was_written(either, out, broken_off):
    assert resume(either, out) > sum(spec.nbytes for spec in either.base.tensors) // 3


@pytest.mark.parametrize(
    "other", ["state", "order", "rule", "segments", "adapter", "base", "torch"]
)
def test_another_tasks_leavings_are_cleared_away(model, out, tmp_path, monkeypatch, other):
    mine = Model(write_base(tmp_path / "base.safetensors"), model.adapters)
    with failing(journaling, "_save", 5, OSError(errno.ENOSPC, "No space left")):
        assert fuse_failing(mine, out, FileError)
    state, sizes = STATE, SMALL
    if other == "rule":
        with pytest.warns(UserWarning, match=f"{out}: .* cleared away: it had other inputs"):
            done = fuse_file(mine.base, mine.adapters, state, out, rule="R4", **sizes)
        assert done.resumed_bytes == 0
        return
    if other == "state":
        state = State(STATE, user=-0.5)
    elif other == "order":
        state = State(reversed(list(STATE.items())))
    elif other == "segments":
        sizes = {**SMALL, "segment_bytes": 5000}
    elif other == "adapter":
        path = tmp_path / "user.safetensors"
        mine.adapters["user"] = write_adapter(
            path, "user", mine.base, lora_alpha="1", lora_rank="2"
        )
    elif other == "base":
        os.utime(mine.base.path, ns=(0, 0))
        mine = mine.on(mine.base.path)
    else:
        monkeypatch.setattr(torch, "__version__", "another")
    with pytest.warns(UserWarning, match=f"{out}: .* cleared away: it had other inputs"):
        done = fuse_file(mine.base, mine.adapters, state, out, **sizes)
    assert done.resumed_bytes == 0
    assert_fused(mine, state, out)


def test_of_two_runs_at_once_the_second_is_refused_and_the_first_unharmed(
    either, out, small_tiles, monkeypatch
):
    save, refused = journaling._save, []

    def meanwhile(*args) -> None:
        with pytest.raises(FileError, match=f"^{out}: another run is writing it"):
            fuse_file(either.base, either.adapters, STATE, out, **SMALL)
        refused.append(save(*args))

    monkeypatch.setattr(journaling, "_save", meanwhile)
    fuse_file(either.base, either.adapters, STATE, out, **SMALL)
    assert len(refused) > 3
    assert_fused(either, STATE, out)


def test_a_run_that_waited_at_the_lock_of_one_that_ended_is_refused(model, out, monkeypatch):
    locked = journaling.fcntl.flock

    def flock(file, how) -> None:
        locked(file, how)
        shutil.rmtree(partial(out))  # as the other run did between our opening it and now

    monkeypatch.setattr(journaling.fcntl, "flock", flock)
    with pytest.raises(FileError, match=f"^{out}: another run"):
        fuse_file(model.base, model.adapters, STATE, out)
    assert not list(out.parent.iterdir())


@pytest.mark.parametrize("spoil", ["nan", "inf", "-inf", "overflow"])
def test_a_bad_factor_or_an_overflow_leaves_no_file_and_nothing_hidden(
    either, out, tmp_path, small_tiles, spoil
):
    tensors = load_file(either.adapters["user"].file.path)
    value = 3e38 if spoil == "overflow" else float(spoil)
    tensors["diffusion_model.c.lora_B.weight"].view(-1)[-1] = value
    save_file(tensors, tmp_path / "bad.safetensors")
    bad = Adapter.open(tmp_path / "bad.safetensors", either.base.tensors)
    message = {
        "overflow": f"weight '{PREFIX}c.weight': .* values overflow in rows",
    }.get(spoil, f"^{bad.file.path}: tensor 'diffusion_model.c.lora_B.weight': 1 values are not")
    with nothing_left(), pytest.raises(AdapterError, match=message):
        fuse_file(either.base, {"user": bad}, State(user=100.0), out, **SMALL)
    assert not list(out.parent.iterdir())


@pytest.mark.parametrize("which", ["base", "user"])
@pytest.mark.parametrize("change", ["touched", "cut off", "replaced", "gone"])
def test_an_input_that_changes_meanwhile_leaves_no_file(
    tmp_path, out, small_tiles, monkeypatch, which, change
):
    (tmp_path / "in").mkdir()
    model = write_model(tmp_path / "in")
    path = (model.base if which == "base" else model.adapters[which].file).path
    content, save = path.read_bytes(), journaling._save

    def change_it(folder, task, segments) -> None:
        save(folder, task, segments)
        if segments > 2:
            if change == "touched":
                os.utime(path, ns=(0, 0))
            elif change == "cut off":
                os.truncate(path, len(content) // 2)
            else:
                path.unlink(missing_ok=True)
                if change == "replaced":
                    path.write_bytes(content)

    monkeypatch.setattr(journaling, "_save", change_it)
    with nothing_left(), pytest.warns(UserWarning, match="broken off"):
        with pytest.raises(FileError, match=f"^{path}: "):
            fuse_file(model.base, model.adapters, STATE, out, **SMALL)
    assert not out.exists()


def test_after_success_nothing_is_left_of_the_run(either, out, small_tiles):
    with nothing_left():
        fuse_file(either.base, either.adapters, STATE, out, **SMALL)
    assert_fused(either, STATE, out)


def test_a_shard_without_bytes_is_no_stumbling_block_wherever_a_run_stops(sharded, tmp_path):
    fresh = tmp_path / "out" / "fused"
    for n in itertools.count(1):
        broken = OSError(errno.ENOSPC, "No space left")
        with failing(journaling, "_save", n, broken) as saves, suppress(FileError):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                fuse_file(sharded.base, sharded.adapters, STATE, fresh, **SMALL)
        if saves.calls < n:
            break
        done = fuse_file(sharded.base, sharded.adapters, STATE, fresh, **SMALL)
        assert (done.resumed_bytes > 0) == (n > 2)  # the first shard has no bytes
        assert_fused(sharded, STATE, fresh)
        shutil.rmtree(fresh)
    assert n > 10


def growth_of_memory(folder: Path) -> tuple[float, float]:
    """MB by which memory grows at most while 64 MB are fused to a file, and while they stream."""
    torch.set_num_threads(1)
    names = [f"{PREFIX}{i}.weight" for i in range(64)]
    write_raw(folder / "base.safetensors", {n: torch.randn(512, 1024).bfloat16() for n in names})
    base = Checkpoint.open(folder / "base.safetensors")
    factors = {}
    for i in range(64):
        factors[f"{i}.lora_A.weight"] = torch.randn(4, 1024)
        factors[f"{i}.lora_B.weight"] = torch.randn(512, 4)
    save_file(factors, folder / "user.safetensors")
    user = {"user": Adapter.open(folder / "user.safetensors", base.tensors)}
    grown = []
    for run in (
        lambda: fuse_file(base, user, State(user=1.0), folder / "out.safetensors",
                          overwrite=True, segment_bytes=2 << 20),
        lambda: StreamedWeights(base, user).load(State(user=1.0)),
    ):  # fmt: skip
        streamed.lay_out = partial_of(lay_out, limit=2 << 20)
        run()  # libraries set up what they keep
        with Observer(0.005) as observer:
            run()
        seen = observer.observation
        grown.append((seen.peak_private_bytes - seen.baseline_private_bytes) / 1e6)
    return grown[0], grown[1]


def test_memory_is_bounded_by_the_segments_whatever_the_models_size(tmp_path):
    for grown in alone(growth_of_memory, tmp_path):
        # segments of 2 MB, and the scratch of one worker: the delta and its f32 sum
        assert grown < BUFFERS * 2.2 + 3.2 + 8 < 64


@pytest.mark.parametrize("found", ["file", "link", "pipe", "folder"])
def test_what_isnt_an_earlier_runs_in_its_folders_place_is_left_alone(model, out, found):
    place = partial(out)
    place.parent.mkdir(parents=True, exist_ok=True)
    if found == "file":
        place.write_text("mine")
    elif found == "link":
        place.symlink_to(out.parent)
    elif found == "pipe":
        os.mkfifo(place)
    else:
        place.mkdir()
        (place / "mine.txt").write_text("mine")
    with pytest.raises(FileError, match=f"^{place}: expected the folder of an earlier run, found"):
        fuse_file(model.base, model.adapters, STATE, out)
    assert os.path.lexists(place)
    if found == "folder":
        assert [path.name for path in place.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize("found", ["pipe", "link to nothing"])
def test_only_a_file_is_overwritten(model, out, found):
    out.parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(out) if found == "pipe" else out.symlink_to("nothing.safetensors")
    with pytest.raises(FileError, match=f"^{out}: expected a file to overwrite"):
        fuse_file(model.base, model.adapters, STATE, out, overwrite=True)
    assert out.is_fifo() or out.is_symlink()
