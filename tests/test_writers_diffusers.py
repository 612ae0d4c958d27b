"""Adapters as diffusers writes them, held against what diffusers itself fuses into the weights."""

import pytest
import torch
from dit import differing, factors, fill, fused, write, write_base
from safetensors.torch import load_file
from torch import nn

from lorabench.adapter import Adapter
from lorabench.errors import AdapterError

FILE = "pytorch_lora_weights.safetensors"

CONFIGS = {
    "plain": {"lora_alpha": 4},
    "alpha": {"lora_alpha": 3},
    "rsLoRA": {"r": 6, "lora_alpha": 3, "use_rslora": True},
    "patterns": {
        "rank_pattern": {"to_q": 8, r"^transformer_blocks\.1\.ff\.net\.2": 2},
        "alpha_pattern": {"transformer_blocks.0.attn2.to_k": 7, r"attn\d.to_v": 5},
    },
}


def untrained():
    """The smallest model of LTX-Video that diffusers makes."""
    from diffusers import LTXVideoTransformer3DModel

    torch.manual_seed(3)
    return LTXVideoTransformer3DModel(
        in_channels=8, out_channels=8, num_attention_heads=2, attention_head_dim=8,
        cross_attention_dim=16, caption_channels=16, num_layers=2,
    ).to(torch.bfloat16)  # fmt: skip


def lora(**options):
    from peft import LoraConfig

    targets = ["to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2"]
    return LoraConfig(**{"r": 4, "lora_alpha": 2, "target_modules": targets} | options)


def trained(**options):
    model = untrained()
    model.add_adapter(lora(**options))
    fill(factors(model))
    return model


def state_dict(model):
    from peft import get_peft_model_state_dict

    return get_peft_model_state_dict(model)


def metadata(**parts):
    """What the training scripts of diffusers hand to ``save_lora_weights`` of a part's config."""
    from diffusers.training_utils import _collate_lora_metadata

    return _collate_lora_metadata(parts)


def expected(model):
    model.fuse_lora()
    model.unload_lora()
    return model.state_dict()


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_base(tmp_path_factory.mktemp("base") / "ltx.safetensors", untrained())


@pytest.fixture
def text_encoder():
    from peft import inject_adapter_in_model

    class TextEncoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.text_model = nn.ModuleDict({"q_proj": nn.Linear(8, 8)})

    model = TextEncoder()
    inject_adapter_in_model(lora(r=3, target_modules=["q_proj"]), model)
    return model


# What diffusers fuses on a CPU is PEFT's merge: R3 where factors have the weights' dtype.


@pytest.mark.parametrize("name", CONFIGS)
def test_what_a_pipeline_saves_fuses_into_the_bits_that_diffusers_fuses(base, tmp_path, name):
    from diffusers.loaders import LTX2LoraLoaderMixin

    model = trained(**CONFIGS[name])
    LTX2LoraLoaderMixin.save_lora_weights(
        tmp_path, state_dict(model), **metadata(transformer=model)
    )
    assert all(key.startswith("transformer.") for key in load_file(tmp_path / FILE))
    assert differing(fused(base, tmp_path / FILE, "R3"), expected(model)) == []


@pytest.mark.parametrize("name", CONFIGS)
def test_what_a_model_saves_by_itself_fuses_into_the_bits_that_diffusers_fuses(
    base, tmp_path, name
):
    model = trained(**CONFIGS[name])
    model.save_lora_adapter(tmp_path)
    assert all(key.startswith("transformer_blocks.") for key in load_file(tmp_path / FILE))
    assert differing(fused(base, tmp_path / FILE, "R3"), expected(model)) == []


def test_patterns_in_the_metadata_set_the_scales_of_the_modules_that_they_match(base, tmp_path):
    from diffusers.loaders import LTX2LoraLoaderMixin

    model = trained(**CONFIGS["patterns"])
    LTX2LoraLoaderMixin.save_lora_weights(
        tmp_path, state_dict(model), **metadata(transformer=model)
    )
    adapter = Adapter.open(tmp_path / FILE, base.tensors)
    found = {module.path.removeprefix("transformer."): module.scale.value
             for module in adapter.modules}  # fmt: skip
    scales = {"to_q": 2 / 8, "to_k": 2 / 4, "to_v": 5 / 4, "to_out.0": 2 / 4}
    told = {
        f"transformer_blocks.{block}.{attention}.{linear}": scale
        for block in (0, 1) for attention in ("attn1", "attn2") for linear, scale in scales.items()
    }  # fmt: skip
    told |= {f"transformer_blocks.{block}.ff.net.0.proj": 2 / 4 for block in (0, 1)}
    told |= {"transformer_blocks.0.ff.net.2": 2 / 4, "transformer_blocks.1.ff.net.2": 2 / 2}
    told["transformer_blocks.0.attn2.to_k"] = 7 / 4
    assert found == told


def test_without_metadata_alpha_is_assumed_to_be_the_rank(base, tmp_path):
    from diffusers.loaders import LTX2LoraLoaderMixin

    model = trained(lora_alpha=4)
    LTX2LoraLoaderMixin.save_lora_weights(tmp_path, state_dict(model))
    [scale] = Adapter.open(tmp_path / FILE, base.tensors).scales
    assert (scale.value, scale.source[:7]) == (1.0, "assumed")
    assert differing(fused(base, tmp_path / FILE, "R3"), expected(model)) == []


def test_what_is_of_a_text_encoder_is_listed_and_its_configuration_is_not_the_models(
    base, tmp_path, text_encoder
):
    from diffusers.loaders import FluxLoraLoaderMixin

    model = trained(lora_alpha=3)
    FluxLoraLoaderMixin.save_lora_weights(
        tmp_path, state_dict(model), text_encoder_lora_layers=state_dict(text_encoder),
        **metadata(transformer=model, text_encoder=text_encoder),
    )  # fmt: skip
    adapter = Adapter.open(tmp_path / FILE, base.tensors)
    assert adapter.text_encoders == ("text_encoder.text_model.q_proj",)
    assert {scale.value for scale in adapter.scales} == {3 / 4}
    assert differing(fused(base, tmp_path / FILE, "R3"), expected(model)) == []


def test_a_file_of_nothing_but_a_text_encoder_is_refused_as_that(base, tmp_path, text_encoder):
    from diffusers.loaders import StableDiffusionLoraLoaderMixin
    from diffusers.utils.state_dict_utils import convert_state_dict_to_diffusers

    StableDiffusionLoraLoaderMixin.save_lora_weights(
        tmp_path,
        text_encoder_lora_layers=convert_state_dict_to_diffusers(state_dict(text_encoder)),
    )
    assert any("lora_linear_layer" in key for key in load_file(tmp_path / FILE))
    with pytest.raises(AdapterError, match="all 1 modules are of text encoders"):
        Adapter.open(tmp_path / FILE, base.tensors)


def test_a_unets_old_names_mix_with_new_ones_and_text_encoders_as_its_script_saves_them(
    base, tmp_path, text_encoder
):
    from diffusers.loaders import StableDiffusionLoraLoaderMixin
    from diffusers.utils.state_dict_utils import convert_state_dict_to_diffusers

    model = trained(lora_alpha=3)
    StableDiffusionLoraLoaderMixin.save_lora_weights(
        tmp_path,
        unet_lora_layers=convert_state_dict_to_diffusers(state_dict(model)),
        text_encoder_lora_layers=convert_state_dict_to_diffusers(state_dict(text_encoder)),
        **metadata(unet=model, text_encoder=text_encoder),
    )
    names = load_file(tmp_path / FILE)
    assert any(key.endswith("to_out.0.lora.up.weight") for key in names)
    assert any(key.endswith("ff.net.2.lora_B.weight") for key in names)
    assert differing(fused(base, tmp_path / FILE, "R3"), expected(model)) == []


def test_old_names_mean_what_diffusers_converts_them_to(base, tmp_path):
    from diffusers.utils.state_dict_utils import (
        convert_all_state_dict_to_peft,
        convert_state_dict_to_diffusers,
        convert_unet_state_dict_to_peft,
    )

    old = convert_state_dict_to_diffusers(state_dict(trained()))
    forms = {"old": old, "unet": convert_unet_state_dict_to_peft(old),
             "all": convert_all_state_dict_to_peft(old)}  # fmt: skip
    found = [
        fused(base, write(tmp_path / f"{name}.safetensors", form)) for name, form in forms.items()
    ]
    assert differing(found[0], found[1]) == differing(found[0], found[2]) == []


@pytest.mark.parametrize("prefix", ["unet.", "transformer.", "base_model.model.", ""])
def test_what_diffusers_converts_to_kohyas_names_is_found_with_and_without_a_prefix(
    base, tmp_path, prefix
):
    from diffusers.utils.state_dict_utils import convert_state_dict_to_kohya

    model = trained(lora_alpha=4, rank_pattern={"to_k": 6}, alpha_pattern={"to_k": 6})
    kohya = convert_state_dict_to_kohya(
        {f"{prefix}{name}": value for name, value in state_dict(model).items()}
    )
    flat = prefix.replace("unet.", "lora_unet.").replace(".", "_")
    assert f"{flat}transformer_blocks_0_attn1_to_out_0.lora_up.weight" in kohya
    path = write(tmp_path / "kohya.safetensors", kohya)
    assert {scale.source for scale in Adapter.open(path, base.tensors).scales} == {
        "each module's own alpha / its rank"
    }
    assert differing(fused(base, path, "R3"), expected(model)) == []


def test_dora_of_diffusers_is_refused_by_its_name_in_both_styles(base, tmp_path):
    from diffusers.utils.state_dict_utils import convert_state_dict_to_kohya

    model = trained(use_dora=True)
    model.save_lora_adapter(tmp_path)
    kohya = convert_state_dict_to_kohya(state_dict(model))
    for path in (tmp_path / FILE, write(tmp_path / "kohya.safetensors", kohya)):
        with pytest.raises(AdapterError, match=r"isn't applied: DoRA \('"):
            Adapter.open(path, base.tensors)
