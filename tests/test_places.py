"""A module's path in an adapter means one place of the base, or it is told that it doesn't."""

import pytest

from lorabench.geometry import TensorSpec
from lorabench.places import Place, Places, forms, is_text_encoders


def places(*modules):
    return Places([TensorSpec(f"{m}.weight", (2, 2), "BF16") for m in modules])


def found(base, path):
    return [place.modules for place in base.find(path)]


PREFIX = "model.diffusion_model."
MODULES = ("blocks.0.attn.to_q", "blocks.0.attn.to_out.0", "blocks.10.ff_in.proj", "proj_out")


@pytest.mark.parametrize("inside", ["", "diffusion_model.", PREFIX, "transformer.", "_orig_mod."])
@pytest.mark.parametrize(
    "prefix",
    ["", "diffusion_model.", PREFIX, "transformer.", "base_model.model.", "unet.", "module.",
     "base_model.model.diffusion_model."],
)  # fmt: skip
def test_a_path_is_found_under_any_stack_of_wrappers(inside, prefix):
    base = places(*(inside + module for module in MODULES))
    for module in MODULES:
        assert found(base, prefix + module) == [(inside + module,)]


@pytest.mark.parametrize("inside", ["", PREFIX])
@pytest.mark.parametrize("prefix", ["lora_unet_", "lora_transformer_", "lycoris_", ""])
def test_a_flattened_path_is_found_among_the_flattened_names(inside, prefix):
    base = places(*(inside + module for module in MODULES))
    assert found(base, f"{prefix}blocks_0_attn_to_q") == [(f"{inside}blocks.0.attn.to_q",)]
    assert found(base, f"{prefix}blocks_10_ff_in_proj") == [(f"{inside}blocks.10.ff_in.proj",)]
    assert found(base, f"{prefix}proj_out") == [(f"{inside}proj_out",)]
    assert found(base, f"{prefix}blocks_0_attn_to_out_0") == [(f"{inside}blocks.0.attn.to_out.0",)]


def test_two_names_that_flatten_to_one_are_both_told():
    base = places("blocks.1.to_q", "blocks.1_to.q")
    assert found(base, "lora_unet_blocks_1_to_q") == [("blocks.1.to_q",), ("blocks.1_to.q",)]
    assert found(base, "blocks.1.to_q") == [("blocks.1.to_q",)]


def test_an_underscore_is_never_taken_for_a_dot_in_a_dotted_path():
    assert found(places("blocks.0.attn.to_q"), "blocks.0_attn.to_q") == []


def test_a_modules_own_name_goes_before_what_wrappers_leave_of_others():
    base = places("x", "model.x")
    assert found(base, "x") == [("x",)]
    assert found(base, "model.x") == [("model.x",)]
    assert found(base, "base_model.model.x") == [("x",)]  # PEFT's prefix is never a model's own
    assert found(base, "base_model.model.model.x") == [("model.x",)]


def test_what_wrappers_leave_of_several_names_is_told_apart_by_nothing():
    base = places("model.x", "transformer.x")
    assert found(base, "diffusion_model.x") == [("model.x",), ("transformer.x",)]
    assert found(base, "base_model.model.x") == [("model.x",), ("transformer.x",)]
    assert set(found(places("x", "model.x"), "diffusion_model.x")) == {("x",), ("model.x",)}


def test_a_flattened_name_that_begins_as_a_wrapper_does_is_not_cut():
    base = places("transformer_blocks.0.q", "blocks.5.q", "list.0", "ema.x", "proj_out")
    assert found(base, "lora_unet_transformer_blocks_0_q") == [("transformer_blocks.0.q",)]
    assert found(base, "lora_unet_transformer_blocks_5_q") == []
    assert found(base, "lora_unet_module_list_0") == []
    assert found(base, "lora_unet_model_ema_x") == []
    assert found(places("blocks.5.q"), "lora_unet_transformer_blocks_5_q") == []
    # As diffusers' converter leaves them.
    assert found(base, "lora_unet_transformer_transformer_blocks_0_q") == [
        ("transformer_blocks.0.q",)
    ]
    assert found(base, "lora_unet_transformer_proj_out") == [("proj_out",)]
    assert found(base, "lora_unet_base_model_model_blocks_5_q") == [("blocks.5.q",)]


def test_no_more_wrappers_are_taken_off_than_any_stack_has():
    assert len(list(forms("model." * 300 + "x"))) < 10


def test_a_segment_inside_a_path_is_no_wrapper():
    assert found(places("blocks.0.x"), "blocks.model.0.x") == []
    assert found(places("encoder.transformer.x"), "encoder.x") == []
    assert list(forms("model.transformer.x.model")) == [
        "model.transformer.x.model", "transformer.x.model", "x.model",
    ]  # fmt: skip


@pytest.mark.parametrize("inner", ["0", "base_layer", "linear"])
def test_an_inner_module_is_found_without_it_and_the_other_way_round(inner):
    assert found(places(f"attn.to_out.{inner}"), "attn.to_out") == [(f"attn.to_out.{inner}",)]
    assert found(places(f"attn.to_out.{inner}"), "lora_unet_attn_to_out") == [
        (f"attn.to_out.{inner}",)
    ]
    assert found(places("attn.to_out"), f"attn.to_out.{inner}") == [("attn.to_out",)]


def test_an_inner_module_among_others_is_not_meant_by_their_parents_name():
    assert found(places("net.0", "net.2"), "net") == []
    assert found(places("net.0", "net.2"), "net.0") == [("net.0",)]


def test_a_fused_name_means_the_split_modules_in_their_order():
    base = places("a.to_v", "a.to_k", "a.to_q", "b.gate_proj", "b.up_proj", "c.k_proj", "c.v_proj")
    assert base.find("a.to_qkv") == (Place(("a.to_q", "a.to_k", "a.to_v")),)
    assert base.find("transformer.a.qkv") == (Place(("a.to_q", "a.to_k", "a.to_v")),)
    assert base.find("lora_unet_a_qkv") == (Place(("a.to_q", "a.to_k", "a.to_v")),)
    assert base.find("a.to_kv") == (Place(("a.to_k", "a.to_v")),)
    assert base.find("b.gate_up_proj") == (Place(("b.gate_proj", "b.up_proj")),)
    assert base.find("c.kv_proj") == (Place(("c.k_proj", "c.v_proj")),)
    assert base.find("c.qkv_proj") == ()


def test_a_split_name_means_a_part_of_the_fused_module():
    base = places("a.to_qkv", "b.gate_up_proj")
    parts = ("to_q", "to_k", "to_v")
    for i, part in enumerate(parts):
        assert base.find(f"a.{part}") == (Place(("a.to_qkv",), i, parts),)
        assert base.find(f"lora_unet_a_{part}") == (Place(("a.to_qkv",), i, parts),)
    assert base.find("b.up_proj") == (Place(("b.gate_up_proj",), 1, ("gate_proj", "up_proj")),)


def test_a_split_name_of_two_fused_modules_is_told_apart_by_nothing():
    assert len(places("a.to_qkv", "a.to_kv").find("a.to_k")) == 2


@pytest.mark.parametrize(
    ("path", "is_one"),
    [
        ("lora_te_text_model_encoder_layers_0_mlp_fc1", True),
        ("lora_te2_text_model_encoder_layers_0_mlp_fc1", True),
        ("text_encoder.text_model.encoder.layers.0.mlp.fc1", True),
        ("text_encoder_2.encoder.block.0", True),
        ("base_model.model.text_model.encoder", True),
        ("lora_unet_text_model", False),
        ("blocks.0.text_encoder.x", False),
        ("audio_prompt_adaln_single.linear", False),
    ],
)
def test_paths_into_text_encoders_are_known_by_how_they_begin(path, is_one):
    assert is_text_encoders(path) is is_one
