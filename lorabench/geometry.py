"""Names, shapes and dtypes of a model, and what follows from them without reading a weight.

A :class:`Geometry` comes from a template (a TOML file under ``data/models``) or from the header of
a checkpoint; both are cut to a number of blocks and counted in the same way.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from lorabench.errors import ConfigError, did_you_mean
from lorabench.resources import data_folder, read_toml

DTYPE_BYTES = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
}
"""Bytes of one element, by the safetensors name of its dtype."""


_TEMPLATE_KEYS = (
    "name", "description", "prefix", "dtype", "blocks", "connectors",
    "adapter", "sizes", "tensors", "parts", "streams",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor: its name, its shape, and its dtype by its safetensors name."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def params(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor's data."""
        return self.params * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Target:
    """A weight ``[out, in_]`` or bias ``[n]`` that an adapter touches, where, and at what rank."""

    module: str  # the weight's name without the base's prefix and without ".weight"
    weight: TensorSpec
    rank: int  # 0 where the adapter holds a delta and no factors
    some: range | None = None  # of the rows; None for all

    @property
    def rows(self) -> range:
        """The rows that are touched."""
        return range(self.weight.shape[0]) if self.some is None else self.some

    @property
    def columns(self) -> int:
        """Elements of a row."""
        return prod(self.weight.shape[1:])

    @property
    def macs(self) -> int:
        """Multiply-accumulates of B @ A: rows x in x rank."""
        return len(self.rows) * self.columns * self.rank

    @property
    def adapter_params(self) -> int:
        """Elements of the pair: A ``[rank, in]`` and B ``[rows, rank]``, or of the delta."""
        if not self.rank:
            return len(self.rows) * self.columns
        return (len(self.rows) + self.columns) * self.rank


@dataclass(frozen=True)
class Counts:
    """What a geometry amounts to; the adapter's figures are None where no rank is known."""

    tensors: int
    params: int
    tensor_bytes: int
    targets: int
    touched_params: int
    macs: int | None
    adapter_params: int | None
    adapter_tensor_bytes: int | None
    ranks: dict[int, int] | None


@dataclass(frozen=True)
class Geometry:
    """The tensors of a model and where an adapter touches them.

    Attributes
    ----------
    name
        The template's name, or the checkpoint's file name.
    tensors
        Every tensor, in the file's order.
    prefix
        What every name begins with (``model.diffusion_model.``).
    block_prefix
        What the names of the repeated blocks begin with, up to the block's number; None if the
        model has no such blocks.
    connector_prefixes
        What the names of the parts begin with that no adapter touches and that a cut leaves out.
    adapter_prefix
        What an adapter's names begin with, in the place of ``prefix``.
    rank
        The adapter's rank before it is capped; None if no adapter is assumed.
    streams
        The template's rules for which tokens a module works on, a pattern and a stream each: see
        :mod:`lorabench.streams`.
    """

    name: str
    tensors: tuple[TensorSpec, ...]
    prefix: str = ""
    block_prefix: str | None = None
    connector_prefixes: tuple[str, ...] = ()
    adapter_prefix: str = ""
    rank: int | None = None
    streams: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        if self.rank is not None and self.rank < 1:
            raise ConfigError(
                f"geometry '{self.name}': expected an adapter rank of 1 or more, found {self.rank}"
            )

    @property
    def blocks(self) -> int:
        """Number of repeated blocks."""
        return len({b for t in self.tensors if (b := self.block_of(t.name)) is not None})

    @property
    def weights(self) -> tuple[TensorSpec, ...]:
        """The weights that an adapter may touch: 2-D ``.weight`` tensors outside the connectors."""
        return tuple(
            t
            for t in self.tensors
            if len(t.shape) == 2
            and t.name.endswith(".weight")
            and not t.name.startswith(self.connector_prefixes)
        )

    @property
    def targets(self) -> tuple[Target, ...]:
        """The weights with the rank of the adapter's pair there: ``min(rank, out, in)``.

        Raises
        ------
        ConfigError
            No adapter rank is known for this geometry.
        """
        if self.rank is None:
            raise ConfigError(
                f"geometry '{self.name}' comes without an adapter rank; give one (--rank)"
            )
        return tuple(Target(self.module(w.name), w, min(self.rank, *w.shape)) for w in self.weights)

    def module(self, weight_name: str) -> str:
        """Return a weight's name without the base's prefix and without ``.weight``."""
        return weight_name.removeprefix(self.prefix).removesuffix(".weight")

    def adapter_tensors(self) -> Iterator[TensorSpec]:
        """Yield the tensors of an adapter file: A ``[rank, in]`` and B ``[out, rank]``, BF16."""
        for target in self.targets:
            out, in_ = target.weight.shape
            stem = f"{self.adapter_prefix}{target.module}"
            yield TensorSpec(f"{stem}.lora_A.weight", (target.rank, in_), "BF16")
            yield TensorSpec(f"{stem}.lora_B.weight", (out, target.rank), "BF16")

    def cut(self, blocks: int) -> "Geometry":
        """Keep the globals and the first ``blocks`` blocks; leave the connectors out.

        Raises
        ------
        ConfigError
            The model has fewer blocks, or none that repeat.
        """
        if self.block_prefix is None:
            raise ConfigError(f"geometry '{self.name}' has no repeated blocks to cut")
        if not 0 <= blocks <= self.blocks:
            raise ConfigError(
                f"geometry '{self.name}' has {self.blocks} blocks; it can't be cut to {blocks}"
            )
        kept = tuple(
            t
            for t in self.tensors
            if not t.name.startswith(self.connector_prefixes)
            and ((block := self.block_of(t.name)) is None or block < blocks)
        )
        return replace(self, tensors=kept)

    def counts(self) -> Counts:
        """Count tensors, parameters, bytes, targets, multiply-accumulates and ranks."""
        params = sum(t.params for t in self.tensors)
        nbytes = sum(t.nbytes for t in self.tensors)
        weights = self.weights
        touched = sum(w.params for w in weights)
        if self.rank is None:
            return Counts(
                len(self.tensors), params, nbytes, len(weights), touched, None, None, None, None
            )
        targets = self.targets
        return Counts(
            tensors=len(self.tensors),
            params=params,
            tensor_bytes=nbytes,
            targets=len(targets),
            touched_params=touched,
            macs=sum(t.macs for t in targets),
            adapter_params=sum(t.adapter_params for t in targets),
            adapter_tensor_bytes=sum(t.nbytes for t in self.adapter_tensors()),
            ranks=dict(sorted(Counter(t.rank for t in targets).items(), reverse=True)),
        )

    def block_of(self, name: str) -> int | None:
        """Return the number of the block that a tensor belongs to; None for a global."""
        if self.block_prefix is None or not name.startswith(self.block_prefix):
            return None
        number = name[len(self.block_prefix) :].split(".", 1)[0]
        return int(number) if number.isdecimal() and len(number) < 10 else None


def geometry_names() -> list[str]:
    """Names of the shipped templates."""
    return sorted(path.stem for path in data_folder("models").glob("*.toml"))


def load_geometry(
    name_or_path: str | Path, *, shrink: int = 1, rank: int | None = None
) -> Geometry:
    """Load a template by its shipped name, or from a TOML file of the same form.

    Parameters
    ----------
    shrink
        Divide every size and the rank by this; each must divide evenly, the rank rounds down.
    rank
        The adapter's rank in the place of the template's.

    Raises
    ------
    ConfigError
        No such template, or one that doesn't say a whole model.
    """
    path = Path(name_or_path)
    if path.suffix != ".toml":
        path = data_folder("models") / f"{name_or_path}.toml"
        if not path.is_file():
            names = geometry_names()
            raise ConfigError(
                f"no geometry '{name_or_path}'{did_you_mean(str(name_or_path), names)}; shipped: "
                f"{', '.join(names)}; a path to a .toml template will do too"
            )
    template = read_toml(path)
    try:
        return _expand(template, shrink, rank)
    except KeyError as error:
        raise ConfigError(f"{path}: the template lacks {error}") from error
    except RecursionError as error:
        raise ConfigError(f"{path}: a part holds itself, or the file is nested too deep") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path}: {error}") from error


def from_tensors(name: str, tensors: Iterable[TensorSpec], rank: int | None = None) -> Geometry:
    """Make a geometry of a checkpoint's header.

    The repeated blocks are the largest family of names that differ in one number; a part whose
    name has ``connector`` in it counts as a connector.
    """
    tensors = tuple(tensors)
    families: Counter[str] = Counter()
    connectors: set[str] = set()
    for t in tensors:
        parts = t.name.split(".")
        at = next((i for i, part in enumerate(parts) if "connector" in part), None)
        if at is not None:
            connectors.add(".".join(parts[: at + 1]) + ".")
        elif numbered := re.match(r"(?:.*?\.)?(?=\d+\.)", t.name):
            families[numbered[0]] += t.params
    prefix = next(
        (p for p in ("model.diffusion_model.", "diffusion_model.", "model.")
         if all(t.name.startswith(p) for t in tensors)),
        "",
    )  # fmt: skip
    return Geometry(
        name=name,
        tensors=tensors,
        prefix=prefix,
        block_prefix=max(families, key=lambda f: families[f]) if families else None,
        connector_prefixes=tuple(sorted(connectors)),
        adapter_prefix="diffusion_model.",
        rank=rank,
    )


def _expand(template: Mapping[str, Any], shrink: int, rank: int | None) -> Geometry:
    _only_known(template, _TEMPLATE_KEYS, "the template")
    _only_known(template["adapter"], ("prefix", "rank"), "[adapter]")
    for key in ("name", "prefix", "dtype", "blocks"):
        if not isinstance(template[key], str):
            raise ValueError(f"{key} = {template[key]!r} must be text")
    connectors = template["connectors"]
    if not isinstance(connectors, list) or not all(isinstance(c, str) for c in connectors):
        raise ValueError(f"connectors = {connectors!r} must be a list of texts")
    sizes = {}
    for size, value in template["sizes"].items():
        if shrink < 1 or _whole(f"size {size}", value) % shrink:
            raise ValueError(f"size {size} = {value} can't be divided by shrink = {shrink}")
        sizes[size] = value // shrink
    prefix = template["prefix"]
    tensors = tuple(
        _tensors(template["tensors"], prefix, sizes, template["parts"], template["dtype"])
    )
    names = Counter(t.name for t in tensors)
    for t in tensors:
        if t.dtype not in DTYPE_BYTES:
            near = did_you_mean(t.dtype, DTYPE_BYTES)
            raise ValueError(f"tensor '{t.name}' has an unknown dtype '{t.dtype}'{near}")
        if names[t.name] > 1:
            raise ValueError(f"tensor '{t.name}' is described more than once")
    streams = template.get("streams", {})
    if not isinstance(streams, dict) or not all(isinstance(s, str) for s in streams.values()):
        raise ValueError(f"streams = {streams!r} must be a table of texts")
    default_rank = _whole("adapter.rank", template["adapter"]["rank"])
    return Geometry(
        name=template["name"],
        tensors=tensors,
        prefix=prefix,
        block_prefix=f"{prefix}{template['blocks']}.",
        connector_prefixes=tuple(f"{prefix}{c}." for c in connectors),
        adapter_prefix=str(template["adapter"]["prefix"]),
        rank=max(1, default_rank // shrink) if rank is None else rank,
        streams=tuple(streams.items()),
    )


def _tensors(
    lines: Mapping[str, Any],
    prefix: str,
    sizes: Mapping[str, int],
    parts: Mapping[str, Mapping[str, Any]],
    dtype: str,
) -> Iterator[TensorSpec]:
    for name, line in lines.items():
        if not isinstance(line, dict):
            yield from _line(f"{prefix}{name}", str(line), sizes, dtype)
            continue
        parameters = {k: v for k, v in line.items() if k not in ("part", "repeat")}
        used = set(re.findall(r"\w+", str(parts[line["part"]])))
        _only_known(parameters, used, f"part '{line['part']}', as {name},")
        inner = {**sizes, **{k: _size(str(v), sizes) for k, v in parameters.items()}}
        numbers = [""]
        if "repeat" in line:
            numbers = [f"{i}." for i in range(_whole(f"repeat of {name}", line["repeat"]))]
        for number in numbers:
            yield from _tensors(
                parts[line["part"]], f"{prefix}{name}.{number}", inner, parts, dtype
            )


def _line(name: str, line: str, sizes: Mapping[str, int], dtype: str) -> Iterator[TensorSpec]:
    if linear := re.fullmatch(r"(.+?) <- (.+?)(, no bias)?", line):
        out, in_ = _size(linear[1], sizes), _size(linear[2], sizes)
        yield TensorSpec(f"{name}.weight", (out, in_), dtype)
        if not linear[3]:
            yield TensorSpec(f"{name}.bias", (out,), dtype)
    elif tensor := re.fullmatch(r"\[(.+)\](?: (\w+))?", line):
        shape = tuple(_size(size, sizes) for size in tensor[1].split(","))
        yield TensorSpec(name, shape, tensor[2] or dtype)
    else:
        raise ValueError(f"'{name} = {line}' is neither 'out <- in' nor '[shape] dtype'")


def _only_known(table: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    for key in table:
        if key not in (known := list(known)):
            raise ValueError(f"{where} has no use for '{key}'{did_you_mean(key, known)}")


def _whole(name: str, value: Any) -> int:
    if type(value) is not int or value < 1:
        raise ValueError(f"{name} = {value!r} must be a whole number above 0")
    return value


def _size(text: str, sizes: Mapping[str, int]) -> int:
    """Work out a size such as ``4*V``."""
    return prod(
        int(factor) if factor.isdigit() else sizes[factor]
        for factor in (f.strip() for f in text.split("*"))
    )
