"""Everything of vLLM that this project relies on, and a check of a vLLM by reading it.

Nothing is imported or run, so the vLLM may be of a kind that this machine cannot load: a GPU wheel, the next release.

    python -m vllm_evict.engine.upstream FOLDER-THAT-HOLDS-vllm
"""

from __future__ import annotations

import ast
import hashlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from vllm_evict.engine.upstream_table import HOOKS, READ, Hook


@dataclass
class _Module:
    """A file, read."""

    name: str
    is_package: bool
    tree: ast.Module

    def definition(self, name: str) -> ast.stmt | None:
        """What binds ``name`` at module level: the last of several, as at run time (in either branch of an if)."""
        found = None
        for node in _statements(self.tree.body):
            if name in _bound(node):
                found = node
        return found

    def stars(self) -> list[str]:
        """Modules of which all is imported."""
        nodes = [node for node in _statements(self.tree.body) if isinstance(node, ast.ImportFrom)]
        return [self._source(node) for node in nodes if node.names[0].name == "*"]

    def origin(self, node: ast.stmt, name: str) -> tuple[str, str] | None:
        """Module and name that an import statement takes ``name`` from."""
        if not isinstance(node, ast.ImportFrom):
            return None
        return self._source(node), next(alias.name for alias in node.names if (alias.asname or alias.name) == name)

    def _source(self, node: ast.ImportFrom) -> str:
        package = self.name.split(".") if self.is_package else self.name.split(".")[:-1]
        base = package[: len(package) - node.level + 1] if node.level else []
        return ".".join([*base, *filter(None, [node.module])])


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run when the module or class is defined."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With):
            for part in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(node, part, []))
            for handler in getattr(node, "handlers", []):
                yield from _statements(handler.body)


def _bound(node: ast.stmt) -> set[str]:
    """Names that a statement binds."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return {node.name}
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {alias.asname or alias.name for alias in node.names}
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return {target.id for target in targets if isinstance(target, ast.Name)}


class Upstream:
    """A vLLM in a folder.

    Args:
        folder: holds ``vllm``.

    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._modules: dict[str, _Module | None] = {}

    def mismatches(self, hooks: tuple[Hook, ...] = HOOKS) -> list[str]:
        """One line for every hook that this vLLM has not, or has otherwise."""
        return [f"{hook}: {fault}" for hook in hooks for fault in self._faults(hook)]

    def changed(self, hooks: tuple[Hook, ...] = HOOKS) -> list[str]:
        """One line for every function that is not what was read. It may still do the same."""
        return [
            f"{hook}: not as it was read ({fingerprint})"
            for hook in hooks
            if hook.body is not None and (fingerprint := self.fingerprint(hook)) not in hook.body.split()
        ]

    def fingerprint(self, hook: Hook) -> str:
        """Of a function or class, comments and docstrings aside; ``"missing"`` if there is none."""
        found = self._lookup(hook)
        return _fingerprint(found[1]) if not isinstance(found, str) else "missing"

    def _faults(self, hook: Hook) -> Iterator[str]:
        found = self._lookup(hook)
        if isinstance(found, str):
            yield found
            return
        module, node = found
        if hook.overrides is not None or hook.passed is not None or hook.mentions:
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield "is no function"
                return
            yield from _signature_faults(hook, node)
        if hook.has or hook.abstract is not None:
            if not isinstance(node, ast.ClassDef):
                yield "is no class"
                return
            known = self._attributes(module, node)
            yield from (f"has no {name}" for name in hook.has if name not in known)
        if hook.abstract is not None:
            abstract = self._abstract(module, node)
            yield from (f"is abstract without {name}, which we do not define" for name in abstract - {*hook.abstract})

    def _lookup(self, hook: Hook) -> tuple[_Module, ast.stmt] | str:
        """The definition, or what is missing."""
        if self._module(hook.module) is None:
            return "no such module"
        name, _, member_name = hook.name.partition(".")
        found = self._find(hook.module, name)
        if found is None:
            return f"no {name}"
        if not member_name:
            return found
        module, node = found
        member = self._member(module, node, member_name) if isinstance(node, ast.ClassDef) else None
        return member or f"{name} has no {member_name}"

    def _module(self, name: str) -> _Module | None:
        if name not in self._modules:
            path = self._folder.joinpath(*name.split("."))
            files = (path / "__init__.py", path.with_suffix(".py"))
            file = next((file for file in files if file.is_file()), None)
            self._modules[name] = file and _Module(
                name, file.name == "__init__.py", ast.parse(file.read_text(encoding="utf-8"))
            )
        return self._modules[name]

    def _find(self, module_name: str, name: str, depth: int = 5) -> tuple[_Module, ast.stmt] | None:
        """Where ``name`` of a module is defined, imports followed; the import itself where it leads out of sight."""
        module = self._module(module_name)
        node = module.definition(name) if module is not None else None
        if module is None:
            return None
        if node is None:
            return next(filter(None, (self._find(star, name, depth - 1) for star in module.stars() if depth)), None)
        origin = module.origin(node, name)
        if origin is None or not depth or self._module(origin[0]) is None:
            return module, node
        return self._find(*origin, depth - 1)

    def _bases(self, module: _Module, node: ast.ClassDef) -> Iterator[tuple[_Module, ast.ClassDef]]:
        for base in node.bases:
            expression = base.value if isinstance(base, ast.Subscript) else base
            found = isinstance(expression, ast.Name) and self._find(module.name, expression.id)
            if found and isinstance(found[1], ast.ClassDef):
                yield found[0], found[1]

    def _member(self, module: _Module, node: ast.ClassDef, name: str) -> tuple[_Module, ast.stmt] | None:
        """What binds ``name`` in a class or, if nothing does, in its bases."""
        own = [statement for statement in _statements(node.body) if name in _bound(statement)]
        if own:
            return module, own[-1]
        return next(filter(None, (self._member(*base, name) for base in self._bases(module, node))), None)

    def _abstract(self, module: _Module, node: ast.ClassDef) -> set[str]:
        """Methods without which the class cannot be instantiated."""
        own = {name for statement in _statements(node.body) for name in _bound(statement)}
        inherited = set().union(*(self._abstract(*base) for base in self._bases(module, node)))
        decorated = {
            statement.name
            for statement in _statements(node.body)
            if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef)
            and "abstractmethod" in {ast.unparse(decorator).split(".")[-1] for decorator in statement.decorator_list}
        }
        return (inherited - own) | decorated

    def _attributes(self, module: _Module, node: ast.ClassDef) -> set[str]:
        """Names bound in a class and its bases, on the class or on ``self``."""
        names = {name for statement in _statements(node.body) for name in _bound(statement)}
        for child in ast.walk(node):
            for target in getattr(child, "targets", [getattr(child, "target", None)]):
                for part in target.elts if isinstance(target, ast.Tuple) else [target]:
                    if isinstance(part, ast.Attribute) and ast.unparse(part.value) == "self":
                        names.add(part.attr)
        return names.union(*(self._attributes(*base) for base in self._bases(module, node)))


def _fingerprint(node: ast.AST) -> str:
    return hashlib.sha256(_plain(node).encode()).hexdigest()[:12]


def _plain(value: object) -> str:
    """A syntax tree as text, without docstrings and whatever only some versions of Python put there."""
    if isinstance(value, list):
        is_docstring = lambda part: isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant)  # noqa: E731
        return f"[{' '.join(_plain(part) for part in value if not is_docstring(part))}]"
    if isinstance(value, ast.AST):
        fields = [_plain(part) for name, part in ast.iter_fields(value) if part and name not in ("ctx", "type_params")]
        return f"{type(value).__name__}({' '.join(fields)})"
    return repr(value)


def _signature_faults(hook: Hook, node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    arguments = node.args
    positional = [argument.arg for argument in arguments.posonlyargs + arguments.args]
    bare = {"staticmethod"} & {ast.unparse(decorator) for decorator in node.decorator_list}
    if "." in hook.name and not bare:
        positional = positional[1:]
    keyword_only = [argument.arg for argument in arguments.kwonlyargs]
    if hook.overrides is not None and tuple(positional + keyword_only) != hook.overrides:
        yield f"takes ({', '.join(positional + keyword_only)}), we override ({', '.join(hook.overrides)})"
    if hook.passed is not None:
        optional = positional[len(positional) - len(arguments.defaults) :] + [
            name for name, default in zip(keyword_only, arguments.kw_defaults, strict=True) if default is not None
        ]
        unknown = [name for name in hook.passed if name not in positional + keyword_only] if not arguments.kwarg else []
        missing = [name for name in positional + keyword_only if name not in optional and name not in hook.passed]
        leading = [name for name in hook.passed if name in positional]
        yield from (f"does not take {name}, which we pass" for name in unknown)
        yield from (f"needs {name}, which we do not pass" for name in missing)
        if not unknown and leading != [name for name in positional if name in hook.passed]:
            yield f"takes ({', '.join(positional)}), we pass ({', '.join(hook.passed)})"
    source = {part.attr for part in ast.walk(node) if isinstance(part, ast.Attribute)}
    source |= {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
    source |= {part.arg for part in ast.walk(node) if isinstance(part, ast.keyword) and part.arg}
    yield from (f"does not use {name} any more" for name in hook.mentions if name not in source)


def main(folder: str) -> int:
    """Print what does not fit, and what is to be read again; 1 if anything does not fit."""
    upstream = Upstream(Path(folder))
    mismatches, changed = upstream.mismatches(), upstream.changed()
    print(*mismatches, f"{len(HOOKS)} hooks checked: {len(mismatches)} do not fit", sep="\n")
    print(*changed, f"{len(READ)} function bodies compared: {len(changed)} are not as they were read", sep="\n")
    return int(bool(mismatches))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
