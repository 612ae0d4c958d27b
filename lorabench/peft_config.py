"""PEFT's description of an adapter: alphas, ranks, and what the factors alone don't tell.

It lies beside the file, or in its metadata, where diffusers keeps it.
"""

import os
import re
import reprlib
import warnings
from collections.abc import Mapping
from contextlib import suppress
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

from lorabench.checkpoint import Checkpoint
from lorabench.errors import AdapterError
from lorabench.header import parse_json, read_json
from lorabench.places import PEFT_PREFIX, is_text_encoders

BESIDE = "adapter_config.json"
"""PEFT's description of the adapter in the same folder."""

GOES_WITH = "adapter_model"
"""The stem of the file that PEFT writes beside it; it says nothing of a file of another name."""

DIFFUSERS_KEY = "lora_adapter_metadata"
"""Where diffusers keeps the same description: a pipeline's parts prefix its keys, a model alone
does not."""

_PATTERN = r"(.*\.)?({})$"  # of a module's name, as PEFT 0.21 has it (utils/other.py)

# Ways to begin a training that take something out of the base, which the file doesn't tell.
_CHANGES_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


_NESTED = re.compile(r"[+*}][^()]*\)+[+*{]")  # (a+)+

_REFUSED = {
    "use_dora": "DoRA scales each row of the fused weight",
    "fan_in_fan_out": "its weights are transposed",
    "use_qalora": "it was trained for a quantised base",
    "use_bdlora": "its factors are block-diagonal",
    "layer_replication": "it repeats layers of the base",
    "alora_invocation_tokens": "it is for some tokens only, and can't be fused",
    "target_parameters": "it is for parameters that aren't a module's weight",
    "trainable_token_indices": "it has trained tokens besides factors",
    "modules_to_save": "it has whole weights besides factors",
    "kasa_config": "KaSA changes the base's weights",
    "velora_config": "VeLoRA isn't known here",
    "monteclora_config": "MonteCLoRA samples its factors",
    "arrow_config": "Arrow routes between adapters, and can't be fused",
}
"""What changes the meaning of factors, and why they can't be applied then."""


class Config(NamedTuple):
    """What PEFT says of modules."""

    where: str
    prefix: str  # of the paths that it is about, which its patterns don't have
    alone: bool  # it is about every path, with the prefix or without
    alpha: float
    rank: float
    alphas: Mapping[re.Pattern[str], float]
    ranks: Mapping[re.Pattern[str], float]
    rslora: bool

    def of(self, path: str) -> tuple[float, float] | None:
        """Return alpha and rank of a module."""
        if not self.alone and not path.startswith(self.prefix):
            return None
        name = path.removeprefix(self.prefix)
        return _matching(self.alphas, name, self.alpha), _matching(self.ranks, name, self.rank)


def read_configs(file: Checkpoint, *, allow_skip: bool) -> tuple[Config, ...]:
    """Read what PEFT says of a file's modules.

    Parameters
    ----------
    allow_skip
        Whole weights, which PEFT saves beside its factors, are left out.

    Raises
    ------
    FileError
        The file beside it can't be read.
    AdapterError
        It says what can't be applied, or isn't PEFT's.
    """
    configs = []
    beside = file.path.parent / BESIDE
    # A link that leads nowhere, as an interrupted download leaves it, is no absent file.
    if file.path.name.partition(".")[0] == GOES_WITH and os.path.lexists(beside):
        fields = read_json(beside)
        prefix = PEFT_PREFIX
        configs.append(
            _config(file.path, str(beside), prefix, fields, alone=True, allow_skip=allow_skip)
        )
    if DIFFUSERS_KEY in file.metadata:
        where = f"metadata {DIFFUSERS_KEY}"
        fields = parse_json(file.metadata[DIFFUSERS_KEY].encode(), f"{file.path}: {where}")
        parts: dict[str, dict[str, Any]] = {}
        for key, value in fields.items():
            part, dot, name = key.rpartition(".")
            parts.setdefault(part + dot, {})[name] = value
        configs += [
            _config(file.path, where, part, found, alone=not part, allow_skip=allow_skip)
            for part, found in parts.items()
            if not is_text_encoders(part)
        ]
    return tuple(configs)


def _config(
    file: Path, where: str, prefix: str, fields: Mapping[str, Any], *, alone: bool, allow_skip: bool
) -> Config:
    """Read PEFT's description; refuse what changes what the factors mean."""
    if (kind := fields.get("peft_type", "LORA")) != "LORA":
        raise AdapterError(f"{file}: {where} says peft_type {reprlib.repr(kind)}; expected 'LORA'")
    start = fields.get("init_lora_weights")
    for name, why in _REFUSED.items():
        if allow_skip and name == "modules_to_save":
            continue  # they are tensors of the file, and listed as skipped
        if fields.get(name):
            raise AdapterError(
                f"{file}: {where} says {name} = {reprlib.repr(fields[name])}: {why}; merge it with "
                f"PEFT instead"
            )
    if isinstance(start, str) and start.lower().startswith(_CHANGES_THE_BASE):
        raise AdapterError(
            f"{file}: {where} says init_lora_weights = {reprlib.repr(start)}, which changed the "
            f"base before the training; let PEFT convert it "
            f"(path_initial_model_for_weight_conversion)"
        )

    def number(name: str, value: Any) -> float:
        if isinstance(value, int | float) and not isinstance(value, bool):
            with suppress(OverflowError):
                if isfinite(value):
                    return float(value)
        raise AdapterError(
            f"{file}: {where}: {name}: expected a finite number, found {reprlib.repr(value)}"
        )

    def numbers(name: str) -> dict[re.Pattern[str], float]:
        patterns = fields.get(name) or {}
        if not isinstance(patterns, dict):
            raise AdapterError(
                f"{file}: {where}: {name}: expected patterns, found {reprlib.repr(patterns)}"
            )
        compiled = {}
        for pattern, value in patterns.items():
            if _NESTED.search(pattern):
                raise AdapterError(
                    f"{file}: {where}: {name}: {reprlib.repr(pattern)} repeats what is repeated, "
                    f"which may take forever to match; write it otherwise"
                )
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # what a later Python may read otherwise
                    regex = re.compile(_PATTERN.format(pattern))
            except (re.error, OverflowError, RecursionError) as error:
                raise AdapterError(
                    f"{file}: {where}: {name}: {reprlib.repr(pattern)} is no regular expression: "
                    f"{error}"
                ) from None
            compiled[regex] = number(f"{name}.{pattern}", value)
        return compiled

    if not isinstance(rslora := fields.get("use_rslora", False), bool):
        raise AdapterError(
            f"{file}: {where}: use_rslora: expected true or false, found {reprlib.repr(rslora)}"
        )
    for name in ("lora_alpha", "r"):
        if name not in fields:
            raise AdapterError(f"{file}: {where}: '{name}' is missing; expected PEFT's description")
    return Config(
        where,
        prefix,
        alone,
        number("lora_alpha", fields["lora_alpha"]),
        number("r", fields["r"]),
        numbers("alpha_pattern"),
        numbers("rank_pattern"),
        rslora,
    )


def _matching(patterns: Mapping[re.Pattern[str], float], name: str, default: float) -> float:
    """Return the value of the first pattern that matches a module's name, or its end, as PEFT."""
    for pattern, value in patterns.items():
        if pattern.match(name):
            return value
    return default
