"""Free memory is touched as far as there is any, and given back."""

import pytest
import torch

from lorabench import devices
from lorabench.measure import private_bytes

CPU = torch.device("cpu")
BYTES = 256 << 20


def test_memory_that_was_touched_is_free_again(monkeypatch):
    seen = []
    fill = torch.Tensor.fill_
    monkeypatch.setattr(
        torch.Tensor, "fill_", lambda t, v: (fill(t, v), seen.append(private_bytes()))[0]
    )
    before = private_bytes()
    assert devices.touch_free(CPU, BYTES) == BYTES
    assert seen[0] - before > 0.9 * BYTES
    assert private_bytes() - before < 0.1 * BYTES


@pytest.mark.parametrize(
    ("free", "nbytes", "touched"), [(1000, 2000, 1000), (None, 2000, 2000), (1000, -5, 0)]
)
def test_no_more_is_touched_than_is_free(monkeypatch, free, nbytes, touched):
    monkeypatch.setattr(devices, "free_bytes", lambda device: free)
    assert devices.touch_free(CPU, nbytes) == touched


def test_a_gpus_memory_is_left_alone():
    assert devices.touch_free(torch.device("cuda"), BYTES) == 0
