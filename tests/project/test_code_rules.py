"""Rules of product code hold everywhere, and a breach of each is found."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from benchmarks.code import code_rules
from benchmarks.code.code_rules import Imports, faults, long_parameter_lists, unformatted, wide_classes

NINE = ", ".join("abcdefghi")
EIGHT = ", ".join("abcdefgh")


def test_product_code_keeps_the_rules() -> None:
    files = code_rules.product_files()
    assert len(files) > 400
    assert not [fault for path in files for fault in faults(path)]
    assert not code_rules.names_defined_twice(files)
    imports = Imports(files)
    assert not imports.too_many()
    assert imports.of.keys() >= code_rules.COMPOSITION_ROOTS


@pytest.mark.parametrize(
    ("source", "is_found"),
    [
        (f"def make({NINE}): ...", True),
        (f"async def make({NINE}): ...", True),
        (f"def make({EIGHT}): ...", False),
        (f"class A:\n    def make(self, {EIGHT}): ...", False),
        (f"class A:\n    def make(self, {NINE}): ...", True),
        (f"class A:\n    def make(self, a, *, {NINE[3:]}): ...", True),
        (f"def make_a(a, b, c, d, e, *, {NINE[15:]}): ...", False),
        (f"def make_a(a, b, c, d, e, f, *, {NINE[18:]}): ...", True),
        (f"def form(*, {NINE}): ...", True),
        (f"class A:\n    @classmethod\n    def of(cls, {NINE}) -> Self:\n        'Parts.'", False),
        (f"class A:\n    @classmethod\n    def of(cls, {NINE}) -> Self: ...", True),
        (f"class A:\n    def __init__(self, {NINE}): ...", True),
        (f'class A:\n    def __init__(self, {NINE}):\n        """Parts."""', False),
    ],
)
def test_a_long_parameter_list_is_found(source: str, is_found: bool) -> None:
    assert bool(list(long_parameter_lists(ast.parse(source)))) == is_found


@pytest.mark.parametrize(
    ("name", "count", "is_found"),
    [("A", 21, True), ("A", 20, False), ("_A", 21, True), ("Client", 21, False)],
)
def test_a_class_of_many_public_methods_is_found(name: str, count: int, is_found: bool) -> None:
    methods = "".join(f"    def m{i}(self): ...\n" for i in range(count))
    others = "    def _own(self): ...\n    def m0(self): ...\n    @property\n    def p(self): ...\n"
    source = f"class {name}:\n{methods}{others}"
    assert bool(list(wide_classes(ast.parse(source)))) == is_found


def test_what_the_formatter_skips_is_found_unless_it_is_a_literal() -> None:
    literal = "names = [\n    1, 2,\n]  # fmt: skip\n"
    assert not list(unformatted(literal))
    assert not list(
        unformatted(f"class A:\n    names: list[int] = [\n        1, 2,\n    ]  # {'fmt'}: skip\n")
    )
    assert list(unformatted("run(\n    1, 2,\n)  # fmt: skip\n")) == ["3 )  # fmt: skip"]
    assert list(unformatted(f"{literal}# fmt: off\na = (1,\n)\n# fmt: on\n")) == [
        "4 # fmt: off",
        "7 # fmt: on",
    ]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(code_rules, "MAX_IMPORTS", 2)
    monkeypatch.setattr(code_rules, "MAX_IMPORTS_OF_A_ROOT", 3)
    monkeypatch.setattr(code_rules, "COMPOSITION_ROOTS", {"p.root"})
    for name in ("one", "two", "three"):
        (tmp_path / f"p/{name}").mkdir(parents=True)
        (tmp_path / f"p/{name}/__init__.py").write_text("")
        (tmp_path / f"p/{name}/m.py").write_text("class A: ...\n")
    (tmp_path / "p/__init__.py").write_text("")
    return tmp_path


def imports_of(root: Path) -> Imports:
    return Imports(sorted(root.rglob("*.py")), root)


def test_a_module_that_imports_many_is_found_and_a_root_may_import_more(project: Path) -> None:
    three = "from p.one.m import A as A\nfrom p.two import m\nimport p.three.m\nimport os\n"
    (project / "p/user.py").write_text(three)
    (project / "p/root.py").write_text(three)
    assert imports_of(project).too_many() == ["p.user imports 3 modules"]
    (project / "p/root.py").write_text(f"{three}from p.user import B\n")
    assert imports_of(project).too_many() == ["p.root imports 4 modules", "p.user imports 3 modules"]


def test_a_name_counts_where_it_is_defined_and_for_types_too(project: Path) -> None:
    (project / "p/front.py").write_text(
        "from p.one.m import A as One\nfrom p.two.m import A as Two\nfrom p.three.m import A as Three\n"
    )
    (project / "p/user.py").write_text(
        "if TYPE_CHECKING:\n    from p.front import One, Two\n\ndef f():\n    from p.front import Three\n"
    )
    imports = imports_of(project)
    assert imports.of["p.user"] == {"p.one.m", "p.two.m", "p.three.m"}
    assert "p.user imports 3 modules" in imports.too_many()


def test_a_module_that_one_neighbour_alone_imports_is_named(project: Path) -> None:
    (project / "p/one/n.py").write_text("from p.one import m\nfrom p.two.m import A\n")
    (project / "p/two/n.py").write_text("from p.two.m import A\n")
    assert imports_of(project).of_one_neighbour() == {"p.one.m": "p.one.n"}


def test_a_name_that_two_modules_define_is_named(project: Path) -> None:
    (project / "p/one/m.py").write_text(
        "Twice: TypeAlias = int\nclass _Own: ...\nclass Once: ...\nx: int = 1\n"
    )
    (project / "p/two/m.py").write_text("class Twice: ...\nclass _Own: ...\nx: int = 1\n")
    (project / "p/three/m.py").write_text("from p.one.m import Once\n")
    found = code_rules.names_defined_twice(sorted(project.rglob("*.py")), project)
    assert found == {"Twice": ["p.one.m", "p.two.m"]}
