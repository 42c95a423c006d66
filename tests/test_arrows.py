"""Who may import whom, what the training process may load, and that a file says what belongs in it.

Read from the syntax tree, so an import inside a function counts as well.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "keepstep"

# Part -> the other parts that it may import. `errors` (and the package itself) are everybody's.
ARROWS: dict[str, set[str]] = {
    "core": set(),
    "wire": {"core"},
    "transfer": {"wire", "core"},
    "trainer": {"core", "wire", "transfer"},
    "agent": {"core", "wire"},
    "controller": {"core", "wire"},
    "sim": {"core"},
    "cli": {"core", "wire", "transfer", "agent", "controller", "sim"},
}
IN_THE_TRAINING_PROCESS = ("core", "wire", "transfer", "trainer")
WITHOUT_TORCH = ("core", "wire", "agent", "controller", "sim", "cli")

# A file holds one idea. One that cannot is named here, with the reason.
MOST_LINES = 400
LONGER: dict[str, str] = {}


def python_files(*folders: str) -> list[Path]:
    found = [p for folder in folders for p in sorted((ROOT / folder).rglob("*.py"))]
    assert found
    return found


def part_of(path: Path) -> str:
    """The part of the package that a file belongs to; "" for the files at the package's top."""
    inside = path.relative_to(PACKAGE).parts
    return inside[0] if len(inside) > 1 else ""


def imports(path: Path) -> Iterator[tuple[str, bool, int]]:
    """(module in full, at the file's top level?, line) of every import that can run."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    package = ("keepstep", *path.relative_to(PACKAGE).parent.parts)
    for node, top in _runnable(tree, True):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, top, node.lineno
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                module = ".".join((*package[: len(package) - node.level + 1], *filter(None, [module])))
            yield module, top, node.lineno
            if module == "keepstep":
                for alias in node.names:
                    yield f"keepstep.{alias.name}", top, node.lineno


def _runnable(node: ast.AST, top: bool) -> Iterator[tuple[ast.AST, bool]]:
    """Every node with "runs at import?"; blocks under `if TYPE_CHECKING` are left out."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            for other in child.orelse:
                yield other, top
                yield from _runnable(other, top)
            continue
        inner = top and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield child, top
        yield from _runnable(child, inner)


def test_every_part_imports_only_what_the_arrows_allow() -> None:
    wrong = []
    for path in python_files("keepstep"):
        part = part_of(path)
        for module, _, line in imports(path):
            names = module.split(".")
            if names[0] != "keepstep" or len(names) == 1:
                continue
            other = names[1]
            if other in ARROWS and other != part and part and other not in ARROWS.get(part, set()):
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {part} may not import {other}")
    assert not wrong, "\n".join(wrong)


def test_every_folder_of_the_package_stands_in_the_table() -> None:
    folders = {p.parent.name for p in PACKAGE.glob("*/__init__.py")}
    assert folders == set(ARROWS)


def test_the_training_process_loads_torch_and_the_standard_library_only() -> None:
    wrong = []
    for path in python_files(*(f"keepstep/{part}" for part in IN_THE_TRAINING_PROCESS)):
        for module, top, line in imports(path):
            name = module.split(".")[0]
            if name in sys.stdlib_module_names or name in ("keepstep", "torch"):
                continue
            if name == "numpy" and not top:  # its random state is recorded, when the script uses it
                continue
            wrong.append(f"{path.relative_to(ROOT)}:{line}: imports {module}")
    assert not wrong, "\n".join(wrong)


def test_the_core_uses_the_standard_library_without_clock_or_io() -> None:
    """A decision is a pure function: what would make it depend on the machine is not imported."""
    forbidden = {"time", "socket", "os", "asyncio", "threading", "subprocess", "random", "pathlib", "io"}
    wrong = []
    for path in python_files("keepstep/core"):
        for module, _, line in imports(path):
            name = module.split(".")[0]
            if name in forbidden or (name not in sys.stdlib_module_names and name != "keepstep"):
                wrong.append(f"{path.relative_to(ROOT)}:{line}: imports {module}")
    assert not wrong, "\n".join(wrong)


def test_the_wire_never_unpickles() -> None:
    wrong = []
    for path in python_files(*(f"keepstep/{part}" for part in ARROWS)):
        for module, _, line in imports(path):
            if module.split(".")[0] in ("pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve"):
                wrong.append(f"{path.relative_to(ROOT)}:{line}: imports {module}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("part", WITHOUT_TORCH)
def test_torch_stays_out_of_parts_that_never_train(part: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: imports {module}"
        for path in python_files(f"keepstep/{part}")
        for module, _, line in imports(path)
        if module.split(".")[0] == "torch"
    ]
    assert not wrong, "\n".join(wrong)


def test_the_command_line_starts_without_torch() -> None:
    entry = PACKAGE / "cli" / "main.py"
    if not entry.exists():
        pytest.fail("keepstep/cli/main.py is missing: the entry point of the command line")
    code = "import sys, keepstep.cli.main; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], timeout=60, capture_output=True, text=True)
    assert done.returncode == 0, f"torch was loaded by the command line\n{done.stderr}"


def test_every_file_opens_with_what_belongs_in_it() -> None:
    silent = [
        str(path.relative_to(ROOT))
        for path in python_files("keepstep", "examples", "benchmarks", "tests")
        if not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not silent, f"no docstring as the first statement: {', '.join(silent)}"


def test_no_file_outgrows_its_one_idea() -> None:
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines())
        for path in python_files("keepstep", "examples", "benchmarks")
    }
    for name, reason in LONGER.items():
        print(f"LONGER THAN {MOST_LINES} LINES BY DECISION: {name} ({lengths.get(name)} lines): {reason}")
    too_long = {n: c for n, c in lengths.items() if c > MOST_LINES and n not in LONGER}
    assert not too_long, f"more than {MOST_LINES} lines: {too_long}"
    stale = [n for n in LONGER if lengths.get(n, 0) <= MOST_LINES]
    assert not stale, f"no longer long, take them out of the list: {stale}"
