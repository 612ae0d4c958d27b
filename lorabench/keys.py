"""What a tensor's name in an adapter file says by itself, before any base is looked at.

A name is a path to a module and a suffix that says what of the module it is. The two are written
in styles of their own, independent of each other; here it is the suffix that is read. What another
kind of adapter leaves behind is told apart by its suffix too, and refused under that kind's name.
"""

import re
from typing import NamedTuple

STYLES = ("lora_A/lora_B", "lora_down/lora_up", "lora.down/lora.up")
"""How factors are called: by PEFT, by kohya's scripts, by diffusers."""


class Part(NamedTuple):
    """A tensor of a module that is understood."""

    name: str  # in the file
    path: str  # the module's, prefix and all
    role: str  # A, B, bias (of B), alpha, diff or diff_b
    style: str = ""  # of the factors' names; empty for other roles
    infix: str = ""  # an adapter's name between factor and suffix, as PEFT has it in memory


class Refused(NamedTuple):
    """A tensor of a kind that isn't applied."""

    name: str
    path: str
    kind: str
    remedy: str


_FACTOR = re.compile(
    r"(?P<path>.+?)\.(?:"
    r"lora_(?P<peft>[AB])(?:\.(?P<infix>[^.]+))?"
    r"|lora_(?P<kohya>down|up)"
    r"|lora(?:_linear_layer)?\.(?P<diffusers>down|up)"
    r")\.(?P<what>weight|bias)"
)
_OTHER = re.compile(r"(?P<path>.+)\.(?P<suffix>alpha|diff|diff_b|w_norm|b_norm)")
_ROLES = {"w_norm": "diff", "b_norm": "diff_b"}  # LyCORIS has names of its own for a norm's deltas

WHOLE = "a whole weight"
"""The kind of what is to replace a weight, or to be beside it, rather than to be added."""

_MERGE = "merge it into a base with the library that wrote it, or extract a plain LoRA from that"
_REPLACE = "put it into the base, or save the adapter without it"
_KINDS = tuple(
    (re.compile(rf"(?P<path>{path})\.(?:{suffix})"), kind, remedy)
    for path, suffix, kind, remedy in (
        (r".+", r"lora_magnitude_vector(?:\.[^.]+)*|dora_scale", "DoRA", _MERGE),
        (r".+", r"hada_w[12]_[ab]|hada_t[12]", "LoHa", _MERGE),
        (r".+", r"lokr_w[12](?:_[ab])?|lokr_t[12]", "LoKr", _MERGE),
        (r".+", r"lora_mid\.weight", "LoCon with a mid (Tucker) factor", _MERGE),
        (r".+", r"[ab][12]\.weight|bm\.weight", "GLoRA", _MERGE),
        (r".+?", r"b?oft_[^.]+(?:\..+)?|rescale", "OFT", _MERGE),
        (r".+", r"[qp]_layer\.weight|lambda_layer", "T-LoRA", _MERGE),
        (r".+?", r"on_input|ia3_l(?:\..+)?", "IA3", _MERGE),
        (r".+?", r"vera_[^.]+(?:\..+)?", "VeRA", _MERGE),
        (r".+?", r"lora_E(?:\..+)?|ranknum(?:\..+)?|lora_[AB]", "AdaLoRA", _MERGE),
        (r".+?", r"lora_embedding_[AB](?:\..+)?", "a LoRA of an embedding", _MERGE),
        (r".+", r"reshape_weight|set_weight", "a weight to be put in the base's place", _REPLACE),
        (
            r".+?",
            r"(?:qweight|qzeros|scales|absmax|quant_state|quant_map|weight_scale(?:_2)?"
            r"|scale_weight|scaled_fp8)(?:\..+)?",
            "a quantised tensor",
            "save the adapter in bf16, fp16 or f32",
        ),
        (
            r".+?",
            r"(?:lora_A(?:\.[^.]+)?|lora_down|lora_up|lora\.down|lora\.up)\.bias",
            "a factor with a bias that no writer documents",
            _MERGE,
        ),
        (r".+?", r"modules_to_save\..+", WHOLE, _REPLACE),
        (r"(?:(?!(?:^|\.)lora_[A-Z]).)+", r"weight|bias", WHOLE, _REPLACE),
    )
)

_SIGNS = re.compile(
    r"(?:lora|lycoris)_.*"
    r"|.*\.(?:lora[_.].*|(?:hada|lokr|oft|boft|vera|ia3)_.*|dora_scale|diff|diff_b|[wb]_norm|on_input|lambda_layer)"
)


def is_adapters(name: str) -> bool:
    """Return whether a name is one of an adapter's, of whatever kind, rather than of a base's."""
    return _SIGNS.fullmatch(name) is not None


def parse_key(name: str) -> Part | Refused:
    """Read a tensor's name."""
    if factor := _FACTOR.fullmatch(name):
        written = (factor["peft"], factor["kohya"], factor["diffusers"])
        [(style, half)] = [(s, w) for s, w in zip(STYLES, written, strict=True) if w]
        role = "A" if half in ("A", "down") else "B"
        if factor["what"] == "weight":
            return Part(name, factor["path"], role, style, factor["infix"] or "")
        if half == "B":
            return Part(name, factor["path"], "bias", style, factor["infix"] or "")
    elif other := _OTHER.fullmatch(name):
        return Part(name, other["path"], _ROLES.get(other["suffix"], other["suffix"]))
    for pattern, kind, remedy in _KINDS:
        if found := pattern.fullmatch(name):
            # What PEFT trains of the very module that it wraps belongs to that module.
            return Refused(name, found["path"].removesuffix(".base_layer"), kind, remedy)
    return Refused(
        name,
        name,
        "a key that isn't understood",
        "expected a module's path, then lora_A.weight and lora_B.weight, lora_down.weight and "
        "lora_up.weight, lora.down.weight and lora.up.weight, alpha, diff or diff_b",
    )
