"""The house rules of CONTRIBUTING.md about imports, and logs and traces as torch's own tools ask for them."""

import ast
import graphlib
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LINK = ROOT / "compiled_fsdp" / "passes"
PACKAGE = sorted(path for path in (ROOT / "compiled_fsdp").rglob("*.py") if LINK not in path.parents)
PASSES = sorted((ROOT / "passes").rglob("*.py"))

EVERYTHING = sorted(
    p for folder in ("compiled_fsdp", "passes", "tests", "bench", "examples") for p in (ROOT / folder).rglob("*.py")
)

Names = Callable[[Path], Iterator[str]]


def imported(path: Path) -> Iterator[str]:
    """Every name that a file imports, in full: `from a import b` is "a.b"."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ("." * node.level + f"{node.module}.{alias.name}" for alias in node.names)


def private_attributes(path: Path) -> Iterator[str]:
    """Names such as `torch._C` or `torch._dynamo.config` that a file reaches without an import."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            parts, inner = [node.attr], node.value
            while isinstance(inner, ast.Attribute):
                parts.append(inner.attr)
                inner = inner.value
            if isinstance(inner, ast.Name) and inner.id == "torch":
                yield ".".join(["torch", *reversed(parts)])


def is_private(name: str) -> bool:
    return name.split(".")[0] == "torch" and any(part.startswith("_") for part in name.split(".")[1:])


def test_files_are_found():
    assert {"gate.py", "dynamo.py", "explain.py"} <= {path.name for path in PACKAGE}
    assert {"bucket.py", "plan.py"} <= {path.name for path in PASSES}
    assert (ROOT / "compiled_fsdp" / "passes").resolve() == ROOT / "passes"


def offenders(paths: list[Path], wrong: Callable[[str], bool], names: Names = imported) -> dict[str, list[str]]:
    found = {str(path.relative_to(ROOT)): [name for name in names(path) if wrong(name)] for path in paths}
    return {path: bad for path, bad in found.items() if bad}


def test_passes_is_never_imported_as_a_top_level_module():
    """From the repository's root it would be a second copy of every module."""
    assert not offenders(EVERYTHING, lambda name: name.split(".")[0] == "passes")


# A room imports what stands before it, and its own files. passes/ stands beside sharding: it knows buckets, base and
# compat alone, and what stands between it and reporting does not know it.
ROOMS = (
    "compat", "base", "buckets", "sharding", "passes", "optim", "state", "ranks", "runtime", "ops", "frontend",
    "reporting", "compiler", "training", "tools", "errors", "__init__", "__main__",
)  # fmt: skip
BLIND_TO_PASSES = ("sharding", "optim", "state", "ranks", "runtime", "ops", "frontend")


def module_of(path: Path) -> str:
    """A file's module, without "compiled_fsdp."; the package's own is "__init__"."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "passes" else parts[1:]
    return ".".join(parts if len(parts) == 1 or parts[-1] != "__init__" else parts[:-1])


def room_of(module: str) -> str:
    return module.split(".")[0]


def known_modules() -> dict[str, set[str]]:
    """Of each module of ours, those that it imports: for a type, in a function, and lazily by name too."""
    modules = {module_of(path): path for path in (*PACKAGE, *PASSES)}
    known: dict[str, set[str]] = {}
    for module, path in modules.items():
        found = known[module] = set()
        for name in imported(path):
            inner = name.removeprefix("compiled_fsdp.")
            if name != inner:  # "room.file.function", "room.file" or "room"
                found |= {part for part in (inner, inner.rpartition(".")[0]) if part in modules} - {module}
    return known


def test_every_file_has_a_room():
    modules = [module_of(path) for path in (*PACKAGE, *PASSES)]
    assert {room_of(module) for module in modules} == set(ROOMS)
    assert {path.name for path in (ROOT / "compiled_fsdp").glob("*.py")} == {"__init__.py", "__main__.py", "errors.py"}
    for folder in {path.parent for path in (*PACKAGE, *PASSES)}:
        assert ast.get_docstring(ast.parse((folder / "__init__.py").read_text())), f"{folder}: what belongs there?"


def test_rooms_know_only_what_stands_before_them():
    up = [
        f"{module} -> {other}"
        for module, others in known_modules().items()
        for other in others
        if ROOMS.index(room_of(other)) > ROOMS.index(room_of(module))
        or (room_of(module) == "passes" and room_of(other) not in ("passes", "buckets", "base", "compat"))
        or (room_of(other) == "passes" and room_of(module) in BLIND_TO_PASSES)
    ]
    assert not up, up
    assert not offenders([p for p in PASSES if p.parent.name == "plan"], lambda name: name.startswith("torch.fx"))


def test_ops_are_not_called_from_below():
    """No op of ours is called by name in a room that stands before the one that defines it. Passes know calls in graphs
    by name, whoever defines the ops."""
    texts = {room_of(module_of(path)): "" for path in PACKAGE}
    for path in PACKAGE:
        texts[room_of(module_of(path))] += path.read_text()
    defined = {name: room for room, text in texts.items() for name in re.findall(r'define\(\s*f?"(\w+)\(', text)}
    assert {"unshard", "launch", "encode", "pack_shards", "accumulate_grad"} <= defined.keys()
    up = [
        f"{room}: {name}, of {defined[name]}"
        for room, text in texts.items()
        for name in re.findall(r"\b(?:ours|ops\.compiled_fsdp)\.(\w+)", text)
        if ROOMS.index(defined.get(name, room)) > ROOMS.index(room)
    ]
    assert not up, up


def test_files_know_each_other_in_one_direction():
    """A package's own file hands on what its files define, and is not counted."""
    known = {module: {o for o in others if "." in o} for module, others in known_modules().items() if "." in module}
    graphlib.TopologicalSorter(known).prepare()  # raises CycleError, which names the circle


MANY_ATTRIBUTES = 20
LONG_FILE = 400


def attributes_of(cls: ast.ClassDef) -> set[str]:
    """What an instance has: annotated in the class, or assigned to ``self`` in ``__init__``."""
    fields = {n.target.id for n in cls.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
    made = [n for n in cls.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"]
    assigned = [target for init in made for node in ast.walk(init) for target in getattr(node, "targets", [])]
    assigned += [node.target for init in made for node in ast.walk(init) if isinstance(node, ast.AnnAssign)]
    flat = [t for target in assigned for t in (target.elts if isinstance(target, ast.Tuple) else [target])]
    return fields | {t.attr for t in flat if isinstance(t, ast.Attribute) and getattr(t.value, "id", "") == "self"}


def test_large_classes_and_files_say_why():
    """More than 20 attributes, or 400 lines, only with a reason in the docstring."""
    for path in (*PACKAGE, *PASSES):
        tree = ast.parse(path.read_text(), str(path))
        if len(path.read_text().splitlines()) > LONG_FILE:
            assert f"More than {LONG_FILE} lines" in (ast.get_docstring(tree) or ""), path
        for cls in [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]:
            if len(attributes_of(cls)) > MANY_ATTRIBUTES:
                assert f"More than {MANY_ATTRIBUTES} attributes" in (ast.get_docstring(cls) or ""), (path, cls.name)


def test_private_torch_is_used_in_compat_alone():
    paths = [path for path in (*PACKAGE, *PASSES) if path.parent.name != "compat"]
    assert not offenders(paths, is_private)
    assert set(offenders(paths, bool, private_attributes)) == {"compiled_fsdp/buckets/transport.py"}


def test_one_file_names_the_collectives():
    """`buckets/transport.py`: a call is one of its names, and a graph is asked through it."""
    transport = ROOT / "compiled_fsdp" / "buckets" / "transport.py"
    assert set(private_attributes(transport)) == {"torch.ops._c10d_functional"}
    named = re.compile(r"(all_gather_into_tensor|reduce_scatter_tensor|all_to_all_single)")
    for path in (*PACKAGE, *PASSES):
        words = [node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)]
        names = [node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)]
        found = [word for word in (*words, *names) if isinstance(word, str) and named.match(word)]
        assert path == transport or not found, (path, found)


# ---- fresh interpreters ----------------------------------------------------------------------------------------------
def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A program in a fresh interpreter; fails the test if it exits badly."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("TORCH_LOGS", "TORCH_TRACE"))}
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, env=clean | environment, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    return done


def test_the_import_is_light():
    loaded = run("import sys, torch, compiled_fsdp; print(*sys.modules, sep='\\n')").stdout.split()
    assert "compiled_fsdp" in loaded
    without = run("import sys, torch; print(*sys.modules, sep='\\n')").stdout.split()
    for heavy in ("torch.distributed.fsdp", "torch._dynamo", "torch._inductor", "torch.distributed.tensor"):
        assert heavy in without or heavy not in loaded
    assert {name for name in loaded if name.startswith("compiled_fsdp")} == {"compiled_fsdp"}


@pytest.mark.more
def test_every_module_can_be_imported_first():
    """The backend's entry point does not import what a user's script perhaps has not."""
    modules = [".".join(p.relative_to(ROOT).with_suffix("").parts) for p in (*PACKAGE, *PASSES)]
    modules = [m.removesuffix(".__init__") for m in modules]
    modules = [f"compiled_fsdp.{m}" if m.split(".")[0] == "passes" else m for m in modules]
    assert {"compiled_fsdp.compiler.backend", "compiled_fsdp.passes.lower", "compiled_fsdp.runtime.gate"} <= set(
        modules
    )
    # a process for each, but torch is imported once
    code = f"""
import importlib, os, torch, torch.distributed.fsdp, torch._dynamo
bad = []
for name in {modules}:
    if (pid := os.fork()) == 0:
        importlib.import_module(name)
        os._exit(0)
    if os.waitpid(pid, 0)[1]:
        bad.append(name)
assert not bad, bad
"""
    run(code)


def test_every_public_name_is_there():
    import compiled_fsdp

    assert set(compiled_fsdp.__all__) <= set(dir(compiled_fsdp))
    for name in compiled_fsdp.__all__:
        found = getattr(compiled_fsdp, name)
        assert found.__name__ == name if callable(found) else found
    with pytest.raises(AttributeError, match="no attribute 'fully_shrad'"):
        _ = compiled_fsdp.fully_shrad


@pytest.mark.parametrize(
    "logs",
    [
        "+compiled_fsdp.passes",
        *(pytest.param(logs, marks=pytest.mark.more) for logs in ("+compiled_fsdp", "compiled_fsdp", "-compiled_fsdp")),
    ],
)
def test_torch_starts_with_our_logs_asked_for(logs):
    """TORCH_LOGS imports us while torch itself is being imported."""
    assert run("import torch; print(torch.__version__)", TORCH_LOGS=logs).stdout.strip()


PROGRAM = """
import torch, torch.distributed as dist
from compiled_fsdp import fully_shard
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = fully_shard(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)))
options = {"codegen": "aot_eager", "collectives_at_world_size_1": True}
torch.compile(model, backend="compiled_fsdp", options=options)(torch.ones(2, 4)).sum().backward()
dist.destroy_process_group()
"""


def test_logs_and_traces_of_a_compiled_model(tmp_path):
    log = run(PROGRAM, TORCH_LOGS="+compiled_fsdp", TORCH_TRACE=str(tmp_path)).stderr
    assert "forward graph: 4 parameters read, 1 gathers of" in log  # a line for each graph
    assert "backward graph: 4 parameters read, 0 gathers of 0.000 MB, 1 reductions of" in log
    assert "1.bias, 1.weight, 0.bias and 1 more" in log  # for each collective
    for name in ("bucket", "schedule", "lower", "verify"):  # for each pass
        assert f"forward graph, {name}: " in log
    assert "forward graph after schedule:" in log
    trace = "".join(path.read_text() for path in tmp_path.glob("*.log"))
    for name in ("dynamo_graph", "forward_before", "forward_after", "backward_before", "backward_after"):
        assert f'"compiled_fsdp_{name}"' in trace


@pytest.mark.more
@pytest.mark.parametrize("logs", [None, "compiled_fsdp"])
def test_another_rank_logs_where_it_is_asked_to(logs):
    """Not because a program has the root logger at INFO."""
    code = """
import logging, os, torch, torch._inductor.compile_fx
logging.basicConfig(level=logging.INFO)
for rank in "01":  # torch is imported once
    if os.fork() == 0:
        os.environ["RANK"] = rank
        import compiled_fsdp.compiler.compilation, compiled_fsdp.compiler.measure
        for name in ("compiler.compilation", "passes.plan_pass", "passes.cut", "compiler.hardware", "compiler.measure"):
            logging.getLogger(f"compiled_fsdp.{name}").info("rank %s: a line of %s", rank, name)
            logging.getLogger(f"compiled_fsdp.{name}").warning("rank %s: a warning of %s", rank, name)
        os._exit(0)
    os.wait()
"""
    whole = run(code, **({} if logs is None else {"TORCH_LOGS": logs})).stderr
    for rank in "01":
        log = "\n".join(line for line in whole.splitlines() if f"rank {rank}: " in line)
        said = {what: set(re.findall(rf"{what} of (\S+)", log)) for what in ("a line", "a warning")}
        assert len(said["a line"]) == (5 if rank == "0" or logs else 0), log
        assert len(said["a warning"]) == 5, log


@pytest.mark.more
def test_logs_are_short_without_the_plus_and_silent_by_default():
    log = run(PROGRAM, TORCH_LOGS="compiled_fsdp").stderr
    lines = [line.split("] ", 1)[-1] for line in log.splitlines() if "compiled_fsdp" in line]
    assert len(lines) == 5  # the hardware that is planned for, and for each graph what it does and the plan's numbers
    assert "planning for cpu" in lines[0]
    assert sum("overlap efficiency" in line for line in lines) == 2
    assert "forward graph: 4 parameters read" in log
    assert "graph" not in run(PROGRAM).stderr
