"""Adapters: understood whole or refused by name, never skipped in silence."""

import pytest
import torch
from safetensors.torch import save_file

from lorabench.adapter import Adapter
from lorabench.checkpoint import Checkpoint
from lorabench.errors import AdapterError, FileError, WeightsLostError
from lorabench.geometry import TensorSpec
from lorabench.resident import ResidentWeights

OUT, IN, RANK = 6, 8, 2
BASE = [
    TensorSpec("model.diffusion_model.attn.to_q.weight", (OUT, IN), "BF16"),
    TensorSpec("model.diffusion_model.attn.to_q.bias", (OUT,), "BF16"),
    TensorSpec("model.diffusion_model.attn.to_k.weight", (OUT, IN), "F32"),
    TensorSpec("model.diffusion_model.norm.weight", (IN,), "BF16"),
    TensorSpec("model.diffusion_model.half.weight", (OUT, IN), "F16"),
]
Q, K = "diffusion_model.attn.to_q", "diffusion_model.attn.to_k"


def pair(module, out=OUT, in_=IN, rank=RANK, dtype=torch.bfloat16):
    """The two tensors of a module."""
    return {
        f"{module}.lora_A.weight": torch.ones(rank, in_).to(dtype),
        f"{module}.lora_B.weight": torch.ones(out, rank).to(dtype),
    }


@pytest.fixture
def write(tmp_path):
    path = tmp_path / "adapter.safetensors"

    def write(tensors, **metadata):
        save_file(tensors, path, metadata or None)
        return path

    return write


def test_the_shrunk_adapters_match_every_target_at_its_rank(geometry, adapters):
    for adapter in adapters.values():
        assert adapter.targets == geometry.targets
        assert adapter.ranks == geometry.counts().ranks
        assert adapter.factor_bytes == geometry.counts().adapter_tensor_bytes
        assert adapter.unmatched == ()


def test_pairs_carry_the_factors_of_the_file(files, adapters):
    file = Checkpoint.open(files.adapters["user"])
    for name, found in adapters["user"].load().items():
        stem = "diffusion_model." + name.removeprefix("model.diffusion_model.")
        assert torch.equal(found.a, file.read(stem.replace(".weight", ".lora_A.weight")))
        assert torch.equal(found.b, file.read(stem.replace(".weight", ".lora_B.weight")))
        assert found.scale == 1.0


class TestScale:
    def test_is_one_ratio_of_the_metadata_even_where_ranks_are_capped(self, write):
        tensors = pair(Q, rank=4) | pair(K, rank=1)
        adapter = Adapter.open(write(tensors, lora_alpha="450", lora_rank="450"), BASE)
        assert [p.scale for p in adapter.load().values()] == [1.0, 1.0]
        adapter = Adapter.open(write(tensors, lora_alpha="2", lora_rank="4"), BASE)
        assert [p.scale for p in adapter.load().values()] == [0.5, 0.5]
        assert (adapter.scale, adapter.scale_source) == (0.5, "metadata lora_alpha 2 / lora_rank 4")

    def test_is_one_and_said_to_be_assumed_without_metadata(self, write):
        adapter = Adapter.open(write(pair(Q), note="no alpha"), BASE)
        assert adapter.scale == 1.0
        assert adapter.scale_source.startswith("assumed")

    @pytest.mark.parametrize(
        "metadata",
        [
            {"lora_alpha": "4"},
            {"lora_rank": "4"},
            {"lora_alpha": "four", "lora_rank": "4"},
            {"lora_alpha": "4", "lora_rank": "0"},
            {"lora_alpha": "4", "lora_rank": "-4"},
            {"lora_alpha": "nan", "lora_rank": "4"},
            {"lora_alpha": "4", "lora_rank": "inf"},
            {"lora_alpha": "1e300", "lora_rank": "1e-300"},
            {"lora_alpha": "", "lora_rank": ""},
        ],
    )
    def test_is_refused_when_malformed(self, write, metadata):
        path = write(pair(Q), **metadata)
        with pytest.raises(AdapterError, match=f"^{path}: metadata must hold lora_alpha"):
            Adapter.open(path, BASE)


class TestKeys:
    @pytest.mark.parametrize("prefix", ["", "diffusion_model.", "model.diffusion_model."])
    def test_match_a_base_with_or_without_prefixes(self, write, prefix):
        path = write(pair(f"{prefix}attn.to_q"))
        bare = [
            TensorSpec(t.name.removeprefix("model.diffusion_model."), t.shape, t.dtype)
            for t in BASE
        ]
        for base in (BASE, bare):
            (found,) = Adapter.open(path, base).pairs
            assert (found.module, found.weight) == ("attn.to_q", base[0])

    def test_of_one_module_under_two_prefixes_are_refused(self, write):
        path = write(pair(Q) | pair("attn.to_q"))
        with pytest.raises(AdapterError, match=r"'attn\.to_q' has two lora_A, under two prefixes"):
            Adapter.open(path, BASE)

    def test_of_one_module_in_a_base_under_two_prefixes_are_refused(self, write):
        twice = [*BASE, TensorSpec("attn.to_q.weight", (OUT, IN), "BF16")]
        with pytest.raises(AdapterError, match=r"'attn\.to_q' twice.*ambiguous"):
            Adapter.open(write(pair(Q)), twice)

    @pytest.mark.parametrize(
        "key",
        [
            f"{Q}.alpha",
            f"{Q}.lora_down.weight",
            f"{Q}.lora_A.bias",
            f"{Q}.lora_A",
            f"{Q}.lora_A.default.weight",
            f"{Q}.dora_scale",
            f"{Q}.lora_C.weight",
            "lora_A.weight",
        ],
    )
    def test_that_are_not_understood_are_refused_by_name(self, write, key):
        path = write(pair(Q) | {key: torch.ones(1)})
        with pytest.raises(AdapterError, match=f"1 keys are not understood: '{key}'"):
            Adapter.open(path, BASE)

    def test_that_are_many_are_counted(self, write):
        path = write(pair(Q) | {f"x{i}": torch.ones(1) for i in range(5)})
        with pytest.raises(AdapterError, match=r"5 keys .*'x0', 'x1', 'x2' and 2 more"):
            Adapter.open(path, BASE)

    @pytest.mark.parametrize(("half", "other"), [("A", "B"), ("B", "A")])
    def test_of_half_a_pair_are_refused(self, write, half, other):
        tensors = pair(Q)
        del tensors[f"{Q}.lora_{other}.weight"]
        message = rf"'attn\.to_q' has lora_{half} but no lora_{other}"
        with pytest.raises(AdapterError, match=message):
            Adapter.open(write(tensors), BASE)

    def test_of_half_a_pair_are_refused_even_where_the_base_lacks_the_module(self, write):
        tensors = pair(Q) | {"elsewhere.lora_A.weight": torch.ones(RANK, IN)}
        with pytest.raises(AdapterError, match="'elsewhere' has lora_A but no lora_B"):
            Adapter.open(write(tensors), BASE, allow_unmatched=True)

    def test_are_needed(self, write):
        with pytest.raises(AdapterError, match="holds no lora_A / lora_B tensors"):
            Adapter.open(write({}), BASE)


class TestMatching:
    def test_some_modules_is_refused_and_names_those_that_the_base_lacks(self, write):
        path = write(pair(Q) | pair("diffusion_model.blocks.7.proj"))
        with pytest.raises(AdapterError, match=r"only 1 of 2 .* lacks 'blocks\.7\.proj'"):
            Adapter.open(path, BASE)

    def test_some_modules_will_do_when_asked_for_and_the_rest_are_listed(self, write):
        path = write(pair(Q) | pair("diffusion_model.blocks.7.proj"))
        adapter = Adapter.open(path, BASE, allow_unmatched=True)
        assert [p.module for p in adapter.pairs] == ["attn.to_q"]
        assert adapter.unmatched == ("blocks.7.proj",)
        assert adapter.factor_bytes == 2 * RANK * (OUT + IN)
        assert list(adapter.load()) == [BASE[0].name]

    @pytest.mark.parametrize("allow_unmatched", [False, True])
    def test_no_module_is_always_refused(self, write, allow_unmatched):
        path = write(pair("diffusion_model.blocks.7.proj"))
        with pytest.raises(AdapterError, match=f"^{path}: no modules match the base"):
            Adapter.open(path, BASE, allow_unmatched=allow_unmatched)

    def test_a_cut_base_takes_the_wholes_adapter_when_asked(self, geometry, adapters):
        cut = geometry.cut(0)
        path = adapters["user"].file.path
        with pytest.raises(AdapterError, match=r"only 28 of 62 .* cut to fewer blocks"):
            Adapter.open(path, cut.tensors)
        found = Adapter.open(path, cut.tensors, allow_unmatched=True)
        assert found.targets == cut.targets
        assert len(found.unmatched) == 34


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (pair(Q, in_=IN + 1), rf"B @ A is \[{OUT}, {IN + 1}\], but .*to_q.weight' is \[6, 8\]"),
        (pair(Q, out=OUT + 1), rf"B @ A is \[{OUT + 1}, {IN}\]"),
        (pair(Q, out=IN, in_=OUT), rf"B @ A is \[{IN}, {OUT}\]"),
        (pair(Q, rank=0), r"found A \[0, 8\] and B \[6, 0\]"),
        (pair(Q) | {f"{Q}.lora_B.weight": torch.ones(OUT, 3)}, r"found A \[2, 8\] and B \[6, 3\]"),
        (pair(Q) | {f"{Q}.lora_A.weight": torch.ones(RANK)}, r"found A \[2\]"),
        (pair(Q) | {f"{Q}.lora_B.weight": torch.ones(OUT, RANK, 1)}, r"B \[6, 2, 1\]"),
        (pair("diffusion_model.norm"), r"'norm'.*B @ A is \[6, 8\], but .*norm.weight' is \[8\]"),
        (pair(Q, dtype=torch.float64), r"to_q\.lora_A\.weight': dtype F64 .* BF16, F16, F32"),
        (pair(Q, dtype=torch.int8), r"dtype I8 is not supported"),
        (pair(Q, dtype=torch.float8_e4m3fn), r"dtype F8_E4M3 is not supported"),
        (pair("diffusion_model.half"), r"'half'.*half.weight' is F16; .* BF16 and F32"),
    ],
)
def test_a_pair_that_does_not_fit_is_refused_with_its_module(write, tensors, message):
    path = write(tensors)
    with pytest.raises(AdapterError, match=f"^{path}: .*{message}"):
        Adapter.open(path, BASE)


def test_a_damaged_file_is_a_file_error(tmp_path):
    path = tmp_path / "adapter.safetensors"
    path.write_bytes(b"<html>")
    with pytest.raises(FileError, match=f"^{path}: "):
        Adapter.open(path, BASE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("half", ["A", "B"])
def test_a_factor_that_is_not_finite_is_found_before_a_weight_is_read(
    write, tmp_path, monkeypatch, dtype, bad, half
):
    base = tmp_path / "base.safetensors"
    save_file({f"{Q}.weight": torch.ones(OUT, IN), f"{K}.weight": torch.ones(OUT, IN)}, base)
    checkpoint = Checkpoint.open(base)
    tensors = pair(Q) | pair(K, dtype=dtype)
    tensors[f"{K}.lora_{half}.weight"][1, 1] = bad
    path = write(tensors)
    weights = ResidentWeights(checkpoint, {"user": Adapter.open(path, checkpoint.tensors)})
    read_into = Checkpoint.read_into

    def read_no_weight(file, name, tensor):
        assert file.path != base, f"read {name}"
        read_into(file, name, tensor)

    monkeypatch.setattr(Checkpoint, "read_into", read_no_weight)
    message = rf"^{path}: tensor '{K}\.lora_{half}\.weight': 1 of \d+ values are not finite"
    with pytest.raises(AdapterError, match=message):
        weights.load()
    with pytest.raises(WeightsLostError):
        _ = weights.state


def test_a_file_that_changed_since_it_was_opened_is_not_loaded(write):
    adapter = Adapter.open(write(pair(Q)), BASE)
    write(pair(Q, rank=3))
    with pytest.raises(FileError, match="changed since it was opened"):
        adapter.load()


def test_an_alpha_in_a_form_that_is_not_understood_is_refused(tmp_path):
    base = [TensorSpec("m.weight", (4, 4), "BF16")]
    path = tmp_path / "a.safetensors"
    factors = {"m.lora_A.weight": torch.ones(2, 4), "m.lora_B.weight": torch.ones(4, 2)}
    save_file(factors, path, metadata={"ss_network_alpha": "8"})
    with pytest.raises(AdapterError, match="'ss_network_alpha' speaks of an alpha in a form"):
        Adapter.open(path, base)
