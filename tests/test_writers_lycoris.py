"""Adapters as LyCORIS writes them, by itself and under kohya's names; and one adapter by everyone.

LyCORIS merges as rule R2 has it where adapter and weights are bf16, and in one rounding in f32.
"""

from pathlib import Path

import pytest
import torch
from dit import MODULES, WIDTH, Dit, differing, factors, fill, fused, write, write_base
from safetensors.torch import load_file
from torch import nn

from lorabench.adapter import Adapter
from lorabench.adapter_file import AdapterFile
from lorabench.errors import AdapterError

PREFIXES = ("lycoris_", "lora_unet_")
DTYPES = {"BF16": (torch.bfloat16, "R2"), "F32": (torch.float32, "R4")}


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bases")
    return {
        name: write_base(folder / f"{name}.safetensors", Dit(dtype))
        for name, (dtype, _) in DTYPES.items()
    }


@pytest.fixture(scope="module")
def base(bases):
    return bases["BF16"]


def network(model, prefix="lycoris_", *, dim=4, alpha=3, text_encoder=None, **options):
    """A network of LyCORIS on a model: its own, or the one that kohya's scripts train with."""
    from lycoris import create_lycoris
    from lycoris.kohya import create_network

    if prefix == "lycoris_":
        made = create_lycoris(
            model, 1.0, linear_dim=dim, linear_alpha=alpha, warn_on_unmatched=False, **options
        )
        made.apply_to()
        return made
    made = create_network(
        1.0, dim, alpha, None, text_encoder, model, warn_on_unmatched=False, **options
    )
    made.apply_to(text_encoder, model, text_encoder is not None, True)
    return made


def saved(made, path: Path, dtype=torch.bfloat16) -> Path:
    made.save_weights(str(path), dtype, {})
    return path


def merged(path: Path, model, prefix: str) -> dict[str, torch.Tensor]:
    """What LyCORIS makes of a file: it reads the file again and merges it into a model."""
    from lycoris.kohya import create_network_from_weights
    from lycoris.wrapper import create_lycoris_from_weights

    with torch.no_grad():
        if prefix == "lycoris_":
            made, _ = create_lycoris_from_weights(1.0, str(path), model)
            made.merge_to(1.0)
        else:
            made, held = create_network_from_weights(1.0, str(path), None, None, model)
            made.merge_to(None, model, held, None, None)
    return model.state_dict()


def module_names(path: Path) -> set[str]:
    return {key.partition(".")[0] for key in load_file(path)}


@pytest.mark.parametrize("weights", DTYPES)
@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"alpha": 0.5},
        {"dim": 6, "rs_lora": True},
        {"use_scalar": True},
        {"algo": "dylora", "block_size": 2},
    ],
    ids=lambda options: " ".join(options) or "locon",
)
def test_what_lycoris_saves_of_linear_layers_fuses_into_the_bits_that_it_merges(
    bases, tmp_path, options, prefix, weights
):
    dtype, rule = DTYPES[weights]
    made = network(Dit(dtype), prefix, **options)
    fill(made.parameters())
    path = saved(made, tmp_path / "adapter.safetensors", dtype)
    expected = merged(path, Dit(dtype), prefix)
    touched = MODULES if prefix == "lycoris_" else MODULES[:-1]
    assert module_names(path) == {f"{prefix}{name.replace('.', '_')}" for name in touched}
    before = {name: bases[weights].read(name) for name in bases[weights].entries}
    assert len(differing(expected, before)) == len(touched)
    assert differing(fused(bases[weights], path, rule), expected) == []


def test_alpha_of_a_network_stands_in_its_file_and_rslora_is_put_into_it(base, tmp_path):
    plain = network(Dit(), "lora_unet_", dim=4, alpha=0.5)
    rooted = network(Dit(), "lora_unet_", dim=4, alpha=3, rs_lora=True)
    for made, scale in ((plain, 0.5 / 4), (rooted, 3 / 2)):
        fill(made.parameters())
        path = saved(made, tmp_path / "adapter.safetensors")
        [(found, count)] = Adapter.open(path, base.tensors).scales.items()
        assert (found.value, count) == (scale, 12)
        assert found.source == "each module's own alpha / its rank"


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("rule", ["R1", "R2", "R3", "R4"])
def test_full_deltas_fuse_into_the_weights_that_were_trained(tmp_path, prefix, rule):
    model = Dit()
    fill(model.parameters(), seed=1)  # multiples of 1/16: a difference is exact
    base = write_base(tmp_path / "base.safetensors", model)
    made = network(model, prefix, algo="full")
    expected = {name: base.read(name) for name in base.entries}
    fill(made.parameters(), seed=2)
    for module in made.loras:
        [name] = [m for m in MODULES if module.lora_name == f"{prefix}{m.replace('.', '_')}"]
        expected[f"{name}.weight"] = module.weight.detach()
        expected[f"{name}.bias"] = module.bias.detach()
    path = saved(made, tmp_path / "adapter.safetensors")
    assert {key.partition(".")[2] for key in load_file(path)} == {"diff", "diff_b"}
    assert differing(fused(base, path, rule), expected) == []
    assert Adapter.open(path, base.tensors).scales == {}


# What is refused

KINDS = [
    ({"algo": "loha"}, "LoHa"),
    ({"algo": "loha", "dora_wd": True}, "LoHa"),
    ({"algo": "lokr", "dim": 1}, "LoKr"),
    ({"algo": "lokr", "dim": 99, "full_matrix": True}, "LoKr"),
    ({"algo": "lokr", "dim": 1, "decompose_both": True, "factor": 4}, "LoKr"),
    ({"algo": "glora"}, "GLoRA"),
    ({"algo": "diag-oft"}, "OFT"),
    ({"algo": "diag-oft", "rescaled": True}, "OFT"),
    ({"algo": "boft"}, "OFT"),
    ({"algo": "ia3"}, "IA3"),
    ({"algo": "tlora"}, "T-LoRA"),
    ({"dora_wd": True}, "DoRA"),
    ({"dora_wd": True, "wd_on_output": False}, "DoRA"),
]


@pytest.mark.parametrize(
    ("options", "kind"), KINDS, ids=[" ".join(map(str, o.values())) for o, _ in KINDS]
)
def test_another_kind_of_lycoris_is_refused_by_its_name_and_listed(base, tmp_path, options, kind):
    made = network(nn.Sequential(nn.Linear(WIDTH, WIDTH)).bfloat16(), **options)
    fill(made.parameters())
    path = saved(made, tmp_path / "adapter.safetensors")
    with pytest.raises(AdapterError, match=rf"isn't applied: (DoRA.*; )?{kind} \('lycoris_0\."):
        Adapter.open(path, base.tensors)
    file = AdapterFile.open(path, allow_skip=True)
    assert not file.modules
    assert {key.name for key in file.skipped} == load_file(path).keys()
    assert {key.kind for key in file.skipped if key.remedy} <= {kind, "DoRA"}


def test_trained_norms_fuse_into_the_weights_that_lycoris_merges(base, tmp_path):
    made = network(Dit(), train_norm=True)
    fill(made.parameters())
    path = saved(made, tmp_path / "adapter.safetensors")
    norms = {
        m.path for m in AdapterFile.open(path).modules if m.kinds == ("full delta", "bias delta")
    }
    assert norms == {f"lycoris_transformer_blocks_{block}_norm" for block in (0, 1)}
    assert differing(fused(base, path, "R2"), merged(path, Dit(), "lycoris_")) == []


class Odd(nn.Module):
    """Convolutions beside a linear layer."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(WIDTH, WIDTH, 3)
        self.point = nn.Conv2d(WIDTH, WIDTH, 1)
        self.linear = nn.Linear(WIDTH, WIDTH)


@pytest.mark.parametrize(
    ("options", "kinds"),
    [
        ({}, {"a convolution's factor"}),
        ({"use_tucker": True}, {"a convolution's factor", "LoCon with a mid (Tucker) factor"}),
        ({"algo": "full"}, {"a convolution's factor"}),
    ],
    ids=["locon", "tucker", "full"],
)
def test_convolutions_are_refused_or_skipped_whole_and_the_linear_layer_is_applied(
    tmp_path, options, kinds
):
    base = write_base(tmp_path / "base.safetensors", Odd().bfloat16())
    made = network(Odd().bfloat16(), **options)
    fill(made.parameters())
    path = saved(made, tmp_path / "adapter.safetensors")
    with pytest.raises(AdapterError, match="a convolution's factor"):
        Adapter.open(path, base.tensors)
    adapter = Adapter.open(path, base.tensors, allow_skip=True)
    assert [module.path for module in adapter.modules] == ["lycoris_linear"]
    assert {key.name for key in adapter.skipped} == {
        key for key in load_file(path) if not key.startswith("lycoris_linear.")
    }
    found = {key.kind for key in adapter.skipped if key.remedy}
    assert found == kinds


class CLIPAttention(nn.Module):  # a name that kohya's scripts look for
    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(8, 8)


class TextEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.self_attn = CLIPAttention()


@pytest.mark.parametrize("count", [1, 2])
def test_kohyas_text_encoders_are_listed_and_the_model_is_fused(base, tmp_path, count):
    encoders = [TextEncoder().bfloat16() for _ in range(count)]
    made = network(Dit(), "lora_unet_", text_encoder=encoders[0] if count == 1 else encoders)
    fill(made.parameters())
    path = saved(made, tmp_path / "adapter.safetensors")
    adapter = Adapter.open(path, base.tensors)
    numbers = [""] if count == 1 else ["1", "2"]
    assert adapter.text_encoders == tuple(f"lora_te{n}_self_attn_q_proj" for n in numbers)
    expected = merged(path, Dit(), "lora_unet_")
    assert differing(fused(base, path, "R2"), expected) == []


# One adapter, written by everyone


@pytest.fixture(scope="module")
def one_adapter():
    """A model of PEFT's, from whose memory everyone's file is written."""
    import peft

    config = peft.LoraConfig(r=4, lora_alpha=3, target_modules=["to_q", "to_k", "to_v", "to_out.0"])
    model = peft.get_peft_model(Dit(), config, autocast_adapter_dtype=False)
    for i, factor in enumerate(factors(model)):
        factor.data = torch.randn(
            factor.shape, generator=torch.Generator().manual_seed(i)
        ).bfloat16()
    return model


def held(model) -> dict[str, torch.Tensor]:
    from peft import get_peft_model_state_dict

    found = get_peft_model_state_dict(model).items()
    return {key.removeprefix("base_model.model."): value for key, value in found}


def by_peft(model, folder):
    model.save_pretrained(folder)
    return folder / "adapter_model.safetensors"


def by_diffusers(model, folder):
    from diffusers.loaders import LTX2LoraLoaderMixin

    told = model.peft_config["default"].to_dict()
    LTX2LoraLoaderMixin.save_lora_weights(
        folder, held(model), transformer_lora_adapter_metadata=told
    )
    return folder / "pytorch_lora_weights.safetensors"


def by_diffusers_under_old_names(model, folder):
    from diffusers.loaders import StableDiffusionLoraLoaderMixin
    from diffusers.utils.state_dict_utils import convert_state_dict_to_diffusers

    old = convert_state_dict_to_diffusers(held(model))
    told = model.peft_config["default"].to_dict()
    StableDiffusionLoraLoaderMixin.save_lora_weights(folder, old, unet_lora_adapter_metadata=told)
    return folder / "pytorch_lora_weights.safetensors"


def by_diffusers_under_kohyas_names(model, folder):
    """Its converter knows no alpha but the rank; people put their own in its place."""
    from diffusers.utils.state_dict_utils import convert_state_dict_to_kohya

    kohya = convert_state_dict_to_kohya({f"unet.{k}": value for k, value in held(model).items()})
    kohya |= {key: torch.tensor(3.0) for key in kohya if key.endswith(".alpha")}
    return write(folder / "kohya.safetensors", kohya)


def by_lycoris(model, folder, prefix="lycoris_"):
    made = network(Dit(), prefix)
    for name in [name for name, _ in made.named_children() if "_attn1_" not in name]:
        delattr(made, name)
    by_flat_name = {key.replace(".", "_"): value for key, value in held(model).items()}
    for name, lora in made.named_children():
        name = name.removeprefix(prefix)
        lora.lora_down.weight.data.copy_(by_flat_name[f"{name}_lora_A_weight"])
        lora.lora_up.weight.data.copy_(by_flat_name[f"{name}_lora_B_weight"])
    return saved(made, folder / "lycoris.safetensors")


def by_kohyas_script(model, folder):
    return by_lycoris(model, folder, "lora_unet_")


WRITERS = [
    by_diffusers,
    by_diffusers_under_old_names,
    by_diffusers_under_kohyas_names,
    by_lycoris,
    by_kohyas_script,
]


@pytest.mark.parametrize("writer", WRITERS)
def test_one_adapter_written_by_anyone_fuses_into_the_same_bits(
    base, one_adapter, tmp_path, writer
):
    (tmp_path / "peft").mkdir()
    expected = fused(base, by_peft(one_adapter, tmp_path / "peft"))
    before = {name: base.read(name) for name in base.entries}
    assert len(differing(expected, before)) == 8
    assert differing(fused(base, writer(one_adapter, tmp_path)), expected) == []
