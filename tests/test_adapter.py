"""Adapters: understood whole or refused by name, never skipped in silence."""

import re

import pytest
import torch
from safetensors.torch import save_file

from lorabench.adapter import Adapter, check_base
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
    TensorSpec("model.diffusion_model.eighth.weight", (OUT, IN), "F8_E4M3"),
    TensorSpec("model.diffusion_model.packed.weight", (OUT, IN // 2), "U8"),
    TensorSpec("model.diffusion_model.conv.weight", (OUT, IN, 3, 3), "BF16"),
    TensorSpec("model.diffusion_model.mix.kv.weight", (10, IN), "BF16"),
    TensorSpec("model.diffusion_model.mix.kv.bias", (10,), "BF16"),
    TensorSpec("model.diffusion_model.mlp.gate_proj.weight", (4, IN), "BF16"),
    TensorSpec("model.diffusion_model.mlp.up_proj.weight", (6, IN), "BF16"),
    TensorSpec("model.diffusion_model.mlp.up_proj.bias", (6,), "BF16"),
]
PREFIX = "model.diffusion_model."
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
        assert adapter.unmatched == adapter.text_encoders == adapter.skipped == ()
        assert {scale.value for scale in adapter.scales} == {1.0}


def test_a_pair_lies_where_the_file_has_it(files, adapters):
    file = Checkpoint.open(files.adapters["user"])
    for found in adapters["user"].pairs:
        stem = "diffusion_model." + found.weight.name.removeprefix(PREFIX).removesuffix(".weight")
        assert found.a == file.entries[f"{stem}.lora_A.weight"]
        assert found.b == file.entries[f"{stem}.lora_B.weight"]
        assert (found.scale, found.top) == (1.0, 0)


def added(adapter):
    """What is added: weight, first row, rows, rank, and where in the factors' tensor it begins."""
    start = min(p.b.offset for p in adapter.pairs)
    return [
        (p.weight.name.removeprefix(PREFIX), p.top, len(p.rows), p.rank, p.b.offset - start)
        for p in adapter.pairs
    ]


class TestNames:
    """Path style and suffix style are independent of each other."""

    @pytest.mark.parametrize(
        "path",
        ["attn.to_q", Q, f"model.{Q}", "transformer.attn.to_q", "base_model.model.attn.to_q",
         f"base_model.model.{Q}", "lora_unet_attn_to_q", "lycoris_attn_to_q", "attn_to_q"],
    )  # fmt: skip
    @pytest.mark.parametrize(
        ("down", "up"),
        [
            ("lora_A.weight", "lora_B.weight"),
            ("lora_A.default.weight", "lora_B.default.weight"),
            ("lora_down.weight", "lora_up.weight"),
            ("lora.down.weight", "lora.up.weight"),
        ],
    )
    def test_of_every_style_mean_the_same(self, write, path, down, up):
        tensors = {f"{path}.{down}": torch.ones(RANK, IN), f"{path}.{up}": torch.ones(OUT, RANK)}
        [found] = Adapter.open(write(tensors), BASE).pairs
        assert (found.module, found.weight) == ("attn.to_q", BASE[0])
        assert (found.a.spec.name, found.b.spec.name) == (f"{path}.{down}", f"{path}.{up}")

    def test_of_one_module_in_two_styles_are_refused(self, write):
        down = {"attn.to_q.lora_down.weight": torch.ones(RANK, IN)}
        with pytest.raises(AdapterError, match=r"two lora_A, 'attn.*' and 'attn.*'; keep one"):
            Adapter.open(write(pair("attn.to_q") | down), BASE)

    @pytest.mark.parametrize("more", [pair("attn.to_q"), {"attn.to_q.diff_b": torch.ones(OUT)}])
    def test_of_one_module_under_two_prefixes_are_refused(self, write, more):
        told = r"modules '.*to_q' and '.*to_q' are both for the base's '.*attn\.to_q'; keep one"
        with pytest.raises(AdapterError, match=told):
            Adapter.open(write(pair(Q) | more), BASE)

    def test_of_two_adapters_in_one_file_are_refused(self, write):
        tensors = {}
        for name in ("one", "two"):
            for half, tensor in pair(Q if name == "one" else K).items():
                tensors[half.replace(".weight", f".{name}.weight")] = tensor
        with pytest.raises(AdapterError, match=r"holds several adapters, '(one|two)', '(one|two)'"):
            Adapter.open(write(tensors), BASE)

    def test_that_may_mean_two_modules_are_refused(self, write):
        twice = [TensorSpec(f"{p}x.weight", (OUT, IN), "BF16") for p in ("model.", "transformer.")]
        with pytest.raises(AdapterError, match=r"'x' may mean 'model\.x', 'transformer\.x'"):
            Adapter.open(write(pair("x")), twice)

    def test_that_flatten_alike_are_refused(self, write):
        twice = [TensorSpec(f"{n}.weight", (OUT, IN), "BF16") for n in ("a.b_c", "a_b.c")]
        with pytest.raises(AdapterError, match=r"'lora_unet_a_b_c' may mean 'a\.b_c', 'a_b\.c'"):
            Adapter.open(write(pair("lora_unet_a_b_c")), twice)

    def test_of_text_encoders_are_listed_as_out_of_scope(self, write):
        te = "lora_te1_text_model_encoder_layers_0_mlp_fc1"
        adapter = Adapter.open(write(pair(Q) | pair(te)), BASE)
        assert adapter.text_encoders == (te,)
        assert [p.module for p in adapter.pairs] == ["attn.to_q"]
        with pytest.raises(AdapterError, match="all 1 modules are of text encoders"):
            Adapter.open(write(pair(te)), BASE, allow_unmatched=True)

    def test_that_are_not_understood_are_refused(self, write):
        path = write(pair(Q) | {f"x{i}": torch.ones(1) for i in range(5)})
        with pytest.raises(AdapterError, match=r"isn't understood \('x0', 'x1', 'x2' and 2 more\)"):
            Adapter.open(path, BASE)

    @pytest.mark.parametrize("styles", [("lora_A", "lora_B"), ("lora_down", "lora_up")])
    @pytest.mark.parametrize("half", [0, 1])
    def test_of_half_a_pair_are_refused_even_where_the_base_lacks_the_module(
        self, write, styles, half
    ):
        key = f"elsewhere.{styles[half]}.weight"
        path = write(pair(Q) | {key: torch.ones(RANK, RANK)})
        lacks = ("lora_B (lora_up)", "lora_A (lora_down)")[half]
        with pytest.raises(AdapterError, match=re.escape(f"has '{key}' but no {lacks}")):
            Adapter.open(path, BASE, allow_unmatched=True)

    @pytest.mark.parametrize(
        ("tensors", "told"),
        [
            ({}, "nothing in it can be applied"),
            ({"x.hada_w1_a": torch.ones(2)}, "nothing in it can be applied"),
            ({"x.weight": torch.ones(2)}, "is it a base, given in an adapter's place"),
        ],
    )
    def test_of_an_adapter_are_needed(self, write, tensors, told):
        with pytest.raises(AdapterError, match=told):
            Adapter.open(write(tensors), BASE, allow_skip=True)


class TestMatching:
    def test_some_modules_is_refused_and_names_those_that_the_base_lacks(self, write):
        path = write(pair(Q) | pair("diffusion_model.attn.to_qq"))
        told = r"only 1 of 2 .* lacks '.*to_qq' \(did you mean 'attn.to_q'\?\)"
        with pytest.raises(AdapterError, match=told):
            Adapter.open(path, BASE)

    def test_some_modules_will_do_when_asked_for_and_the_rest_are_listed(self, write):
        path = write(pair(Q) | pair("diffusion_model.blocks.7.proj"))
        adapter = Adapter.open(path, BASE, allow_unmatched=True)
        assert [p.module for p in adapter.pairs] == ["attn.to_q"]
        assert adapter.unmatched == ("diffusion_model.blocks.7.proj",)
        assert adapter.factor_bytes == 2 * RANK * (OUT + IN)

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


class TestFusedAndSplit:
    """The base holds ``mix.kv`` fused (10 rows) and the mlp's gate (4 rows) and up (6) split."""

    def test_a_fused_pair_is_cut_into_the_rows_of_the_split_weights(self, write):
        adapter = Adapter.open(write(pair("mlp.gate_up_proj", out=10)), BASE)
        assert added(adapter) == [
            ("mlp.gate_proj.weight", 0, 4, RANK, 0),
            ("mlp.up_proj.weight", 0, 6, RANK, 4 * RANK * 2),
        ]
        assert {p.a for p in adapter.pairs} == {adapter.pairs[0].a}

    def test_split_pairs_touch_the_rows_of_the_fused_weight_equal_or_not(self, write):
        for k_rows in (5, 2):
            path = write(
                pair("mix.v", out=10 - k_rows) | pair("lora_unet_mix_k", out=k_rows, rank=1)
            )
            found = [row[:4] for row in added(Adapter.open(path, BASE))]
            assert sorted(found) == [
                ("mix.kv.weight", 0, k_rows, 1), ("mix.kv.weight", k_rows, 10 - k_rows, RANK)
            ]  # fmt: skip

    def test_one_of_the_split_pairs_is_placed_where_parts_are_equal(self, write):
        [found] = added(Adapter.open(write(pair("mix.v", out=5)), BASE))
        assert found[:4] == ("mix.kv.weight", 5, 5, RANK)

    @pytest.mark.parametrize("rows", [{"v": 4}, {"k": 4, "v": 4}, {"k": 6, "v": 6}])
    def test_rows_that_do_not_tell_where_they_go_are_refused(self, write, rows):
        tensors = {}
        for part, count in rows.items():
            tensors |= pair(f"mix.{part}", out=count)
        with pytest.raises(AdapterError, match=r"holds it in '.*mix\.kv' of 10 rows, as k, v"):
            Adapter.open(write(tensors), BASE)

    def test_a_fused_pair_of_other_rows_than_the_split_weights_is_refused(self, write):
        told = r"has 8 outputs, but the base's '.*gate_proj' 4 \+ '.*up_proj' 6"
        with pytest.raises(AdapterError, match=told):
            Adapter.open(write(pair("mlp.gate_up_proj", out=8)), BASE)

    def test_a_fused_and_a_split_pair_for_the_same_rows_are_refused(self, write):
        path = write(pair("mlp.gate_up_proj", out=10) | pair("mlp.up_proj", out=6))
        with pytest.raises(AdapterError, match=r"are both for the base's '.*up_proj\.weight'"):
            Adapter.open(path, BASE)

    def test_a_part_under_two_names_is_refused(self, write):
        path = write(pair("mix.k", out=5) | pair("mix.k_proj", out=5))
        with pytest.raises(AdapterError, match=r"'mix\.k' and 'mix\.k_proj' are both for part 'k"):
            Adapter.open(path, BASE)

    def test_biases_go_with_their_rows(self, write):
        tensors = pair("mix.v", out=5) | {"mix.v.lora_B.bias": torch.ones(5)}
        assert [row[:4] for row in added(Adapter.open(write(tensors), BASE))] == [
            ("mix.kv.weight", 5, 5, RANK), ("mix.kv.bias", 5, 5, 0)
        ]  # fmt: skip


class TestKinds:
    def test_a_bias_of_b_is_scaled_as_the_pair_and_a_bias_delta_is_not(self, write):
        bias = {f"{Q}.lora_B.bias": torch.ones(OUT)}
        adapter = Adapter.open(write(pair(Q) | bias, lora_alpha="3", lora_rank="2"), BASE)
        assert [(p.module, p.a is None, p.scale) for p in adapter.pairs] == [
            ("attn.to_q", False, 1.5), ("attn.to_q.bias", True, 1.5)
        ]  # fmt: skip
        bias = {f"{Q}.diff_b": torch.ones(OUT)}
        adapter = Adapter.open(write(pair(Q) | bias, lora_alpha="3", lora_rank="2"), BASE)
        assert [p.scale for p in adapter.pairs] == [1.5, 1.0]

    def test_full_deltas_of_weights_norms_and_biases_have_no_scale(self, write):
        tensors = {
            f"{Q}.diff": torch.ones(OUT, IN),
            f"{Q}.diff_b": torch.ones(OUT),
            "norm.diff": torch.ones(IN),
        }
        adapter = Adapter.open(write(tensors, lora_alpha="3", lora_rank="2"), BASE)
        assert {(p.weight.name.removeprefix(PREFIX), p.scale, p.rank) for p in adapter.pairs} == {
            ("norm.weight", 1.0, 0), ("attn.to_q.weight", 1.0, 0), ("attn.to_q.bias", 1.0, 0)
        }  # fmt: skip
        assert adapter.ranks == adapter.scales == {}

    def test_a_bias_that_the_base_lacks_is_refused(self, write):
        tensors = pair(K) | {f"{K}.lora_B.bias": torch.ones(OUT)}
        with pytest.raises(
            AdapterError, match=r"lora_B\.bias', but the base has no '.*to_k\.bias'"
        ):
            Adapter.open(write(tensors), BASE)

    @pytest.mark.parametrize(
        ("tensors", "told"),
        [
            ({f"{Q}.lora_B.bias": torch.ones(OUT)}, "but no factors"),
            ({f"{Q}.alpha": torch.ones(())}, "but no factors"),
            (pair(Q) | {f"{Q}.diff": torch.ones(OUT, IN)}, "what both mean together"),
            (
                pair(Q) | {f"{Q}.diff_b": torch.ones(OUT), f"{Q}.lora_B.bias": torch.ones(OUT)},
                "what both mean together",
            ),
            (pair(Q) | {f"{Q}.diff_b": torch.ones(OUT + 1)}, "of one number of outputs"),
            ({f"{Q}.diff_b": torch.ones(OUT, 1)}, "of one number of outputs"),
            ({f"{Q}.diff": torch.ones(())}, "of one number of outputs"),
        ],
    )
    def test_what_does_not_belong_together_is_refused(self, write, tensors, told):
        with pytest.raises(AdapterError, match=told):
            Adapter.open(write(tensors), BASE)

    OTHERS = (
        ("dora_scale", (OUT, 1), "DoRA"),
        ("lora_mid.weight", (2, 2, 3, 3), "mid"),
        ("hada_w1_a", (2, 2), "LoHa"),
        ("lokr_w1", (2, 2), "LoKr"),
        ("oft_blocks", (2, 2), "OFT"),
        ("a1.weight", (2, 2), "GLoRA"),
        ("weight", (2, 2), "a whole weight"),
    )

    @pytest.mark.parametrize(("suffix", "shape", "kind"), OTHERS)
    def test_another_kind_is_refused_by_its_name_or_skipped_with_its_module_and_listed(
        self, write, suffix, shape, kind
    ):
        path = write(pair(Q) | pair(K) | {f"{K}.{suffix}": torch.ones(shape)})
        with pytest.raises(AdapterError, match=rf"isn't applied: .*{kind}.* \('{K}\.{suffix}'\): "):
            Adapter.open(path, BASE)
        adapter = Adapter.open(path, BASE, allow_skip=True)
        assert [p.module for p in adapter.pairs] == ["attn.to_q"]
        assert {key.name for key in adapter.skipped} == {
            f"{K}.{suffix}", f"{K}.lora_A.weight", f"{K}.lora_B.weight"
        }  # fmt: skip

    @pytest.mark.parametrize(
        "key", [f"{K}.lora_router.weight", f"{K}.gate.weight", f"model.{K}.dora_scale"]
    )
    def test_what_is_trained_beside_a_pair_takes_it_along(self, write, key):
        path = write(pair(Q) | pair(K) | {key: torch.ones(2)})
        with pytest.raises(AdapterError, match="isn't applied"):
            Adapter.open(path, BASE)
        adapter = Adapter.open(path, BASE, allow_skip=True)
        assert [p.module for p in adapter.pairs] == ["attn.to_q"]

    def test_what_seems_a_text_encoders_is_refused_where_the_base_has_it(self, write):
        base = [TensorSpec(f"text_model.l{i}.weight", (OUT, IN), "BF16") for i in (1, 2)]
        tensors = pair("text_model.l1") | pair("text_model.l2")
        path = write(tensors | {"text_model.l1.dora_scale": torch.ones(OUT, 1)})
        with pytest.raises(AdapterError, match="isn't applied: DoRA"):
            Adapter.open(path, base)
        [found] = Adapter.open(path, base, allow_skip=True).pairs
        assert found.module == "text_model.l2"

    @pytest.mark.parametrize(
        ("tensors", "kind"),
        [
            (pair(K, dtype=torch.float64), "a factor of dtype F64"),
            (pair(K, dtype=torch.int8), "a factor of dtype I8"),
            (pair(K, dtype=torch.float8_e4m3fn), "a factor of dtype F8_E4M3"),
            (
                {f"{K}.lora_down.weight": torch.ones(RANK, IN, 3, 3),
                 f"{K}.lora_up.weight": torch.ones(OUT, RANK, 1, 1)},
                "a convolution's factor",
            ),
            ({f"{K}.diff": torch.ones(OUT, IN, 3, 3)}, "a convolution's factor"),
        ],
    )  # fmt: skip
    def test_factors_that_are_quantised_or_of_convolutions_are_too(self, write, tensors, kind):
        path = write(pair(Q) | tensors)
        with pytest.raises(AdapterError, match=f"isn't applied: {kind}"):
            Adapter.open(path, BASE)
        adapter = Adapter.open(path, BASE, allow_skip=True)
        assert {key.name for key in adapter.skipped} == tensors.keys()

    @pytest.mark.parametrize(
        ("module", "told"),
        [
            ("eighth", r"'.*eighth\.weight' is F8_E4M3: fp8"),
            ("packed", r"'.*packed\.weight' is U8: int8, or packed \(nvfp4"),
            ("conv", r"'.*conv\.weight' \[6, 8, 3, 3\] is a convolution's"),
        ],
    )
    def test_a_quantised_base_and_a_convolution_are_refused(self, write, module, told):
        with pytest.raises(AdapterError, match=told):
            Adapter.open(write(pair(module)), BASE)

    def test_a_base_of_fp16_will_do(self, write):
        [found] = Adapter.open(write(pair("half")), BASE).pairs
        assert found.weight.dtype == "F16"


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (pair(Q, in_=IN + 1), rf"is \[{OUT}, {IN + 1}\], but .*to_q.weight' is \[6, 8\]"),
        (pair(Q, out=OUT + 1), rf"has {OUT + 1} outputs, but the base's '.*attn\.to_q' 6"),
        (pair(Q, out=IN, in_=OUT), rf"has {IN} outputs"),
        (pair(Q, rank=0), r"found A \[0, 8\] and B \[6, 0\]"),
        (pair(Q) | {f"{Q}.lora_B.weight": torch.ones(OUT, 3)}, r"found A \[2, 8\] and B \[6, 3\]"),
        (pair(Q) | {f"{Q}.lora_A.weight": torch.ones(RANK)}, r"found A \[2\]"),
        (pair("norm", out=IN), r"'norm'.*is \[8, 8\], but .*norm.weight' is \[8\]"),
        ({f"{Q}.diff": torch.ones(OUT)}, r"is \[6\], but .*to_q.weight' is \[6, 8\]"),
    ],
)
def test_a_pair_that_does_not_fit_is_refused_with_its_module(write, tensors, message):
    path = write(tensors)
    with pytest.raises(AdapterError, match=f"^{path}: .*{message}"):
        Adapter.open(path, BASE)


def test_one_file_under_two_roles_is_warned_of(write, tmp_path):
    base = tmp_path / "base.safetensors"
    save_file({f"{Q}.weight": torch.ones(OUT, IN)}, base)
    opened = Checkpoint.open(base)
    adapter = Adapter.open(write(pair(Q)), opened.tensors)
    with pytest.warns(UserWarning, match="adapters 'a' and 'b' are this one file"):
        check_base(opened, {"a": adapter, "b": adapter})


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
