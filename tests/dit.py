"""A small transformer to train adapters for, and what is fused from a file that a writer wrote."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from conftest import bits
from safetensors.torch import load_file, save_file
from torch import nn

from lorabench.adapter import Adapter
from lorabench.checkpoint import Checkpoint
from lorabench.fusedfile import fuse_file
from lorabench.recipe import State

# Nothing here asks the Hub for anything; the libraries look for this when they are imported.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

WIDTH = 16
LINEARS = ("attn1.to_q", "attn1.to_k", "attn1.to_v", "attn1.to_out.0", "ff.net.0", "ff.net.2")
"""The linear layers of a block."""


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.to_q = nn.Linear(WIDTH, WIDTH)
        self.to_k = nn.Linear(WIDTH, WIDTH)
        self.to_v = nn.Linear(WIDTH, WIDTH)
        self.to_out = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Dropout(0.0)])


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        layers = nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        self.net = nn.Sequential(*layers)


class Block(nn.Module):  # a name that LyCORIS looks for
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attn1 = Attention()
        self.ff = FeedForward()


class Dit(nn.Module):
    """Two blocks and a projection, random but for a seed."""

    def __init__(self, dtype=torch.bfloat16):
        super().__init__()
        self.transformer_blocks = nn.ModuleList([Block(), Block()])
        self.proj_out = nn.Linear(WIDTH, WIDTH)
        generator = torch.Generator().manual_seed(1)
        for parameter in self.parameters():
            parameter.data = (0.3 * torch.randn(parameter.shape, generator=generator)).to(dtype)


MODULES = (
    *(f"transformer_blocks.{block}.{linear}" for block in (0, 1) for linear in LINEARS),
    "proj_out",
)
"""Every linear layer of the small transformer."""


def fill(parameters: Iterable[torch.Tensor], seed: int = 5) -> None:
    """Train, in an instant: give values whose products and sums are exact in f32."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        values = torch.randint(-8, 8, parameter.shape, generator=generator)
        parameter.data.copy_((values + (values >= 0)) / 16)  # none is 0


def factors(model: nn.Module) -> list[torch.Tensor]:
    """Parameters of a model that are an adapter's, by PEFT's names for them."""
    return [parameter for name, parameter in model.named_parameters() if "lora_" in name]


def write(path: Path, tensors: Mapping[str, torch.Tensor]) -> Path:
    """Write a file by hand, from what a library has in memory."""
    save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, path)
    return path


def write_base(path: Path, model: nn.Module) -> Checkpoint:
    """Write a model's weights, as they are before anything is trained."""
    return Checkpoint.open(write(path, model.state_dict()))


def fused(
    base: Checkpoint, path: Path, rule: str = "R1", *, allow_skip: bool = False
) -> dict[str, torch.Tensor]:
    """Fuse an adapter's file into a base; give the tensors of the file that comes of it."""
    adapter = Adapter.open(path, base.tensors, allow_skip=allow_skip)
    out = path.parent / f"fused-{rule}.safetensors"
    fuse_file(base, {"user": adapter}, State(user=1.0), out, rule=rule, overwrite=True)
    return load_file(out)


def differing(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> list[str]:
    """Name the tensors that differ in a bit, or that only one has."""
    return sorted(
        name
        for name in one.keys() | other.keys()
        if name not in one
        or name not in other
        or one[name].dtype != other[name].dtype
        or not torch.equal(bits(one[name]), bits(other[name]))
    )
