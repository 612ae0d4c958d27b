"""Bases and adapters made at random, right ones and damaged ones, and what must be true of each.

``python tests/fuzzing.py --seconds 600 --seed 1`` makes them until the time is over. Each case is
made from the seed and its number alone; ``--case`` makes one again, ``--keep`` leaves its files.
"""

import argparse
import json
import os
import random
import re
import struct
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from odd import at_most

from lorabench.adapter import Adapter
from lorabench.adapter_file import AdapterFile
from lorabench.arguments import holds_adapter
from lorabench.checkpoint import Checkpoint
from lorabench.describe import describe_adapter, describe_base, describe_match
from lorabench.errors import AdapterError, FileError
from lorabench.geometry import DTYPE_BYTES, TensorSpec, from_tensors
from lorabench.inspected import inspect_text, left_out_text
from lorabench.measure import private_bytes
from lorabench.places import _FUSED as FUSED
from lorabench.places import TEXT_ENCODERS, WRAPPERS, is_text_encoders

MEMORY = 200 * 2**20
"""More than before that a process may hold, in bytes."""

SECONDS = 20
"""That a case may take; it takes a few milliseconds, on a machine that is free."""

Random = random.Random
Tensors = dict[str, tuple[str, tuple[int, ...]]]  # name -> dtype, shape

FLOATS = ("BF16", "F16", "F32")
OUTS = (0, 1, 2, 3, 4, 6, 12)
INS = (0, 1, 3, 4, 8)
GROUPS = (
    ("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"),
    ("attn.qkv", "attn.to_out"),
    ("attn.q_proj", "attn.k_proj", "attn.v_proj"),
    ("attn.to_q", "attn.to_kv"),
    ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.gate_up_proj",),
    ("ff.net.0.proj", "ff.net.2"),
    ("a_b.c", "a.b_c"),
    ("m", "m.base_layer"),
    ("m.linear",),
    ("é", "x y", "a..b", "line\nbreak", "\x1b[31m"),
    ("model.x", "transformer.x", "x"),
    ("0", "alpha", "bias", "lora_unet_x", "text_encoder.q"),
)
BASE_PREFIXES = (
    *("", "", "model.diffusion_model.", "diffusion_model.", "transformer.", "model."),
    *("base_model.model.", "module.", "_orig_mod.", "unet."),
)
FLAT = ("lora_unet_", "lora_unet_", "lora_transformer_", "lycoris_", "")
OTHER_SUFFIXES = (
    *("dora_scale", "lora_magnitude_vector", "hada_w1_a", "hada_t1", "lokr_w1", "lokr_w2_a"),
    *("lora_mid.weight", "a1.weight", "oft_blocks", "oft_R.default.weight", "on_input", "w_norm"),
    *("vera_lambda_b", "lora_E", "lora_embedding_A", "reshape_weight", "weight", "bias", "qweight"),
    *("weight_scale", "modules_to_save.default.weight", "lora_A.bias", "lora_down.bias", "alpha.x"),
    *("lora_C.weight", "lora_A", "lora.weight", "", "lora_A.default.x.weight"),
)
MAGICS = (
    b"PK\x03\x04",
    b"\x80\x04",
    b"GGUF",
    b"<html>",
    b"\n{",
    b"version https://git-lfs",
    b"\x1f\x8b",
)


def any_json(rng: Random, depth: int = 0) -> Any:
    """A value of any kind that JSON has, and of some that it hasn't."""
    if depth < 3 and rng.random() < 0.2:
        inside = [any_json(rng, depth + 1) for _ in range(rng.randint(0, 4))]
        return inside if rng.random() < 0.5 else {f"k{i}": v for i, v in enumerate(inside)}
    return rng.choice(
        (
            *(
                None,
                True,
                False,
                0,
                1,
                2,
                -1,
                1.5,
                0.5,
                2**31,
                2**63,
                10**20,
                10**400,
                1e308,
                1e-320,
            ),
            *(
                float("nan"),
                float("inf"),
                "",
                "x",
                "LORA",
                "8",
                "nan",
                "[[a]",
                "(a",
                "a{99999999999}",
            ),
            *("\ud800", "é", "F32", "BF16", "to_q", ".*", "^.*attn", "\0", "a" * 2000, "../x"),
        )
    )


def make_base(rng: Random) -> Tensors:
    """A base's tensors: linear layers above all, of names that adapters may mean in many ways."""
    prefix = rng.choice(BASE_PREFIXES)
    tensors: Tensors = {}
    for number in range(rng.randint(1, 3)):
        block = rng.choice((f"blocks.{number}.", f"transformer_blocks.{number}.", ""))
        for group in rng.sample(GROUPS, rng.randint(1, 4)):
            in_ = rng.choice(INS)
            for module in group:
                out = rng.choice(OUTS)
                shape = rng.choices(
                    ((out, in_), (out,), (out, in_, 1, 1), ()), weights=(120, 9, 1, 1)
                )[0]
                dtype = rng.choice(FLOATS if rng.random() < 0.95 else [*DTYPE_BYTES])
                name = f"{prefix}{block}{module}"
                if rng.random() < 0.97:
                    tensors[f"{name}.weight"] = dtype, shape
                if rng.random() < 0.5:
                    tensors[f"{name}.bias"] = dtype, (out if rng.random() < 0.97 else out + 1,)
    return tensors


def in_another_way(rng: Random, module: str) -> str:
    """A path that may mean a module of a base."""
    path = module
    while rng.random() < 0.3 and path.partition(".")[0] in WRAPPERS:
        path = path.partition(".")[2]
    if path.endswith(".0") and rng.random() < 0.5:
        path = path.removesuffix(".0")
    elif rng.random() < 0.05:
        path += rng.choice((".0", ".base_layer", ".linear"))
    way = rng.random()
    if way < 0.25:
        return rng.choice(FLAT) + path.replace(".", "_")
    while way < 0.6 and rng.random() < 0.6:
        path = f"{rng.choice(sorted(WRAPPERS))}.{path}"
    return path


@dataclass
class Draft:
    """An adapter that is being made: all ranks alike or not, one style or several."""

    rng: Random
    tensors: Tensors = field(default_factory=dict)
    rank: int = 0
    style: int = 0
    own_alpha: bool = False

    def __post_init__(self) -> None:
        self.rank = self.rng.randint(1, 4) if self.rng.random() < 0.7 else 0
        self.style = self.rng.randrange(5)
        self.own_alpha = self.rng.random() < 0.3

    def add(self, path: str, shape: tuple[int, ...], *, bias: bool = False) -> None:
        """Add a module of a weight's shape, and for its bias too where it has one."""
        rng, dtype = self.rng, self.rng.choice(FLOATS)
        biased = rng.random() < (0.3 if bias else 0.01)
        out = shape[:1]
        if len(shape) == 2 and rng.random() < 0.85:
            rank = self.rank or rng.randint(1, 4)
            down, up = self.halves()
            self.tensors[f"{path}.{down}.weight"] = dtype, (rank, shape[1])
            self.tensors[f"{path}.{up}.weight"] = dtype, (shape[0], rank)
            if biased and rng.random() < 0.5:
                biased = rng.random() < 0.05  # both kinds are refused
                self.tensors[f"{path}.{up}.bias"] = dtype, out
            if self.own_alpha:
                self.tensors[f"{path}.alpha"] = self.alpha()
        else:
            self.tensors[f"{path}.diff"] = dtype, shape
        if biased:
            self.tensors[f"{path}.diff_b"] = dtype, out

    def halves(self) -> tuple[str, str]:
        infix = "default" if self.rng.random() < 0.99 else "other"
        style = self.style if self.rng.random() < 0.97 else self.rng.randrange(5)
        return (
            ("lora_A", "lora_B"),
            (f"lora_A.{infix}", f"lora_B.{infix}"),
            ("lora_down", "lora_up"),
            ("lora.down", "lora.up"),
            ("lora_linear_layer.down", "lora_linear_layer.up"),
        )[style]

    def alpha(self) -> tuple[str, tuple[int, ...]]:
        if self.rng.random() < 0.95:
            return self.rng.choice((*FLOATS, "F64", "I64")), self.rng.choice(((), (1,)))
        return self.rng.choice([*DTYPE_BYTES]), self.rng.choice(((), (2,), (0,), (1, 1)))


def make_adapter(rng: Random, base: Tensors) -> Draft:
    """An adapter for a base: most of it right, its parts named in ways that are hard to tell."""
    draft = Draft(rng)
    modules = dict.fromkeys(name.rpartition(".")[0] for name in base)
    for module in rng.sample([*modules], rng.randint(min(1, len(modules)), min(6, len(modules)))):
        if f"{module}.weight" not in base:
            continue
        _, shape = base[f"{module}.weight"]
        bias = f"{module}.bias" in base
        if rng.random() < 0.5 and (parts := in_other_parts(rng, module, shape, base)):
            for path, rows in parts.items():
                draft.add(path, (rows, *shape[1:]), bias=bias)
        else:
            draft.add(in_another_way(rng, module), shape, bias=bias)
    if rng.random() < 0.1:
        draft.add(f"{rng.choice(TEXT_ENCODERS)}layers.0.q", (4, 4))
    if rng.random() < 0.1:
        draft.add(rng.choice(("nowhere", "a", "lora_unet_nowhere", "blocks.9.attn.to_q")), (4, 4))
    if rng.random() < 0.1 and draft.tensors:
        path = rng.choice([*draft.tensors]).partition(".lora")[0]
        draft.tensors[f"{path}.{rng.choice(OTHER_SUFFIXES)}"] = rng.choice(FLOATS), (2,)
    return draft


def in_other_parts(
    rng: Random, module: str, shape: tuple[int, ...], base: Tensors
) -> dict[str, int]:
    """The parts of a module that is fused, or the fused one that it is a part of, with rows."""
    parent, dot, last = module.rpartition(".")
    for wholes, namings in FUSED:
        if last in wholes and shape:
            names = rng.choice(namings)
            cuts = sorted(rng.randint(0, shape[0]) for _ in names[1:])
            if rng.random() < 0.7:
                cuts = [shape[0] * i // len(names) for i in range(1, len(names))]
            rows = [b - a for a, b in zip([0, *cuts], [*cuts, shape[0]], strict=True)]
            chosen = rng.random() < 0.8 or rng.randrange(len(names))
            return {
                f"{parent}{dot}{name}": count
                for i, (name, count) in enumerate(zip(names, rows, strict=True))
                if chosen is True or i == chosen
            }
        for names in namings:
            split = [base.get(f"{parent}{dot}{name}.weight") for name in names]
            if last in names and all(spec and spec[1] for spec in split):
                rows = sum(spec[1][0] for spec in split if spec)
                return {f"{parent}{dot}{rng.choice(wholes)}": rows}
    return {}


def make_metadata(rng: Random, draft: Draft) -> dict[str, str]:
    """What a file tells of itself."""
    rank = draft.rank or 4
    alpha = rng.choice(("1", "2", "4", "0.5", "-3"))
    kind = rng.random()
    if kind < 0.7:
        return rng.choice(({}, {"format": "pt"}, {"ss_network_dim": "4", "note": "é\n\t x"}))
    if kind < 0.82:
        return {"lora_alpha": alpha, "lora_rank": str(rank)}
    if kind < 0.88:
        return {"ss_network_alpha": alpha, "ss_network_dim": str(rank)}
    if kind < 0.96:
        prefix = rng.choice(("transformer", "unet", "text_encoder", ""))
        told = {f"{prefix}.{key}": value for key, value in make_config(rng, draft).items()}
        text = mangled(rng, json.dumps(told).encode(), 0.1)
        return {"lora_adapter_metadata": text.decode("latin1")}
    odd = ("8", "nan", "", "1e400", "-1", "0", "x" * 3000, "9" * 5000, "٣", "1_0", "\0", "Dynamic")
    key = rng.choice(("lora_alpha", "lora_rank", "ss_network_alpha", "my_alpha", "k" * 3000, ""))
    return {key: rng.choice(odd), "lora_rank": rng.choice(odd)}


def make_config(rng: Random, draft: Draft) -> dict[str, Any]:
    """PEFT's description of an adapter, right or with something else in it."""
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "r": draft.rank or 4,
        "lora_alpha": rng.choice((1, 8, 0.5, -2)),
        "use_rslora": rng.random() < 0.3,
        "target_modules": ["to_q"],
    }
    if rng.random() < 0.1:
        config["init_lora_weights"] = rng.choice((True, "gaussian", "pissa_niter_16", "olora"))
    if rng.random() < 0.3:
        config["alpha_pattern"] = {rng.choice(("to_q", r"attn\..*", "^blocks.0", "[a-c]")): 3}
    if rng.random() < 0.1:
        config["rank_pattern"] = {rng.choice(("to_q", ".*", "[[a]", "(", "é")): draft.rank or 2}
    if rng.random() < 0.3:
        odd = ("use_dora", "rank_pattern", "alpha_pattern", "bias", *config)
        config[rng.choice(odd)] = any_json(rng)
    return config


def mangled(rng: Random, text: bytes, share: float = 0.3) -> bytes:
    """Bytes as they are, or with some of them changed, doubled, cut out or put in."""
    while text and rng.random() < share:
        at, to = sorted((rng.randrange(len(text)), rng.randrange(len(text))))
        text = rng.choice(
            (
                text[:at] + bytes([rng.randrange(256)]) + text[at + 1 :],
                text[:at] + text[min(to, at + 9) :],
                text[:to] + text[at : at + 40] + text[to:],
                text[:at]
                + rng.choice((b"0", b"-", b"9" * 30, b'"', b"[", b"{", b"\\u00"))
                + text[at:],
                text[:at],
            )
        )
    return text


def alter(rng: Random, tensors: Tensors) -> Tensors:
    """Change what an adapter holds: names, shapes, dtypes, tensors left out or doubled."""
    changed = dict(tensors)
    for _ in range(rng.choice((0, 0, 0, 1, 1, 2, 4))):
        if not changed:
            break
        name = rng.choice([*changed])
        dtype, shape = changed[name]
        what = rng.randrange(10)
        if what > 6:  # a path, in all its tensors' names
            path = re.split(r"\.(?:lora|diff|alpha)", name)[0]
            at = rng.randrange(len(path) + 1)
            other = path[:at] + rng.choice(("", ".", "_", "0", "model.")) + path[at:]
            changed = {key.replace(path, other, 1): value for key, value in changed.items()}
        elif what == 0:
            del changed[name]
        elif what == 1:
            changed[name] = rng.choice([*DTYPE_BYTES]), shape
        elif what == 2:
            shape = tuple(rng.choice((n, n, n + 1, 0)) for n in shape)
            changed[name] = dtype, rng.choice((shape, (*shape, 1), shape[1:], shape[::-1]))
        elif what == 3:
            del changed[name]
            at = rng.randrange(len(name) + 1)
            cut = rng.choice((0, 1, 3))
            changed[name[:at] + rng.choice(("", ".", "_", "x", "0.", "\n")) + name[at + cut :]] = (
                dtype,
                shape,
            )
        elif what == 4:
            changed[f"{rng.choice(sorted(WRAPPERS))}.{name}"] = dtype, shape
        elif what == 5:
            changed[name.replace("lora_A", "lora_down").replace("_B", "_up")] = dtype, shape
        else:
            changed[rng.choice(("", "x", "y" * 1200, f"{name}.default", "lora_unet_"))] = (
                dtype,
                shape,
            )
    return changed


def encode(rng: Random, tensors: Tensors, metadata: Mapping[str, str], damage: float) -> bytes:
    """A file of tensors, in a random order, damaged with a likelihood."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    data = b""
    for name in rng.sample([*tensors], len(tensors)):
        dtype, shape = tensors[name]
        content = content_of(rng, TensorSpec(name, shape, dtype))
        header[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [len(data), len(data) + len(content)],
        }
        data += content
    kind = rng.randrange(7) if rng.random() < damage else None
    if kind == 0 and header:
        value = header[rng.choice([*header])]
        if value and isinstance(value, dict):
            value[rng.choice([*value])] = any_json(rng)
    elif kind == 1 and header:
        header[rng.choice([*header, "__metadata__"])] = any_json(rng)
    elif kind == 2 and header:
        value = header[rng.choice([*header])]
        numbers = value.get("data_offsets")
        at = rng.choice((4, 8, -numbers[0])) if numbers else 0
        if numbers and rng.random() < 0.5:  # another place, of the right size
            value["data_offsets"] = [number + at for number in numbers]
        elif numbers:
            numbers[rng.randrange(len(numbers))] += rng.choice((-1, 1, 8, 2**62))
    text = json.dumps(header, ensure_ascii=rng.random() < 0.5).encode("utf-8", "replace")
    text += b" " * rng.choice((0, 0, 7))
    if damage and rng.random() < 0.02:
        text = text.replace(b"{", b'{"x":1,"x":2,', 1)
    if kind == 3:
        text = mangled(rng, text, 0.9)
    length = len(text).to_bytes(8, "little")
    if kind == 4:
        length = struct.pack("<Q", rng.choice((0, 1, len(text) - 1, len(text) + 1, 10**8, 2**63)))
    if kind == 5:
        data = rng.choice((data[:-1], data + b"x", data * 2, b""))
    if kind == 6:
        return rng.choice((rng.choice(MAGICS) + text, (length + text)[: rng.randrange(40)]))
    return length + text + data


def content_of(rng: Random, spec: TensorSpec) -> bytes:
    """Zeros for factors, and numbers of all kinds for alphas."""
    if not spec.name.endswith("alpha"):
        return bytes(spec.nbytes)
    known = {"F32": "<f", "F16": "<e", "F64": "<d", "I64": "<q"}.get(spec.dtype)
    if known and spec.params == 1 and rng.random() < 0.95:
        return struct.pack(known, rng.choice((1, 2, 4, 8, 0, -1)))
    if spec.dtype == "BF16" and spec.params == 1 and rng.random() < 0.95:
        return b"\x80\x3f"
    return rng.randbytes(spec.nbytes)


def write(
    rng: Random, path: Path, tensors: Tensors, metadata: Mapping[str, str], damage: float
) -> Path:
    """Write a file, or shards with their index; give what to open."""
    if rng.random() > 0.15:
        path.write_bytes(encode(rng, tensors, metadata, damage))
        return path.parent if path.suffix == ".safetensors" and rng.random() < 0.3 else path
    shards = [f"{path.stem}-{i}.safetensors" for i in range(rng.randint(1, 3))]
    weight_map: dict[str, Any] = {name: rng.choice(shards) for name in tensors}
    for shard in shards:
        part = {name: tensors[name] for name, place in weight_map.items() if place == shard}
        if part or rng.random() < 0.2:
            path.with_name(shard).write_bytes(encode(rng, part, metadata, damage / 3))
    index = path.with_name(f"{path.name}.index.json")
    if weight_map and rng.random() < damage / 3:
        weight_map[rng.choice([*weight_map, "x"])] = rng.choice(
            (*shards, "../x", "/", any_json(rng))
        )
    text = json.dumps({"metadata": {}, "weight_map": weight_map}).encode()
    index.write_bytes(mangled(rng, text, damage / 6))
    return path.parent if path.suffix == ".safetensors" and rng.random() < 0.3 else index


def write_config(rng: Random, beside: Path, draft: Draft) -> None:
    """Write a configuration, or something else under its name."""
    kind = rng.random()
    if kind < 0.9:
        text = json.dumps(make_config(rng, draft)).encode("utf-8", "replace")
        beside.write_bytes(mangled(rng, text, 0.1))
    elif kind < 0.93:
        beside.mkdir()
    elif kind < 0.96:
        os.mkfifo(beside)
    else:
        beside.symlink_to(rng.choice((beside.name, "missing", "/dev/zero")))


@dataclass
class Tally:
    """What came of the cases."""

    runs: int = 0
    accepted: Counter[str] = field(default_factory=Counter)  # by what was opened
    refused: Counter[str] = field(default_factory=Counter)  # by the error's class
    reasons: Counter[str] = field(default_factory=Counter)  # messages without names and numbers
    peak_bytes: int = 0  # above what was held before the first

    @property
    def accepted_share(self) -> float:
        return self.accepted["adapter held against a base"] / self.accepted["adapters made"]

    def told(self, seconds: float) -> str:
        return (
            f"{self.runs:,} runs, {self.runs / seconds:.0f} a second; "
            f"of {self.accepted['adapters made']:,} adapters {self.accepted_share:.1%} accepted; "
            f"{', '.join(f'{name} {count:,}' for name, count in self.accepted.items())}; refused: "
            f"{', '.join(f'{name} {count:,}' for name, count in self.refused.items())}, for "
            f"{len(self.reasons)} reasons; peak memory {self.peak_bytes / 2**20:.1f} MiB above the "
            f"baseline"
        )


def fuzz(seed: int, cases: Iterable[int], place: Path) -> Tally:
    """Make cases in an empty folder, one after another, and check what comes of them."""
    tally = Tally()
    run_case(seed, -1, place, Tally())  # what is imported late is no case's memory
    before = private_bytes()
    with memory_at_most(MEMORY):
        for number in cases:
            run_case(seed, number, place, tally)
            tally.peak_bytes = max(tally.peak_bytes, private_bytes() - before)
            assert tally.peak_bytes < MEMORY, f"case {number} of seed {seed} holds too much"
    return tally


def run_case(seed: int, number: int, place: Path, tally: Tally, *, keep: bool = False) -> None:
    """Make one case; raise whatever is neither right nor refused as it should be."""
    rng = Random(f"{seed}/{number}")
    tally.runs += 1
    try:
        with at_most(SECONDS), warnings.catch_warnings():
            warnings.simplefilter("error")
            one_case(rng, place, tally)
    except Exception as error:
        error.add_note(f"case {number} of seed {seed}: fuzzing.py --seed {seed} --case {number}")
        raise
    finally:
        for path in () if keep else place.iterdir():
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()


def one_case(rng: Random, place: Path, tally: Tally) -> None:
    base = make_base(rng)
    damage = rng.choice((0.0, 0.0, 0.0, 0.0, 0.3, 0.9))
    if rng.random() < 0.15:
        path = write(rng, place / "model.safetensors", alter(rng, base), {"a": "b"}, damage)
        attempt(place, tally, "base", lambda: tell_base(path))
        return
    draft = make_adapter(rng, base)
    tensors = alter(rng, draft.tensors) if rng.random() < 0.4 else draft.tensors
    name = rng.choice(("adapter_model.safetensors", "adapter.safetensors", "a.bin"))
    path = write(rng, place / name, tensors, make_metadata(rng, draft), damage)
    if rng.random() < 0.2:
        write_config(rng, place / "adapter_config.json", draft)
    specs = [TensorSpec(name, shape, dtype) for name, (dtype, shape) in base.items()]
    skip, unmatched = rng.random() < 0.8, rng.random() < 0.8
    alpha = rng.choice((4.0, -0.0, float("nan"), 1e308)) if rng.random() < 0.1 else None
    tally.accepted["adapters made"] += 1
    file = attempt(place, tally, "file", lambda: Checkpoint.open(path))
    held = attempt(
        place, tally, "adapter", lambda: AdapterFile.open(path, allow_skip=skip, alpha=alpha)
    )
    if file:
        check_bytes(file)
    assert file or not held
    found = attempt(
        place,
        tally,
        "adapter held against a base",
        lambda: Adapter.open(
            path, iter(specs), allow_unmatched=unmatched, allow_skip=skip, alpha=alpha
        ),
    )
    if held:
        check_file(held)
        tell(describe_adapter(held))
    if found:
        assert held
        check_match(held, found, specs)
        assert unmatched or not found.unmatched
        assert skip or all(is_text_encoders(key.path) for key in held.skipped)
        geometry = from_tensors("base", specs)
        tell(describe_adapter(held) | {"base": describe_match(found, geometry)})
        left_out_text(found).encode()


def attempt(place: Path, tally: Tally, what: str, do: Callable[[], Any]) -> Any:
    """Do what may be refused; None where it is. Nothing is written in any case."""
    before = listing(place)
    result = None
    try:
        result = do()
        tally.accepted[what] += 1
    except (FileError, AdapterError) as error:  # and no other
        message = str(error)
        assert message.removeprefix("'").startswith(str(place)), message
        assert len(message) < 10_000, f"{len(message)} characters: {message[:500]}"
        message.encode()
        tally.refused[type(error).__name__] += 1
        bare = message.partition(": ")[2].replace("'s ", "s ")
        bare = re.sub(r"'[^']*'|\"[^\"]*\"|\[.*?\]|[A-Z]+\d+\w*|[-\d.,]+", "*", bare)
        tally.reasons[bare[:60]] += 1
    assert listing(place) == before
    return result


def listing(place: Path) -> list[tuple[str, int, int]]:
    """What lies in a folder, and when each was changed."""
    return sorted(
        (entry.name, (told := entry.stat(follow_symlinks=False)).st_size, told.st_mtime_ns)
        for entry in os.scandir(place)
    )


def tell_base(path: Path) -> None:
    file = Checkpoint.open(path)
    check_bytes(file)
    assert file.identity
    holds_adapter(file)
    tell(describe_base(file))


def tell(fields: Mapping[str, Any]) -> None:
    """Put it into words and into JSON, both of which can be printed."""
    assert len(inspect_text(fields).encode()) < 100_000
    json.dumps(fields, allow_nan=False).encode()


def check_bytes(file: Checkpoint) -> None:
    """Every byte of a file after its header is one tensor's."""
    for path, (size, *_) in file.stamps.items():
        spans = sorted(
            (entry.offset, entry.offset + entry.spec.nbytes)
            for entry in file.entries.values()
            if entry.file == path
        )
        header = 8 + int.from_bytes(path.read_bytes()[:8], "little")
        assert [begin for begin, _ in spans] + [size] == [header, *(end for _, end in spans)]


def check_file(held: AdapterFile) -> None:
    """Every tensor belongs to a module, or is listed as not applied."""
    parts = [entry.spec.name for module in held.modules for entry in module.parts.values()]
    assert Counter([*parts, *(key.name for key in held.skipped)]) == Counter([*held.file.entries])
    assert not {key.path for key in held.skipped} & {module.path for module in held.modules}
    for module in held.modules:
        assert abs(module.scale.value) < 3.5e38
        assert module.scale.source


def check_match(held: AdapterFile, found: Adapter, base: Sequence[TensorSpec]) -> None:
    """Every module is matched or listed; every row of a factor goes to one row of the base."""
    modules = {module.path: module for module in held.modules}
    named = [*(m.path for m in found.modules), *found.unmatched, *found.text_encoders]
    assert sorted(named) == sorted(modules)
    assert [key.name for key in found.skipped] == [key.name for key in held.skipped]
    assert found.pairs
    assert all(map(is_text_encoders, found.text_encoders))
    assert not any(map(is_text_encoders, found.unmatched))

    specs = {spec.name: spec for spec in base}
    taken: dict[str, set[int]] = {}
    bytes_of: dict[str, list[tuple[int, int]]] = {}
    for pair in found.pairs:
        assert specs[pair.weight.name] == pair.weight
        assert pair.weight.dtype in FLOATS
        assert 0 <= pair.rows.start <= pair.rows.stop <= pair.weight.shape[0], pair
        rows = taken.setdefault(pair.weight.name, set())
        assert rows.isdisjoint(pair.rows), pair
        rows.update(pair.rows)
        if pair.a:
            _, in_ = pair.weight.shape
            assert pair.a == found.file.entries[pair.a.spec.name]
            assert pair.a.spec.shape == (pair.rank, in_)
            assert pair.rank > 0
            assert pair.b.spec.shape == (len(pair.rows), pair.rank)
        else:
            assert pair.b.spec.shape == (len(pair.rows), *pair.weight.shape[1:])
        begin = pair.b.offset
        bytes_of.setdefault(pair.b.spec.name, []).append((begin, begin + pair.b.spec.nbytes))
    for module in found.modules:
        exact = {f"{module.path}.weight", f"{module.path}.bias"} & specs.keys()
        for role, entry in module.parts.items():
            if role in ("A", "alpha"):
                continue
            spans = sorted(bytes_of.pop(entry.spec.name))
            ends = [entry.offset, *(end for _, end in spans)]
            assert [begin for begin, _ in spans] == ends[:-1]
            assert ends[-1] == entry.offset + entry.spec.nbytes
            weights = {p.weight.name for p in found.pairs if p.b.spec.name == entry.spec.name}
            assert not exact or weights <= exact
    assert not bytes_of


@contextmanager
def memory_at_most(nbytes: int) -> Iterator[None]:
    """Let what would take more memory than that fail, however short it took it; on Linux only."""
    status = Path("/proc/self/status")
    if not sys.platform.startswith("linux") or not status.exists():
        yield
        return
    import resource

    rows = dict(row.split(":", 1) for row in status.read_text().splitlines())
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = int(rows["VmData"].split()[0]) * 1024 + nbytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def until(deadline: float) -> Iterator[int]:
    """Numbers of cases, while there is time."""
    number = 0
    while time.monotonic() < deadline:
        yield number
        number += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="make this one alone")
    parser.add_argument("--keep", type=Path, help="a folder for this case's files")
    parser.add_argument("--reasons", action="store_true", help="say for what files were refused")
    given = parser.parse_args()
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        if given.case is not None:
            tally = Tally()
            run_case(
                given.seed, given.case, given.keep or Path(folder), tally, keep=bool(given.keep)
            )
        else:
            tally = fuzz(given.seed, until(begun + given.seconds), Path(folder))
    print(tally.told(time.monotonic() - begun))
    if given.reasons or given.case is not None:
        for reason, count in tally.reasons.most_common():
            print(f"{count:8,}  {reason}")


if __name__ == "__main__":
    main()
