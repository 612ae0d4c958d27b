"""The loop of mudler/vllm.cpp #1210, as its engine ran it, for measuring what it costs.

For each output and each input one f32 accumulator runs over the rank; both factors are widened
from bf16 inside the multiply; A is read with a stride of ``in`` elements; the delta is stored as
bf16 and a second loop adds it to the weight. One thread. It holds no lock while it runs, so that
an observer in the same process can sample it.
"""
# pyright: basic, reportCallIssue=false, reportArgumentType=false
# numba compiles these functions: they take and give numbers of its types, which Python has none of.

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numba import njit, types
from numba.core.extending import intrinsic
from torch import Tensor

from lorabench.fuse import Term
from lorabench.kernels.scratch import Scratch

# Compiled code is kept beside this file for the next process, where that may be written.
compiled = njit(nogil=True, cache=os.access(Path(__file__).parent, os.W_OK))


@intrinsic
def _float_from_bits(typing_context, bits):
    def generate(context, builder, signature, args):
        return builder.bitcast(args[0], context.get_value_type(types.float32))

    return types.float32(types.uint32), generate


@intrinsic
def _bits_from_float(typing_context, value):
    def generate(context, builder, signature, args):
        return builder.bitcast(args[0], context.get_value_type(types.uint32))

    return types.uint32(types.float32), generate


@compiled
def _widen(bits: int) -> float:
    """Return the f32 of bf16 bits."""
    return _float_from_bits(np.uint32(bits) << np.uint32(16))


@compiled
def _round(value: float) -> int:
    """Return the bf16 bits nearest to an f32, ties to even; a NaN stays one, made quiet."""
    bits = _bits_from_float(value)
    if value != value:
        return np.uint16(0x7FC0)
    return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> 16)


@compiled
def _scale(b: np.ndarray, factor: np.float32, scaled: np.ndarray) -> None:
    for i in range(b.shape[0]):
        for k in range(b.shape[1]):
            scaled[i, k] = _round(np.float32(factor * _widen(b[i, k])))


@compiled
def _first_delta(b: np.ndarray, a: np.ndarray, delta: np.ndarray) -> None:
    for i in range(delta.shape[0]):
        for j in range(delta.shape[1]):
            total = np.float32(0)
            for k in range(a.shape[0]):
                total += _widen(b[i, k]) * _widen(a[k, j])
            delta[i, j] = _round(total)


@compiled
def _further_delta(b: np.ndarray, a: np.ndarray, factor: np.float32, delta: np.ndarray) -> None:
    for i in range(delta.shape[0]):
        for j in range(delta.shape[1]):
            total = np.float32(0)
            for k in range(a.shape[0]):
                total += _widen(b[i, k]) * _widen(a[k, j])
            delta[i, j] = _round(_widen(delta[i, j]) + np.float32(factor * total))


@compiled
def _further_whole(b: np.ndarray, factor: np.float32, delta: np.ndarray) -> None:
    for i in range(delta.shape[0]):
        for j in range(delta.shape[1]):
            delta[i, j] = _round(_widen(delta[i, j]) + np.float32(factor * _widen(b[i, j])))


@compiled
def _add_bf16(weight: np.ndarray, delta: np.ndarray) -> None:
    for i in range(weight.shape[0]):
        for j in range(weight.shape[1]):
            weight[i, j] = _round(_widen(delta[i, j]) + _widen(weight[i, j]))


@compiled
def _add_f32(weight: np.ndarray, delta: np.ndarray) -> None:
    for i in range(weight.shape[0]):
        for j in range(weight.shape[1]):
            weight[i, j] = _widen(_round(_widen(delta[i, j]) + weight[i, j]))


def fuse_scalar(weight: Tensor, terms: Sequence[Term], scratch: Scratch) -> None:
    """Fuse rule R1's delta into ``weight [out, in]`` on the CPU, one multiply at a time.

    The weight is in bf16 or f32, and the terms touch all of its rows.
    """
    delta = _bits(scratch.take("delta", tuple(weight.shape), torch.bfloat16))
    for i, term in enumerate(terms):
        b = _bits(term.pair.b.to(torch.bfloat16))
        a = None if term.pair.a is None else _bits(term.pair.a.to(torch.bfloat16))
        factor = np.float32(term.factor)
        if a is None:
            if i == 0:
                _scale(b, factor, delta)
            else:
                _further_whole(b, factor, delta)
        elif i == 0:
            scaled = _bits(scratch.take("scaled", b.shape, torch.bfloat16))
            _scale(b, factor, scaled)
            _first_delta(scaled, a, delta)
        else:
            _further_delta(b, a, factor, delta)
    if weight.dtype == torch.bfloat16:
        _add_bf16(_bits(weight), delta)
    else:
        _add_f32(weight.numpy(), delta)


def _bits(tensor: Tensor) -> np.ndarray:
    """View a bf16 tensor as uint16, sharing memory."""
    return tensor.view(torch.uint16).numpy()
