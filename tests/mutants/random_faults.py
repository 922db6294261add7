"""Faults at random places of the numerics: one operator, number or condition is another.

Only what computes is changed: annotations, decorators, texts, assertions and errors are left alone.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOMS = ("ops", "engine", "members")
OPERATORS: dict[type, str] = {ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.BitAnd: "|", ast.BitOr: "&"}
COMPARISONS: dict[type, str] = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}
# One call for another that takes the same arguments.
CALLS = {"min": "max", "max": "min", "amin": "amax", "amax": "amin", "any": "all", "all": "any", "exp": "expm1"}
NOT_COMPUTED = (ast.Raise, ast.Assert, ast.Import, ast.ImportFrom, ast.JoinedStr)


def changes(node: ast.AST, text: str) -> Iterator[tuple[ast.AST, str]]:
    """What may take the place of a node, or of a part of it, as text."""
    match node:
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            yield node, f"({_text(left, text)} {OPERATORS[type(op)]} {_text(right, text)})"
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in COMPARISONS:
            yield node, f"({_text(left, text)} {COMPARISONS[type(op)]} {_text(right, text)})"
        case ast.BoolOp(op=op, values=values):
            word = " and " if isinstance(op, ast.Or) else " or "
            yield node, f"({word.join(f'({_text(value, text)})' for value in values)})"
        case ast.UnaryOp(op=ast.USub() | ast.Not() | ast.Invert(), operand=operand):
            yield node, f"({_text(operand, text)})"
        case ast.Constant(value=bool() as value):
            yield node, str(not value)
        case ast.Constant(value=int() | float() as value):
            yield node, repr(value + 1)
        case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
            yield test, f"(not ({_text(test, text)}))"
        case ast.Call(func=ast.Attribute(value=owner, attr=name) as function) if name in CALLS:
            yield function, f"{_text(owner, text)}.{CALLS[name]}"


def _text(node: ast.AST, text: str) -> str:
    return ast.get_source_segment(text, node) or ""


def _without_effect(node: ast.AST) -> bool:
    """Whether a node computes nothing: texts and errors, and the check of `zip` that lists are equally long."""
    return isinstance(node, NOT_COMPUTED) or (isinstance(node, ast.keyword) and node.arg == "strict")


def _computed(tree: ast.Module) -> Iterator[ast.AST]:
    """The nodes of a file that compute something."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "bases", "type_params"):
                continue
            parts = value if isinstance(value, list) else [value]
            waiting += [
                p for p in parts if isinstance(p, ast.AST) and not isinstance(p, (*NOT_COMPUTED, ast.JoinedStr))
            ]


def _offset(text: str, line: int, column: int) -> int:
    """The position in a text of a line, from 1, and a column in bytes of UTF-8."""
    lines = text.splitlines(keepends=True)
    return sum(map(len, lines[: line - 1])) + len(lines[line - 1].encode()[:column].decode())


def _around(text: str, first: int, last: int) -> tuple[int, int]:
    """The whole lines around a place, so many that they occur once."""
    begin = text.rfind("\n", 0, first) + 1
    end = text.find("\n", last)
    end = len(text) if end < 0 else end
    while text.count(text[begin:end]) > 1 and begin > 0:
        begin = text.rfind("\n", 0, begin - 1) + 1
    return begin, end


@dataclass(frozen=True)
class Change:
    """A node of a file and what may take its place."""

    file: str
    text: str
    place: Any
    new: str

    def fault(self) -> tuple[str, int, str, str] | None:
        """(file, line, old, new), where `old` occurs once in the file; None where `new` is no Python."""
        text, place = self.text, self.place
        first = _offset(text, place.lineno, place.col_offset)
        last = _offset(text, place.end_lineno, place.end_col_offset)
        begin, end = _around(text, first, last)
        changed = text[begin:first] + self.new + text[last:end]
        try:
            ast.parse(text[:begin] + changed + text[end:])
        except SyntaxError:
            return None
        return self.file, place.lineno, text[begin:end], changed


def every_change(root: Path) -> Iterator[Change]:
    """All changes that there are."""
    source = root / "src" / "manymax"
    for path in sorted(path for room in ROOMS for path in (source / room).rglob("*.py")):
        if "triton" in path.name or path.name in ("theory.py", "facts.py"):  # another machine, and statements
            continue
        text = path.read_text(encoding="utf-8")
        for node in _computed(ast.parse(text)):
            for place, new in changes(node, text):
                yield Change(path.relative_to(root).as_posix(), text, place, new)


def random_faults(root: Path, count: int, seed: int) -> list[tuple[str, int, str, str]]:
    """So many faults, at most one in a line."""
    found = list(every_change(root))
    random.Random(seed).shuffle(found)
    chosen: dict[tuple[str, int], tuple[str, int, str, str]] = {}
    for change in found:
        if len(chosen) == count:
            break
        key = change.file, change.place.lineno
        if key not in chosen and (fault := change.fault()) is not None:
            chosen[key] = fault
    return list(chosen.values())
