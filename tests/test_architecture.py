"""The shape of the code: sizes, import circles, what an import loads, mirrored tests, and names.

`docs/architecture.md` lists the rules. Which package may import which stands in `pyproject.toml`,
as contracts of import-linter; this file holds the rules that import-linter can't express.
"""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import symtable
import sys
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import grimp
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]
PACKAGES = ("bus", "sidecar", "trainer_agent", "lab")
INLINED = ("listcomp", "dictcomp", "setcomp")

MAX_LINES = 500
MAX_MODULES = 16
MAX_LEVELS = 4
MAX_CLASS_LINES = 250
# Classes that are longer than that, with their lines: they may shrink, and no other may join them.
LONG_CLASSES = {
    "Broker": 391,
    "Commands": 388,
    "DpGroups": 251,
    "EmbeddedEngine": 390,
    "EngineCore": 364,
    "EnginePause": 257,
    "EngineRegistry": 351,
    "EngineSession": 415,
    "EngineUpdate": 392,
    "Group": 313,
    "Sidecar": 421,
    "TrainerAgent": 376,
    "TrainerEngineSession": 371,
    "UpdateMachine": 285,
    "WavebusWeightTransferEngine": 380,
}

# The glossary's words (docs/glossary.md) replaced these in names. Each is one or several parts of
# an identifier: "strays" forbids `_strays` and `StraysOf`, and not `astray`.
REPLACED_IN_NAMES = {
    "roster": "engine_registry",
    "strays": "reconciliation",
    "forsake": "abandon",
    "forsaken": "abandoned",
    "sharpen": "strengthen",
    "doubtful": "unconfirmed",
    "spoil": "invalidate",
    "forget": "discard",
    "obey": "apply",
    "stageable": "staging_decision",
    "holdpage": "pause_lease",
    "corepage": "core_status",
    "lifeline": "rank_liveness",
    "door": "admission",
    "doors": "admission",
    "holder": "owner",
    "lane": "staging_channel",
    "lanes": "staging_channels",
    "mate": "peer_rank",
    "mates": "peers",
    "stray": "reconcile",
    "told": "what it is: answer, text, request",
    "unsure": "pause_unknown",
}

# The same in prose: docstrings, comments, texts and docs, as whole words.
REPLACED_IN_PROSE = (
    "hold page",
    "holder",
    "holders",
    "lanes",
    "lifeline",
    "lifelines",
    "mate",
    "mates",
    "roster",
    "sharpen",
    "strays",
    "unsure",
)
# Participles that were methods once, and said neither event, predicate, query nor command.
PARTICIPLES = frozenset(
    {"asked", "done", "given", "gone", "heard", "joined", "lost", "paid", "promised", "sent"}
    | {"shut", "taken", "told", "tried"}
)
# What users call, or what mirrors vLLM, keeps its name.
KEPT_METHODS = frozenset({"Sidecar.joined"})


def modules() -> Iterator[Path]:
    """Every Python file of the product."""
    for package in PACKAGES:
        yield from sorted((ROOT / package).rglob("*.py"))


@cache
def parsed(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"))


def shown(path: Path) -> str:
    """A path below the root, as people write it."""
    return str(path.relative_to(ROOT))


def words(name: str) -> list[str]:
    """The parts of an identifier: `_StrayPauses` is stray, pauses."""
    return re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+", name.replace("_", " "))


def defined_names(tree: ast.Module) -> Iterator[str]:
    """Names of classes, functions, arguments, attributes that are set, and constants."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def test_no_module_is_longer_than_500_lines() -> None:
    lines = {shown(path): len(path.read_text(encoding="utf-8").splitlines()) for path in modules()}
    assert {name: n for name, n in lines.items() if n > MAX_LINES} == {}


def test_no_folder_holds_more_than_16_modules() -> None:
    counts = Counter(shown(path.parent) for path in modules() if path.name != "__init__.py")
    assert {name: n for name, n in counts.items() if n > MAX_MODULES} == {}


def test_no_module_lies_deeper_than_4_levels() -> None:
    """`sidecar/_vllm/plugin/core/swap.py` is at level 4."""
    assert [shown(p) for p in modules() if len(p.relative_to(ROOT).parts) - 1 > MAX_LEVELS] == []


def test_no_imports_run_in_a_circle() -> None:
    """Imports for types and within functions count as well."""
    graph = grimp.build_graph(*PACKAGES, exclude_type_checking_imports=False, cache_dir=None)
    sorter = graphlib.TopologicalSorter(
        {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    )
    try:
        sorter.prepare()
    except graphlib.CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def loaded_by(statement: str) -> set[str]:
    """Modules that a new Python has loaded after a statement."""
    program = f"{statement}\nimport sys\nprint()\nprint(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
    )
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize(
    "statement",
    [
        "import bus",
        "import bus._cli.main",
        "import bus._runtime.broker_server",
        "import bus._protocol.engine.session",
        "import trainer_agent",
        "import sidecar._vllm.plugin",
    ],
)
def test_an_import_loads_no_torch(statement: str) -> None:
    """What only relays messages, prints a help text, or is loaded by every vLLM process."""
    assert loaded_by(statement) & {"torch", "vllm", "numpy"} == set()


def test_torch_is_found_where_it_is_loaded() -> None:
    """The check above can fail."""
    assert "torch" in loaded_by("import bus._weight_transfer.base")


def test_a_help_text_loads_no_machines() -> None:
    """They and structlog, with rich, took half of the time of `wavebus --help`."""
    loaded = loaded_by(
        "from bus._cli.main import main\n"
        "import sys\n"
        "sys.argv = ['wavebus', '--help']\n"
        "try:\n    main()\nexcept SystemExit:\n    pass"
    )
    assert "bus._cli.broker" in loaded
    assert loaded & {"bus._protocol.group.group", "structlog", "rich", "torch", "vllm"} == set()


def hidden_names(table: symtable.SymbolTable) -> Iterator[str]:
    """Names that a comprehension binds in a function that hands the same name on from outside."""
    for child in table.get_children():
        yield from hidden_names(child)
        if isinstance(table, symtable.Function) and child.get_name() in INLINED:
            bound = {each.get_name() for each in child.get_symbols() if each.is_local()}
            yield from (f"{table.get_name()}: {name}" for name in bound & {*table.get_frees()})


def test_no_comprehension_hides_a_name_from_a_function_beside_it() -> None:
    """Python 3.12 and 3.13 run a comprehension in its function, where its names then hide those of
    the functions around, also from a nested function that needs one: a NameError at its call."""
    example = """
def outer(name):
    def middle():
        def inner():
            return name
        return inner, [name for name in "ab"]
"""
    assert list(hidden_names(symtable.symtable(example, "", "exec"))) == ["middle: name"]
    found = [
        f"{path}: {name}"
        for path in (*modules(), *sorted((ROOT / "tests").rglob("*.py")))
        for name in hidden_names(symtable.symtable(path.read_text(), str(path), "exec"))
    ]
    assert found == []


def test_no_class_name_stands_twice() -> None:
    homes = defaultdict(list)
    for path in modules():
        for node in parsed(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(shown(path))
    assert {name: found for name, found in homes.items() if len(found) > 1} == {}


def test_no_class_is_longer_than_250_lines() -> None:
    """But those that were when the rule came; one that has shrunk has its lines lowered here."""
    lines = {
        node.name: (node.end_lineno or 0) - node.lineno + 1
        for path in modules()
        for node in parsed(path).body
        if isinstance(node, ast.ClassDef)
    }
    long = {name: n for name, n in lines.items() if n > MAX_CLASS_LINES}
    assert {name: n for name, n in long.items() if n > LONG_CLASSES.get(name, 0)} == {}
    assert LONG_CLASSES.keys() <= long.keys()


def mirrored(folder: Path) -> Path:
    """The folder of the product that a folder below `tests/unit` stands for."""
    found = ROOT
    for part in folder.parts:
        found = next((found / n for n in (part, f"_{part}") if (found / n).is_dir()), found / part)
    return found


def test_unit_tests_mirror_the_modules() -> None:
    """`tests/unit/bus/journal/test_replay_torn.py` tests `bus/_journal/replay.py`: the file's name
    begins with the module's, or the folder is one module's. Tests have no `_` before the names."""
    astray = []
    for path in sorted((ROOT / "tests/unit").rglob("test_*.py")):
        inner = path.relative_to(ROOT / "tests/unit")
        if inner.parts[0] not in PACKAGES:
            continue
        folder = mirrored(inner.parent)
        stem = inner.stem.removeprefix("test_")
        names = [p.stem.removeprefix("_") for p in (*folder.glob("*.py"), *folder.glob("*/"))]
        if not any(stem == name or stem.startswith(f"{name}_") for name in names):
            astray.append(shown(path))
    assert astray == []


def test_replaced_words_do_not_come_back() -> None:
    found = [
        f"{shown(path)}: {name}"
        for path in modules()
        for name in {*defined_names(parsed(path)), path.stem}
        if REPLACED_IN_NAMES.keys() & set(map(str.lower, words(name)))
    ]
    assert found == []


def test_replaced_words_do_not_come_back_in_prose() -> None:
    replaced = re.compile(rf"\b({'|'.join(REPLACED_IN_PROSE)})\b", re.IGNORECASE)
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
    found = [
        f"{shown(path)}:{number}: {line.strip()}"
        for path in (*modules(), *pages)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if replaced.search(line)
    ]
    assert found == []


def test_no_method_is_named_by_a_participle() -> None:
    found = [
        f"{shown(path)}: {klass.name}.{node.name}"
        for path in modules()
        for klass in ast.walk(parsed(path))
        if isinstance(klass, ast.ClassDef)
        for node in klass.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.lstrip("_") in PARTICIPLES
        and f"{klass.name}.{node.name}" not in KEPT_METHODS
    ]
    assert found == []
