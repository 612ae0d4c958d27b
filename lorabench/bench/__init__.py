"""Cases of measurement, each run alone, checked and recorded."""

from lorabench.bench.cases import Case, Result, Subject, sweep
from lorabench.bench.denoise import DENOISE_TOKENS, denoise_case
from lorabench.bench.drift import DRIFT_CYCLES, TRAINING_STEPS, drift_case, drift_frame
from lorabench.bench.fuse import fuse_case
from lorabench.bench.judged import accounts_frame, restores_frame
from lorabench.bench.kernels import CONTENDERS, KERNEL_SECONDS, kernels_case
from lorabench.bench.load import load_case
from lorabench.bench.loop import LOOP_SECONDS, WHOLE_PASS, loop_case
from lorabench.bench.peers import PASS_CONTENDERS, PASS_SECONDS, peers_case
from lorabench.bench.restores import STRENGTHS as RESTORE_STRENGTHS
from lorabench.bench.restores import restores_case, restores_on
from lorabench.bench.rules import (
    RULE_RATIOS,
    RULE_SIDES,
    RULE_STRENGTHS,
    rules_case,
    rules_frame,
)
from lorabench.bench.walk import walk_case

__all__ = [
    "CONTENDERS",
    "DENOISE_TOKENS",
    "DRIFT_CYCLES",
    "KERNEL_SECONDS",
    "LOOP_SECONDS",
    "PASS_CONTENDERS",
    "PASS_SECONDS",
    "RESTORE_STRENGTHS",
    "RULE_RATIOS",
    "RULE_SIDES",
    "RULE_STRENGTHS",
    "TRAINING_STEPS",
    "WHOLE_PASS",
    "Case",
    "Result",
    "Subject",
    "accounts_frame",
    "denoise_case",
    "drift_case",
    "drift_frame",
    "fuse_case",
    "kernels_case",
    "load_case",
    "loop_case",
    "peers_case",
    "restores_case",
    "restores_frame",
    "restores_on",
    "rules_case",
    "rules_frame",
    "sweep",
    "walk_case",
]
