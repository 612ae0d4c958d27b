"""A module's scale is what its file says of it, or is said to be assumed, or the file is refused.

Expected values are alpha / rank, or alpha / sqrt(rank), worked out by hand.
"""

import json

import pytest
import torch
from safetensors.torch import save_file

from lorabench.adapter_file import AdapterFile
from lorabench.errors import AdapterError, FileError


def factors(module, rank=4, style=("lora_A", "lora_B")):
    down, up = style
    return {
        f"{module}.{down}.weight": torch.ones(rank, 6),
        f"{module}.{up}.weight": torch.ones(8, rank),
    }


def scales(path, **options):
    return {m.path: m.scale.value for m in AdapterFile.open(path, **options).modules}


def sources(path):
    return {m.scale.source for m in AdapterFile.open(path).modules}


@pytest.fixture
def write(tmp_path):
    def write(tensors, metadata=None, config=None):
        path = tmp_path / "adapter_model.safetensors"
        save_file(tensors, path, metadata)
        if config is not None:
            text = config if isinstance(config, str) else json.dumps(config)
            (tmp_path / "adapter_config.json").write_text(text)
        return path

    return write


class TestOwnAlpha:
    @pytest.mark.parametrize(
        "alpha",
        [
            torch.tensor(0.5, dtype=dtype)
            for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64)
        ]
        + [torch.tensor([0.5])],
    )
    def test_of_a_half_is_a_half_in_every_dtype(self, write, alpha):
        assert scales(write(factors("x") | {"x.alpha": alpha})) == {"x": 0.5 / 4}

    @pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.int8])
    def test_of_integers(self, write, dtype):
        assert scales(write(factors("x") | {"x.alpha": torch.tensor(8, dtype=dtype)})) == {"x": 2.0}

    def test_goes_with_the_modules_own_rank(self, write):
        tensors = factors("x", rank=4) | factors("y", rank=2)
        tensors |= {"x.alpha": torch.tensor(2.0), "y.alpha": torch.tensor(2.0)}
        assert scales(write(tensors)) == {"x": 0.5, "y": 1.0}

    def test_stands_above_metadata_and_configuration(self, write):
        tensors = factors("x") | {"x.alpha": torch.tensor(2.0)}
        path = write(tensors, {"lora_alpha": "4", "lora_rank": "4"}, {"r": 4, "lora_alpha": 64})
        assert scales(path) == {"x": 0.5}

    def test_of_some_modules_leaves_the_others_to_what_else_is_said(self, write):
        tensors = factors("x") | factors("y") | {"x.alpha": torch.tensor(2.0)}
        path = write(tensors, {"lora_alpha": "3", "lora_rank": "4"})
        assert scales(path) == {"x": 0.5, "y": 0.75}

    def test_of_zero_is_zero(self, write):
        assert scales(write(factors("x") | {"x.alpha": torch.tensor(0.0)})) == {"x": 0.0}

    @pytest.mark.parametrize(
        ("alpha", "told"),
        [
            (torch.ones(2), r"found F32 \[2\]"),
            (torch.ones(1, 1), r"found F32 \[1, 1\]"),
            (torch.ones(0), r"found F32 \[0\]"),
            (torch.tensor(True), r"found BOOL \[\]"),
            (torch.tensor(float("nan")), "the alpha is nan"),
            (torch.tensor(float("inf")), "the alpha is inf"),
            (torch.tensor(1e300, dtype=torch.float64), "scale is 2.5e.299"),
        ],
    )
    def test_that_is_not_one_finite_number_is_refused(self, write, alpha, told):
        path = write(factors("x") | {"x.alpha": alpha})
        with pytest.raises(AdapterError, match=told):
            AdapterFile.open(path)


class TestMetadata:
    def test_is_one_ratio_even_where_ranks_are_capped(self, write):
        tensors = factors("x", rank=4) | factors("y", rank=1)
        assert scales(write(tensors, {"lora_alpha": "450", "lora_rank": "450"})) == {"x": 1, "y": 1}
        path = write(tensors, {"lora_alpha": "2", "lora_rank": "4"})
        assert scales(path) == {"x": 0.5, "y": 0.5}
        assert sources(path) == {"metadata lora_alpha 2 / lora_rank 4"}

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
    def test_that_is_malformed_is_refused(self, write, metadata):
        path = write(factors("x"), metadata)
        with pytest.raises(AdapterError, match=f"^{path}: metadata must hold lora_alpha"):
            AdapterFile.open(path)

    def test_that_speaks_of_an_alpha_in_another_form_is_refused(self, write):
        with pytest.raises(AdapterError, match=r"'network\.alpha' speaks of an alpha in a form"):
            AdapterFile.open(write(factors("x"), {"network.alpha": "8"}))


ASKED = {"ss_network_alpha": "2", "ss_network_dim": "4"}


class TestKohyasMetadata:
    def test_says_nothing_beside_each_modules_alpha(self, write):
        assert scales(write(factors("x") | {"x.alpha": torch.tensor(4.0)}, ASKED)) == {"x": 1}

    @pytest.mark.parametrize("dim", ["4", None])
    def test_without_them_leaves_a_doubt(self, write, dim):
        asked = {"ss_network_alpha": "2"} | ({"ss_network_dim": dim} if dim else {})
        path = write(factors("x"), asked)
        told = rf"ss_network_alpha 2 / ss_network_dim {dim} says.*--alpha"
        with pytest.raises(AdapterError, match=told):
            AdapterFile.open(path)
        assert scales(path, alpha=2.0) == {"x": 0.5}

    @pytest.mark.parametrize(
        "metadata",
        [
            {"ss_network_alpha": "4", "ss_network_dim": "4"},
            {"ss_network_alpha": "Dynamic", "ss_network_dim": "Dynamic"},
        ],
    )
    def test_that_asked_for_a_scale_of_one_or_for_none_leaves_no_doubt(self, write, metadata):
        path = write(factors("x"), metadata)
        assert scales(path) == {"x": 1.0}
        assert "assumed" in sources(path).pop()


CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8}


class TestPeftsConfiguration:
    def test_tells_alpha_and_rank(self, write):
        assert scales(write(factors("base_model.model.x"), config=CONFIG)) == {
            "base_model.model.x": 2.0
        }

    def test_of_rslora_divides_by_the_root_of_the_rank(self, write):
        path = write(factors("base_model.model.x"), config=CONFIG | {"use_rslora": True})
        assert scales(path) == {"base_model.model.x": 8 / 2}
        assert "rsLoRA" in sources(path).pop()

    def test_has_patterns_for_the_ends_of_names(self, write):
        tensors = (
            factors("base_model.model.a.to_q", rank=4)
            | factors("base_model.model.a.to_k", rank=2)
            | factors("base_model.model.b.to_k", rank=4)
        )
        config = CONFIG | {
            "rank_pattern": {"a.to_k": 2},
            "alpha_pattern": {"^b.to_k": 1, "to_k": 3},
        }
        assert scales(write(tensors, config=config)) == {
            "base_model.model.a.to_q": 8 / 4,
            "base_model.model.a.to_k": 3 / 2,
            "base_model.model.b.to_k": 1 / 4,
        }

    def test_of_another_file_says_nothing(self, write, tmp_path):
        path = write(factors("x"), config=CONFIG)
        other = path.rename(tmp_path / "other.safetensors")
        assert scales(other) == {"x": 1.0}

    def test_of_another_rank_than_the_factors_is_refused(self, write):
        path = write(factors("base_model.model.x", rank=2), config=CONFIG)
        with pytest.raises(AdapterError, match=r"are of rank 2, but .*adapter_config.json says 4"):
            AdapterFile.open(path)

    @pytest.mark.parametrize(
        ("field", "value", "told"),
        [
            ("use_dora", True, "use_dora = True: DoRA"),
            ("fan_in_fan_out", True, "weights are transposed"),
            ("modules_to_save", ["proj_out"], "whole weights besides factors"),
            ("peft_type", "LOHA", "peft_type 'LOHA'; expected 'LORA'"),
            ("init_lora_weights", "pissa_niter_4", "changed the base"),
            ("init_lora_weights", "olora", "changed the base"),
            ("alora_invocation_tokens", [1], "can't be fused"),
            ("lora_alpha", "8", "lora_alpha: expected a finite number, found '8'"),
            ("lora_alpha", None, "lora_alpha: expected a finite number"),
            ("r", True, "r: expected a finite number, found True"),
            ("lora_alpha", 10**400, "lora_alpha: expected a finite number"),
            ("alpha_pattern", {"x": "y"}, r"alpha_pattern\.x: expected a finite number"),
            ("alpha_pattern", ["x"], "alpha_pattern: expected patterns"),
            ("alpha_pattern", {"x[": 1}, "is no regular expression"),
            ("alpha_pattern", {"(a+)+b": 1}, "may take forever to match"),
            ("rank_pattern", {"((a*))*b": 1}, "may take forever to match"),
            ("use_rslora", "false", "use_rslora: expected true or false, found 'false'"),
        ],
    )
    def test_of_what_cannot_be_applied_is_refused_by_its_name(self, write, field, value, told):
        path = write(factors("base_model.model.x"), config=CONFIG | {field: value})
        with pytest.raises(AdapterError, match=told):
            AdapterFile.open(path)

    @pytest.mark.parametrize("start", ["gaussian", "orthogonal", "eva", True, False])
    def test_of_another_beginning_than_those_is_fine(self, write, start):
        path = write(factors("x"), config=CONFIG | {"init_lora_weights": start})
        assert scales(path) == {"x": 2.0}

    @pytest.mark.parametrize("text", ["", "{", "[]", '{"r": 4, "r": 5}', "\ud800"])
    def test_that_is_damaged_is_a_file_error(self, write, tmp_path, text):
        path = write(factors("x"))
        (tmp_path / "adapter_config.json").write_bytes(text.encode("utf-8", "surrogatepass"))
        with pytest.raises(FileError, match=r"adapter_config\.json"):
            AdapterFile.open(path)

    def test_without_alpha_or_rank_is_refused(self, write):
        with pytest.raises(AdapterError, match="'lora_alpha' is missing"):
            AdapterFile.open(write(factors("x"), config={"r": 4}))


class TestDiffusersMetadata:
    def test_is_of_the_part_of_the_pipeline_that_its_keys_name(self, write):
        told = {
            "transformer.r": 4, "transformer.lora_alpha": 2, "transformer.alpha_pattern": {"y": 1},
            "text_encoder.r": 9, "text_encoder.lora_alpha": 9, "text_encoder.use_dora": True,
        }  # fmt: skip
        path = write(
            factors("transformer.x") | factors("transformer.y") | factors("text_encoder_2.x"),
            {"lora_adapter_metadata": json.dumps(told)},
        )
        assert scales(path) == {
            "transformer.x": 0.5, "transformer.y": 0.25, "text_encoder_2.x": 1.0
        }  # fmt: skip

    @pytest.mark.parametrize("path", ["x", "diffusion_model.x", "unet.x"])
    def test_of_names_that_were_changed_since_leaves_a_doubt(self, write, path):
        told = json.dumps({"transformer.r": 4, "transformer.lora_alpha": 2})
        file = write(factors(path), {"lora_adapter_metadata": told})
        with pytest.raises(AdapterError, match=r"of 'transformer\.', and nothing of this one"):
            AdapterFile.open(file)
        assert scales(file, alpha=8.0) == {path: 2.0}

    def test_that_contradicts_another_source_is_refused(self, write):
        told = json.dumps({"transformer.r": 4, "transformer.lora_alpha": 2})
        path = write(
            factors("transformer.x"),
            {"lora_adapter_metadata": told, "lora_alpha": "4", "lora_rank": "4"},
        )
        with pytest.raises(AdapterError, match=r"0\.5 by metadata lora_adapter.*but 1 by metadata"):
            AdapterFile.open(path)

    @pytest.mark.parametrize("text", ["", "{", "7", '{"transformer": 3}', '{"r": 4}'])
    def test_that_is_damaged_is_refused(self, write, text):
        with pytest.raises((AdapterError, FileError), match=r"adapter_model\.safetensors"):
            AdapterFile.open(write(factors("x"), {"lora_adapter_metadata": text}))


class TestNothingSaid:
    def test_is_one_and_said_to_be_assumed(self, write):
        path = write(factors("x"), {"note": "trained on pictures"})
        assert scales(path) == {"x": 1.0}
        assert sources(path) == {"assumed: nothing tells an alpha, so alpha = rank"}

    def test_may_be_overridden(self, write):
        tensors = factors("x", rank=4) | factors("y", rank=2)
        assert scales(write(tensors), alpha=2.0) == {"x": 0.5, "y": 1.0}

    def test_is_not_overridden_where_something_is_said(self, write):
        path = write(factors("x") | {"x.alpha": torch.tensor(4.0)})
        with pytest.raises(AdapterError, match="alpha 2 was given, but the file tells its scale"):
            AdapterFile.open(path, alpha=2.0)

    @pytest.mark.parametrize("alpha", [float("nan"), float("inf")])
    def test_is_overridden_by_a_finite_number_only(self, write, alpha):
        with pytest.raises(AdapterError, match="expected a finite number"):
            AdapterFile.open(write(factors("x")), alpha=alpha)
