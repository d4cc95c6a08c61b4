"""Python source made short: a start command has room for 4 kB, and a program that reads well needs more.

Not general: it knows the plain style of the modules that boot.py gives it (no string of many lines but docstrings, no
name that is looked up by its text).
"""

from __future__ import annotations

import ast
import io
import re
import string
import tokenize
from collections import Counter
from collections.abc import Collection, Sequence


def minify(*sources: str, keep: str = "") -> list[str]:
    """The same programs without comments, docstrings and annotations, with short names and little indentation. What
    they name alike is named alike afterwards, so that they compress better together. Attributes that `keep`, a source
    too, knows of keep their names."""
    trees = [ast.parse(source) for source in sources]
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    shorter = _Shorter(trees, {node.attr for node in ast.walk(ast.parse(keep)) if isinstance(node, ast.Attribute)})
    texts = [ast.unparse(ast.fix_missing_locations(shorter.visit(tree))) for tree in trees]
    return [_squeezed(text) for text in texts]


class _Shorter(ast.NodeTransformer):
    """Constants where they are used, no annotations, and one or two letters for each name that is the module's own.

    A name is renamed everywhere or nowhere: not if it is also an attribute, a keyword of a call, or "main". An
    attribute is renamed if nothing but `self` has it."""

    def __init__(self, trees: Sequence[ast.Module], keep: Collection[str]) -> None:
        nodes = [node for tree in trees for node in ast.walk(tree)]
        self._constants = {
            node.targets[0].id: node.value
            for node in (node for tree in trees for node in tree.body)
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and _is_constant(node.value)
        }
        names = Counter(node.id for node in nodes if isinstance(node, ast.Name))
        names.update(node.arg for node in nodes if isinstance(node, ast.arg))
        own = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        own |= {node.arg for node in nodes if isinstance(node, ast.arg)}
        own |= {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
        own |= {node.name for node in nodes if isinstance(node, ast.ExceptHandler) and node.name}
        fixed = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        fixed |= {node.arg for node in nodes if isinstance(node, ast.keyword)} | {"main"}
        own -= fixed | self._constants.keys()
        own -= {name for name in own if name.startswith("__")}
        attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
        foreign = {node.attr for node in attributes if getattr(node.value, "id", "") != "self"}
        names.update(node.attr for node in attributes)
        own |= {node.attr for node in attributes} - foreign - set(keep)
        letters = (first + second for second in ("", *string.digits) for first in string.ascii_letters)
        free = (name for name in letters if name not in names and name not in fixed)
        self._short = dict(zip(sorted(own, key=lambda name: (-names[name], name)), free))  # noqa: B905

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if isinstance(node.ctx, ast.Load) and node.id in self._constants:
            return self._constants[node.id]
        node.id = self._short.get(node.id, node.id)
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        node.attr = self._short.get(node.attr, node.attr)
        return self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        return ast.arg(self._short.get(node.arg, node.arg))

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> ast.AST:
        node.name = self._short.get(node.name, node.name)
        return self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        node.name = self._short.get(node.name, node.name)
        return self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.name = self._short.get(node.name, node.name)
        node.returns = None
        return self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> ast.AST | None:
        constant = isinstance(node.targets[0], ast.Name) and node.targets[0].id in self._constants
        return None if constant else self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST | None:
        return node.value and self.visit(ast.copy_location(ast.Assign([node.target], node.value), node))

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST | None:
        return None if node.module in ("__future__", "collections.abc") else node


def _is_constant(node: ast.AST) -> bool:
    return all(isinstance(part, (ast.Constant, ast.BinOp, ast.operator)) for part in ast.walk(node))


def _squeezed(text: str) -> str:
    """Without blank lines, spaces between tokens that need none, and three of four spaces of indentation. Raises
    ValueError where that would change the program."""
    out, end = "", (0, 0)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        (row, column), line = token.start, token.line
        if token.type in (tokenize.NEWLINE, tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER):
            continue
        if row != end[0]:
            out += "\n" + " " * ((len(line) - len(line.lstrip())) // 4)
        elif re.fullmatch(r"\w\w", out[-1] + line[column]):
            out += line[end[1] : column]
        out += line[column : token.end[1]]
        end = token.end
    if ast.dump(ast.parse(out)) != ast.dump(ast.parse(text)):
        raise ValueError("a program of a style that minify does not know")
    return out.strip() + "\n"
