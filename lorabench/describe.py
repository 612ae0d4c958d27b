"""What a file or a model is, as plain JSON, from headers alone."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lorabench.adapter import Adapter
from lorabench.adapter_file import AdapterFile, ranks_of, scales_of
from lorabench.checkpoint import Checkpoint
from lorabench.cost import predict_plan, touches_of
from lorabench.geometry import DTYPE_BYTES, Geometry, TensorSpec, from_tensors
from lorabench.places import is_text_encoders
from lorabench.plan import Strategy, plan
from lorabench.recipe import Recipe
from lorabench.synthetic import Files


def describe_geometry(geometry: Geometry) -> dict[str, Any]:
    """Return a model's name, blocks and counts; ranks are keyed by text, as JSON wants it."""
    fields = asdict(geometry.counts())
    if fields["ranks"] is not None:
        fields["ranks"] = _by_text(fields["ranks"])
    return {"name": geometry.name, "blocks": geometry.blocks, **fields}


def describe_base(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return what a checkpoint of a model holds."""
    geometry = from_tensors(checkpoint.path.name, checkpoint.tensors)
    return {
        "kind": "base",
        **_describe_files(checkpoint),
        "params": sum(t.params for t in checkpoint.tensors),
        "blocks": geometry.blocks,
        "metadata": dict(checkpoint.metadata),
    }


def describe_adapter(adapter: AdapterFile) -> dict[str, Any]:
    """Return what an adapter's file holds, without a base to hold it against."""
    modules = adapter.modules
    return {
        "kind": "adapter",
        **_describe_files(adapter.file),
        "names": list(adapter.styles),
        "modules": len(modules),
        "kinds": _count(kind for module in modules for kind in module.kinds),
        "params": sum(t.params for t in adapter.file.tensors),
        "ranks": _by_text(ranks_of(modules)),
        "scales": [
            {"scale": scale.value, "source": scale.source, "modules": count}
            for scale, count in scales_of(modules).items()
        ],
        "factor_bytes": sum(module.nbytes for module in modules),
        "pass_flops": sum(module.flops for module in modules),
        "text_encoders": [m.path for m in modules if is_text_encoders(m.path)],
        "not_applied": [
            {"tensor": key.name, "kind": key.kind, "remedy": key.remedy} for key in adapter.skipped
        ],
        "metadata": dict(adapter.file.metadata),
    }


def describe_match(adapter: Adapter, base: Geometry) -> dict[str, Any]:
    """Return which of an adapter's modules a base has, and what a pass over those amounts to."""
    params = sum(t.params for t in base.tensors)
    touched = {target: len(target.rows) * target.columns for target in adapter.targets}
    touched_bytes = sum(n * DTYPE_BYTES[target.weight.dtype] for target, n in touched.items())
    return {
        "name": base.name,
        "params": params,
        "matched": [pair.module for pair in adapter.pairs],
        "unmatched": list(adapter.unmatched),
        "text_encoders": list(adapter.text_encoders),
        "touched_params": sum(touched.values()),
        "touched_share": sum(touched.values()) / params if params else 0.0,
        "pass_flops": sum(2 * target.macs for target in touched),
        "pass_bytes": 2 * touched_bytes + adapter.factor_bytes,
    }


def describe_synthetic(geometry: Geometry, files: Files) -> dict[str, Any]:
    """Return the files that `synthesize` makes of a geometry; bytes are the tensors' own.

    Raises
    ------
    ConfigError
        No adapter rank is known for this geometry.
    """
    factors = tuple(geometry.adapter_tensors())
    return {
        "geometry": geometry.name,
        "blocks": geometry.blocks,
        "rank": geometry.rank,
        "base": _describe_file(files.base, geometry.tensors),
        "adapters": {name: _describe_file(path, factors) for name, path in files.adapters.items()},
    }


def describe_recipe(recipe: Recipe) -> dict[str, Any]:
    """Return a recipe's roles and the states of its phases."""
    return {
        "name": recipe.name,
        "aliases": list(recipe.aliases),
        "description": recipe.description,
        "roles": {r.name: "required" if r.required else "optional" for r in recipe.roles},
        "phases": [phase.state.as_dict() for phase in recipe.phases],
    }


def describe_plan(
    recipe: Recipe,
    strengths: Mapping[str, float],
    strategy: Strategy,
    renders: int,
    geometry: Geometry,
) -> dict[str, Any]:
    """Return a plan's actions, and the work predicted for each.

    Parameters
    ----------
    recipe
        A bound recipe.
    strengths
        What the user said of the bound roles; 1 for a role that isn't in it.
    geometry
        The model that the work is predicted for, every adapter touching every target.

    Raises
    ------
    ConfigError
        Fewer than one render, or a geometry without an adapter rank.
    """
    touches = touches_of(geometry, [role.name for role in recipe.roles])
    base_bytes = sum(tensor.nbytes for tensor in geometry.tensors)
    actions = plan(recipe, strategy, renders)
    works = predict_plan(actions, touches, base_bytes, strategy.restore)
    return {
        "recipe": recipe.name,
        "roles": {role.name: strengths.get(role.name, 1.0) for role in recipe.roles},
        "strategy": asdict(strategy),
        "renders": renders,
        "geometry": geometry.name,
        "rank": geometry.rank,
        "actions": [action.as_dict() for action in actions],
        "work": [asdict(work) for work in works],
    }


def _describe_file(path: Path, tensors: Sequence[TensorSpec]) -> dict[str, Any]:
    return {
        "path": str(path),
        "tensors": len(tensors),
        "tensor_bytes": sum(tensor.nbytes for tensor in tensors),
    }


def _describe_files(checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "path": str(checkpoint.path),
        "files": [str(file) for file in checkpoint.stamps],
        "bytes": sum(size for size, *_ in checkpoint.stamps.values()),
        "tensors": len(checkpoint.entries),
        "tensor_bytes": sum(t.nbytes for t in checkpoint.tensors),
        "dtypes": _count(t.dtype for t in checkpoint.tensors),
    }


def _count(texts: Iterable[str]) -> dict[str, int]:
    return dict(Counter(texts).most_common())


def _by_text(ranks: dict[int, int]) -> dict[str, int]:
    return {str(rank): pairs for rank, pairs in ranks.items()}
