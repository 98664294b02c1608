"""A parsed script, and the questions that rules ask of it: which name is what, what stands around
what, and which calls can happen in one run."""

import ast
from collections.abc import Iterator
from functools import cached_property

Function = ast.FunctionDef | ast.AsyncFunctionDef
Loop = ast.For | ast.AsyncFor | ast.While
Scope = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef
HALF_TYPES = {"torch.float16", "torch.half", "torch.bfloat16"}


class Script:
    """A module's tree with parents, imports and the values given to names."""

    def __init__(self, tree: ast.Module) -> None:
        self.tree = tree
        self.parents: dict[ast.AST, ast.AST] = {
            child: parent for parent in ast.walk(tree) for child in ast.iter_child_nodes(parent)
        }
        self.nodes: list[ast.AST] = sorted(ast.walk(tree), key=position)
        self.calls = [node for node in self.nodes if isinstance(node, ast.Call)]
        self.imports = self._imports()

    def _imports(self) -> dict[str, set[str]]:
        """Of each imported name, what it can mean: more than one after `try … except
        ImportError`."""
        names: dict[str, set[str]] = {}
        for node in self.nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.asname:
                        names.setdefault(alias.asname, set()).add(alias.name)
                    else:
                        root = alias.name.partition(".")[0]
                        names.setdefault(root, set()).add(root)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for alias in node.names:
                    full = f"{node.module}.{alias.name}"
                    names.setdefault(alias.asname or alias.name, set()).add(full)
        return names

    @cached_property
    def values(self) -> dict[str, list[ast.expr]]:
        """Everything assigned to a name or attribute, by its text (`scaler`, `self.scaler`)."""
        found: dict[str, list[ast.expr]] = {}
        for node in self.nodes:
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    self._assign(found, target, node.value)
            elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
                self._assign(found, node.target, node.value)
            elif isinstance(node, ast.withitem) and node.optional_vars is not None:
                self._assign(found, node.optional_vars, node.context_expr)
        return found

    def _assign(self, found: dict[str, list[ast.expr]], target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple | ast.List):
            same = isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(target.elts)
            for i, part in enumerate(target.elts):
                self._assign(found, part, value.elts[i] if same else value)  # type: ignore[attr-defined]
        else:
            found.setdefault(text(target), []).append(value)

    def meanings(self, node: ast.expr) -> set[str]:
        """The full dotted names that an expression can stand for, imports resolved; empty where it
        is no dotted name."""
        dotted = text(node) if isinstance(node, ast.Name | ast.Attribute) else ""
        root, dot, rest = dotted.partition(".")
        if not dotted or "(" in dotted or "[" in dotted:
            return set()
        return {f"{origin}{dot}{rest}" for origin in self.imports.get(root, {root})}

    def means(self, node: ast.expr, *names: str) -> bool:
        """Whether the expression can only be one of these full dotted names."""
        meanings = self.meanings(node)
        return bool(meanings) and meanings <= set(names)

    def called(self, *names: str) -> Iterator[ast.Call]:
        """The calls of a function by its full dotted name."""
        return (call for call in self.calls if self.means(call.func, *names))

    def methods(self, *names: str) -> Iterator[tuple[ast.Call, str]]:
        """The calls of a method by its name, each with the text of its receiver."""
        for call in self.calls:
            if isinstance(call.func, ast.Attribute) and call.func.attr in names:
                yield call, text(call.func.value)

    def mentions(self, *words: str) -> bool:
        """Whether a name, attribute or argument of the script is one of these."""
        return bool(self._words & set(words))

    @cached_property
    def _words(self) -> set[str]:
        words = {node.attr for node in self.nodes if isinstance(node, ast.Attribute)}
        words |= {node.id for node in self.nodes if isinstance(node, ast.Name)}
        words |= {node.arg for node in self.nodes if isinstance(node, ast.keyword) and node.arg}
        for meanings in self.imports.values():
            words |= {part for meaning in meanings for part in meaning.split(".")}
        return words

    # What stands around a node.

    def around(self, node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
        """Each parent with the child through which it is reached, from the inside out."""
        while node in self.parents:
            parent = self.parents[node]
            yield parent, node
            node = parent

    def scope(self, node: ast.AST) -> Scope:
        """The function a node is in, or the module."""
        for parent, _ in self.around(node):
            if isinstance(parent, ast.FunctionDef | ast.AsyncFunctionDef):
                return parent
        return self.tree

    def loops(self, node: ast.AST) -> list[Loop]:
        """The loops whose body a node is in, within its function, from the inside out."""
        found: list[Loop] = []
        for parent, child in self.around(node):
            if isinstance(parent, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                break
            if isinstance(parent, ast.For | ast.AsyncFor | ast.While) and child in parent.body:
                found.append(parent)
        return found

    def branches(self, node: ast.AST, up_to: ast.AST | None = None) -> dict[ast.AST, str]:
        """The conditions a node depends on within its function (or `up_to`), each with the side
        it is on."""
        found: dict[ast.AST, str] = {}
        for parent, child in self.around(node):
            if parent is up_to or isinstance(parent, ast.FunctionDef | ast.AsyncFunctionDef):
                break
            if isinstance(parent, ast.If | ast.IfExp | ast.Try | ast.Match):
                found[parent] = self._side(parent, child)
        return {parent: side for parent, side in found.items() if side not in {"test", "try"}}

    def _side(self, parent: ast.AST, child: ast.AST) -> str:
        if isinstance(parent, ast.Try):
            return "except" if child in parent.handlers else "try"
        if isinstance(parent, ast.Match):
            return str(parent.cases.index(child)) if child in parent.cases else "test"
        if child is parent.test:  # type: ignore[attr-defined]
            return "test"
        body = parent.body  # type: ignore[attr-defined]
        return "body" if child is body or (isinstance(body, list) and child in body) else "else"

    def exclude(self, one: ast.AST, other: ast.AST) -> bool:
        """Whether two nodes of a function can't both run in one pass: other sides of a condition,
        or behind a branch that leaves."""
        first, second = self.branches(one), self.branches(other)
        if any(second.get(parent, side) != side for parent, side in first.items()):
            return True
        return self._leaves_before(one, other) or self._leaves_before(other, one)

    def _leaves_before(self, one: ast.AST, other: ast.AST) -> bool:
        """Whether `one` is in a branch that ends in return, continue, break or raise, and `other`
        comes after that branch."""
        for parent, side in self.branches(one).items():
            if isinstance(parent, ast.If) and position(other) > position(parent):
                block = parent.body if side == "body" else parent.orelse
                if isinstance(block[-1], ast.Return | ast.Continue | ast.Break | ast.Raise):
                    inside = self.branches(other).get(parent) == side
                    return not inside
        return False

    def inside(self, node: ast.AST, kind: type[ast.AST] | tuple[type[ast.AST], ...]) -> bool:
        """Whether a node is anywhere inside a node of this kind."""
        return any(isinstance(parent, kind) for parent, _ in self.around(node))

    # Mixed precision's own words.

    def is_autocast(self, node: ast.expr) -> bool:
        """Whether an expression is an autocast context, on or chosen at run time, but not one
        turned off."""
        if isinstance(node, ast.IfExp):
            return self.is_autocast(node.body) or self.is_autocast(node.orelse)
        if isinstance(node, ast.Call):
            named = text(node.func).rpartition(".")[2]
            names = {meaning.rpartition(".")[2] for meaning in self.meanings(node.func)}
            enabled = argument(node, "enabled")
            return "autocast" in names | {named} and not is_constant(enabled, False)
        given = self.values.get(text(node), [])
        return bool(given) and any(
            self.is_autocast(value) for value in given if text(value) != text(node)
        )

    def is_autocast_off(self, node: ast.expr) -> bool:
        """Whether an expression is `autocast(enabled=False)`."""
        if not isinstance(node, ast.Call):
            return False
        named = text(node.func).rpartition(".")[2]
        return named.endswith("autocast") and is_constant(argument(node, "enabled"), False)

    def autocast(self, node: ast.AST) -> ast.Call | None:
        """The autocast in whose region a node is, by `with` or by decorator, within its
        function."""
        for parent, child in self.around(node):
            if isinstance(parent, ast.With | ast.AsyncWith) and child in parent.body:
                for item in reversed(parent.items):
                    if self.is_autocast_off(item.context_expr):
                        return None
                    if self.is_autocast(item.context_expr):
                        return self._autocast_call(item.context_expr)
            if isinstance(parent, ast.Lambda | ast.ClassDef):
                return None
            if isinstance(parent, ast.FunctionDef | ast.AsyncFunctionDef):
                on = [d for d in parent.decorator_list if child is not d and self.is_autocast(d)]
                return self._autocast_call(on[0]) if on else None
        return None

    def _autocast_call(self, node: ast.expr) -> ast.Call:
        for inner in [node, *self.values.get(text(node), [])]:
            for part in ast.walk(inner):
                if isinstance(part, ast.Call) and self.is_autocast(part):
                    return part
        raise AssertionError(text(node))

    @cached_property
    def uses_device(self) -> bool:
        """Whether the script can run on something else than the CPU."""
        return self.mentions("cuda", "device", "local_rank", "accelerator", "mps", "xpu") or any(
            isinstance(node, ast.Constant) and isinstance(node.value, str) and "cuda" in node.value
            for node in self.nodes
        )

    @cached_property
    def autocasts(self) -> list[ast.Call]:
        """All autocast contexts made in the script that are not turned off."""
        return [call for call in self.calls if self.is_autocast(call)]

    @cached_property
    def scaler_calls(self) -> list[ast.Call]:
        """Where a GradScaler is made that is on, or may be."""
        return [
            call
            for call in self.calls
            if text(call.func).rpartition(".")[2] == "GradScaler"
            and not is_constant(argument(call, "enabled"), False)
        ]

    @cached_property
    def scalers(self) -> set[str]:
        """The texts under which a GradScaler is used: known by how it is made, or by
        `x.scale(loss).backward()` and `x.unscale_(optimizer)`, which nothing else has."""
        found = {receiver for _, receiver in self.methods("unscale_")}
        for call, _ in self.methods("backward"):
            inner = call.func.value  # type: ignore[attr-defined]
            method = inner.func if isinstance(inner, ast.Call) else None
            if isinstance(method, ast.Attribute) and method.attr == "scale":
                found.add(text(method.value))
        for name, values in self.values.items():
            made = {id(node) for value in values for node in ast.walk(value)}
            if any(id(call) in made for call in self.scaler_calls):
                found.add(name)
        return found

    def scaler_methods(self, *names: str) -> list[tuple[ast.Call, str]]:
        """The calls of a method on a GradScaler, each with the scaler's text."""
        return [(call, name) for call, name in self.methods(*names) if name in self.scalers]

    @cached_property
    def optimizer_steps(self) -> list[tuple[ast.Call, str]]:
        """Each step that updates parameters, with the optimizer's text: `optimizer.step()` and
        `scaler.step(optimizer)`."""
        found = []
        for call, name in self.methods("step"):
            if name in self.scalers:
                if call.args:
                    found.append((call, text(call.args[0])))
            elif self.is_optimizer(name):
                found.append((call, name))
        return found

    def is_optimizer(self, name: str) -> bool:
        """Whether a text names an optimizer: made by torch.optim, or called so."""
        last = name.rpartition(".")[2].lower()
        if any(word in last for word in ("sched", "scaler", "warm", "accelerator")):
            return False
        if last.startswith("opt") or "optim" in last:
            return True
        return any(
            meaning.startswith("torch.optim.") and ".lr_scheduler." not in meaning
            for value in self.values.get(name, [])
            if isinstance(value, ast.Call)
            for meaning in self.meanings(value.func)
        )

    def is_scheduler(self, name: str) -> bool:
        """Whether a text names a learning rate scheduler: made by torch, or called so."""
        return "sched" in name.rpartition(".")[2].lower() or any(
            ".lr_scheduler." in meaning
            for value in self.values.get(name, [])
            if isinstance(value, ast.Call)
            for meaning in self.meanings(value.func)
        )

    @cached_property
    def backwards(self) -> list[ast.Call]:
        """The calls of `loss.backward()`, also behind a scaler's `scale`; not those of distributed
        autograd, whose gradients live in a context and need no `zero_grad`."""
        return [
            call
            for call, _ in self.methods("backward")
            if not self.means(call.func, "torch.distributed.autograd.backward")
        ]

    def every_nth(self, test: ast.expr) -> bool:
        """Whether a condition is true at every Nth batch, written there or in a variable before."""
        parts = list(ast.walk(test))
        for part in list(parts):
            if isinstance(part, ast.Name) and len(self.values.get(part.id, [])) == 1:
                parts += ast.walk(self.values[part.id][0])
        return any(
            (isinstance(part, ast.BinOp) and isinstance(part.op, ast.Mod))
            or (isinstance(part, ast.Compare) and text(part.left) in self._counters)
            for part in parts
        )

    @cached_property
    def _counters(self) -> set[str]:
        """Names that start at 0, count up and are set back to 0."""
        counted = {
            text(node.target)
            for node in self.nodes
            if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add)
        }
        zeros = {
            name: [value for value in values if is_constant(value, 0)]
            for name, values in self.values.items()
        }
        return {name for name in counted if len(zeros.get(name, [])) > 1}

    def statement(self, node: ast.AST) -> tuple[ast.stmt, list[ast.stmt]]:
        """The innermost statement a node is in, and the block that statement is in."""
        for parent, child in [(self.parents.get(node), node), *self.around(node)]:
            for name in ("body", "orelse", "finalbody"):
                block = getattr(parent, name, None)
                if isinstance(block, list) and child in block:
                    assert isinstance(child, ast.stmt)
                    return child, block
        raise AssertionError("a node outside of every statement")


def text(node: ast.AST) -> str:
    """An expression as one would write it; what names are compared by."""
    return ast.unparse(node)


def position(node: ast.AST) -> tuple[int, int]:
    """Where a node starts, for ordering; (0, 0) for one without a place."""
    return getattr(node, "lineno", 0), getattr(node, "col_offset", 0)


def argument(call: ast.Call, name: str, index: int | None = None) -> ast.expr | None:
    """An argument of a call by its name, or by its place in the order."""
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    if index is not None and index < len(call.args):
        return call.args[index]
    return None


def passes_on(call: ast.Call) -> bool:
    """Whether a call hands on arguments that the text does not show (`**options`)."""
    return any(keyword.arg is None for keyword in call.keywords) or any(
        isinstance(value, ast.Starred) for value in call.args
    )


def is_constant(node: ast.expr | None, value: object) -> bool:
    """Whether an expression is this literal."""
    return isinstance(node, ast.Constant) and node.value is value


def calls_in(node: ast.AST, attribute: str) -> bool:
    """Whether a method of this name is called anywhere inside."""
    return any(
        isinstance(part, ast.Call)
        and isinstance(part.func, ast.Attribute)
        and part.func.attr == attribute
        for part in ast.walk(node)
    )
