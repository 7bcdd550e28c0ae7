"""Write the classes of a program's model as Python text."""

from __future__ import annotations

import textwrap

from tests.fuzz.layers import KINDS, WRITE_TO_BUFFERS
from tests.fuzz.program import OTHERS, Layer, Program

LOOK = """def look(note, when, model, loss):
    note(f"{when}: loss", loss)
    for name, p in model.named_parameters():
        note(f"{when}: {name}", p), note(f"{when}: gradient of {name}", p.grad)"""
BUFFERS = """    for name, buffer in model.named_buffers():
        note(f"{when}: buffer {name}", buffer)"""

FAIL = """class Fail(torch.autograd.Function):
    told = False
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)
    @staticmethod
    def backward(ctx, grad):
        if Fail.told:
            raise ArithmeticError("told to")
        return grad"""

WRITE = """@torch.compiler.disable
def write(layer):
    with torch.no_grad():
        [p.mul_(0.9) for p in layer.parameters() if p.dtype not in (torch.int64, torch.float8_e4m3fn)]"""


class Lines:
    """Indented text of a program that is written for `ways` only."""

    def __init__(self, ways: tuple[str, ...]) -> None:
        self.text: list[str] = []
        self.depth = 0
        self.ways = ways

    @property
    def all_sharded(self) -> bool:
        """Whether the text is for sharded models only."""
        return set(self.ways) == {"ours", "fsdp2"}

    def add_sharded(self, text: str) -> None:
        """Add text that only sharded models run."""
        if not self.all_sharded and "\n" not in text:
            text = f"if sharded: {text}"
        elif not self.all_sharded:
            text = "if sharded:\n" + textwrap.indent(text, "    ")
        self.add(text)

    def add(self, text: str, depth: int = 0) -> None:
        """Add one line or several, indented by `depth` more steps."""
        self.text.append(textwrap.indent(text, "    " * (self.depth + depth)))


def fails(program: Program, where: str) -> bool:
    """Whether a step raises an exception at the place `where`."""
    return any(step.fails == where for step in program.steps)


def _writes(program: Program, position: int) -> bool:
    """Whether forward writes to a unit's shards before its call at `position`.

    The unit is called only once, because after a first call its values are saved for backward.
    """
    number = program.calls[position]
    alone = program.layers[number].unit and not (program.grouped and number < 2)
    return program.writes and position > 0 and alone and program.calls.count(number) == 1


def add_model(lines: Lines, program: Program) -> None:
    """Add `Model`, the classes of its layers, and the helpers that they need."""
    classes = _class_names(program)
    lines.add(LOOK)
    if any(layer.kind in WRITE_TO_BUFFERS for layer in classes):
        lines.add(BUFFERS)
    for helper in dict.fromkeys(KINDS[layer.kind].helper for layer in classes):
        if helper:
            lines.add(helper)
    if fails(program, "backward"):
        lines.add(FAIL)
    if any(_writes(program, position) for position in range(len(program.calls))):
        lines.add(WRITE)
    for layer, name in classes.items():
        _class(lines, layer, name, classes)
    _model(lines, program, classes)


def _plain(layer: Layer) -> Layer:
    """Return a layer with only those fields that its class depends on."""
    inner = tuple(Layer(**{**vars(_plain(each)), "checkpoint": each.checkpoint}) for each in layer.inner)
    return Layer(layer.kind, layer.hidden, dtype=layer.dtype, inner=inner)


def _class_names(program: Program) -> dict[Layer, str]:
    """Return the class name of each different layer, inner layers first. Equal layers have one class."""
    names: dict[Layer, str] = {}

    def visit(layer: Layer) -> None:
        for inner in layer.inner:
            visit(inner)
        names.setdefault(_plain(layer), f"L{len(names)}")

    for layer in program.layers:
        visit(layer)
    return names


def _class(lines: Lines, layer: Layer, name: str, classes: dict[Layer, str]) -> None:
    kind = KINDS[layer.kind]
    lines.add(f"class {name}(nn.Module):")
    lines.add("def __init__(self):", 1)
    lines.add("super().__init__()" + ("; " if kind.init else "") + kind.init.format(h=layer.hidden), 2)
    if layer.inner:
        lines.add(
            f"self.before = nn.ModuleList([{', '.join(classes[_plain(each)] + '()' for each in layer.inner)}])", 2
        )
    lines.add("def forward(self, x):", 1)
    if layer.dtype:
        lines.add(f"return self.compute(x.to(torch.{layer.dtype})).to(x.dtype)", 2)
        lines.add("def compute(self, x):", 1)
    for i, each in enumerate(layer.inner):
        lines.add(_call(f"self.before[{i}]", each), 2)
    lines.add(kind.forward.replace("{h}", str(layer.hidden)), 2)


def _call(module: str, layer: Layer) -> str:
    if layer.checkpoint:
        return f"x = checkpoint({module}, x, use_reentrant={layer.checkpoint == 'reentrant'})"
    return f"x = {module}(x)"


def _model(lines: Lines, program: Program, classes: dict[Layer, str]) -> None:
    lines.add("class Model(nn.Module):")
    lines.add("def __init__(self):", 1)
    made = ", ".join(classes[_plain(layer)] + "()" for layer in program.layers)
    lines.add(f"super().__init__(); self.layers = nn.ModuleList([{made}])", 2)
    if fails(program, "forward"):
        lines.add("self.fails = False", 2)
    if program.other:
        lines.add("self.odd = False", 2)
    if program.tokens:
        lines.add("self.embedding = nn.Embedding(11, 8)", 2)
    if program.head:
        lines.add(f"self.head = nn.Linear(8, {11 if program.tokens else 8}, bias=False)", 2)
    if program.head == "tied":
        lines.add("self.head.weight = self.embedding.weight", 2)
    lines.add("def forward(self, x):", 1)
    if program.tokens:
        lines.add("x = self.embedding(x)", 2)
    half = len(program.calls) // 2
    for position, number in enumerate(program.calls):
        if position == _middle(program):
            lines.add("middle = x", 2)
        if position and program.mode in ("broken", "compiled autograd"):
            lines.add("torch._dynamo.graph_break()", 2)
        if position == half and fails(program, "forward"):
            lines.add('if self.fails:\n    raise ArithmeticError("told to")', 2)
        if position == half and fails(program, "backward"):
            lines.add("x = torch.compiler.disable(Fail.apply)(x)", 2)
        if _writes(program, position):
            lines.add(f"write(self.layers[{number}])", 2)
        call = _call(f"self.layers[{number}]", program.layers[number])
        if program.other and position == program.other_at:
            other = OTHERS[program.other].replace("{m}", f"self.layers[{number}]")
            call = f"if self.odd:\n{textwrap.indent(other, '    ')}\nelse:\n    {call}"
        lines.add(call, 2)
    if program.head:
        lines.add("x = self.head(x)", 2)
    if program.output == "tensor":
        lines.text[-1] = lines.text[-1].replace("x = ", "return ", 1)
    else:
        lines.add("return " + _OUTPUTS[program.output], 2)


_OUTPUTS = {"dict": '{"y": x}', "tuple": "(x, x.shape[0])", "beside": "(x, x.mean())", "middle": "(x, middle)"}


def _middle(program: Program) -> int:
    """Return the position of the call whose input is the model's second output; -1 if there is none."""
    return len(program.calls) // 2 if program.output == "middle" else -1
