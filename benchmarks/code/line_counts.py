"""Lines of product code at two commits, by package, and the difference.

    python -m benchmarks.code.line_counts BASE HEAD

Counted are the lines of Python files that hold code: no blank ones, comments and docstrings. Left out are
tests, benchmarks, examples and the interfaces of TensorRT-LLM; native sources are no Python. A file of BASE
that was moved, as git sees it, is counted where it is at HEAD.
"""

from __future__ import annotations

import argparse
import ast
import io
import subprocess
import tarfile
import tokenize
from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType

NOT_COUNTED = ("tests/", "benchmarks/", "examples/", "carousel/trtllm/")
NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


def num_code_lines(source: str) -> int:
    """Return the number of lines with code. A string that stands alone counts as a docstring."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def package_of(path: str) -> str:
    """Return the folder under which a file is counted: two levels deep where there are as many."""
    return "/".join(path.split("/")[:-1][:2]) or "."


def git(*args: str) -> bytes:
    return subprocess.run(["git", *args], check=True, stdout=subprocess.PIPE).stdout


def moves(base: str, head: str) -> dict[str, str]:
    """Return the new paths of files that were moved, by their old ones."""
    fields = git("diff", "-z", "-M40%", "-l0", "--diff-filter=R", "--name-status", base, head).decode()
    names = fields.split("\0")[:-1]  # status, old, new; status, ...
    return dict(zip(names[1::3], names[2::3], strict=True))


def count(commit: str, moved: Mapping[str, str] = MappingProxyType({})) -> tuple[Counter[str], Counter[str]]:
    """Return files and lines of code by package. `moved`: where files are counted instead."""
    files: Counter[str] = Counter()
    lines: Counter[str] = Counter()
    with tarfile.open(fileobj=io.BytesIO(git("archive", commit))) as tar:
        for member in tar:
            path = moved.get(member.name, member.name)
            if not path.endswith(".py") or path.startswith(NOT_COUNTED) or not member.isfile():
                continue
            data = tar.extractfile(member)
            assert data is not None
            files[package_of(path)] += 1
            lines[package_of(path)] += num_code_lines(data.read().decode())
    return files, lines


def report(base: str, head: str) -> dict[str, tuple[int, int, int, int]]:
    """Return files at base and head and lines at base and head, of each package and of all."""
    columns = [*count(base, moves(base, head)), *count(head)]
    packages = sorted(set().union(*columns))
    rows = {package: [column[package] for column in columns] for package in packages}
    rows["all"] = [column.total() for column in columns]
    return {name: (files, files_now, lines, now) for name, (files, lines, files_now, now) in rows.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("base")
    parser.add_argument("head")
    args = parser.parse_args()
    heads = ("files", "now", "more", "lines", "now", "more")
    print(f"{'package':34s}", " ".join(f"{head:>7s}" for head in heads))
    for name, (files, files_now, lines, now) in report(args.base, args.head).items():
        print(f"{name:34s} {files:7d} {files_now:7d} {files_now - files:+7d}", end="")
        print(f" {lines:7d} {now:7d} {now - lines:+7d}")


if __name__ == "__main__":
    main()
