"""A tensor's name says which part of which module it is, or of which kind that isn't applied."""

import pytest

from lorabench.keys import STYLES, Part, Refused, is_adapters, parse_key

PEFT, KOHYA, DIFFUSERS = STYLES


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("x.to_q.lora_A.weight", ("x.to_q", "A", PEFT, "")),
        ("x.to_q.lora_B.weight", ("x.to_q", "B", PEFT, "")),
        ("x.to_q.lora_A.default.weight", ("x.to_q", "A", PEFT, "default")),
        ("x.to_q.lora_B.my-style.weight", ("x.to_q", "B", PEFT, "my-style")),
        ("x.to_q.lora_B.bias", ("x.to_q", "bias", PEFT, "")),
        ("x.to_q.lora_B.default.bias", ("x.to_q", "bias", PEFT, "default")),
        ("lora_unet_x_to_q.lora_down.weight", ("lora_unet_x_to_q", "A", KOHYA, "")),
        ("lora_unet_x_to_q.lora_up.weight", ("lora_unet_x_to_q", "B", KOHYA, "")),
        ("x.to_q.lora_down.weight", ("x.to_q", "A", KOHYA, "")),
        ("lora_unet_x_to_q.lora_A.weight", ("lora_unet_x_to_q", "A", PEFT, "")),
        ("x.to_q.lora.down.weight", ("x.to_q", "A", DIFFUSERS, "")),
        ("x.to_q.lora.up.weight", ("x.to_q", "B", DIFFUSERS, "")),
        ("x.to_q.lora_linear_layer.up.weight", ("x.to_q", "B", DIFFUSERS, "")),
        ("x.to_q.alpha", ("x.to_q", "alpha", "", "")),
        ("x.to_q.diff", ("x.to_q", "diff", "", "")),
        ("x.to_q.diff_b", ("x.to_q", "diff_b", "", "")),
        ("x.norm.w_norm", ("x.norm", "diff", "", "")),
        ("x.norm.b_norm", ("x.norm", "diff_b", "", "")),
    ],
)
def test_a_part_of_a_module_is_read_off_its_suffix(name, part):
    assert parse_key(name) == Part(name, *part)


@pytest.mark.parametrize(
    ("suffix", "kind"),
    [
        ("lora_magnitude_vector", "DoRA"),
        ("lora_magnitude_vector.default.weight", "DoRA"),
        ("dora_scale", "DoRA"),
        ("hada_w1_a", "LoHa"),
        ("hada_t2", "LoHa"),
        ("lokr_w1", "LoKr"),
        ("lokr_w2_b", "LoKr"),
        ("lokr_t2", "LoKr"),
        ("lora_mid.weight", "LoCon with a mid (Tucker) factor"),
        ("a1.weight", "GLoRA"),
        ("b2.weight", "GLoRA"),
        ("oft_blocks", "OFT"),
        ("oft_R.default.weight", "OFT"),
        ("boft_R", "OFT"),
        ("lambda_layer", "T-LoRA"),
        ("on_input", "IA3"),
        ("ia3_l.default", "IA3"),
        ("vera_lambda_d", "VeRA"),
        ("lora_E", "AdaLoRA"),
        ("lora_A", "AdaLoRA"),
        ("lora_embedding_A", "a LoRA of an embedding"),
        ("set_weight", "a weight to be put in the base's place"),
        ("weight_scale", "a quantised tensor"),
        ("lora_A.bias", "a factor with a bias that no writer documents"),
        ("lora_up.bias", "a factor with a bias that no writer documents"),
        ("weight", "a whole weight"),
        ("modules_to_save.default.weight", "a whole weight"),
    ],
)
def test_another_kind_is_refused_by_its_name_and_with_what_to_do(suffix, kind):
    found = parse_key(f"x.to_q.{suffix}")
    assert isinstance(found, Refused)
    assert (found.path, found.kind) == ("x.to_q", kind)
    assert found.remedy


@pytest.mark.parametrize(
    "name", ["lora_A.weight", "x.lora_C.weight", "x", "", "x.lora_A.a.b.weight", "."]
)
def test_what_is_no_name_of_an_adapter_is_not_understood(name):
    found = parse_key(name)
    assert isinstance(found, Refused)
    assert found.kind == "a key that isn't understood"


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        ("x.to_q.lora_A.weight", True),
        ("lora_unet_x.alpha", True),
        ("lycoris_x.a1.weight", True),
        ("x.lora.down.weight", True),
        ("x.hada_w1_a", True),
        ("x.diff", True),
        ("x.ia3_l.weight", True),
        ("x.lambda_layer", True),
        ("x.to_q.weight", False),
        ("x.to_q.bias", False),
        ("x.to_q.weight_scale", False),
        ("x.alpha", False),
        ("explorative.weight", False),
    ],
)
def test_an_adapters_name_is_told_from_a_bases(name, is_one):
    assert is_adapters(name) is is_one
