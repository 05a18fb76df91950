"""Who may import whom. A module is a room, and imports only rooms on floors below its own."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

FLOORS = [
    # 0: the schema, the error tree, the package itself
    {"raytrain", "raytrain.config", "raytrain.errors", "raytrain.data"},
    # 1: a config from words; a recipe's arithmetic; this process among others; folders, here or in a store
    {
        "raytrain.commandline",
        "raytrain.distributed",
        "raytrain.monitor",
        "raytrain.plan",
        "raytrain.signals",
        "raytrain.storage",
    },
    # 2: one subject each
    {
        "raytrain.checkpoint",
        "raytrain.cluster",
        "raytrain.console",
        "raytrain.failures",
        "raytrain.model",
        "raytrain.optim",
        "raytrain.recorder",
        "raytrain.relay",
        "raytrain.schedule",
        "raytrain.tracking",
        "raytrain.data.autoaugment",
        "raytrain.data.decode",
        "raytrain.data.mix",
        "raytrain.data.order",
    },
    {"raytrain.data.augment", "raytrain.data.origin", "raytrain.data.transcode", "raytrain.saver", "raytrain.watch"},
    {
        "raytrain.data.digits",
        "raytrain.data.folder",
        "raytrain.data.parquet",
        "raytrain.data.shards",
        "raytrain.data.webdataset",
    },
    {"raytrain.data.convert"},
    {"raytrain.data.cache"},
    {"raytrain.data.source"},
    {"raytrain.data.bad", "raytrain.data.fill", "raytrain.data.identity"},
    {"raytrain.comm.step", "raytrain.data.loader", "raytrain.describe"},
    {
        "raytrain.comm.predict",
        "raytrain.comm.bucket",
        "raytrain.comm.group",
        "raytrain.comm.lane",
        "raytrain.comm.server",
    },
    {"raytrain.comm.topology"},
    {"raytrain.comm.compression"},
    {"raytrain.comm.exact", "raytrain.comm.float", "raytrain.comm.onebit", "raytrain.comm.powersgd"},
    {"raytrain.comm.late", "raytrain.comm.local", "raytrain.comm.momentum", "raytrain.evaluation"},
    {"raytrain.comm.asynchronous", "raytrain.comm.probe"},
    {"raytrain.comm.choose"},
    {"raytrain.comm"},
    {"raytrain.state"},
    # 3: the loop, and the run directory
    {"raytrain.loop", "raytrain.run"},
    # 4: what one process does, and what it came to; who starts the processes
    {"raytrain.worker", "raytrain.preparation", "raytrain.remote", "raytrain.results"},
    {"raytrain.attempt"},
    {"raytrain.supervisor"},
    {"raytrain.launch", "raytrain.standalone"},
    # 5: command lines
    {
        "raytrain.bench",
        "raytrain.evaluate",
        "raytrain.export",
        "raytrain.fit",
        "raytrain.prepare",
        "raytrain.rebuild",
        "raytrain.sweep",
    },
]
ROOMS_OF_SEVERAL_FILES = {"raytrain.tracking", "raytrain.bench", "raytrain.sweep"}
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}

ONLY_IN = {
    "ray": {
        "raytrain.attempt",
        "raytrain.launch",
        "raytrain.preparation",
        "raytrain.remote",
        "raytrain.supervisor",
        "raytrain.sweep",
    },
    "mlflow": {"raytrain.tracking"},
    "pyarrow": {
        "raytrain.data.folder",
        "raytrain.data.parquet",
        "raytrain.data.shards",
        "raytrain.storage",
    },
    "sklearn": {"raytrain.data.digits"},
    "rich": {"raytrain.console"},
    "pydantic": {"raytrain.config", "raytrain.commandline", "raytrain.sweep"},
}


def floor_of(room):
    return FLOOR_OF[whole(room)]


def whole(room):
    """A file of a room that has several, as `raytrain.tracking` may, stands on that room's floor."""
    return next((name for name in ROOMS_OF_SEVERAL_FILES if room.startswith(f"{name}.")), room)


def find_rooms():
    rooms = {}
    for path in sorted((ROOT / "raytrain").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        rooms[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return rooms


ROOMS = find_rooms()


def imports_of(room):
    """Every module that a room imports, at its top or in a function; of `from package import module`, the module."""
    found = set()
    for node in ast.walk(ast.parse(ROOMS[room].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{room} imports relatively"
            assert node.module is not None
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.add(whole if whole in ROOMS else node.module)
    return found


def own_imports_of(room):
    return {name for name in imports_of(room) if name.split(".")[0] == "raytrain"}


def test_every_room_has_a_floor():
    assert [room for room in ROOMS if whole(room) not in FLOOR_OF] == []


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_rooms_below_it(room):
    others = {name for name in own_imports_of(room) if whole(name) != whole(room)}
    assert {name for name in others if floor_of(name) >= floor_of(room)} == set()


def test_no_room_is_imported_in_a_circle():
    done = set()

    def visit(room, path):
        assert room not in path, " -> ".join([*path, room])
        if room not in done:
            for name in sorted(own_imports_of(room) & set(ROOMS)):
                visit(name, [*path, room])
            done.add(room)

    for room in ROOMS:
        visit(room, [])


@pytest.mark.parametrize("library", ONLY_IN)
def test_a_library_is_imported_where_it_belongs_and_nowhere_else(library):
    users = {whole(room) for room in ROOMS if any(name.split(".")[0] == library for name in imports_of(room))}
    assert users - {"raytrain.bench"} <= ONLY_IN[library]  # benchmarks compare with others


def test_what_a_worker_runs_is_not_defined_in_a_command_line():
    """Pickle names the functions of `__main__` by a module that no worker has."""
    for room in ("raytrain.fit", "raytrain.sweep", "raytrain.prepare", "raytrain.rebuild"):
        if room in ROOMS:
            assert not any(name.split(".")[0] in {"ray", "torch"} for name in imports_of(room))


LOADS_NONE_OF = {
    ("torch", "torchvision", "ray", "mlflow", "numpy", "pyarrow"): [
        "raytrain.config",
        "raytrain.errors",
        "raytrain.commandline",
        "raytrain.plan",
        "raytrain.schedule",
        "raytrain.describe",
        "raytrain.fit",
    ],
    ("ray", "mlflow", "sklearn"): [
        room
        for room in ROOMS
        if room.startswith(("raytrain.data", "raytrain.comm."))
        or room.split(".")[-1] in {"loop", "model", "checkpoint", "evaluation", "state", "optim", "distributed"}
    ],
    ("ray",): ["raytrain.worker", "raytrain.standalone", "raytrain.tracking", "raytrain.run"],
}


@pytest.mark.parametrize(("libraries", "rooms"), LOADS_NONE_OF.items(), ids=lambda value: "+".join(value)[:40])
def test_importing_a_room_does_not_load_what_it_does_without(libraries, rooms):
    code = (
        "import sys, importlib\n"
        f"for room in {rooms!r}:\n"
        "    importlib.import_module(room)\n"
        f"    loaded = [name for name in {libraries!r} if name in sys.modules]\n"
        "    assert not loaded, f'{room} loads {loaded}'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_importing_a_room_writes_and_prints_nothing(tmp_path):
    """No work at import time."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import raytrain.loop, raytrain.run, raytrain.standalone"
    done = subprocess.run([sys.executable, "-B", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == done.stderr == ""
    assert list(tmp_path.iterdir()) == []
