"""Records refuse what can't be meant, survive a killed run, and keep machines apart."""

import dataclasses
import fcntl
import json
import os
import platform
import subprocess
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lorabench import machine, records
from lorabench.errors import ConfigError, FileError
from lorabench.machine import machine_name
from lorabench.measure import Samples
from lorabench.records import Record, append, key, read, to_frame

MEASURED: dict[str, Any] = {
    "case": {"strategy": {"kernel": "gemm", "restore": "reread"}, "blocks": 2, "shapes": [4, 8]},
    "seconds": (2.0, 1.0, 4.0),
    "warmup_seconds": (9.0,),
    "counted": {"flops": 8_000_000_000, "bytes_read": 10},
    "peak_private_bytes": 1 << 30,
    "check": "bits equal the reference's",
    "environment": {"machine": "amd-epyc-2c-avx2"},
    "commit": "1a2b3c4d5e6f",
    "provenance": "measured",
    "details": {"private_bytes": [1, 2, 3]},
}


def made(**changes: Any) -> Record:
    return Record(**(MEASURED | changes))


def lines(*made_records: Record, folder: Path) -> bytes:
    for record in made_records:
        append(folder / "whole.jsonl", record)
    return (folder / "whole.jsonl").read_bytes()


class TestRecord:
    def test_what_it_holds_is_plain_json_and_a_copy(self):
        case = {"blocks": np.int64(2), "strength": np.float32(0.5), "shapes": (4, 8)}
        record = made(case=case)
        case["blocks"] = 48
        assert record.case == {"blocks": 2, "strength": 0.5, "shapes": [4, 8]}
        assert type(record.case["blocks"]) is int

    def test_it_is_stamped_with_the_time_in_utc(self):
        assert made().time.endswith("+00:00")
        assert made(time="2026-01-02T03:04:05Z")

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"provenance": "guessed"}, r"provenance: expected one of .*'guessed'"),
            ({"provenance": "published"}, "source: a published record"),
            ({"provenance": "derived", "source": " "}, "source: a derived record"),
            ({"provenance": "predicted"}, "source: a predicted record"),
            ({"seconds": ()}, "seconds: expected a measured time"),
            ({"seconds": (0.0,)}, "seconds: expected a measured time"),
            ({"seconds": (1.0, -1.0)}, r"seconds\[1\]: expected seconds >= 0, found -1.0"),
            ({"seconds": (1.0, float("nan"))}, r"seconds\[1\]: expected a finite number"),
            ({"warmup_seconds": (float("inf"),)}, r"warmup_seconds\[0\]: expected a finite"),
            ({"seconds": "12"}, "seconds: expected a tuple"),
            ({"check": ""}, "check: a measured record"),
            ({"check": None}, "check: expected text"),
            ({"commit": ""}, "commit: expected"),
            ({"time": "2026-01-02T03:04:05"}, "time: expected ISO 8601 in UTC"),
            ({"time": "2026-01-02T03:04:05+02:00"}, "time: expected ISO 8601 in UTC"),
            ({"time": "yesterday"}, "time: expected ISO 8601 in UTC"),
            ({"case": {"a": {"b": [1, Path("x")]}}}, r"case\.a\.b\[1\]: expected JSON.*Path"),
            ({"case": {1: 2}}, r"case: expected names as keys, found \[1\]"),
            ({"case": [1]}, "case: expected a mapping"),
            ({"details": {"x": float("inf")}}, r"details\.x: expected a finite number"),
            ({"counted": {"flops": "many"}}, r"counted\.flops: expected a number"),
            ({"counted": {"flops": True}}, r"counted\.flops: expected a number"),
            ({"peak_private_bytes": -1}, "peak_private_bytes: expected bytes"),
            ({"peak_private_bytes": 1.5}, "peak_private_bytes: expected bytes"),
            ({"case": {"machine": "x"}}, "'machine'.* two columns"),
            ({"case": {"flops": 1}}, "'flops'.* two columns"),
            ({"details": {"blocks": 1}}, "'blocks'.* two columns"),
            ({"case": {"a.b": 1, "a": {"b": 2}}, "counted": {"a.b": 3}}, r"'a\.b'.* two columns"),
        ],
    )
    def test_what_can_not_be_meant_is_refused(self, changes, message):
        with pytest.raises(ConfigError, match=message):
            made(**changes)

    @pytest.mark.parametrize("provenance", ["derived", "predicted", "published"])
    def test_what_was_not_measured_needs_a_source_but_no_samples_or_check(self, provenance):
        assert made(provenance=provenance, source="sglang PR 22869", seconds=(), check="")


class TestKey:
    def test_order_of_fields_makes_no_difference_at_any_depth(self):
        assert key({"a": 1, "b": {"c": 2, "d": 3}}) == key({"b": {"d": 3, "c": 2}, "a": 1})

    def test_a_case_read_back_has_the_key_of_the_case_that_was_run(self, tmp_path):
        case = {"shape": (4, 8), "strength": 1, "name": "é"}
        append(tmp_path / "a.jsonl", made(case=case))
        [record] = read(tmp_path)
        assert key(record.case) == key(case)

    @pytest.mark.parametrize(
        ("one", "other", "same"),
        [
            (1, 1.0, True),
            (0.0, -0.0, True),
            (1, True, False),
            (0, None, False),
            (1, "1", False),
            (0.25, 0.5, False),
            ([1, 2], [2, 1], False),
            ([1.0], [1], True),
        ],
    )
    def test_equal_values_have_one_key_and_others_have_not(self, one, other, same):
        assert (key({"a": one}) == key({"a": other})) == same

    @given(st.dictionaries(st.text(), st.floats(allow_nan=False, allow_infinity=False)))
    def test_a_key_is_the_case_itself(self, case):
        assert json.loads(key(case)) == case


class TestFile:
    def test_records_come_back_as_they_were(self, tmp_path):
        written = [made(), made(seconds=(0.1 + 0.2,), case={"name": "naïve"})]
        lines(*written, folder=tmp_path)
        assert read(tmp_path / "whole.jsonl") == written

    def test_the_records_of_one_case_can_be_appended_together(self, tmp_path):
        together = [made(case={"step": step}) for step in range(3)]
        append(tmp_path / "a.jsonl", *together)
        assert read(tmp_path) == together

    def test_every_line_says_its_schema(self, tmp_path):
        [line] = lines(made(), folder=tmp_path).splitlines()
        assert json.loads(line)["schema"] == records.SCHEMA

    def test_a_folder_is_all_files_below_it_in_order(self, tmp_path):
        for name in ("b.jsonl", "a/z.jsonl", "a/y.jsonl"):
            append(tmp_path / name, made(case={"name": name}))
        (tmp_path / "notes.txt").write_text("not a record")
        assert [r.case["name"] for r in read(tmp_path)] == ["a/y.jsonl", "a/z.jsonl", "b.jsonl"]

    @pytest.mark.parametrize("cut", [1, 10, 0.5, -2])
    def test_a_run_killed_in_mid_line_loses_that_line_only(self, cut, tmp_path):
        first, lost, later = (made(case={"blocks": blocks}) for blocks in (1, 2, 3))
        line = lines(lost, folder=tmp_path)
        path = tmp_path / "killed" / "a.jsonl"
        append(path, first)
        with path.open("ab") as file:
            file.write(line[: int(len(line) * cut) if isinstance(cut, float) else cut])

        with pytest.warns(UserWarning, match=r"a\.jsonl: dropped a last record of \d+ bytes"):
            assert read(path) == [first]
        with pytest.warns(UserWarning, match="dropped"):
            append(path, later)
        assert read(path) == [first, later]
        append(path, lost)
        assert read(path) == [first, later, lost]

    def test_a_run_killed_before_the_newline_loses_nothing(self, tmp_path):
        path = tmp_path / "whole.jsonl"
        first, later = made(case={"blocks": 1}), made(case={"blocks": 2})
        path.write_bytes(lines(first, folder=tmp_path).removesuffix(b"\n"))
        assert read(path) == [first]
        append(path, later)
        assert read(path) == [first, later]

    def test_a_run_killed_in_the_first_line_leaves_a_file_to_go_on_with(self, tmp_path):
        path = tmp_path / "a.jsonl"
        path.write_bytes(b'{"schema": 1, "ca')
        with pytest.warns(UserWarning, match="dropped a last record of 17 bytes"):
            append(path, made())
        assert len(read(path)) == 1

    @pytest.mark.parametrize(
        "line",
        [
            b'{"schema": 1, "case": {',
            b"",
            b"[]",
            b"{}",
            b'{"schema": 1}',
            b'{"schema": 1, "case": {}, "surprise": 1}',
            b"\xff",
        ],
    )
    def test_a_damaged_line_elsewhere_is_an_error_with_its_place(self, line, tmp_path):
        path = tmp_path / "whole.jsonl"
        whole = lines(made(), folder=tmp_path)
        path.write_bytes(whole + line + b"\n" + whole)
        with pytest.raises(FileError, match=r"whole\.jsonl:2: expected a record"):
            read(path)

    def test_a_line_that_says_what_no_record_may_is_an_error_with_its_place(self, tmp_path):
        path = tmp_path / "whole.jsonl"
        path.write_bytes(lines(made(), folder=tmp_path).replace(b"measured", b"guessed"))
        with pytest.raises(FileError, match=r":1: .*'guessed'"):
            read(path)

    def test_a_later_schema_is_told(self, tmp_path):
        path = tmp_path / "whole.jsonl"
        path.write_bytes(lines(made(), folder=tmp_path).replace(b'"schema": 1', b'"schema": 2'))
        with pytest.raises(FileError, match=r":1: expected schema 1, found 2; .* update"):
            read(path)

    def test_nothing_there_is_an_error(self, tmp_path):
        with pytest.raises(FileError, match=r"absent\.jsonl: can't read"):
            read(tmp_path / "absent.jsonl")

    def test_a_place_that_can_not_be_written_is_an_error(self, tmp_path):
        (tmp_path / "file").touch()
        with pytest.raises(FileError, match="can't append"):
            append(tmp_path / "file" / "a.jsonl", made())

    def test_a_line_that_another_writer_has_begun_is_waited_for(self, tmp_path):
        path = tmp_path / "a.jsonl"
        theirs, ours = made(case={"blocks": 1}), made(case={"blocks": 2})
        line = lines(theirs, folder=tmp_path / "other")
        with path.open("ab", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(line[:50])
            writer = threading.Thread(target=append, args=(path, ours))
            writer.start()
            writer.join(0.2)
            file.write(line[50:])
        writer.join()
        assert read(path) == [theirs, ours]


@pytest.fixture(scope="module")
def found():
    return machine.environment()


class TestEnvironment:
    def test_it_is_fit_for_a_record(self, found):
        assert made(environment=found).environment == found

    def test_it_says_what_a_reader_of_a_figure_asks(self, found):
        assert found["cores"] >= 1
        assert found["memory_bytes"] > 1 << 28
        assert found["torch"] == torch.__version__
        assert isinstance(found["fast_bf16_products"], bool)
        assert found["cpu"]

    def test_it_does_not_say_whose_machine_it_is(self, found):
        assert platform.node() not in found.values()
        assert str(Path.home()) not in json.dumps(found)
        asked = "machine cpu cores memory_bytes os kernel python torch numpy numba safetensors"
        asked += " torch_cpu_capability torch_threads fast_bf16_products"
        asked += " cuda_device cuda cuda_driver load_average"
        assert set(found) == set(asked.split()), "is the new one free of names and paths?"

    def test_a_package_that_is_not_installed_has_no_version(self):
        assert machine._version("lorabench-has-no-such-package") is None

    @pytest.mark.parametrize(
        ("cpu", "cores", "capability", "gpu", "label"),
        [
            ("AMD EPYC", 2, "AVX2", None, "amd-epyc-2c-avx2"),
            ("AMD EPYC 9B14 96-Core Processor", 8, "AVX512", None, "amd-epyc-9b14-8c-avx512"),
            (
                "Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz",
                16,
                "AVX512",
                "NVIDIA H200",
                "intel-xeon-platinum-8481c-16c-avx512-nvidia-h200",
            ),
            ("aarch64", 20, "DEFAULT", "NVIDIA GB10", "aarch64-20c-default-nvidia-gb10"),
        ],
    )
    def test_a_machine_has_one_short_label(self, cpu, cores, capability, gpu, label, monkeypatch):
        monkeypatch.setattr(machine, "_cpu_model", lambda: cpu)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(cores), raising=False)
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu is not None)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: gpu)
        assert machine_name(machine.environment()) == label

    def test_a_figure_from_elsewhere_may_name_no_machine(self):
        assert machine_name({}) == "unknown"


class TestGitCommit:
    @pytest.fixture
    def git(self, tmp_path, monkeypatch):
        """A checkout whose package holds this module, and git to change it with."""
        package = tmp_path / "checkout" / "lorabench"
        package.mkdir(parents=True)
        (package / "machine.py").write_text("as committed")
        (tmp_path / "checkout" / "data" / "records").mkdir(parents=True)
        (tmp_path / "checkout" / "data" / "records" / "a.jsonl").write_text("as committed")
        monkeypatch.setattr(machine, "__file__", str(package / "machine.py"))
        monkeypatch.chdir(tmp_path)

        def run(*arguments: str) -> str:
            who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
            command = ["git", *who, "-C", str(tmp_path / "checkout"), *arguments]
            return subprocess.run(command, check=True, capture_output=True, text=True).stdout

        run("init", "-q")
        return run

    def test_outside_a_checkout_it_is_unknown(self, git):
        assert machine.git_commit() == "unknown"

    def test_inside_a_checkout_of_something_else_it_is_unknown(self, git):
        git("commit", "-q", "--allow-empty", "-m", "something else")
        assert machine.git_commit() == "unknown"

    def test_it_is_the_commit_and_tells_of_changed_code(self, git, monkeypatch):
        git("add", ".")
        git("commit", "-q", "-m", "first")
        commit = git("rev-parse", "HEAD")[:12]
        assert machine.git_commit() == commit

        data = Path(machine.__file__).parents[1] / "data" / "records"
        (data / "a.jsonl").write_text("one more record")
        (data / "b.jsonl").write_text("a new file")
        assert machine.git_commit() == commit, "records being collected aren't changes of the code"

        monkeypatch.setenv("GIT_DIR", "elsewhere")
        assert machine.git_commit() == commit, "a hook's variables don't lead astray"
        monkeypatch.delenv("GIT_DIR")

        Path(machine.__file__).write_text("changed")
        assert machine.git_commit() == f"{commit}+dirty"

    def test_without_git_it_is_unknown(self, git, monkeypatch, tmp_path):
        git("add", ".")
        git("commit", "-q", "-m", "first")
        monkeypatch.setenv("PATH", str(tmp_path))
        assert machine.git_commit() == "unknown"


class TestFrame:
    def test_a_row_has_the_case_the_statistics_the_counts_and_the_origin(self):
        frame = to_frame([made(time="2026-01-02T03:04:05+00:00")])
        assert frame.to_dict("records") == [
            {
                "strategy.kernel": "gemm",
                "strategy.restore": "reread",
                "blocks": 2,
                "shapes": (4, 8),
                "n": 3,
                "median_s": 2.0,
                "min_s": 1.0,
                "spread": 0.75,  # quartiles 1.5 and 3.0 over the median 2.0
                "gflops_per_s": 4.0,  # 8 GFLOP in the median of 2 s
                "peak_private_bytes": 1 << 30,
                "flops": 8_000_000_000,
                "bytes_read": 10,
                "provenance": "measured",
                "source": "",
                "machine": "amd-epyc-2c-avx2",
                "commit": "1a2b3c4d5e6f",
                "time": "2026-01-02T03:04:05+00:00",
                "check": "bits equal the reference's",
            }
        ]

    def test_details_that_are_single_values_are_columns_and_series_are_not(self):
        frame = to_frame([made(details={"wrong_share": 0.25, "times": [1, 2], "by": {"x": 1}})])
        assert frame["wrong_share"].tolist() == [0.25]
        assert not {"times", "by", "by.x"} & set(frame.columns)

    def test_its_statistics_are_those_of_samples(self):
        seconds = (3.1, 2.7, 2.9, 4.4, 2.8, 3.3)
        [row] = to_frame([made(seconds=seconds)]).to_dict("records")
        samples = Samples(seconds)
        assert (row["median_s"], row["min_s"]) == (samples.median, samples.min)
        assert row["spread"] == samples.spread

    def test_machines_and_repetitions_keep_rows_of_their_own(self):
        there = made(environment={"machine": "aarch64-20c-nvidia-gb10"})
        frame = to_frame([made(), there, made()])
        assert list(frame["machine"]) == [
            "amd-epyc-2c-avx2",
            "aarch64-20c-nvidia-gb10",
            "amd-epyc-2c-avx2",
        ]

    def test_what_a_record_lacks_is_missing_in_its_row(self):
        bare = Record(
            case={"layout": "residual"},
            environment={},
            commit="unknown",
            provenance="published",
            source="TensorRT-LLM PR 14984",
        )
        frame = to_frame([made(seconds=(2.0,)), bare])
        assert frame["layout"].isna().tolist() == [True, False]
        for column in (
            "blocks",
            "median_s",
            "min_s",
            "gflops_per_s",
            "flops",
            "peak_private_bytes",
        ):
            assert frame[column].isna().tolist() == [False, True], column
        assert frame["spread"].isna().tolist() == [True, True], "one sample has no spread"
        assert frame["machine"].tolist() == ["amd-epyc-2c-avx2", "unknown"]

    def test_no_records_make_an_empty_frame_with_its_columns(self):
        frame = to_frame([])
        assert frame.empty
        assert {"median_s", "machine", "provenance"} <= set(frame.columns)

    def test_reading_a_frame_from_a_file_changes_nothing(self, tmp_path):
        original = made()
        append(tmp_path / "a.jsonl", original)
        assert to_frame(read(tmp_path)).equals(to_frame([original]))


def test_a_record_can_not_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        made().check = "passed"  # pyright: ignore[reportAttributeAccessIssue]


def test_a_file_that_ends_in_something_else_than_a_record_is_left_alone(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("a note of mine")
    with pytest.raises(FileError, match="ends in something that is no record"):
        append(path, made())
    assert path.read_text() == "a note of mine"


def test_a_pipe_in_place_of_records_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FileError, match="expected a file or folder of records"):
        read(tmp_path / "pipe")
