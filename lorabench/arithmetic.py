"""Formulas kept as data: numbers and names under + - * / ** and parentheses, and nothing else."""

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping

from lorabench.errors import ConfigError, did_you_mean

Number = int | float

MAX_CHARACTERS = 300
MAX_EXPONENT = 64
"""Of a power, in size: 2**30 is a GiB, and nothing here needs much more."""
MAX_SIZE = 1e300
"""Of any number on the way, so that powers of powers end early."""

_BINARY: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}


def names(formula: str) -> tuple[str, ...]:
    """Return the names in a formula, each once, in the order they come.

    Raises
    ------
    ConfigError
        It is no formula.
    """
    found = [node for node in ast.walk(_parse(formula)) if isinstance(node, ast.Name)]
    return tuple(dict.fromkeys(n.id for n in sorted(found, key=lambda n: n.col_offset)))


def evaluate(formula: str, values: Mapping[str, Number]) -> Number:
    """Work a formula out.

    Raises
    ------
    ConfigError
        It is no formula, names what has no value, or has no finite real value.
    """
    try:
        figure = _value(_parse(formula), formula, values)
        if isinstance(figure, complex):
            raise ConfigError(f"formula '{formula}': has no real value; correct it")
        if not math.isfinite(figure):
            raise ConfigError(f"formula '{formula}': expected a finite value, found {figure}")
    except ZeroDivisionError as error:
        raise ConfigError(f"formula '{formula}': divides by zero; correct it") from error
    except OverflowError as error:
        raise ConfigError(f"formula '{formula}': its value is too large; correct it") from error
    return figure


def spell(formula: str, values: Mapping[str, Number]) -> str:
    """Return a formula as an equation of numbers: ``4 x 18,977,652,736 / 2^30 = 70.69726``.

    A formula that is one name keeps it, to say what the number is.
    """

    def number(name: re.Match[str]) -> str:
        told = show(values[name[0]])
        return f"({told})" if told.startswith("-") else told

    result = show(evaluate(formula, values))
    if formula.strip().isidentifier():
        return f"{formula.strip()} = {result}"
    spelled = re.sub(r"\b[A-Za-z_]\w*", number, " ".join(formula.split()))
    return f"{spelled.replace('**', '^').replace('*', 'x')} = {result}"


def show(figure: Number) -> str:
    """Return a figure for people: whole numbers in full unless told in short, as 8.53e12."""
    short = re.sub(r"e\+?(-?)0*", r"e\1", f"{figure:.7g}")
    if isinstance(figure, float) and ("e" in short or not figure.is_integer()):
        whole = figure.is_integer() and abs(figure) < 1e15 and float(short) != figure
        return f"{int(figure):,}" if whole else short
    return f"{int(figure):,}"


def _parse(formula: str) -> ast.expr:
    if len(formula) > MAX_CHARACTERS:
        raise ConfigError(f"formula '{formula[:40]}...': longer than {MAX_CHARACTERS} characters")
    try:
        tree = ast.parse(formula.strip(), mode="eval").body
        _check(tree, formula)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(f"formula '{formula}': can't be read: {error}; correct it") from error
    return tree


def _check(node: ast.expr, formula: str) -> None:
    match node:
        case ast.Name():
            pass
        case ast.Constant(value=value) if type(value) in (int, float):
            pass
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            _check(operand, formula)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            _check(left, formula)
            _check(right, formula)
        case _:
            part = ast.get_source_segment(formula.strip(), node) or type(node).__name__
            raise ConfigError(
                f"formula '{formula}': expected numbers, names, + - * / ** and parentheses, found "
                f"'{part}'"
            )


def _value(node: ast.expr, formula: str, values: Mapping[str, Number]) -> Number:
    match node:
        case ast.Constant(value=int() | float() as value):
            return value
        case ast.Name(id=name):
            if name not in values:
                raise ConfigError(
                    f"formula '{formula}': nothing is called '{name}'{did_you_mean(name, values)}"
                )
            return values[name]
        case ast.UnaryOp(operand=operand):
            return -_value(operand, formula, values)
        case ast.BinOp(left=left, op=op, right=right):
            base, other = _value(left, formula, values), _value(right, formula, values)
            if isinstance(op, ast.Pow) and abs(other) > MAX_EXPONENT:
                raise ConfigError(
                    f"formula '{formula}': expected an exponent of at most {MAX_EXPONENT}, found "
                    f"{show(other)}"
                )
            result = _BINARY[type(op)](base, other)
            if abs(result) > MAX_SIZE:
                raise OverflowError
            return result
    raise AssertionError(node)
