"""Synthetic weights: real names and shapes, seeded bits, asked-for statistics, bounded memory."""

import gc
import json
import shutil
import weakref
from pathlib import Path

import pytest
import torch
from conftest import ADAPTERS
from safetensors import safe_open

from lorabench import synthetic
from lorabench.checkpoint import Checkpoint
from lorabench.errors import ConfigError, FileError, UnavailableError
from lorabench.geometry import TensorSpec, from_tensors, load_geometry
from lorabench.synthetic import SIZES, WEIGHT_STD, Files, sample_weights, synthesize

PREFIX = "model.diffusion_model.transformer_blocks.0"
SMALL = load_geometry("ltx-2.5-22b", shrink=32)


def paths(files: Files) -> list[Path]:
    return [files.base, *files.adapters.values()]


def test_one_seed_gives_one_files_bytes(files, geometry, tmp_path):
    again = synthesize(tmp_path, geometry, ADAPTERS, seed=7, ratio=0.3)
    for one, other in zip(paths(files), paths(again), strict=True):
        assert one.read_bytes() == other.read_bytes()


def test_another_seed_gives_other_weights(files, base, geometry, tmp_path):
    other = Checkpoint.open(synthesize(tmp_path, geometry, (), seed=8).base)
    assert not any(torch.equal(base.read(name), other.read(name)) for name in base.entries)


def test_tensors_of_one_shape_differ_from_each_other(base):
    q, k, v = (base.read(f"{PREFIX}.attn1.to_{half}.weight") for half in "qkv")
    assert not torch.equal(q, k)
    assert not torch.equal(k, v)


def test_adapters_differ_from_each_other_and_factors_from_each_other(adapters):
    user, distilled = (adapters[role].file for role in ("user", "distilled"))
    same = [torch.equal(user.read(name), distilled.read(name)) for name in user.entries]
    assert not any(same)
    q = "diffusion_model.transformer_blocks.0.attn1.to_q"
    a, b = user.read(f"{q}.lora_A.weight"), user.read(f"{q}.lora_B.weight")
    assert a.shape == b.T.shape
    assert not torch.equal(a, b.T)


def test_a_cut_holds_the_weights_of_the_whole(tmp_path):
    two = synthesize(tmp_path / "two", SMALL.cut(2), seed=3)
    one = synthesize(tmp_path / "one", SMALL.cut(1), seed=3)
    for part, whole in zip(paths(one), paths(two), strict=True):
        cut, longer = Checkpoint.open(part), Checkpoint.open(whole)
        assert cut.entries.keys() < longer.entries.keys()
        assert all(torch.equal(cut.read(name), longer.read(name)) for name in cut.entries)


def test_every_base_tensor_has_the_std_of_weights(base):
    for spec in base.tensors:
        if spec.params >= 4096:
            values = base.read(spec.name).double()
            # five standard errors of a std, and of a mean
            assert abs(values.std() / WEIGHT_STD - 1) < 5 / (2 * spec.params) ** 0.5, spec.name
            assert abs(values.mean() / WEIGHT_STD) < 5 / spec.params**0.5, spec.name


@pytest.mark.parametrize("ratio", [0.01, 0.3])
def test_the_deltas_std_is_the_asked_for_ratio_of_the_weights(geometry, tmp_path, ratio):
    files = synthesize(tmp_path, geometry, ratio=ratio)
    file = Checkpoint.open(files.adapters["distilled"])
    total, count = 0.0, 0
    for target in geometry.targets:
        stem = f"{geometry.adapter_prefix}{target.module}"
        a, b = (file.read(f"{stem}.lora_{half}.weight").double() for half in "AB")
        total += float((b @ a).square().sum())
        count += target.weight.params
        assert 0.5 < (b @ a).std() / (ratio * WEIGHT_STD) < 2 or target.weight.params < 1024
    assert (total / count) ** 0.5 / WEIGHT_STD == pytest.approx(ratio, rel=0.05)


def test_names_dtypes_and_metadata_are_those_of_the_shipped_files(files, geometry):
    base = Checkpoint.open(files.base)
    assert base.tensors == geometry.tensors
    assert base.metadata == {"geometry": "ltx-2.5-22b", "seed": "7"}
    for path in files.adapters.values():
        adapter = Checkpoint.open(path)
        assert adapter.tensors == tuple(geometry.adapter_tensors())
        assert adapter.metadata == {"lora_rank": "14", "lora_alpha": "14", "seed": "7"}
        assert len(adapter.tensors) == 2 * 62
        with safe_open(path, "pt") as theirs:
            assert sorted(theirs.keys()) == sorted(adapter.entries)


def test_files_are_as_large_as_the_geometry_predicts(files, geometry):
    counts = geometry.counts()
    nbytes = [counts.tensor_bytes, *[counts.adapter_tensor_bytes] * len(ADAPTERS)]
    for path, expected in zip(paths(files), nbytes, strict=True):
        header = int.from_bytes(path.read_bytes()[:8], "little")
        assert path.stat().st_size == 8 + header + expected
        json.loads(path.read_bytes()[8 : 8 + header])


def test_files_lie_where_they_can_be_named_without_looking(files):
    assert Files.inside(files.base.parent, ADAPTERS) == files
    assert [path.name for path in paths(files)] == [
        "base.safetensors",
        *(f"{name}.safetensors" for name in ADAPTERS),
    ]


@pytest.mark.parametrize("existing", ["base", *ADAPTERS])
def test_an_existing_file_is_found_before_anything_is_written(geometry, tmp_path, existing):
    path = tmp_path / f"{existing}.safetensors"
    path.write_bytes(b"precious")
    with pytest.raises(FileError, match=f"^{path}: exists already"):
        synthesize(tmp_path, geometry, ADAPTERS)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    assert path.read_bytes() == b"precious"
    files = synthesize(tmp_path, SMALL.cut(0), ADAPTERS, overwrite=True)
    assert Checkpoint.open(files.base).tensors == SMALL.cut(0).tensors


def test_a_geometry_without_a_rank_is_refused_before_anything_is_written(geometry, tmp_path):
    without = from_tensors("mine", geometry.tensors)
    with pytest.raises(ConfigError, match="'mine' comes without an adapter rank"):
        synthesize(tmp_path, without)
    assert not list(tmp_path.iterdir())
    assert synthesize(tmp_path, without, ()).base.exists()


@pytest.mark.parametrize("name", ["base", "", "a/b", "a.b", "..", "two words"])
def test_a_name_that_is_no_files_is_refused(geometry, tmp_path, name):
    with pytest.raises(ConfigError, match=f"adapter name '{name}'"):
        synthesize(tmp_path, geometry, [name])
    assert not list(tmp_path.iterdir())


def test_one_name_twice_is_refused(geometry, tmp_path):
    with pytest.raises(ConfigError, match=r"'user' must be .* given once"):
        synthesize(tmp_path, geometry, ["user", "user"])


@pytest.mark.parametrize("ratio", [0, -0.1, float("inf"), float("nan")])
def test_a_ratio_that_is_not_positive_is_refused(geometry, tmp_path, ratio):
    with pytest.raises(ConfigError, match=f"positive number, 100 at most, found {ratio}"):
        synthesize(tmp_path, geometry, ratio=ratio)


def test_one_tensor_is_alive_at_a_time(geometry, tmp_path, monkeypatch):
    made: list[weakref.ref[torch.Tensor]] = []
    make = synthetic._normal

    def watched(spec: TensorSpec, seed: str, std: float) -> torch.Tensor:
        gc.collect(0)
        assert not [ref for ref in made if ref() is not None], f"two are alive at {spec.name}"
        tensor = make(spec, seed, std)
        made.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(synthetic, "_normal", watched)
    synthesize(tmp_path, geometry, ADAPTERS)
    assert len(made) == len(geometry.tensors) + len(ADAPTERS) * 2 * 62


def test_a_failure_in_one_file_leaves_those_before_it_and_no_half_of_it(
    geometry, tmp_path, monkeypatch
):
    make = synthetic._normal

    def failing(spec: TensorSpec, seed: str, std: float) -> torch.Tensor:
        if "lora_B" in spec.name:
            raise KeyboardInterrupt
        return make(spec, seed, std)

    monkeypatch.setattr(synthetic, "_normal", failing)
    with pytest.raises(KeyboardInterrupt):
        synthesize(tmp_path, geometry)
    assert [path.name for path in tmp_path.iterdir()] == ["base.safetensors"]


def test_sample_weights_are_written_once_and_found_again(tmp_path):
    files = sample_weights(tmp_path, "tiny")
    assert files.base.parent == tmp_path / "ltx-2.5-22b-tiny"
    geometry = load_geometry("ltx-2.5-22b", shrink=SIZES["tiny"].shrink).cut(2)
    assert Checkpoint.open(files.base).tensors == geometry.tensors
    written = [path.stat().st_mtime_ns for path in paths(files)]
    assert sample_weights(tmp_path, "tiny") == files
    assert [path.stat().st_mtime_ns for path in paths(files)] == written


def test_another_adapters_sample_leaves_the_base_as_it_is(tmp_path):
    both = sample_weights(tmp_path, "tiny", ["distilled", "user"])
    kept = {path: path.stat() for path in (both.base, both.adapters["distilled"])}
    was = both.adapters["user"].read_bytes()
    both.adapters["user"].unlink()
    assert sample_weights(tmp_path, "tiny", ["user"]).base == both.base
    assert both.adapters["user"].read_bytes() == was
    for path, stat in kept.items():
        assert (path.stat().st_ino, path.stat().st_mtime_ns) == (stat.st_ino, stat.st_mtime_ns)


def test_sample_weights_of_an_unknown_size_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"'tinny' \(did you mean 'tiny'\?\)"):
        sample_weights(tmp_path, "tinny")


def test_sample_weights_do_not_take_other_weights_for_theirs(tmp_path):
    folder = tmp_path / "ltx-2.5-22b-tiny"
    files = synthesize(folder, SMALL.cut(0))
    with pytest.raises(FileError, match=f"^{files.base}: holds other weights"):
        sample_weights(tmp_path, "tiny")
    (folder / "distilled.safetensors").unlink()
    with pytest.raises(FileError, match=f"^{files.base}: holds other weights"):
        sample_weights(tmp_path, "tiny")


def test_a_size_that_memory_cannot_hold_is_refused_before_anything_is_written(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(synthetic, "available_bytes", lambda: 40_000_000_000)
    with pytest.raises(UnavailableError, match=r"size 'full' needs 46,\d+,\d+,\d+ bytes of memory"):
        sample_weights(tmp_path, "full")
    assert list(tmp_path.iterdir()) == []


def test_room_for_base_and_adapters_together_is_checked_before_the_base_is_written(
    geometry, tmp_path, monkeypatch
):
    counts = geometry.counts()
    both = counts.tensor_bytes + counts.adapter_tensor_bytes
    usage = shutil.disk_usage(tmp_path)._replace(free=both - 1)  # enough for either alone
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(FileError, match=f"needs {both:,} bytes, but the disk has {both - 1:,}"):
        synthesize(tmp_path / "weights", geometry)
    assert list(tmp_path.iterdir()) == []
