"""The shipped template is LTX-2.5 to the tensor, and a header is a geometry like any other."""

from collections import Counter
from dataclasses import astuple, replace

import pytest

from lorabench.checkpoint import Checkpoint
from lorabench.errors import ConfigError
from lorabench.geometry import (
    Geometry,
    TensorSpec,
    from_tensors,
    geometry_names,
    load_geometry,
)
from lorabench.resources import data_folder
from lorabench.synthetic import synthesize

LTX = load_geometry("ltx-2.5-22b")


def test_the_template_gives_the_published_counts_of_the_whole_model():
    counts = LTX.counts()
    assert counts.tensors == 4349
    assert counts.params == 21_004_025_600
    assert counts.tensor_bytes == 42_017_512_960
    assert counts.targets == 1660
    assert counts.touched_params == 18_977_652_736
    assert counts.macs == 8_526_382_497_792
    assert counts.adapter_params == 4_449_681_408
    assert counts.adapter_tensor_bytes == 8_899_362_816
    assert counts.ranks == {450: 1360, 256: 8, 128: 4, 32: 288}


def test_tensor_bytes_and_headers_are_the_published_file_sizes():
    assert LTX.counts().tensor_bytes + 8 + 677_616 == 42_018_190_584
    assert LTX.counts().adapter_tensor_bytes + 8 + 526_744 == 8_899_889_568


def test_scale_shift_tables_alone_are_f32():
    dtypes = Counter(t.dtype for t in LTX.tensors)
    assert dtypes == {"BF16": 4059, "F32": 290}
    assert all((t.dtype == "F32") == ("scale_shift_table" in t.name) for t in LTX.tensors)


def test_every_name_is_unique_and_carries_the_prefix():
    names = [t.name for t in LTX.tensors]
    assert len(set(names)) == len(names)
    assert all(name.startswith("model.diffusion_model.") for name in names)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("patchify_proj.weight", (4096, 128)),
        ("audio_proj_out.bias", (128,)),
        ("keyframes_abs_pos_embedding", (1, 4096)),
        ("adaln_single.linear.weight", (9 * 4096, 4096)),
        ("av_ca_a2v_gate_adaln_single.linear.weight", (4096, 4096)),
        ("audio_adaln_single.emb.timestep_embedder.linear_1.weight", (2048, 256)),
        ("transformer_blocks.47.audio_to_video_attn.to_q.weight", (2048, 4096)),
        ("transformer_blocks.0.audio_to_video_attn.to_k.weight", (2048, 2048)),
        ("transformer_blocks.0.audio_to_video_attn.to_out.0.weight", (4096, 2048)),
        ("transformer_blocks.0.video_to_audio_attn.to_v.weight", (2048, 4096)),
        ("transformer_blocks.0.video_to_audio_attn.to_gate_logits.weight", (32, 2048)),
        ("transformer_blocks.0.attn1.q_norm.weight", (4096,)),
        ("transformer_blocks.0.ff.net.2.weight", (4096, 16384)),
        ("transformer_blocks.0.audio_ff.net.0.proj.bias", (8192,)),
        ("transformer_blocks.0.scale_shift_table_a2v_ca_audio", (5, 2048)),
        ("audio_embeddings_connector.learnable_registers", (128, 2048)),
        ("video_embeddings_connector.transformer_1d_blocks.7.ff.net.0.proj.bias", (16384,)),
    ],
)
def test_tensors_have_their_published_names_and_shapes(name, shape):
    assert [t.shape for t in LTX.tensors if t.name == f"{LTX.prefix}{name}"] == [shape]


def test_the_video_feed_forward_has_no_biases():
    names = {t.name.removeprefix(LTX.prefix) for t in LTX.tensors}
    assert not names & {f"transformer_blocks.{i}.ff.net.2.bias" for i in range(48)}
    assert not names & {f"transformer_blocks.{i}.ff.net.0.proj.bias" for i in range(48)}


def test_targets_are_34_in_each_block_and_28_globals_and_none_in_connectors():
    per_block = Counter(LTX.block_of(t.weight.name) for t in LTX.targets)
    assert per_block == {None: 28, **dict.fromkeys(range(48), 34)}
    assert not any("connector" in t.module for t in LTX.targets)


def test_a_target_has_the_smallest_of_rank_out_and_in():
    assert all(t.rank == min(450, *t.weight.shape) for t in LTX.targets)
    assert {t.rank for t in LTX.targets if "to_gate_logits" in t.module} == {32}


def test_adapter_tensors_are_pairs_that_multiply_to_their_weight():
    tensors = list(LTX.adapter_tensors())
    assert len(tensors) == 3320
    for target, a, b in zip(LTX.targets, tensors[::2], tensors[1::2], strict=True):
        assert a.name == f"diffusion_model.{target.module}.lora_A.weight"
        assert b.name == f"diffusion_model.{target.module}.lora_B.weight"
        assert (b.shape[0], a.shape[1]) == target.weight.shape
        assert a.shape[0] == b.shape[1] == target.rank
        assert a.dtype == b.dtype == "BF16"


def test_the_whole_without_connectors_is_the_cut_to_all_blocks():
    counts = LTX.cut(48).counts()
    assert (counts.tensors, counts.params) == (4091, 18_987_859_200)
    assert (counts.targets, counts.macs) == (1660, 8_526_382_497_792)


def test_a_cut_is_the_globals_and_so_many_blocks_exactly():
    cuts = [amounts(LTX.cut(n)) for n in range(49)]
    block = [b - a for a, b in zip(cuts[0], cuts[1], strict=True)]
    assert all(amount > 0 for amount in block)
    for n, cut in enumerate(cuts):
        assert cut == [g + n * b for g, b in zip(cuts[0], block, strict=True)]


def amounts(geometry: Geometry) -> list[int]:
    """Every count but the ranks, which are a table."""
    *counts, ranks = astuple(geometry.counts())
    return [*counts, sum(ranks.values())]


def test_a_cut_keeps_the_first_blocks_in_the_order_of_the_whole():
    cut = LTX.cut(2)
    kept = set(cut.tensors)
    assert cut.blocks == 2
    assert cut.tensors == tuple(t for t in LTX.tensors if t in kept)
    assert {LTX.block_of(t.name) for t in cut.tensors} == {None, 0, 1}


def test_cutting_twice_is_cutting_once():
    assert LTX.cut(5).cut(2) == LTX.cut(2)


@pytest.mark.parametrize("shrink", [2, 8, 32])
def test_shrinking_divides_widths_and_rank_and_changes_nothing_else(shrink):
    small = load_geometry("ltx-2.5-22b", shrink=shrink)
    assert small.rank == 450 // shrink
    for whole, part in zip(LTX.tensors, small.tensors, strict=True):
        assert (part.name, part.dtype) == (whole.name, whole.dtype)
        # Tables, embeddings and registers have so many rows at any width.
        fixed = 0 if part.name.endswith((".weight", ".bias")) else 1
        sizes = list(zip(whole.shape, part.shape, strict=True))
        assert all(w in (p, p * shrink) for w, p in sizes)
        assert all(w == p * shrink for w, p in sizes[fixed:])
    for whole, part in zip(LTX.targets, small.targets, strict=True):
        assert part.module == whole.module
        assert part.weight.shape == tuple(n // shrink for n in whole.weight.shape)
        assert part.rank == min(450 // shrink, *part.weight.shape)


@pytest.mark.parametrize("shrink", [0, -1, 3, 64])
def test_a_shrink_that_does_not_divide_every_size_is_refused(shrink):
    with pytest.raises(ConfigError, match=rf"size . = \d+ can't be divided by shrink = {shrink}"):
        load_geometry("ltx-2.5-22b", shrink=shrink)


def test_another_rank_takes_the_place_of_the_templates():
    ranks = load_geometry("ltx-2.5-22b", rank=384).counts().ranks
    assert ranks == {384: 1360, 256: 8, 128: 4, 32: 288}


@pytest.mark.parametrize("rank", [0, -3])
def test_a_rank_below_one_is_refused(rank):
    with pytest.raises(ConfigError, match=f"rank.*{rank}"):
        load_geometry("ltx-2.5-22b", rank=rank)
    with pytest.raises(ConfigError, match=f"rank.*{rank}"):
        from_tensors("x", LTX.tensors, rank=rank)


@pytest.mark.parametrize("blocks", [None, 0, 1, 3])
def test_the_header_of_a_written_file_is_the_geometry_it_was_written_from(tmp_path, blocks):
    template = load_geometry("ltx-2.5-22b", shrink=32)
    # All 48 blocks are 40 MB; three with the connectors say the same.
    cut = template.cut(3 if blocks is None else blocks)
    connectors = [t for t in template.tensors if t.name.startswith(template.connector_prefixes)]
    if blocks is None:
        cut = replace(cut, tensors=(*cut.tensors, *connectors))
    base = synthesize(tmp_path, cut, ()).base
    header = from_tensors(base.name, Checkpoint.open(base).tensors, rank=template.rank)
    assert header.tensors == cut.tensors
    assert header.counts() == cut.counts()
    assert header.blocks == cut.blocks
    assert list(header.adapter_tensors()) == list(cut.adapter_tensors())
    if cut.blocks:
        assert header.cut(1).counts() == template.cut(1).counts()


def test_a_header_without_a_rank_counts_all_but_the_adapter():
    unknown = dict.fromkeys(("macs", "adapter_params", "adapter_tensor_bytes", "ranks"))
    assert from_tensors("ltx", LTX.tensors).counts() == replace(LTX.counts(), **unknown)
    with pytest.raises(ConfigError, match="'ltx' comes without an adapter rank"):
        _ = from_tensors("ltx", LTX.tensors).targets


def test_blocks_are_the_largest_numbered_family_and_unnumbered_names_beside_them_are_globals():
    def weight(name, *shape):
        return TensorSpec(name, shape, "F32")

    tensors = [
        *(weight(f"layers.{i}.fc.weight", 8, 8) for i in (0, 1, 2)),
        weight("layers.norm.weight", 8),
        weight("small.0.weight", 2, 2),
        weight("head.weight", 8, 8),
    ]
    geometry = from_tensors("mine", tensors, rank=2)
    assert geometry.blocks == 3
    assert geometry.block_of("layers.norm.weight") is None
    assert [t.name for t in geometry.cut(1).tensors] == [
        "layers.0.fc.weight",
        "layers.norm.weight",
        "small.0.weight",
        "head.weight",
    ]


@pytest.mark.parametrize("blocks", [-1, 49])
def test_a_cut_beyond_the_blocks_there_are_is_refused(blocks):
    with pytest.raises(ConfigError, match=rf"has 48 blocks; it can't be cut to {blocks}"):
        LTX.cut(blocks)


def test_a_model_without_repeated_blocks_has_none_to_cut():
    flat = from_tensors("flat", [TensorSpec("fc.weight", (2, 2), "F32")])
    assert flat.blocks == 0
    with pytest.raises(ConfigError, match="'flat' has no repeated blocks"):
        flat.cut(0)


def test_an_unknown_name_lists_the_shipped_ones_and_the_closest():
    assert geometry_names() == ["ltx-2.5-22b"]
    with pytest.raises(ConfigError, match=r"did you mean 'ltx-2.5-22b'.*shipped: ltx-2.5-22b"):
        load_geometry("ltx-2.5-22")


MINI = """
name = "mini"
prefix = "m."
dtype = "BF16"
blocks = "blocks"
connectors = []
[adapter]
prefix = "d."
rank = 4
[sizes]
V = 8
[tensors]
head = "V <- 2*V"
blocks = { part = "block", repeat = 2, w = "V" }
[parts.block]
proj = "w <- w, no bias"
table = "[3, w] F32"
"""


def test_a_template_of_ones_own_is_a_model(tmp_path):
    path = tmp_path / "mini.toml"
    path.write_text(MINI)
    assert load_geometry(path).tensors == (
        TensorSpec("m.head.weight", (8, 16), "BF16"),
        TensorSpec("m.head.bias", (8,), "BF16"),
        TensorSpec("m.blocks.0.proj.weight", (8, 8), "BF16"),
        TensorSpec("m.blocks.0.table", (3, 8), "F32"),
        TensorSpec("m.blocks.1.proj.weight", (8, 8), "BF16"),
        TensorSpec("m.blocks.1.table", (3, 8), "F32"),
    )


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('name = "mini"', "name =", "is not TOML"),
        ('prefix = "m."', "", "lacks 'prefix'"),
        ("[adapter]", "[adaptor]", "no use for 'adaptor'"),
        ("rank = 4", "rank = 'four'", "rank = 'four' must be a whole number"),
        ("rank = 4", "rank = 0", "rank = 0 must be a whole number above 0"),
        ("V = 8", "V = 'eight'", "size V = 'eight'"),
        ("V = 8", "V = 8.0", r"size V = 8\.0"),
        ("V = 8", "V = -8", "size V = -8"),
        ("V <- 2*V", "V <- 2*W", "lacks 'W'"),
        ("V <- 2*V", "V -> 2*V", "neither 'out <- in' nor"),
        ("[3, w] F32", "[3, w] F33", "blocks.0.table' has an unknown dtype 'F33'"),
        ('dtype = "BF16"', 'dtype = "bf16"', "m.head.weight' has an unknown dtype 'bf16'"),
        ('part = "block"', 'part = "blok"', "lacks 'blok'"),
        ('part = "block", ', "", "lacks 'part'"),
        ("repeat = 2", "repeat = 'two'", "repeat of blocks = 'two'"),
        ('proj = "w <- w, no bias"', 'proj = { part = "block" }', "itself"),
        ('table = "[3, w] F32"', '"proj.weight" = "[w]"', "proj.weight' is described more than"),
        ('head = "V <- 2*V"', "head = 3", "'m.head = 3' is neither"),
    ],
)  # fmt: skip
def test_a_template_that_says_no_whole_model_is_refused_with_its_path(tmp_path, old, new, message):
    path = tmp_path / "mini.toml"
    assert MINI.count(old) == 1
    path.write_text(MINI.replace(old, new))
    with pytest.raises(ConfigError, match=f"mini.toml: .*{message}"):
        load_geometry(path)


def test_a_template_that_is_missing_or_no_text_is_refused_with_its_path(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.toml: can't be read"):
        load_geometry(tmp_path / "none.toml")
    path = tmp_path / "latin.toml"
    path.write_bytes(b'name = "\xff"')
    with pytest.raises(ConfigError, match=r"latin\.toml: is not TOML in UTF-8"):
        load_geometry(path)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('part = "block", repeat = 48', None),
        ('part = "block", repeet = 48', "no use for 'repeet'"),
        ('part = "block", repeat = 48, W = 3', "no use for 'W'"),
    ],
)
def test_a_word_in_a_template_that_nothing_uses_is_refused(line, told, tmp_path):
    shipped = (data_folder("models") / "ltx-2.5-22b.toml").read_text("utf-8")
    path = tmp_path / "mine.toml"
    path.write_text(shipped.replace('part = "block", repeat = 48', line))
    if told is None:
        assert load_geometry(path).blocks == 48
    else:
        with pytest.raises(ConfigError, match=told):
            load_geometry(path)
