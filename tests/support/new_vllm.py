"""A vLLM that is not as it was: single definitions of the installed one, changed in memory, as a
new release might have them."""

from __future__ import annotations

import ast
import copy
import textwrap
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from bus._vllm.seams import Fields, Has, Says, Takes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from bus._vllm.seams import Expectation, Registry, Seam
    from bus._vllm.source import SourceTree

NEW = "wavebus_never_saw"


def installed() -> Path:
    """The folder that has the package ``vllm`` in it; nothing of it is imported."""
    spec = find_spec("vllm")
    assert spec is not None, "after require_vllm"
    assert spec.origin is not None
    return Path(spec.origin).parents[1]


def check_nothing_is_missed(registry: Registry, seam: Seam, intact: SourceTree) -> None:
    """Disappoint each single expectation of the seam, of what is common to all forms and of the
    form that fits here: the seam must be missed, and its features be off; or another form fits."""
    changing = NewVllm(intact)
    form = next((each for each in seam.forms if not each.gaps(intact)), None)
    expectations = (*seam.common.expectations, *(form.expectations if form else ()))
    assert expectations
    for expectation in expectations:
        for tree in changing.against(expectation):
            report = registry.check(tree)
            if form is not None and report.forms.get(seam.name, form.name) != form.name:
                continue  # it is as another form has it
            assert seam.name in report.reasons, expectation
            assert all(report.features[name] for name in seam.features), expectation


class NewVllm:
    """Makes changed copies of a vLLM."""

    def __init__(self, tree: SourceTree) -> None:
        self._tree = tree

    def renamed(self, target: str) -> SourceTree:
        """The definition has another name."""
        return self._changed(target, _rename)

    def reshaped(self, target: str) -> SourceTree:
        """The function takes one more parameter; the class has one more field, the first."""
        return self._changed(target, _reshape)

    def without(self, target: str, text: str) -> SourceTree:
        """The definition does not do that: the innermost statements that say so are gone."""
        first = text.partition("\n")[0]
        return self._changed(target, lambda node: _Without(first).visit(node))

    def against(self, expectation: Expectation) -> Iterator[SourceTree]:
        """Every way in which the expectation comes to be disappointed."""
        target = expectation.target
        match expectation:
            case Takes(parameters=parameters):
                yield from self._gone(target)
                if parameters:
                    yield self.reshaped(target)
            case Says(texts=texts):
                yield from (self.without(target, text) for text in texts)
            case Fields():
                yield self.reshaped(target)
            case Has(paths=paths):
                for path in paths or [target]:
                    yield from self._gone(path)

    def _gone(self, target: str) -> Iterator[SourceTree]:
        """It has another name, unless a base class has one of its name."""
        tree = self.renamed(target)
        if tree.find(target) is None:
            yield tree

    def _changed(self, target: str, change: Callable[[ast.AST], ast.AST]) -> SourceTree:
        module, node = self._tree.locate(target)
        assert node is not None, f"{target} is not there to be changed"
        lines = self._tree.text(module).split("\n")
        if isinstance(node, ast.Module):
            begin, end, indent = 1, len(lines), 0
        else:
            assert isinstance(node, ast.stmt)
            decorators = getattr(node, "decorator_list", ())
            begin = min([node.lineno, *(each.lineno for each in decorators)])
            assert node.end_lineno is not None
            end, indent = node.end_lineno, node.col_offset
        new = ast.unparse(ast.fix_missing_locations(change(copy.deepcopy(node))))
        lines[begin - 1 : end] = [textwrap.indent(new, " " * indent)]
        changed = "\n".join(lines)
        assert changed != self._tree.text(module)
        tree = self._tree.changed({self._tree.module_path(module): changed})
        whole = self._tree.find(module)
        if whole is not node:
            # As if the text was parsed, which takes 30 ms; what did not change is printed already.
            assert whole is not None
            spliced = _replaced(whole, node, ast.parse(new).body)
            assert isinstance(spliced, ast.Module)
            tree._modules[module] = spliced
        return tree


def _replaced(tree: ast.AST, old: ast.AST, new: list[ast.stmt]) -> ast.AST | None:
    """The tree with other statements in the place of one, sharing all that did not change; None
    if it does not hold that one."""
    for name in ("body", "orelse", "handlers", "finalbody"):
        for place, node in enumerate(getattr(tree, name, ())):
            inner = new if node is old else _replaced(node, old, new)
            if inner is not None:
                copied = copy.copy(tree)
                parts = inner if isinstance(inner, list) else [inner]
                nodes = getattr(tree, name)
                setattr(copied, name, [*nodes[:place], *parts, *nodes[place + 1 :]])
                return copied
    return None


def _rename(node: ast.AST) -> ast.AST:
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        node.name = NEW
    elif isinstance(node, ast.Assign):
        node.targets = [ast.Name(NEW, ast.Store())]
    else:
        assert isinstance(node, ast.AnnAssign), ast.dump(node)
        node.target = ast.Name(NEW, ast.Store())
    return node


def _reshape(node: ast.AST) -> ast.AST:
    if isinstance(node, ast.ClassDef):
        field = ast.AnnAssign(ast.Name(NEW, ast.Store()), ast.Name("int", ast.Load()), None, 1)
        node.body.insert(0, field)
        return node
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef), ast.dump(node)
    node.args.kwonlyargs.append(ast.arg(NEW))
    node.args.kw_defaults.append(ast.Constant(None))
    return node


class _Without(ast.NodeTransformer):
    def __init__(self, text: str) -> None:
        self._text = text

    def generic_visit(self, node: ast.AST) -> ast.AST:
        inner = isinstance(node, ast.stmt) and self._text in ast.unparse(node)
        node = super().generic_visit(node)
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            decorators = node.decorator_list
            node.decorator_list = [d for d in decorators if self._text not in ast.unparse(d)]
        elif inner and self._text in ast.unparse(node):
            return ast.Pass()
        return node


def write(root: Path, changed: Mapping[str, str], folder: Path) -> Path:
    """Lay a vLLM out in ``folder`` that is the one below ``root`` but for these files.

    Args:
        changed: new texts, by their path below ``root``.
    """
    _link_all_but(root / "vllm", folder / "vllm", {Path(path) for path in changed}, Path("vllm"))
    for path, text in changed.items():
        (folder / path).write_text(text)
    return folder


def _link_all_but(source: Path, copy: Path, changed: set[Path], here: Path) -> None:
    copy.mkdir(parents=True)
    for path in source.iterdir():
        if path.name == "__pycache__" or here / path.name in changed:
            continue
        if any(here / path.name in each.parents for each in changed):
            _link_all_but(path, copy / path.name, changed, here / path.name)
        else:
            (copy / path.name).symlink_to(path)
