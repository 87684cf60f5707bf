"""Rules of product code that `make check` holds, and figures that it prints and nobody judges.

    python -m benchmarks.code.code_rules [--all]

prints the lines of code by package, and how many modules one neighbour alone imports. With --all lines are by
folder, and all that is counted is named.
"""

from __future__ import annotations

import argparse
import ast
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, cached_property
from pathlib import Path
from typing import NamedTuple

from benchmarks.code.line_counts import num_code_lines, package_of

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = (
    *("bench_serving", "carousel", "detokenizer_proc", "grammar_proc", "model_worker", "runtime"),
    *("scheduler_proc", "tokenizer_proc"),
)
KERNELS = ("model_worker/kernels/", "model_worker/sampling/triton/")
"""Folders of kernels and their launchers, whose functions have many arguments on few lines."""
MAX_PARAMETERS = 8
FACTORIES = ("build_", "create", "load_", "make_")
MAX_POSITIONAL_OF_A_FACTORY = 5
MAX_PUBLIC_METHODS = 20
MAX_IMPORTS = 15
MAX_IMPORTS_OF_A_ROOT = 30
COMPOSITION_ROOTS = {
    "carousel",
    "carousel.server.endpoints",
    "carousel.server.main",
    "carousel.server.server_state",
    "runtime.launcher.main",
    "model_worker.load_worker",
    "scheduler_proc.batching.composition",
    "scheduler_proc.build_scheduler",
    "scheduler_proc.feature_factories",
    "scheduler_proc.main",
}
"""Modules that assemble a process or a table of names from many parts."""
PUBLIC_FACES = {"AsyncClient", "Client", "GenerationExecutor", "LLM"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def product_files() -> list[Path]:
    """Return the Python files of the product."""
    return [ROOT / "launch.py", *sorted(path for top in PRODUCT for path in (ROOT / top).rglob("*.py"))]


# -- of one file --------------------------------------------------------------------------------------------


def long_parameter_lists(tree: ast.Module) -> Iterator[str]:
    """Yield functions with too many parameters. A constructor with a docstring may have more, and so may a
    factory that takes all but the first few by keyword.
    """
    for node in statements(tree):
        if not isinstance(node, Function):
            continue
        positional = [arg.arg for arg in (*node.args.posonlyargs, *node.args.args)]
        if positional[:1] in (["self"], ["cls"]):
            del positional[0]
        makes_own = node.returns is not None and ast.unparse(node.returns) == "Self"
        is_documented = (node.name == "__init__" or makes_own) and ast.get_docstring(node) is not None
        is_factory = node.name.startswith(FACTORIES) and len(positional) <= MAX_POSITIONAL_OF_A_FACTORY
        count = len(positional) + len(node.args.kwonlyargs)
        if count > MAX_PARAMETERS and not is_documented and not is_factory:
            yield f"{node.lineno} {node.name} takes {count} parameters"


def wide_classes(tree: ast.Module) -> Iterator[str]:
    """Yield classes with too many public methods, not counting properties."""
    for node in statements(tree):
        if isinstance(node, ast.ClassDef) and node.name not in PUBLIC_FACES:
            methods = {
                each.name
                for each in node.body
                if isinstance(each, Function) and each.name[0] != "_" and not _is_property(each)
            }
            if len(methods) > MAX_PUBLIC_METHODS:
                yield f"{node.lineno} {node.name} has {len(methods)} public methods"


def _is_property(function: Function) -> bool:
    names = {ast.unparse(each) for each in function.decorator_list}
    return not names.isdisjoint({"property", "cached_property", f"{function.name}.setter"})


def unformatted(text: str) -> Iterator[str]:
    """Yield statements that the formatter skips although they are not literals."""
    lines = text.splitlines()
    marked = {number for number, line in enumerate(lines, 1) if "# fmt: " in line}
    if not marked:
        return
    literals = {
        node.end_lineno
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Assign | ast.AnnAssign)
        and isinstance(node.value, ast.List | ast.Tuple | ast.Set | ast.Dict | ast.DictComp)
    }
    for number in sorted(marked - literals):
        yield f"{number} {lines[number - 1].strip()}"


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Walk over the statements below a node. Expressions, ten times as many, define and import nothing."""
    for field in ("body", "handlers", "orelse", "finalbody", "cases"):
        for part in getattr(node, field, ()):
            yield part
            yield from statements(part)


class FileFacts(NamedTuple):
    """Facts about one file that the rules need. The tree itself is not kept, because the garbage collector
    would walk over it.
    """

    imports: list[ast.Import | ast.ImportFrom]
    types: list[str]
    """Names of the classes and type aliases that it defines."""
    breaches: list[str]
    """Violations of the rules for kernels, followed by those of the other rules for one file."""
    num_of_kernels: int


@cache
def facts_of(text: str) -> FileFacts:
    """Return the facts about a file's text."""
    tree = ast.parse(text)
    wide = list(wide_classes(tree))
    return FileFacts(
        [node for node in statements(tree) if isinstance(node, ast.Import | ast.ImportFrom)],
        list(_types_in(tree)),
        [*wide, *long_parameter_lists(tree), *unformatted(text)],
        len(wide),
    )


def _types_in(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        match node:
            case (
                ast.ClassDef(name=name)
                | ast.AnnAssign(target=ast.Name(id=name), annotation=ast.Name(id="TypeAlias"))
            ):
                yield name
            case _:
                pass


def faults(path: Path) -> Iterator[str]:
    """Yield the violations of the rules for one file, each with its place."""
    name, facts = str(path.relative_to(ROOT)), facts_of(path.read_text())
    found = facts.breaches[: facts.num_of_kernels] if name.startswith(KERNELS) else facts.breaches
    for each in found:
        yield f"{name}:{each}"


# -- of all files -------------------------------------------------------------------------------------------


class Imports:
    """Import graph of a project. Each imported name counts for the module that defines it."""

    def __init__(self, files: Iterable[Path], root: Path = ROOT) -> None:
        self._paths = {module_of(path, root): path for path in files}

    @cached_property
    def _statements(self) -> Mapping[str, list[ast.Import | ast.ImportFrom]]:
        return {module: facts_of(path.read_text()).imports for module, path in self._paths.items()}

    @cached_property
    def of(self) -> Mapping[str, set[str]]:
        """Return the project's modules that each of its modules imports, including those for types only."""
        return {module: set(self._imported(module)) - {module} for module in self._paths}

    def _imported(self, module: str) -> Iterator[str]:
        for node in self._statements[module]:
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names if alias.name in self._paths)
            elif node.module in self._paths:
                yield from (self._definer(node.module, alias.name) for alias in node.names)

    def _definer(self, module: str, name: str) -> str:
        """Return the module that defines the object called `name` in `module`."""
        if f"{module}.{name}" in self._paths:
            return f"{module}.{name}"
        for node in self._statements[module]:
            if isinstance(node, ast.ImportFrom) and node.module in self._paths:
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        return self._definer(node.module, alias.name)
        return module

    def too_many(self) -> list[str]:
        """Return messages about modules that import too many others."""
        return [
            f"{module} imports {len(imported)} modules"
            for module, imported in sorted(self.of.items(), key=lambda item: -len(item[1]))
            if len(imported) > (MAX_IMPORTS_OF_A_ROOT if module in COMPOSITION_ROOTS else MAX_IMPORTS)
        ]

    def of_one_neighbour(self) -> dict[str, str]:
        """Return the modules that only one neighbour in their folder imports, with that neighbour."""
        importers = defaultdict[str, list[str]](list)
        for module, imported in self.of.items():
            for each in imported:
                importers[each].append(module)
        return {
            module: of[0]
            for module, of in sorted(importers.items())
            if len(of) == 1 and self._paths[of[0]].parent == self._paths[module].parent
        }


def names_defined_twice(files: Iterable[Path], root: Path = ROOT) -> dict[str, list[str]]:
    """Return the public classes and type aliases that several modules define, with these modules."""
    found = defaultdict[str, list[str]](list)
    for path in files:
        for name in facts_of(path.read_text()).types:
            found[name].append(module_of(path, root))
    return {name: of for name, of in sorted(found.items()) if len(of) > 1 and name[0] != "_"}


def module_of(path: Path, root: Path = ROOT) -> str:
    """Return the dotted name of a file."""
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--all", action="store_true")
    shows_all = parser.parse_args().all
    files = product_files()
    lines: Counter[str] = Counter()
    for path in files:
        folder = package_of(str(path.relative_to(ROOT)))
        lines[folder if shows_all else folder.split("/")[0]] += num_code_lines(path.read_text())
    print(f"{lines.total()} lines of code")
    for package, count in sorted(lines.items()):
        print(f"{count:7d} {package}")
    imports = Imports(files)
    alone = imports.of_one_neighbour()
    print(f"{len(alone)} modules that one neighbour alone imports")
    for module, importer in alone.items() if shows_all else ():
        print(f"  {module} <- {importer.rpartition('.')[2]}")


if __name__ == "__main__":
    main()
