"""Check how Inductor's wrapper uses the memory of collectives in flight, by reading the wrapper's text.

The wrapper is straight-line Python with one call per line. The reader follows names to the memory behind them, through
views and through buffers that take over another buffer's memory. The names of a kernel's parameters tell which
arguments it reads and which it writes.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

LAUNCHES = {
    "all_gather_into_tensor": "gather", "all_gather_into_tensor_out": "gather",
    "all_gather_into_tensor_coalesced": "gather",
    "reduce_scatter_tensor": "reduce", "reduce_scatter_tensor_coalesced": "reduce", "all_to_all_single": "reduce",
    "all_reduce": "all_reduce", "all_reduce_": "all_reduce", "all_reduce_coalesced_": "all_reduce",
    "_low_contention_all_gather": "gather", "_low_contention_reduce_scatter": "reduce",
    "start_offload": "offload", "start_reload": "reload",
}  # fmt: skip
# Calls that run no kernel and read no values.
SILENT = {"reinterpret_tensor", "clear"}
ALLOCATES = ("empty_strided_cuda", "empty_strided_cpu", "empty_strided_cpu_pinned")
# Names of buffers and inputs.
_BUFFER = re.compile(
    r"(repeated_\d+_in_\w+?_)?(buf|primals_|tangents_|arg|copy_|view_|mm_|permute_|getitem_|add_|given_)"
)
WAITS_FOR_DEVICE = {"item", "cpu", "tolist", "synchronize", "nonzero"}


@dataclass(frozen=True)
class Event:
    """One launch, wait, piece of compute, or start of a partition."""

    # "gather", "reduce", "all_reduce", "offload", "reload", "wait", "compute", "partition".
    kind: str
    line: str
    # The memory that it reads, and the memory that it writes or makes.
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()


@dataclass
class Wrapper:
    """The events of a wrapper, in order, and the problems that the reader found in it."""

    events: list[Event] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def order(self) -> list[str]:
        """The kinds of launches and waits, in order, without compute."""
        return [event.kind for event in self.events if event.kind not in ("compute", "partition")]

    def products_beside(self) -> list[int]:
        """For each launch, the number of matrix products between it and its first wait."""
        flights: dict[str, int] = {}
        found: list[int] = []
        products = 0
        for event in self.events:
            if event.kind == "compute":
                products += 2 if "_mm_plus_mm" in event.line else "extern_kernels." in event.line
            elif event.kind == "wait":
                index = flights.get(event.reads[0]) if event.reads else None
                if index is not None:
                    found[index] = products - found[index]
                    flights = {name: i for name, i in flights.items() if i != index}
            elif event.kind != "partition":
                flights |= dict.fromkeys(event.writes, len(found))
                found.append(products)
        return found


def read_wrapper(text: str) -> Wrapper:
    """Read the function ``call`` of a wrapper, and the partitions that it calls."""
    return _Reader(text).read()


class _Reader:
    def __init__(self, text: str) -> None:
        self.tree = ast.parse(text)
        self.text = text
        self.out = Wrapper()
        # By name: the memory behind it; several memories for the result of a grouped collective.
        self.memory: dict[str, tuple[str, ...]] = {}
        # By the memory of a result in flight: the memory that its collective sends, in use until the wait.
        self.in_flight: dict[str, tuple[str, ...]] = {}
        # By the memory of a result: all results of the same grouped collective. It ends at the first one's wait.
        self.group_of: dict[str, tuple[str, ...]] = {}
        self.pageable: set[str] = set()
        self.arguments = dict(_kernel_parameters(text))

    def read(self) -> Wrapper:
        functions = {node.name: node for node in ast.walk(self.tree) if isinstance(node, ast.FunctionDef)}
        self.partitions = {name: node for name, node in functions.items() if re.fullmatch(r"partition_\d+", name)}
        self.repeated = {name: node for name, node in functions.items() if re.fullmatch(r"repeated_\d+", name)}
        self._block(functions["call"].body)
        for name in self.in_flight:
            self.out.problems.append(f"{name} is never waited for")
        return self.out

    def _block(self, statements: list[ast.stmt]) -> None:
        for statement in statements:
            if isinstance(statement, ast.With):
                self._block(statement.body)
            elif isinstance(statement, (ast.Assign, ast.Expr)):
                self._statement(statement)

    def _statement(self, statement: ast.Assign | ast.Expr) -> None:
        line, value = ast.unparse(statement), statement.value
        targets = [] if isinstance(statement, ast.Expr) else [n.id for n in _names(statement.targets[0])]
        if isinstance(value, ast.Call):
            self._call(value, targets, line)
        elif isinstance(value, ast.List) and line.startswith("repeated_"):  # the arguments of the call that follows
            self.given = value.elts
        elif isinstance(value, (ast.Name, ast.Subscript, ast.Attribute)) and targets:
            self._alias(targets[0], value)
        elif isinstance(value, ast.Constant) and value.value is None:
            return

    # ---- names -------------------------------------------------------------------------------------------------------
    def _alias(self, target: str, value: ast.expr) -> None:
        names = [node.id for node in _names(value)]
        if len(names) != 1:
            return
        behind = self._behind(names[0])
        if isinstance(value, ast.Subscript) and isinstance(value.slice, ast.Constant) and len(behind) > 1:
            behind = behind[value.slice.value : value.slice.value + 1]
        self.memory[target] = behind

    def _behind(self, name: str) -> tuple[str, ...]:
        return self.memory.get(name, (name,))

    def _all_behind(self, node: ast.AST) -> tuple[str, ...]:
        return tuple(memory for found in _names(node) for memory in self._behind(found.id))

    # ---- calls -------------------------------------------------------------------------------------------------------
    def _call(self, call: ast.Call, targets: list[str], line: str) -> None:
        function = ast.unparse(call.func)
        name = function.removesuffix(".default").rsplit(".", 1)[-1]
        if (partition := re.search(r"partitions?\[(\d+)\]", function)) is not None:
            self._partition(call, targets, int(partition.group(1)), line)
        elif name in self.repeated:
            self.memory[targets[0]] = self._function(name, targets[0])
        elif name in ALLOCATES:
            self.memory[targets[0]] = (targets[0],)
            if name == "empty_strided_cpu":
                self.pageable.add(targets[0])
        elif name == "reinterpret_tensor":
            self._alias(targets[0], call.args[0])
        elif name in SILENT or name.startswith("assert_") or not (targets or _names(call)):
            return
        elif name in ("wait_tensor", "wait_copy"):
            self._wait(self._all_behind(call.args[0]), line)
            if targets:
                self.memory[targets[0]] = self._all_behind(call.args[0])
        elif name in LAUNCHES and ".ops." in function:
            self._launch(LAUNCHES[name], call, targets, line)
        elif name == "launch" and "'gather " in line:  # the wait of a reduction is outside of the graph
            self._launch("gather", call, targets, line)
        else:
            self._compute(call, function, name, targets, line)

    def _launch(self, kind: str, call: ast.Call, targets: list[str], line: str) -> None:
        given = tuple(memory for argument in call.args[:1] for memory in self._all_behind(argument))
        out = tuple(memory for keyword in call.keywords for memory in self._all_behind(keyword.value))
        self._touches(given, (), line)
        several = "coalesced" in line
        tensors = len(call.args[0].elts) if isinstance(call.args[0], ast.List) and several else 1
        made = out or (given if "all_reduce_" in line else ())
        if not made and targets:
            made = (
                (targets[0],)
                if tensors == 1 and "compiled_fsdp.launch" not in line
                else tuple(f"{targets[0]}[{i}]" for i in range(tensors))
            )
        if targets:
            self.memory[targets[0]] = made
        for memory in made:
            self.in_flight[memory], self.group_of[memory] = given, made
        self.out.events.append(Event(kind, line, given, made))

    def _wait(self, waited: tuple[str, ...], line: str) -> None:
        for memory in waited:
            if memory not in self.in_flight:
                self.out.problems.append(f"waits for what is not in flight: {line}")
            self.in_flight.pop(memory, None)
            for other in self.group_of.get(memory, ()):
                if other in self.in_flight:
                    self.in_flight[other] = ()
        self.out.events.append(Event("wait", line, waited))

    def _compute(self, call: ast.Call, function: str, name: str, targets: list[str], line: str) -> None:
        if name in WAITS_FOR_DEVICE or (name == "to" and "cpu" in line):
            self.out.problems.append(f"the host waits for the device: {line}")
        owner = function.removesuffix(".run")
        if owner in self.arguments:
            reads, writes = self._of_kernel(owner, call)
        elif name == "copy_" and isinstance(call.func, ast.Attribute):
            writes, reads = self._all_behind(call.func.value), self._all_behind(call.args[0])
            if self.pageable.intersection((*reads, *writes)) or "True" not in line:
                self.out.problems.append(f"a copy that the host waits for: {line}")
        else:
            written = [keyword.value for keyword in call.keywords if keyword.arg == "out"]
            writes = tuple(memory for node in written for memory in self._all_behind(node))
            given = [*call.args, *(keyword.value for keyword in call.keywords if keyword.arg != "out")]
            reads = tuple(memory for node in given for memory in self._all_behind(node))
        for target in targets:
            self.memory[target] = (target,)
        self._touches(reads, writes, line)
        self.out.events.append(Event("compute", line, reads, (*writes, *targets)))

    def _of_kernel(self, kernel: str, call: ast.Call) -> tuple[tuple[str, ...], tuple[str, ...]]:
        reads: list[str] = []
        writes: list[str] = []
        for parameter, argument in zip(self.arguments[kernel], call.args, strict=False):
            behind = self._all_behind(argument)
            if parameter.startswith(("in_ptr", "in_out")):
                reads += behind
            if parameter.startswith(("out_ptr", "in_out")):
                writes += behind
        return tuple(reads), tuple(writes)

    def _touches(self, reads: tuple[str, ...], writes: tuple[str, ...], line: str) -> None:
        for result, sent in self.in_flight.items():
            if result in (*reads, *writes):
                self.out.problems.append(f"uses {result}, which is in flight: {line}")
            for memory in set(sent).intersection(writes):
                self.out.problems.append(f"writes {memory}, which a collective sends: {line}")

    def _function(self, name: str, result: str) -> tuple[str, ...]:
        """Read a function that the wrapper calls, and return the memory of its results.

        Each call makes new buffers, so their names are extended by the name of this call's result.
        """
        text = ast.unparse(self.repeated[name]).replace(f"{name}_", f"{name}_in_{result}_")
        for statement in ast.parse(text).body[0].body:
            if isinstance(statement, ast.Assign) and ast.unparse(statement.value) == "args":
                for parameter, given in zip(_names(statement.targets[0]), self.given, strict=True):
                    self.memory[parameter.id] = self._all_behind(given)
            elif isinstance(statement, ast.Return):
                return self._all_behind(statement.value)
            else:
                self._block([statement])
        raise AssertionError(f"{name} returns nothing")

    def _partition(self, call: ast.Call, targets: list[str], number: int, line: str) -> None:
        """Read a partition. No collective may be in flight at its borders, because CUDA graphs replay it."""
        if self.in_flight:
            self.out.problems.append(f"{sorted(self.in_flight)} in flight where a partition begins: {line}")
        self.out.events.append(Event("partition", line))
        body = self.partitions.get(f"partition_{number}")
        if body is not None:
            self._block(body.body)
        if self.in_flight:
            self.out.problems.append(f"{sorted(self.in_flight)} in flight where a partition ends: {line}")


def _names(node: ast.AST) -> list[ast.Name]:
    """Return the names in an expression that belong to buffers and inputs."""
    found = [n for n in ast.walk(node) if isinstance(n, ast.Name)]
    return [n for n in found if _BUFFER.match(n.id)]


def _kernel_parameters(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each Triton kernel's name, and its parameters' names in order."""
    for name, source in re.findall(r"^(\w+) = async_compile\.triton\('\w+', '''(.*?)'''", text, re.S | re.M):
        signature = re.search(r"def \w+\((.*?)\):", source, re.S)
        assert signature is not None, name
        yield name, [part.split(":")[0].strip() for part in signature.group(1).split(",")]
