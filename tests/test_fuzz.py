"""Files made at random: applied as they say or refused by name, and nothing else."""

import json
import os
import re
import warnings
from contextlib import suppress
from pathlib import Path
from random import Random

import fuzzing
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lorabench.adapter import Adapter
from lorabench.adapter_file import AdapterFile
from lorabench.errors import AdapterError, FileError
from lorabench.geometry import TensorSpec
from lorabench.inspected import inspect_text

CASES = 4_000

SHAPE = (4, 3)
SEGMENTS = st.text("ab01_", min_size=1, max_size=4)
MODULES = st.lists(SEGMENTS, min_size=1, max_size=4).map(".".join)
BASES = st.lists(MODULES, min_size=1, max_size=6, unique=True)
WRAPPERS = ("", "diffusion_model.", "model.diffusion_model.", "transformer.", "base_model.model.")
HALVES = (
    ("lora_A", "lora_B"),
    ("lora_A.default", "lora_B.default"),
    ("lora_down", "lora_up"),
    ("lora.down", "lora.up"),
    ("lora_linear_layer.down", "lora_linear_layer.up"),
)
FLAT_PREFIXES = ("lora_unet_", "lora_transformer_", "lycoris_")
UNDERSTOOD = re.compile(
    r"(?s).+\.((lora_[AB](\.[^.]+)?|lora_(down|up)|lora(_linear_layer)?\.(down|up))\.(weight|bias)"
    r"|alpha|diff|diff_b)"
)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("names") / "a.safetensors"


def base_of(modules, prefix=""):
    """A base of linear layers of these names."""
    return [TensorSpec(f"{prefix}{module}.weight", SHAPE, "BF16") for module in modules]


def pair(module, halves=HALVES[0]):
    """The tensors of a module, by name."""
    a, b = halves
    return {f"{module}.{a}.weight": ("F32", (2, 3)), f"{module}.{b}.weight": ("F32", (4, 2))}


def write(path: Path, tensors: fuzzing.Tensors, **metadata: str) -> Path:
    path.write_bytes(fuzzing.encode(Random(0), tensors, metadata, damage=0.0))
    return path


def weights_by_path(adapter: Adapter) -> dict[str, str]:
    """The base's module that each of an adapter's paths came to, by its factors' names."""
    return {
        re.sub(r"\.lora.*", "", pair.b.spec.name): pair.weight.name.removesuffix(".weight")
        for pair in adapter.pairs
    }


def test_of_random_files_some_are_applied_and_the_rest_are_refused_by_name(tmp_path):
    tally = fuzzing.fuzz(0, range(CASES), tmp_path)
    assert tally.runs == CASES
    assert tally.accepted_share > 0.25, tally.told(1)
    assert tally.accepted["base"] > CASES * 0.07
    assert len(tally.reasons) > 150
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("break_it", ["take much memory", "write", "raise", "lose a tensor"])
def test_what_must_not_be_is_found(tmp_path, monkeypatch, break_it):
    opened = Adapter.open

    def broken(path, *args, **kwargs):
        adapter = opened(path, *args, **kwargs)
        if break_it == "take much memory":
            bytearray(2 * fuzzing.MEMORY)
        elif break_it == "write":
            Path(path).touch()
        elif break_it == "raise":
            raise KeyError(path)
        else:
            object.__setattr__(adapter, "pairs", adapter.pairs[:-1])
        return adapter

    monkeypatch.setattr(Adapter, "open", broken)
    with pytest.raises((MemoryError, AssertionError, KeyError)) as found:
        fuzzing.fuzz(0, range(100), tmp_path)
    assert "fuzzing.py --seed 0 --case" in found.value.__notes__[0]


@settings(max_examples=60)
@given(
    modules=BASES,
    base=st.sampled_from(WRAPPERS),
    adapter=st.sampled_from(WRAPPERS),
    halves=st.sampled_from(HALVES),
)
def test_every_module_is_found_under_every_wrapper_and_suffix(path, modules, base, adapter, halves):
    tensors = {k: v for m in modules for k, v in pair(f"{adapter}{m}", halves).items()}
    found = Adapter.open(write(path, tensors), base_of(modules, base))
    assert weights_by_path(found) == {f"{adapter}{m}": f"{base}{m}" for m in modules}


@settings(max_examples=60)
@given(
    modules=BASES,
    base=st.sampled_from(WRAPPERS),
    named=st.sampled_from(WRAPPERS),
    flat=st.sampled_from(FLAT_PREFIXES),
    halves=st.sampled_from(HALVES),
    data=st.data(),
)
def test_a_flattened_path_is_the_one_module_that_flattens_to_it_or_is_refused_with_all_that_do(
    path, modules, base, named, flat, halves, data
):
    module = data.draw(st.sampled_from(modules))
    written = (
        named if base.endswith(named) else ""
    )  # a wrapper that the base has not is not looked for
    flattened = flat + f"{written}{module}".replace(".", "_")
    same = [m for m in modules if m.replace(".", "_") == module.replace(".", "_")]
    write(path, pair(flattened, halves))
    if len(same) == 1:
        found = Adapter.open(path, base_of(modules, base))
        assert weights_by_path(found) == {flattened: f"{base}{module}"}
    else:
        with pytest.raises(AdapterError, match="may mean") as refused:
            Adapter.open(path, base_of(modules, base))
        assert all(f"'{base}{m}'" in str(refused.value) for m in same[:4])


@settings(max_examples=60)
@given(
    segments=st.lists(SEGMENTS, min_size=2, max_size=4),
    others=BASES,
    data=st.data(),
)
def test_modules_that_flatten_to_one_name_are_both_named(path, segments, others, data):
    joints = st.lists(
        st.sampled_from("._"), min_size=len(segments) - 1, max_size=len(segments) - 1
    ).map("".join)
    one, other = (
        "".join(a + b for a, b in zip(segments, f"{joint} ", strict=True)).strip()
        for joint in data.draw(st.lists(joints, min_size=2, max_size=2, unique=True))
    )
    flattened = one.replace(".", "_")
    modules = dict.fromkeys([one, other, *(m for m in others if m.replace(".", "_") != flattened)])
    write(path, pair(f"lora_unet_{flattened}"))
    with pytest.raises(AdapterError, match="may mean") as refused:
        Adapter.open(path, base_of(modules))
    assert f"'{one}'" in str(refused.value)
    assert f"'{other}'" in str(refused.value)
    found = Adapter.open(write(path, pair(one) | pair(other)), base_of(modules))
    assert weights_by_path(found) == {one: one, other: other}


@settings(max_examples=150)
@given(
    modules=BASES,
    at=st.integers(0, 20),
    cut=st.integers(0, 1),
    put=st.text("ab01_.", max_size=2),
    flat=st.booleans(),
)
def test_a_path_that_was_changed_means_nothing_but_what_it_now_says(
    path, modules, at, cut, put, flat
):
    changed = modules[0].replace(".", "_") if flat else modules[0]
    changed = changed[:at] + put + changed[at + cut :]
    assume(changed)
    write(path, pair(changed))
    found = None
    with suppress(AdapterError):
        found = Adapter.open(path, base_of(modules))
    if found is None:
        return
    [meant] = weights_by_path(found).values()
    inner = [meant, *(f"{meant}.{name}" for name in ("0", "linear", "base_layer"))]
    if meant.endswith(".0"):
        inner.append(meant.removesuffix(".0"))
    assert changed in [*inner, *(name.replace(".", "_") for name in inner)]


SUFFIXES = [f"{half}.weight" for halves in HALVES for half in halves] + [
    *("alpha", "diff", "diff_b", "dora_scale", "hada_w1_a", "lokr_w1", "lora_mid.weight", "weight")
]


@settings(max_examples=150)
@given(
    suffix=st.one_of(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
        st.tuples(
            st.sampled_from(SUFFIXES), st.integers(0, 12), st.text("aAB_.xw", max_size=1)
        ).map(lambda drawn: drawn[0][: drawn[1]] + drawn[2] + drawn[0][drawn[1] + 1 :]),
    )
)
def test_a_suffix_that_is_not_known_is_refused_by_name_or_listed(path, suffix):
    odd = f"b.{suffix}"
    assume(not UNDERSTOOD.fullmatch(odd))
    write(path, pair("a") | pair("b") | {odd: ("F32", SHAPE)})
    with pytest.raises(AdapterError) as refused:
        Adapter.open(path, base_of("ab"), allow_unmatched=True)
    assert f"'{odd}'" in str(refused.value)
    found = Adapter.open(path, base_of("ab"), allow_skip=True)
    kinds = {key.name: key.kind for key in found.skipped}
    # Of what is understood as another kind's, the path may be one below b.
    if kinds[odd] == "a key that isn't understood" or re.fullmatch(r"b\.[^.]+", odd):
        assert weights_by_path(found) == {"a": "a"}
        assert kinds.keys() == {odd, *pair("b")}
    else:
        assert weights_by_path(found).items() >= {"a": "a"}.items()


class TestFound:
    """What came out of longer runs, and of looking for it."""

    @pytest.fixture
    def adapter(self, tmp_path):
        return write(tmp_path / "adapter_model.safetensors", pair("a"))

    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (os.mkfifo, "expected a JSON file, found a folder or device"),
            (os.mkdir, "expected a JSON file, found a folder or device"),
            (
                lambda path: path.symlink_to(path),
                "can't be read: Too many levels of symbolic links",
            ),
            (lambda path: path.symlink_to("missing"), "can't be read: No such file or directory"),
            (lambda path: path.symlink_to("/dev/zero"), "expected a JSON file, found a folder or"),
            (
                lambda path: path.write_bytes(b""),
                r"the file is not JSON in UTF-8 \(Expecting value",
            ),
            (lambda path: path.write_bytes(b"[]"), r"the file must be a JSON object, found \[\]"),
        ],
    )
    def test_a_configuration_that_can_not_be_read_is_not_taken_for_none(
        self, adapter, make, message
    ):
        make(config := adapter.with_name("adapter_config.json"))
        with pytest.raises(FileError, match=f"^{config}: {message}"):
            AdapterFile.open(adapter)

    def test_a_configuration_goes_with_an_index_of_shards_too(self, adapter):
        index = adapter.with_name("adapter_model.safetensors.index.json")
        index.write_text(json.dumps({"weight_map": dict.fromkeys(pair("a"), adapter.name)}))
        config = {"peft_type": "LORA", "r": 2, "lora_alpha": 5}
        adapter.with_name("adapter_config.json").write_text(json.dumps(config))
        assert AdapterFile.open(index).modules[0].scale.value == 2.5

    def test_a_pattern_that_a_later_python_may_read_otherwise_is_read_as_by_this_one(self, adapter):
        config = {"r": 1, "lora_alpha": 8, "rank_pattern": {"[[a]": 2}}
        adapter.with_name("adapter_config.json").write_text(json.dumps(config))
        with warnings.catch_warnings(action="error"):
            assert AdapterFile.open(adapter).modules[0].scale.value == 4

    @pytest.mark.parametrize(
        ("config", "message"),
        [
            ({"rank_pattern": {"(": 2}}, r"rank_pattern: '\(' is no regular expression: missing"),
            ({"rank_pattern": {"a{99999999999}": 2}}, r"'a.9*.' is no regular expression"),
            ({"rank_pattern": {"(" * 5000: 2}}, r"is no regular expression: "),
            ({"rank_pattern": ["a"]}, r"rank_pattern: expected patterns, found \['a'\]"),
            ({"rank_pattern": {"a": "2"}}, r"rank_pattern\.a: expected a finite number, found '2'"),
            (
                {"lora_alpha": 10**400},
                r"lora_alpha: expected a finite number, found 1000*\.\.\.0*$",
            ),
            ({"lora_alpha": float("nan")}, "lora_alpha: expected a finite number, found nan"),
            ({"r": True}, "r: expected a finite number, found True"),
            ({"peft_type": ["x" * 9999]}, r"says peft_type \['xxx.*\.\.\.x*'\]; expected 'LORA'"),
        ],
    )
    def test_a_configuration_that_says_what_is_no_number_is_refused(self, adapter, config, message):
        whole = {"r": 2, "lora_alpha": 8} | config
        beside = adapter.with_name("adapter_config.json")
        beside.write_text(json.dumps(whole))
        with pytest.raises(AdapterError, match=rf"^{adapter}: {beside}.*{message}") as refused:
            AdapterFile.open(adapter)
        assert len(str(refused.value)) < 1_000

    def test_a_bias_of_another_length_than_its_weight_is_not_added_to(self, path):
        base = [*base_of("a"), TensorSpec("a.bias", (1,), "BF16")]
        write(path, {"a.diff_b": ("F32", (4,))})
        with pytest.raises(AdapterError, match=r"'a\.bias' is \[1\], but its weight has 4 rows"):
            Adapter.open(path, base)

    def test_metadata_of_a_long_name_is_told_in_few_words(self):
        fields = {
            **{"kind": "adapter", "path": "a", "files": ["a"], "bytes": 1, "tensors": 0},
            **{"dtypes": {}, "params": 0, "kinds": {}, "names": [], "modules": 0, "ranks": {}},
            **{"scales": [], "factor_bytes": 0, "pass_flops": 0, "text_encoders": []},
            "metadata": {"k" * 1_000_000: "v" * 1_000_000, "workflow": '{"nodes":' * 1000},
        }
        text = inspect_text(fields)
        assert "  kkkkk" in text
        assert '{"nodes":{"nodes":' in text
        assert max(map(len, text.splitlines())) <= 100
        assert len(text) < 1_000
