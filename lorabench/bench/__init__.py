"""Cases of measurement, each run alone, checked and recorded."""

from lorabench.bench.cases import Case, Result, Subject, sweep
from lorabench.bench.fuse import fuse_case
from lorabench.bench.kernels import CONTENDERS, KERNEL_SECONDS, kernels_case
from lorabench.bench.loop import LOOP_SECONDS, WHOLE_PASS, loop_case
from lorabench.bench.walk import walk_case

__all__ = [
    "CONTENDERS",
    "KERNEL_SECONDS",
    "LOOP_SECONDS",
    "WHOLE_PASS",
    "Case",
    "Result",
    "Subject",
    "fuse_case",
    "kernels_case",
    "loop_case",
    "sweep",
    "walk_case",
]
