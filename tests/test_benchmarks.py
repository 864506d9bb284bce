"""Files of `benchmarks/`: what tests and scripts import from there is found, whatever was imported before."""

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]


def imported(file: Path) -> set[str]:
    """First parts of the names of all modules that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) and node.module and not node.level else []
        found |= {name.partition(".")[0] for name in names}
    return found


def test_no_two_benchmarks_have_a_file_of_the_same_name_that_is_imported() -> None:
    """One process imports a name once: of two files of a name, tests of one benchmark would get the other's."""
    files = sorted((ROOT / "benchmarks").glob("*/*.py"))
    folders = defaultdict(set)
    for file in files:
        folders[file.stem].add(file.parent.name)
    wanted = set().union(*(imported(file) for file in [*files, *(ROOT / "tests").rglob("*.py")]))
    assert {name: found for name, found in folders.items() if name in wanted and len(found) > 1} == {}
    assert {"budget_tables", "tables", "workloads"} <= wanted & folders.keys()  # such imports are seen
