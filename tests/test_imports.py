"""The package's rooms import downwards only; a broken rule is named by file and line."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "meshloom"
SOURCES = sorted(ROOT.rglob("*.py"))

# From the top: a room may import the rooms on lines below its own. Rooms on one line are strangers to each
# other. `tensor_parallel` are the files that lie in it, `tensor_parallel.search` those of the room within.
ORDER = [
    ["__main__"],
    ["cli"],
    ["report.page"],
    ["report"],
    ["__init__"],
    ["lightning"],
    ["adopt"],
    ["verify.scripts"],
    ["measure", "verify"],
    ["verify.compared"],
    ["verify.tolerances"],
    ["verify.between_steps"],
    ["verify.reference"],
    ["loops"],
    ["train"],
    ["train.log"],
    ["train.from_torch"],
    ["asynchronous"],
    ["asynchronous.roles"],
    ["planner.on_clusters"],
    ["planner"],
    ["asynchronous.state", "planner.rehearsal"],
    ["replica"],
    ["replica.buffers", "replica.exchanges"],
    ["planner.memory"],
    ["pipeline.runtime"],
    ["pipeline.stages"],
    ["tensor_parallel"],
    ["program.store", "tensor_parallel.search"],
    ["program.sizes"],
    ["program.capture"],
    ["launch.processes", "program.run"],
    ["optimizer.bfloat16"],
    ["asynchronous.messaging", "launch", "optimizer", "program.recompute"],
    [
        "comm.torch",
        "exchange",
        "planner.measure",
        "program.cost",
        "tensor_parallel.layout",
    ],
    [
        "checkpoint.writing",
        "comm.shm",
        "exchange.buckets",
        "exchange.units",
        "optimizer.offload",
        "parameters",
        "program.trace",
        "tensor_parallel.rules",
    ],
    ["parameters.values", "program.gradients"],
    [
        "checkpoint",
        "comm.collectives",
        "comm.messaging",
        "comm.network",
        "data",
        "program.operators",
        "program.opaque",
        "telemetry",
    ],
    ["asynchronous.protocol", "clusters", "comm", "machine", "pipeline.schedules", "program.ir"],
    ["core.losses"],
    ["comm.liveness", "core.device", "core.moments"],
    ["core.modules"],
    ["core"],
]
LEVEL = {room: len(ORDER) - line for line, rooms in enumerate(ORDER) for room in rooms}
PLAIN_VALUES = {  # import no torch
    "core/mesh.py", "core/plan.py", "core/exchanges.py", "core/plan_shares.py", "core/plan_text.py", "core/schedules.py",
    "core/cache.py", "core/errors.py", "core/precisions.py",
    "machine/machine.py", "machine/links.py", "machine/all_reduce_costs.py", "program/store/typed_json.py", "pipeline/schedules/schedule.py",
    "clusters/cluster.py", "clusters/collective_seconds.py", "clusters/constants.py", "clusters/operator_seconds.py", "clusters/rings.py", "clusters/work.py",
    "telemetry/progress.py", "telemetry/timings.py", "telemetry/summary.py", "telemetry/timeline.py", "telemetry/timeline_files.py",
}  # fmt: skip
# names that users import, and the room whose line they stand on
FACES = {"comm/torch_backend.py": "__init__"}
MAY_NAME_DISTRIBUTED = ("comm/", "launch/")
MAY_READ_ENVIRONMENT = ("launch/environment.py",)
# not there in every installation
OPTIONAL = {
    "accelerate",
    "matplotlib",
    "transformers",
    "lightning",
    "pytorch_lightning",
    "sklearn",
    "psutil",
    "hypothesis",
    "pytest",
}


@dataclass(frozen=True)
class Import:
    """One imported name: `module` as written out in full, and whether it runs when the importing module is
    imported."""

    module: str
    line: int
    at_import: bool


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def room_of(module: str) -> str:
    """`meshloom.comm.shm.segments` -> comm.shm; a package stands for its own `__init__.py`, which is in the
    room that it heads.

    >>> room_of("meshloom.comm.group"), room_of("meshloom.comm.shm.segments"), room_of("meshloom.launch"), room_of("meshloom")
    ('comm', 'comm.shm', 'launch', '__init__')
    """
    parts = module.split(".")[1:]
    while parts and not ROOT.joinpath(*parts).is_dir():
        parts.pop()
    if parts:
        return ".".join(parts)
    return module.split(".")[1] if module == "meshloom.__main__" else "__init__"


def room_at(path: Path) -> str:
    """Of a file."""
    return FACES.get(name_of(path)) or room_of(
        ".".join(["meshloom", *path.relative_to(ROOT).with_suffix("").parts]).removesuffix(".__init__")
    )


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imports_of(path: Path) -> list[Import]:
    """Every import of a file, type-checking ones and those inside functions included."""
    found: list[Import] = []

    def visit(node: ast.AST, at_import: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend(Import(alias.name, node.lineno, at_import) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = path.relative_to(ROOT.parent).parent.parts
            base = (
                ".".join([*package[: len(package) + 1 - node.level], *([node.module] if node.module else [])])
                if node.level
                else node.module or ""
            )
            found.extend(Import(_submodule(base, alias.name), node.lineno, at_import) for alias in node.names)
        inner = at_import and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.expr):  # which has no import in it
                visit(child, inner)

    visit(parsed(path), at_import=True)
    return found


def _submodule(base: str, name: str) -> str:
    """`from meshloom import comm` imports meshloom.comm, `from meshloom import Job` only meshloom."""
    if base.split(".")[0] == "meshloom":
        directory = ROOT.parent.joinpath(*base.split("."))
        return (
            f"{base}.{name}" if (directory / name).is_dir() or (directory / f"{name}.py").is_file() else base
        )
    return f"{base}.{name}"


@cache
def names_of(path: Path) -> list[tuple[str, int]]:
    """What is imported, and `a.b.c` wherever it is written as an expression, with its line."""
    found = [(each.module, each.line) for each in imports_of(path)]
    for node in ast.walk(parsed(path)):
        names: list[str] = []
        inner: ast.AST = node
        while isinstance(inner, ast.Attribute):
            names.append(inner.attr)
            inner = inner.value
        if names and isinstance(inner, ast.Name):
            found.append((".".join([inner.id, *reversed(names)]), inner.lineno))
    return found


def test_every_room_stands_in_the_order():
    # not where nothing but a sentence stands
    rooms = {room_at(path) for path in SOURCES if path.read_text(encoding="utf-8").count("\n") > 1}
    assert rooms <= LEVEL.keys(), (
        f"Add {sorted(rooms - LEVEL.keys())} to ORDER, at the level of what they may import."
    )


def test_imports_go_down():
    wrong = [
        f"meshloom/{name_of(path)}:{each.line} imports {each.module}, which is not below {here}"
        for path in SOURCES
        for here in [room_at(path)]
        for each in imports_of(path)
        if each.module.split(".")[0] == "meshloom"
        and (there := room_of(each.module)) != here
        and LEVEL[there] >= LEVEL[here]
    ]
    assert not wrong, "\n".join(wrong)


def imported_at_once() -> dict[str, set[str]]:
    """Module -> those that it imports as it is imported."""
    return {
        ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__"): {
            each.module for each in imports_of(path) if each.at_import
        }
        for path in SOURCES
    }


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        (
            "meshloom.cli.main",
            {
                "meshloom.train",
                "meshloom.planner",
                "meshloom.program",
                "meshloom.checkpoint",
                "meshloom.verify",
                "rich",
                "scipy",
            },
        ),
        (
            "meshloom.cli.verb_describe",
            {
                "meshloom.train.trainer",
                "meshloom.asynchronous",
                "meshloom.replica.replica",
                "meshloom.verify",
                "zmq",
                "scipy",
            },
        ),
        ("meshloom.cli.verb_train", {"meshloom.planner.pricing", "meshloom.verify", "zmq", "scipy"}),
    ],
)
def test_a_command_imports_what_it_needs(module: str, unwanted: set[str]):
    """A launcher took 2.1 s to start its ranks, of which PyTorch took 1.2; a description loaded trainers,
    verification and sockets."""
    graph = imported_at_once()
    found: dict[str, str] = {}  # module -> who imports it
    new = [module]
    while new:
        here = new.pop()
        for each in graph.get(here, ()):
            if each not in found:
                found[each] = here
                new.append(each)
    wrong = [
        f"{by} imports {name}"
        for name, by in found.items()
        if any(name == each or name.startswith(f"{each}.") for each in unwanted)
    ]
    assert not wrong, "\n".join(wrong)


def test_no_two_files_import_each_other():
    graph = imported_at_once()

    def cycle_from(module: str, trail: tuple[str, ...]) -> tuple[str, ...] | None:
        if module in trail:
            return (*trail[trail.index(module) :], module)
        if module in done:
            return None
        found = next(
            (
                cycle
                for other in sorted(graph.get(module, ()))
                if (cycle := cycle_from(other, (*trail, module)))
            ),
            None,
        )
        done.add(module)
        return found

    done: set[str] = set()
    for module in graph:
        cycle = cycle_from(module, ())
        assert cycle is None, " -> ".join(cycle or ())


def test_plain_values_import_no_torch():
    paths = [path for path in SOURCES if name_of(path) in PLAIN_VALUES]
    assert len(paths) == len(PLAIN_VALUES)
    wrong = [
        f"meshloom/{name_of(path)}:{each.line} imports {each.module}"
        for path in paths
        for each in imports_of(path)
        if each.module.split(".")[0] == "torch"
    ]
    assert not wrong, "\n".join(wrong)


def test_only_comm_and_launch_name_torch_distributed():
    wrong = [
        f"meshloom/{name_of(path)}:{line} names {name}"
        for path in SOURCES
        if not name_of(path).startswith(MAY_NAME_DISTRIBUTED)
        for name, line in names_of(path)
        if name.startswith("torch.distributed")
    ]
    assert not wrong, "\n".join(wrong)


def test_processes_are_started_and_ranks_are_made_in_one_place():
    """Three rooms had their own calls of Popen, and three built a rank's groups."""
    homes = {"Popen": "launch/processes/child.py", "LocalRank": "launch/world.py"}
    called = {
        (
            node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", ""),
            name_of(path),
        )
        for path in SOURCES
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Call)
    }
    assert {(name, place) for name, place in called if name in homes} == set(homes.items())


def test_only_one_file_of_launch_reads_the_environment():
    names = {"os.environ", "os.getenv", "os.environb", "os.putenv"}
    wrong = [
        f"meshloom/{name_of(path)}:{line} names {name}"
        for path in SOURCES
        if name_of(path) not in MAY_READ_ENVIRONMENT
        for name, line in names_of(path)
        if name in names
    ]
    assert not wrong, "\n".join(wrong)


def is_for(package: str, path: Path) -> bool:
    """Whether it is for who has that library, as meshloom/accelerate.py."""
    return name_of(path).partition("/")[0].removesuffix(".py") == package


def test_optional_packages_are_imported_where_they_are_used():
    wrong = [
        f"meshloom/{name_of(path)}:{each.line} imports {each.module}"
        for path in SOURCES
        for each in imports_of(path)
        for package in [each.module.split(".")[0]]
        if each.at_import and package in OPTIONAL and not is_for(package, path)
    ]
    assert not wrong, "\n".join(wrong)


# What one device is computed with besides `core`: a model that is called as plans call it, and sparse buffers as constants.
OF_THE_REFERENCE = {"meshloom.parameters.values.keyed_init", "meshloom.program.ir.sparse_constants"}


def test_the_reference_of_verify_shares_no_code_with_what_it_checks() -> None:
    own = ("meshloom.core", "meshloom.verify.reference")
    wrong = [
        f"{path}:{each.line} imports {each.module}"
        for path in SOURCES
        if room_at(path).startswith("verify.reference")
        for each in imports_of(path)
        if each.module.startswith("meshloom.") and not each.module.startswith(own)
        if not any(each.module.startswith(known) for known in OF_THE_REFERENCE)
    ]
    assert not wrong, "\n".join(wrong)
