"""ADAPTERS.md tells of every kind, and each of its lines names a test that is there."""

import ast
from pathlib import Path

import pytest

from lorabench import keys

TESTS = Path(__file__).parent
PAGE = (TESTS.parent / "ADAPTERS.md").read_text("utf-8")


def rows():
    """The cells of the tables' lines, without their heads."""
    lines = [line.strip().strip("|") for line in PAGE.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.split(" | ")] for line in lines]
    return [row for row in cells if row[-1] not in ("Test", "") and not set(row[0]) <= set("-|")]


def named(tree):
    """The tests of a file, by their names in it."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.ClassDef):
            yield from (
                f"{node.name}::{f.name}" for f in node.body if isinstance(f, ast.FunctionDef)
            )


def test_the_page_has_lines_on_everything():
    assert len(rows()) > 35
    assert {len(row) for row in rows()} == {4}


@pytest.mark.parametrize("test", sorted({row[-1] for row in rows()}))
def test_a_line_names_a_test_that_is_there(test):
    file, _, name = test.partition("::")
    assert name in set(named(ast.parse((TESTS / file).read_text("utf-8"))))


CALLED = {
    "LoCon with a mid (Tucker) factor": "mid (Tucker) factors",
    "OFT": "OFT and BOFT",
    "a LoRA of an embedding": "embeddings",
    "a weight to be put in the base's place": "whole weights",
    "a quantised tensor": "quantised",
    "a factor with a bias that no writer documents": "`lora_A.bias`",
    "a whole weight": "whole weights",
}


def test_every_kind_that_is_not_applied_is_on_the_page():
    for _, kind, _ in keys._KINDS:
        assert CALLED.get(kind, kind) in PAGE
