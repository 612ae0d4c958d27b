"""Adapters as PEFT writes them, held against what PEFT itself merges into the same weights."""

import shutil
from pathlib import Path

import pytest
import torch
from dit import MODULES, WIDTH, Dit, differing, factors, fill, fused, write, write_base
from safetensors.torch import load_file
from torch import nn

from lorabench.adapter import Adapter
from lorabench.adapter_file import AdapterFile
from lorabench.checkpoint import Checkpoint
from lorabench.errors import AdapterError

BLOCKS = ["to_q", "to_k", "to_v", "to_out.0", "ff.net.0", "ff.net.2"]

CONFIGS = {
    "plain": {"r": 4, "lora_alpha": 4, "target_modules": BLOCKS},
    "alpha": {"r": 4, "lora_alpha": 3, "target_modules": BLOCKS},
    "a regular expression of targets": {"r": 4, "target_modules": r".*\.1\..*\.(to_q|net\.2)"},
    "every linear layer": {"r": 4, "lora_alpha": 1, "target_modules": "all-linear"},
    "rsLoRA": {"r": 6, "lora_alpha": 3, "use_rslora": True, "target_modules": BLOCKS},
    "patterns": {
        "r": 4, "lora_alpha": 2, "target_modules": [*BLOCKS, "proj_out"],
        "rank_pattern": {"to_q": 8, r"transformer_blocks\.0\.ff\.net\.\d": 2, "^proj_out": 3},
        "alpha_pattern": {r"^transformer_blocks\.1\..*to_k": 7, "ff.net.2": 3},
    },
    "patterns and rsLoRA": {
        "r": 4, "lora_alpha": 2, "target_modules": BLOCKS, "use_rslora": True,
        "rank_pattern": {"attn1.to_v": 5}, "alpha_pattern": {"to_out.0": 5},
    },
    "bias": {"r": 4, "lora_alpha": 3, "lora_bias": True, "target_modules": BLOCKS},
}  # fmt: skip

# PEFT holds every lora_B that isn't a matrix for a shard's remains, its own bias included.
of_a_bias = pytest.mark.filterwarnings("ignore:Adapter 'default'. 12 LoRA tensor.s. have invalid")
without_a_match = pytest.mark.filterwarnings("ignore:The following alpha_pattern keys did not")

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


@pytest.fixture(scope="module")
def bases(tmp_path_factory) -> dict[str, Checkpoint]:
    folder = tmp_path_factory.mktemp("bases")
    return {
        name: write_base(folder / f"{name}.safetensors", Dit(dtype))
        for name, dtype in DTYPES.items()
    }


@pytest.fixture(scope="module")
def base(bases) -> Checkpoint:
    return bases["BF16"]


def trained(config, dtype=torch.bfloat16, **options):
    """A model that PEFT wrapped, whose factors have the weights' dtype unless told otherwise."""
    import peft

    model = peft.get_peft_model(Dit(dtype), config, **{"autocast_adapter_dtype": False} | options)
    fill(factors(model))
    return model


def lora(**options):
    from peft import LoraConfig

    return LoraConfig(**{"r": 4, "lora_alpha": 2, "target_modules": BLOCKS} | options)


def saved(model, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder / "adapter_model.safetensors"


def merged(model) -> dict[str, torch.Tensor]:
    return model.merge_and_unload().state_dict()


def scales(adapter: AdapterFile | Adapter) -> dict[str, float]:
    return {
        module.path.removeprefix("base_model.model."): module.scale.value
        for module in adapter.modules
    }


# What is merged: see `lorabench.fuse.RULES`. Of f32 factors PEFT makes an f32 delta, rounded once.


@of_a_bias
@pytest.mark.parametrize(
    ("weights", "autocast", "rule"),
    [("BF16", False, "R3"), ("F16", False, "R3"), ("BF16", True, "R4"), ("F32", True, "R4")],
)
@pytest.mark.parametrize("name", CONFIGS)
def test_what_peft_saves_fuses_into_the_bits_that_peft_merges(
    bases, tmp_path, name, weights, autocast, rule
):
    base = bases[weights]
    model = trained(lora(**CONFIGS[name]), DTYPES[weights], autocast_adapter_dtype=autocast)
    path = saved(model, tmp_path)
    expected = merged(model)
    touched = {key.replace(".lora_B", "") for key in load_file(path) if "lora_B" in key}
    before = {name: base.read(name) for name in base.entries}
    assert {f"base_model.model.{name}" for name in differing(expected, before)} == touched
    assert differing(fused(base, path, rule), expected) == []


def test_with_peft_default_a_bf16_base_gets_an_f32_delta_which_r3_would_round(base, tmp_path):
    model = trained(lora(lora_alpha=3), autocast_adapter_dtype=True)
    path = saved(model, tmp_path)
    assert {tensor.dtype for tensor in load_file(path).values()} == {torch.float32}
    assert len(differing(fused(base, path, "R3"), merged(model))) == 12


def test_patterns_of_peft_set_ranks_and_scales_of_the_modules_that_they_match(base, tmp_path):
    path = saved(trained(lora(**CONFIGS["patterns"])), tmp_path)
    found = scales(Adapter.open(path, base.tensors))
    expected = dict.fromkeys(MODULES, 2 / 4)
    for block in (0, 1):
        expected[f"transformer_blocks.{block}.attn1.to_q"] = 2 / 8
        expected[f"transformer_blocks.{block}.ff.net.2"] = 3 / 4
    expected["transformer_blocks.0.ff.net.0"] = 2 / 2
    expected["transformer_blocks.0.ff.net.2"] = 3 / 2
    expected["transformer_blocks.1.attn1.to_k"] = 7 / 4
    expected["proj_out"] = 2 / 3
    assert found == expected


@without_a_match
@pytest.mark.parametrize("pattern", ["^to_k", "o_k", "to", "attn1"])
def test_a_pattern_that_is_no_name_nor_the_last_of_one_matches_nothing(base, tmp_path, pattern):
    path = saved(trained(lora(alpha_pattern={pattern: 9})), tmp_path)
    assert set(scales(Adapter.open(path, base.tensors)).values()) == {2 / 4}


def test_of_two_patterns_that_match_the_one_counts_that_peft_takes_from_the_file(base, tmp_path):
    from peft import PeftModel

    model = trained(lora(alpha_pattern={"to_q": 8, "attn1.to_q": 2}, target_modules=["to_q"]))
    path = saved(model, tmp_path)  # sorts the patterns
    again = PeftModel.from_pretrained(Dit(), tmp_path, autocast_adapter_dtype=False)
    assert set(scales(Adapter.open(path, base.tensors)).values()) == {2 / 4}
    assert differing(fused(base, path, "R3"), merged(again)) == []


def test_rslora_divides_by_the_root_of_a_modules_own_rank(base, tmp_path):
    config = lora(lora_alpha=6, use_rslora=True, rank_pattern={"to_k": 9}, target_modules=BLOCKS)
    found = scales(Adapter.open(saved(trained(config), tmp_path), base.tensors))
    expected = {module: 6 / 3 if module.endswith("to_k") else 6 / 2 for module in MODULES[:-1]}
    assert found == expected


def test_another_name_of_the_adapter_is_its_folders(base, tmp_path):
    model = trained(lora(), adapter_name="user")
    model.save_pretrained(tmp_path)
    path = tmp_path / "user" / "adapter_model.safetensors"
    assert differing(fused(base, path, "R3"), merged(model)) == []


@pytest.mark.parametrize("name", ["default", "user"])
def test_an_adapters_name_may_be_left_in_the_keys(base, tmp_path, name):
    model = trained(lora(lora_alpha=4), adapter_name=name)
    held = {key: value for key, value in model.state_dict().items() if "lora_" in key}
    assert all(f".{name}.weight" in key for key in held)
    path = write(tmp_path / "by_hand.safetensors", held)
    assert differing(fused(base, path, "R3"), merged(model)) == []


def test_two_adapters_names_in_the_keys_are_two_adapters(base, tmp_path):
    model = trained(lora())
    model.add_adapter("user", lora())
    held = {key: value for key, value in model.state_dict().items() if "lora_" in key}
    path = write(tmp_path / "by_hand.safetensors", held)
    with pytest.raises(AdapterError, match=r"holds several adapters, '(default|user)', '"):
        Adapter.open(path, base.tensors)


def test_without_its_configuration_a_file_of_peft_tells_no_alpha(base, tmp_path):
    path = saved(trained(lora()), tmp_path)
    (tmp_path / "adapter_config.json").unlink()
    adapter = Adapter.open(path, base.tensors)
    assert {scale.source for scale in adapter.scales} == {
        "assumed: nothing tells an alpha, so alpha = rank"
    }
    assert set(scales(Adapter.open(path, base.tensors, alpha=2)).values()) == {2 / 4}


@pytest.mark.parametrize("start", ["orthogonal", "gaussian"])
def test_a_start_that_leaves_the_base_alone_is_applied(base, tmp_path, start):
    model = trained(lora(init_lora_weights=start))
    assert differing(fused(base, saved(model, tmp_path), "R3"), merged(model)) == []


def test_pissa_that_peft_converted_fuses_into_what_it_merges_from_the_base_it_changed(
    bases, tmp_path
):
    import peft

    model = peft.get_peft_model(Dit(torch.float32), lora(init_lora_weights="pissa"))
    model.peft_config["default"].init_lora_weights = True  # PEFT's recipe for saving a start
    model.save_pretrained(tmp_path / "start")
    for factor in factors(model):
        factor.data += 0.1
    model.save_pretrained(
        tmp_path / "trained", path_initial_model_for_weight_conversion=str(tmp_path / "start")
    )
    path = tmp_path / "trained" / "adapter_model.safetensors"
    found, expected = fused(bases["F32"], path, "R4"), merged(model)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-5)
    assert Adapter.open(path, bases["F32"].tensors).ranks == {8: 12}


# What is refused

OTHERS = [
    ("LoraConfig", {"use_dora": True}, "DoRA", "use_dora = True"),
    ("IA3Config", {"feedforward_modules": []}, "IA3", "peft_type 'IA3'"),
    ("LoHaConfig", {"r": 4}, "LoHa", "peft_type 'LOHA'"),
    ("LoKrConfig", {"r": 4, "decompose_both": True, "decompose_factor": 2}, "LoKr", "'LOKR'"),
    ("OFTConfig", {"r": 0, "oft_block_size": 4}, "OFT", "peft_type 'OFT'"),
    ("VeraConfig", {"r": 4}, "VeRA", "peft_type 'VERA'"),
    ("AdaLoraConfig", {"total_step": 9, "tinit": 1, "tfinal": 1}, "AdaLoRA", "'ADALORA'"),
]


@pytest.mark.parametrize(("config", "options", "kind", "told"), OTHERS)
def test_another_kind_of_peft_is_refused_by_its_name(base, tmp_path, config, options, kind, told):
    import peft

    model = peft.get_peft_model(
        Dit(), getattr(peft, config)(target_modules=["to_q", "to_v"], **options)
    )
    path = saved(model, tmp_path)
    with pytest.raises(AdapterError, match=rf"isn't applied: .*{kind} \('"):
        Adapter.open(path, base.tensors)
    with pytest.raises(AdapterError, match=told):
        Adapter.open(path, base.tensors, allow_skip=True)
    alone = shutil.copy(path, tmp_path / "without_its_configuration.safetensors")
    with pytest.raises(AdapterError, match=f"nothing in it can be applied: .* it holds .*'{kind}'"):
        Adapter.open(alone, base.tensors, allow_skip=True)
    skipped = AdapterFile.open(alone, allow_skip=True).skipped
    assert {key.name for key in skipped} == load_file(path).keys()
    assert kind in {key.kind for key in skipped}


def test_modules_that_peft_saves_whole_are_refused_or_skipped_and_listed(base, tmp_path):
    model = trained(lora(modules_to_save=["proj_out"]))
    fill(p for name, p in model.named_parameters() if "modules_to_save" in name)
    path = saved(model, tmp_path)
    whole = {f"base_model.model.proj_out.{what}" for what in ("weight", "bias")}
    with pytest.raises(AdapterError, match=r"a whole weight \('base_model\.model\.proj_out\.bias'"):
        Adapter.open(path, base.tensors)
    adapter = Adapter.open(path, base.tensors, allow_skip=True)
    assert {key.name for key in adapter.skipped} == whole
    found = fused(base, path, "R3", allow_skip=True)
    assert differing(found, merged(model)) == ["proj_out.bias", "proj_out.weight"]
    assert torch.equal(found["proj_out.weight"], base.read("proj_out.weight"))


def test_a_layer_whose_own_bias_peft_trained_is_refused_or_skipped_whole(base, tmp_path):
    path = saved(trained(lora(bias="lora_only")), tmp_path)
    with pytest.raises(AdapterError, match=r"a whole weight \('.*to_k\.base_layer\.bias'"):
        Adapter.open(path, base.tensors)
    held = AdapterFile.open(path, allow_skip=True)
    assert not held.modules
    assert {key.name for key in held.skipped} == load_file(path).keys()


class Odd(nn.Module):
    """Layers that aren't linear ones."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(WIDTH, WIDTH, 3)
        self.embed = nn.Embedding(8, WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)


@pytest.mark.parametrize(
    ("target", "kind"), [("conv", "a convolution's factor"), ("embed", "a LoRA of an embedding")]
)
def test_another_layer_than_a_linear_one_is_refused_by_its_kind(tmp_path, target, kind):
    import peft

    model = peft.get_peft_model(Odd(), lora(target_modules=[target, "linear"]))
    path = saved(model, tmp_path)
    with pytest.raises(AdapterError, match=kind):
        AdapterFile.open(path)
    assert [*scales(AdapterFile.open(path, allow_skip=True))] == ["linear"]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"init_lora_weights": "pissa"}, "init_lora_weights = 'pissa', which changed the base"),
        ({"init_lora_weights": "olora"}, "init_lora_weights = 'olora', which changed the base"),
        (
            {"target_parameters": ["transformer_blocks.0.attn1.to_q.weight"], "target_modules": []},
            "target_parameters",
        ),
    ],
)
def test_what_only_the_configuration_tells_is_refused(bases, tmp_path, options, told):
    path = saved(trained(lora(**options), torch.float32), tmp_path)
    for allow_skip in (False, True):
        with pytest.raises(AdapterError, match=told):
            Adapter.open(path, bases["F32"].tensors, allow_skip=allow_skip)


def test_factors_of_transposed_weights_are_refused(tmp_path):
    import peft
    from transformers.pytorch_utils import Conv1D

    model = peft.get_peft_model(
        nn.Sequential(Conv1D(WIDTH, WIDTH)), lora(target_modules=["0"], fan_in_fan_out=True)
    )
    with pytest.raises(AdapterError, match="fan_in_fan_out = True: its weights are transposed"):
        AdapterFile.open(saved(model, tmp_path))
