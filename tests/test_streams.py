"""Which tokens each weight works on: data of the model's template, and pure arithmetic."""

from dataclasses import replace

import pytest

from lorabench.cost import Work, touches_of
from lorabench.errors import ConfigError
from lorabench.geometry import Target, TensorSpec, from_tensors, geometry_names, load_geometry
from lorabench.plan import STRATEGY_VALUES
from lorabench.recipe import BASE, State, load_recipe
from lorabench.resources import data_folder, read_toml
from lorabench.streams import (
    STREAMS,
    Product,
    Stream,
    forward_work,
    products_of,
    streams_of,
)

LTX = load_geometry("ltx-2.5-22b")
ALL = {"video": 64, "audio": 16, "text": 8}
WIDTHS = {"video": 4096, "audio": 2048, "text": None}


def used(geometry, **tokens) -> set[str]:
    """The modules that a forward of these tokens multiplies."""
    streams = streams_of(geometry)
    return {module for module, stream in streams.items() if stream.tokens(tokens)}


def within_block(module: str) -> str:
    return module.removeprefix("transformer_blocks.0.")


@pytest.mark.parametrize(
    ("module", "rows", "needs"),
    [
        ("attn1.to_k", "video", "video"),
        ("attn2.to_q", "video", "video"),
        ("attn2.to_k", "text", "video"),
        ("attn2.to_out.0", "video", "video"),
        ("audio_attn1.to_v", "audio", "audio"),
        ("audio_attn2.to_q", "audio", "audio"),
        ("audio_attn2.to_v", "text", "audio"),
        ("audio_to_video_attn.to_q", "video", "audio"),
        ("audio_to_video_attn.to_k", "audio", "video"),
        ("audio_to_video_attn.to_out.0", "video", "audio"),
        ("audio_to_video_attn.to_gate_logits", "video", "audio"),
        ("video_to_audio_attn.to_q", "audio", "video"),
        ("video_to_audio_attn.to_v", "video", "audio"),
        ("video_to_audio_attn.to_out.0", "audio", "video"),
        ("ff.net.2", "video", "video"),
        ("audio_ff.net.0.proj", "audio", "audio"),
    ],
)
def test_a_block_of_ltx_works_on_three_streams(module, rows, needs):
    assert streams_of(LTX)[f"transformer_blocks.7.{module}"] == Stream(rows, needs)


def test_a_weight_of_ltx_is_as_wide_as_its_stream():
    """Video rows are 4096 wide and audio rows 2048, but inside a layer and for what enters."""
    inner = ("to_out.0", "ff.net.2", "patchify_proj", "linear_1")
    for product in products_of(LTX):
        name = product.name.removesuffix(".weight")
        width = WIDTHS[product.stream.rows]
        if width and not name.endswith(inner):
            assert product.in_ == width, name


def test_sound_alone_uses_no_weight_of_the_video_and_the_other_way_round():
    cut = LTX.cut(1)
    sound = {*map(within_block, used(cut, audio=126, text=1024))}
    assert {"audio_attn1.to_q", "audio_attn2.to_k", "audio_adaln_single.linear"} <= sound
    silent = {*map(within_block, used(cut, video=6144, text=1024))}
    assert {"attn1.to_q", "attn2.to_k", "ff.net.2", "prompt_adaln_single.linear"} <= silent
    both = {*map(within_block, used(cut, **ALL))}
    assert len(both) == len(cut.weights)
    assert not sound & silent
    crossing = both - sound - silent
    assert {name.split(".")[0] for name in crossing} == {
        "audio_to_video_attn",
        "video_to_audio_attn",
        "av_ca_video_scale_shift_adaln_single",
        "av_ca_audio_scale_shift_adaln_single",
        "av_ca_a2v_gate_adaln_single",
        "av_ca_v2a_gate_adaln_single",
    }


@pytest.mark.parametrize("name", geometry_names())
def test_every_rule_of_a_shipped_template_is_some_modules_first(name):
    geometry = load_geometry(name)
    plain = streams_of(geometry)
    for rule in geometry.streams:
        without = tuple(r for r in geometry.streams if r != rule)
        assert streams_of(replace(geometry, streams=without)) != plain, rule


def test_a_cut_a_shrunk_and_a_checkpoint_of_a_model_have_its_streams():
    streams = streams_of(LTX)
    for geometry in (
        LTX.cut(2),
        load_geometry("ltx-2.5-22b", shrink=16).cut(2),
        from_tensors("ltx-2.5-22b", LTX.cut(2).tensors),
        from_tensors("renamed.safetensors", LTX.cut(2).tensors),
    ):
        assert streams_of(geometry).items() <= streams.items()
        assert len(streams_of(geometry)) == len(geometry.weights)


def test_a_model_without_rules_has_one_stream():
    tensors = [TensorSpec(f"blocks.{i}.audio_ff.weight", (4, 4), "BF16") for i in range(2)]
    assert {*streams_of(from_tensors("mine", tensors)).values()} == {Stream("video", "video")}


def mine(folder, streams: str):
    """A template of one's own with such a table."""
    text = (data_folder("models") / "ltx-2.5-22b.toml").read_text("utf-8")
    head, _, tail = text.partition("[streams]\n")
    path = folder / "mine.toml"
    path.write_text(f"{head}{streams}\n{tail[tail.index('[sizes]') :]}", "utf-8")
    return load_geometry(path)


def test_a_template_of_ones_own_has_its_own_rules(tmp_path):
    streams = streams_of(mine(tmp_path, '[streams]\n"*.ff.*" = "text"').cut(1))
    assert {within_block(module) for module, s in streams.items() if s.rows == "text"} == {
        "ff.net.0.proj",
        "ff.net.2",
    }


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ('[streams]\n"*.ff.*" = "vidoe"', "'vidoe' is no stream .did you mean 'video'"),
        ('[streams]\n"*.ff.*" = "text if sound"', "'text if sound': 'sound' is no stream; write"),
        ('[streams]\n"*.ff.*" = "text if"', "'text if' is no stream"),
        ('[streams]\n"*.ff.*" = 3', "streams = .* must be a table of texts"),
        ('[[streams]]\n"*.ff.*" = "text"', "streams = .* must be a table of texts"),
    ],
)
def test_a_table_that_names_no_stream_is_refused(tmp_path, table, message):
    with pytest.raises(ConfigError, match=message):
        streams_of(mine(tmp_path, table))


def test_products_come_globals_first_and_then_block_by_block():
    geometry = LTX.cut(3)
    shuffled = replace(geometry, tensors=geometry.tensors[::-1])
    blocks = [geometry.block_of(product.name) for product in products_of(shuffled)]
    assert blocks == sorted(blocks, key=lambda b: -1 if b is None else b)
    assert set(blocks) == {None, 0, 1, 2}


def test_a_product_knows_what_each_adapter_holds_for_its_weight():
    geometry = LTX.cut(1)
    by_name = {p.name: p for p in products_of(geometry, touches_of(geometry, ("a", "b")))}
    assert len(by_name) == len(geometry.targets)
    for target in geometry.targets:
        product = by_name[target.weight.name]
        assert product.targets == {"a": (target,), "b": (target,)}
        assert (product.out, product.in_) == target.weight.shape
        assert product.elements == target.weight.params


def product(rank, rows=None, dtype="BF16", role="user"):
    weight = TensorSpec("m.weight", (32, 16), dtype)
    return Product(weight, Stream("video", "video"), {role: (Target("m", weight, rank, rows),)})


@pytest.mark.parametrize(
    ("rank", "rows", "macs"),
    [
        (4, None, (16 + 32) * 4),
        (4, range(8, 12), (16 + 4) * 4),
        (0, None, 32 * 16),
        (0, range(8, 12), 4 * 16),
    ],
)
def test_a_runtime_term_is_two_products_or_one_of_a_whole_delta(rank, rows, macs):
    work = forward_work([product(rank, rows)], {"video": 5}, State(user=1.0), "runtime")
    assert (work.flops, work.apply) == (2 * 5 * 32 * 16, Work(flops=2 * 5 * macs))


@pytest.mark.parametrize(("dtype", "nbytes"), [("BF16", 1024), ("F32", 2048)])
def test_fusing_per_layer_copies_and_fuses_however_many_tokens_there_are(dtype, nbytes):
    for tokens in (1, 50):
        work = forward_work(
            [product(4, None, dtype)], {"video": tokens}, State(user=1.0), "per_layer"
        )
        assert work.apply == Work(
            flops=2 * 32 * 16 * 4, snapshot_bytes=nbytes, fused_params=32 * 16
        )
        assert work.weight_bytes == nbytes


@pytest.mark.parametrize("apply", STRATEGY_VALUES["apply"])
def test_the_base_takes_nothing_to_apply_and_no_tokens_take_nothing_at_all(apply):
    assert forward_work([product(4)], {"video": 5}, BASE, apply).apply == Work()
    work = forward_work([product(4)], {"audio": 5}, State(user=1.0), apply)
    assert (work.products, work.flops, work.weight_bytes, work.apply) == (0, 0, 0, Work())


def test_a_forward_of_the_whole_model_is_what_its_counts_say():
    """At one token of each stream, a multiply-accumulate a parameter; per layer, a whole pass."""
    state, ones = State(distilled=1.0), dict.fromkeys(STREAMS, 1)
    products = products_of(LTX, touches_of(LTX, state))
    counts = LTX.counts()
    assert forward_work(products, ones).flops == 2 * counts.touched_params
    assert forward_work(products, ones, state, "runtime").apply.flops == 2 * counts.adapter_params
    assert forward_work(products, ones, state, "per_layer").apply.flops == 2 * counts.macs


def test_what_a_recipes_phases_multiply_is_their_streams():
    products = products_of(LTX)
    sound, video = (load_recipe(name).phases[0] for name in ("t2a_one_stage", "one_stage"))
    assert {p.stream.rows for p in products if p.stream.tokens(sound.tokens)} == {"audio", "text"}
    assert forward_work(products, sound.tokens).products < len(products)
    assert forward_work(products, video.tokens).products == len(products)


@pytest.mark.parametrize(
    ("tokens", "apply", "message"),
    [
        ({"vidio": 3}, "resident", "'vidio' .did you mean 'video'.*: expected those of video"),
        ({"video": -1}, "resident", "'video': expected a whole number, 0 or more, found -1"),
        ({"video": 1.5}, "resident", "found 1.5"),
        ({"video": True}, "resident", "found True"),
        ({"video": 1}, "perlayer", "'perlayer' .did you mean 'per_layer'"),
    ],
)
def test_what_is_no_forward_is_refused(tokens, apply, message):
    with pytest.raises(ConfigError, match=message):
        forward_work([], tokens, apply=apply)


def test_the_shipped_rules_are_read_as_they_stand():
    table = read_toml(data_folder("models") / "ltx-2.5-22b.toml")["streams"]
    assert LTX.streams == tuple(table.items())
