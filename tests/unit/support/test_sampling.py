"""CI's sample: a part by the commit, and what recent commits touch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.sampling import ROOT, Touch, changed_files, is_sampled, mirrors
from tests.unit.support._repository import Repository

if TYPE_CHECKING:
    from pathlib import Path

NAMES = [f"tests/test_{number}.py::test[{number}]" for number in range(3000)]
COMMITS = [f"{number:040x}" for number in range(40)]


def sample(commit: str, parts: int) -> set[str]:
    return {name for name in NAMES if is_sampled(name, commit, parts)}


@pytest.mark.parametrize("parts", [3, 10])
def test_each_test_is_of_one_part_and_commits_choose_among_these(parts: int) -> None:
    samples = {frozenset(sample(commit, parts)) for commit in COMMITS}
    assert len(samples) == parts
    assert set().union(*samples) == set(NAMES)
    assert sum(map(len, samples)) == len(NAMES)
    assert all(abs(len(each) * parts - len(NAMES)) < len(NAMES) / 3 for each in samples)


def test_a_commit_has_the_same_sample_everywhere() -> None:
    chosen = [number for number in range(12) if is_sampled(NAMES[number], COMMITS[0], 3)]
    assert chosen == [1, 3, 4, 8, 9]


PROJECT = {
    "bus/messages/__init__.py": "from bus.messages.pause import *\n",
    "bus/messages/pause.py": "class Pause: ...\n",
    "bus/_lora.py": "class Lora: ...\n",
    "bus/_net.py": "",
    "bus/errors.py": "",
    "trainer_agent/__init__.py": (
        "if TYPE_CHECKING:\n    from trainer_agent._agent import TrainerAgent\n"
    ),
    "trainer_agent/_agent.py": "from bus import _lora as lora\nclass TrainerAgent: ...\n",
    "tests/support/procs.py": "",
    "tests/support/script.py": "",
    "tests/contract/engine_suite.py": "",
    "tests/contract/surface/wire.txt": "",
    "tests/contract/test_engine.py": "from tests.contract.engine_suite import *\n",
    "tests/integration/conftest.py": "",
    "tests/integration/test_agent.py": (
        "from bus.messages import Pause\nfrom trainer_agent import TrainerAgent\n"
        "from tests.support import procs\n"
    ),
    "tests/integration/test_net.py": "import bus._net\n",
    "tests/integration/test_types.py": "if TYPE_CHECKING:\n    from bus._net import X\n",
    "tests/integration/test_script.py": "RUN = 'sidecar._cli'\nTHEN = 'examples/one.py'\n",
    "sidecar/_cli.py": "",
    "examples/one.py": "",
    "tests/unit/bus/test_lora_matching.py": "",
    "tests/unit/bus/lora/test_any.py": "",
    ".ci/setup": "",
    "README.md": "",
}
TESTS = [path for path in PROJECT if "/test_" in path]


@pytest.mark.parametrize(
    ("changed", "touched"),
    [
        ("README.md", []),
        ("tests/integration/test_net.py", ["integration/test_net"]),
        ("bus/_net.py", ["integration/test_net"]),
        ("bus/_lora.py", ["unit/bus/test_lora_matching", "unit/bus/lora/test_any"]),
        ("trainer_agent/_agent.py", ["integration/test_agent"]),
        ("sidecar/_cli.py", ["integration/test_script"]),
        ("examples/one.py", ["integration/test_script"]),
        ("tests/contract/engine_suite.py", ["contract/test_engine"]),
        ("tests/contract/surface/wire.txt", ["contract/test_engine"]),
        (
            "tests/integration/conftest.py",
            [path[6:-3] for path in TESTS if "integration" in path],
        ),
        ("bus/messages/pause.py", []),
        ("tests/support/procs.py", []),
        (".ci/setup", [path[6:-3] for path in TESTS]),
    ],
)
def test_a_commit_touches_what_it_changes_imports_and_mirrors(
    tmp_path: Path, changed: str, touched: list[str]
) -> None:
    repository = Repository(tmp_path)
    repository.commit(PROJECT)
    commit = repository.commit({changed: "X = 1\n"}, hours=13)
    files = changed_files(commit, tmp_path)
    assert files == {changed}
    touch = Touch(files, tmp_path)
    assert [path[6:-3] for path in TESTS if touch.touches(path)] == touched


def test_commits_of_12_hours_count(tmp_path: Path) -> None:
    """Before the commit that is tested, and not before now: the sample stays what it was."""
    repository = Repository(tmp_path)
    repository.commit({"a.py": ""})
    repository.commit({"b.py": "", "moved.py": "text"}, hours=1)
    (tmp_path / "moved.py").rename(tmp_path / "there.py")
    repository.commit({"c.py": ""}, hours=11)
    last = repository.commit({"d.py": ""}, hours=1)
    repository.commit({"e.py": ""}, hours=1)
    assert changed_files(last, tmp_path) == {"b.py", "c.py", "d.py", "moved.py", "there.py"}


@pytest.mark.parametrize(
    ("path", "changed"),
    [
        ("sidecar/_vllm/engine.py", True),
        ("tests/vllm/test_draft.py", True),
        ("tests/unit/trainer_agent/vllm/test_registry.py", True),
        (".ci/setup", True),
        ("sidecar/engine.py", False),
    ],
)
def test_adapters_to_vllm_have_changed(path: str, changed: bool) -> None:
    assert Touch({path}).adapters_changed is changed


def test_every_unit_test_mirrors_a_module_here() -> None:
    """The rule is that of the tests of the architecture."""
    modules = [
        str(path.relative_to(ROOT))
        for package in ("bus", "sidecar", "trainer_agent", "lab")
        for path in (ROOT / package).rglob("*.py")
    ]
    for package in ("bus", "sidecar", "trainer_agent", "lab"):
        for path in (ROOT / "tests/unit" / package).rglob("test_*.py"):
            test = str(path.relative_to(ROOT))
            assert any(mirrors(test, module) for module in modules), test
