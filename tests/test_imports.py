"""The architecture as a property: a room imports only rooms that stand above it in this list."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "src" / "zerofold"

# In dependency order: the first imports none of the others, each may import those before it.
ROOMS = [
    "arguments",
    "stamps",
    "ends",
    "timing",
    "observe.hints",
    "part",
    "parallel.mesh",
    "parallel.marks",
    "parallel.schedules",  # what counts they take: the plan asks too
    "placement",
    "loss_scale",
    "samples",
    "precision",
    "nested",
    "fingerprints",
    "layout",
    "flows",
    "traffic",
    "comm",
    "divergence",
    "groups",
    "watch",
    "memory",
    "offload",  # which unit's states go where: arithmetic, no model yet
    "plan",  # bytes, traffic and time of a step: arithmetic; what builds or runs a model for it stands further down
    "guard",
    "shard_spec",
    "op_rules",
    "refusals",
    "dcp_chunks",
    "sharded",
    "face_gradient",
    "cutting",
    "reduce",
    "gradients",
    "gradients_whole",
    "gradients_on_faces",
    "gradients_away",
    "entry",
    "group_copy",
    "flat",
    "slab",
    "slab_away",
    "unit",
    "gradient_arena",
    "segments",
    "calls",
    "buffers",
    "replicas",
    "reduction_order",
    "unit_order",
    "schedule",
    "boundary",
    "hook_forms",
    "backward",
    "hooks",
    "units",
    "agree",
    "dealing",
    "filling",
    "materialise",
    "changes",
    "offloading",
    "attachments",
    "engine",
    "closing",
    # The ledger reads its numbers off the engine; the rest of observe, which shows them, stands further down.
    "observe.timeline",
    "observe.states",
    "observe.recording",
    "observe.ledger",
    "state_dicts",
    "observe.out_of_memory",
    "optim",
    "access",
    "accumulate",
    "park",
    "join",
    "activation",
    "parallel",
    "checkpoint",
    "config",
    "observe.monitors",  # the writers that a config may ask for
    "compat.schedule",
    "compat.one_cycle",
    "compat.schedulers",
    "configured",
    "checks",
    "sharding",
    "prepare",
    "process_group",
    "compat",
    "fsdp",
    "plan.tracing",
    "plan.users",
    "plan.examples",
    "plan.sources",
    "plan.measure",
    "plan.trial",
    "plan.advice",
    "plan.configs",
    "plan.text",
    "plan.result",
    "plan.given",
    "plan.call",
    "observe",
    "simulation",
    "",  # the public face: zerofold/__init__.py
    "plan.page",
    "plan.sliders",
    "plan.command",
    "launch",
    "launcher",
    "train",
    "bench",
    "simulation.models",  # what is simulated from the command line: the benches' GPT among others
    "simulation.curves",
    "simulation.command",
    "verify",
    "cli",
    "__main__",
]
# The config speaks of stages, as its users do; what it leads to does not.
NOT_CORE = ("config", "compat")
CORE = [room for room in ROOMS[ROOMS.index("layout") : ROOMS.index("compat")] if not room.startswith(NOT_CORE)]
FILES = sorted(PACKAGE.rglob("*.py"))


def name_of(file: Path) -> str:
    """ "train.loop" for train/loop.py, "" for the package's own __init__.py."""
    parts = list(file.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str | None:
    """The most precise room that holds the module; None where the list has none."""
    parts = module.split(".")
    names = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
    return next((name for name in names if name in ROOMS), None)


def imported_modules(file: Path) -> Iterator[tuple[int, str]]:
    """Line and module, for each import from this package, lazy ones and those for types included."""
    here = name_of(file).split(".")
    package = here if file.name == "__init__.py" else here[:-1]
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "zerofold":
                    yield node.lineno, alias.name.removeprefix("zerofold").lstrip(".")
        elif isinstance(node, ast.ImportFrom):
            base = (node.module or "").split(".")
            if node.level:
                base = ["zerofold", *package[: len(package) - node.level + 1], *base]
            if base[0] == "zerofold":
                for alias in node.names:
                    yield node.lineno, ".".join(part for part in [*base[1:], alias.name] if part)


def where(module: str) -> str:
    """The room of an imported name: `comm.all_gather` is in comm; what is in no room is the public face."""
    return room_of(module) or ""


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_imports_point_up_the_list(file: Path) -> None:
    room = room_of(name_of(file))
    assert room is not None, f"{file.name} is in no room: add it to ROOMS where its imports allow"
    for line, module in imported_modules(file):
        if where(module) != room:
            assert ROOMS.index(where(module)) < ROOMS.index(room), (
                f"{name_of(file) or '__init__'}.py:{line} imports {where(module) or 'zerofold'}, "
                f"which stands below {room or 'zerofold'}"
            )


@pytest.mark.parametrize("file", [file for file in FILES if room_of(name_of(file)) in CORE], ids=name_of)
def test_the_core_never_asks_which_stage(file: Path) -> None:
    """A stage is a row of the table in placement.py; the code below it reads placements."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Compare):
            for side in [node.left, *node.comparators]:
                name = getattr(side, "id", getattr(side, "attr", ""))
                assert name != "stage", f"{name_of(file)}.py:{node.lineno} compares the stage: ask the placement"


def test_the_first_reading_names_what_exists() -> None:
    """The call path in docs/design.md, by class and method."""
    page = (PACKAGE.parent.parent / "docs" / "design.md").read_text()
    tour = page.split("## A first reading")[1].split("\n## ")[0]
    methods: dict[str, set[str]] = {}
    bases: dict[str, list[str]] = {}
    for file in (*PACKAGE.glob("*.py"), *PACKAGE.glob("optim/*.py")):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef):
                names = {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
                methods.setdefault(node.name, set()).update(names)
                bases[node.name] = [getattr(base, "id", "") for base in node.bases]
    named = re.findall(r"\b([A-Z]\w+)\.(\w+)", tour)
    assert len(named) > 20
    for kind, method in named:
        family = [kind, *bases.get(kind, [])]
        assert any(method in methods.get(each, set()) for each in family), f"{kind}.{method} does not exist"
    for file in re.findall(r"`([\w/]+\.py)`", tour):
        assert (PACKAGE / file).exists(), f"{file} does not exist"
