"""Others' code for the same work, to be measured beside ours and to hold our rules against.

A peer is first given a weight and its terms to *hold* in its own form (state dicts, layers), so
that what is timed afterwards is fusing alone.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

from lorabench.errors import UnavailableError, did_you_mean
from lorabench.fuse import Term


class Held(NamedTuple):
    """A weight ``[out, in]`` in a peer's hands."""

    fuse: Callable[[], Tensor]
    """Fuses, in place or not, and gives the fused weight."""
    unfuse: Callable[[], Tensor] | None
    """Takes the last fuse back and gives what is left; None where the peer has no way back."""


Hold = Callable[[Tensor, Sequence[Term]], Held]


@dataclass(frozen=True)
class Peer:
    """Code that isn't ours.

    Attributes
    ----------
    hold
        Takes a bf16 weight ``[out, in]`` and its terms, of two factors for all rows; a peer that
        fuses in place shares memory.
    rules
        The rule of `lorabench.fuse.RULES` that it follows for one adapter of bf16 factors, by type
        of device.
    package
        What has to be installed for it; None where torch is enough.
    install
        How that is done.
    """

    hold: Hold
    rules: Mapping[str, str]
    package: str | None = None
    install: str = ""

    @property
    def here(self) -> bool:
        """Whether it is installed."""
        return self.package is None or find_spec(self.package) is not None


def fuse_ltx_core(weight: Tensor, terms: Sequence[Term]) -> Tensor:
    """Return ``weight [out, in]`` fused by ``apply_loras`` of Lightricks/LTX-2's ltx-core.

    It has no scale, so strength x scale goes in as the strength.

    Raises
    ------
    UnavailableError
        ltx-core isn't installed.
    """
    return get_peer("ltx_core").hold(weight, terms).fuse()


def _hold_ltx_core(weight: Tensor, terms: Sequence[Term]) -> Held:
    from ltx_core.loader.fuse_loras import apply_loras
    from ltx_core.loader.primitives import LoraStateDictWithStrength, StateDict

    def state_dict(tensors: dict[str, Tensor]) -> StateDict:
        nbytes = sum(tensor.nbytes for tensor in tensors.values())
        return StateDict(tensors, weight.device, nbytes, {weight.dtype})

    model = state_dict({"m.weight": weight})
    loras = [
        LoraStateDictWithStrength(
            state_dict({"m.lora_A.weight": pair.factors[0], "m.lora_B.weight": pair.b}),
            strength * pair.scale,
        )
        for pair, strength in terms
    ]
    return Held(lambda: apply_loras(model, loras).sd["m.weight"], None)


def _hold_peft(weight: Tensor, terms: Sequence[Term], *, autocast: bool) -> Held:
    """Hold a weight in PEFT's layer, one adapter a term.

    With ``autocast`` the factors are widened to f32, as ``get_peft_model`` does unless told not to.
    """
    from peft import LoraConfig
    from peft.tuners.lora import Linear

    out, in_ = weight.shape
    base = torch.nn.Linear(in_, out, bias=False, device="meta")
    base.weight = torch.nn.Parameter(weight, requires_grad=False)
    layer: Linear | None = None
    for number, (pair, strength) in enumerate(terms):
        a, b = pair.factors
        name, rank = f"adapter_{number}", len(a)
        config = LoraConfig(r=rank, lora_alpha=rank, init_lora_weights=False)
        if layer is None:
            layer = Linear(base, name, config, r=rank, lora_alpha=rank)
        else:
            layer.update_layer(name, rank, lora_alpha=rank, config=config)
        for factors, factor in ((layer.lora_A, a), (layer.lora_B, b)):
            held = factor.float() if autocast else factor
            factors[name].weight = torch.nn.Parameter(held, requires_grad=False)
        layer.scaling[name] = strength * pair.scale
    assert layer is not None, "a peer holds a weight that some adapter touches"
    names = list(layer.lora_A)

    def merge() -> Tensor:
        layer.merged_adapters.clear()  # the base's bits may have been put back under it
        layer.merge(adapter_names=names)
        return base.weight.data

    def unmerge() -> Tensor:
        layer.unmerge()
        return base.weight.data

    return Held(merge, unmerge)


def _hold_torch(weight: Tensor, terms: Sequence[Term]) -> Held:
    """Write the loop as most engines have it: ``W += s * (B @ A)``, all of it in bf16."""

    def fuse() -> Tensor:
        for pair, strength in terms:
            a, b = pair.factors
            weight.add_((strength * pair.scale) * (b @ a))
        return weight

    return Held(fuse, None)


def _hold_torch_f32(weight: Tensor, terms: Sequence[Term]) -> Held:
    """Write the loop of those that widen everything and round once."""

    def fuse() -> Tensor:
        total = weight.float()
        for pair, strength in terms:
            a, b = pair.factors
            total += (strength * pair.scale) * (b.float() @ a.float())
        return weight.copy_(total)

    return Held(fuse, None)


_LTX_CORE = "pip install --no-deps ltx-core==1.0.0 and pip install einops"
_PEFT = "pip install 'peft>=0.21,<0.22'"

PEERS: dict[str, Peer] = {
    "ltx_core": Peer(_hold_ltx_core, {"cpu": "R1", "cuda": "R1"}, "ltx_core", _LTX_CORE),
    "peft": Peer(partial(_hold_peft, autocast=False), {"cpu": "R3", "cuda": "R2"}, "peft", _PEFT),
    "peft_f32": Peer(
        partial(_hold_peft, autocast=True), {"cpu": "R4", "cuda": "R4"}, "peft", _PEFT
    ),
    "torch": Peer(_hold_torch, {"cpu": "R2", "cuda": "R2"}),
    "torch_f32": Peer(_hold_torch_f32, {"cpu": "R4", "cuda": "R4"}),
}


def get_peer(name: str) -> Peer:
    """Return a peer by name.

    Raises
    ------
    UnavailableError
        No such peer, or it isn't installed.
    """
    if name not in PEERS:
        raise UnavailableError(
            f"no peer '{name}'{did_you_mean(name, PEERS)}; choose from {', '.join(PEERS)}"
        )
    if not (peer := PEERS[name]).here:
        raise UnavailableError(f"peer '{name}' isn't installed; run: {peer.install}")
    return peer
