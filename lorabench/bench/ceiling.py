"""The rate of the matrix unit, as a ceiling for passes: big square products."""

import torch

from lorabench.errors import CheckError
from lorabench.measure import time_once

SIDE = {"cpu": 4096, "cuda": 16384}
"""The side of a big square, by type of device."""

_LEAST_SIDE = 256
_MOST_SECONDS = 6.0  # for a product: some dtypes have no instructions on some machines


class Squares:
    """Products of two square matrices into memory that is there already, timed one by one.

    Parameters
    ----------
    most_flops
        What a product may cost. Its side is the largest power of two, up to ``SIDE``, that keeps
        to that and to six seconds.

    Raises
    ------
    CheckError
        A product is wrong.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, most_flops: float) -> None:
        self.device, self.dtype = device, dtype
        self.seconds: list[float] = []
        self._make(_LEAST_SIDE)
        while 16 * self.side**3 <= most_flops and 2 * self.side <= SIDE[device.type]:
            self._time()  # the first starts threads and chooses code
            if 8 * self._time() > _MOST_SECONDS:
                break
            self._make(2 * self.side)
        self._time()
        self._check()

    @property
    def flops(self) -> int:
        """Operations of one product."""
        return 2 * self.side**3

    def take(self) -> float:
        """Time one product; return the seconds."""
        self.seconds.append(seconds := self._time())
        return seconds

    def _make(self, side: int) -> None:
        generator = torch.Generator().manual_seed(side)
        self.side = side
        # A GPU's clock falls with the bits that switch, so values are no zeros.
        self._a, self._b = (
            torch.randn(side, side, generator=generator).to(self.device, self.dtype)
            for _ in range(2)
        )
        self._out = torch.empty_like(self._a)

    def _time(self) -> float:
        return time_once(lambda: torch.mm(self._a, self._b, out=self._out), self.device)

    def _check(self) -> None:
        row = self._a[0].double() @ self._b.double()
        size = self._a[0].double().abs() @ self._b.double().abs()
        # The sum's error in f32, at worst, and the rounding of the result.
        bound = self.side * 2.0**-24 * size + torch.finfo(self.dtype).eps * row.abs()
        if bool(((self._out[0].double() - row).abs() > bound).any()):
            raise CheckError(f"a square product of {self.side} in {self.dtype} is wrong")
