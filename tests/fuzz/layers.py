"""The kinds of layers, each with the code of its `__init__` and of its `forward`, [batch, 4, 8] in and out.

`{h}` is replaced by the layer's inner size.
"""

from __future__ import annotations

from typing import NamedTuple


class Kind(NamedTuple):
    """The code of a layer's class. `helper` is code that must come before the class."""

    init: str
    forward: str
    helper: str = ""


SCALE = """class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight
    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad * weight, (grad * x).sum((0, 1))"""

PAIR = """class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)
    def forward(self, given, *, scale):
        return {"y": self.inner(given["x"][0]), "rest": (given["x"], scale)}"""

LINEAR = "self.inner = nn.Linear(8, 8)"

HOW = """class How(enum.Enum):
    GOES = 0
    BREAKS = 1"""

NAMED = """class Named(nn.Linear):
    def __init_subclass__(cls, *, name):
        super().__init_subclass__()
class First(Named, name="first"):
    pass"""

TWO = "self.a, self.b = nn.Linear(8, {h}), nn.Linear({h}, 8)"
BREAK = "y = torch.relu(self.a(x))\nif CONDITION:\n    torch._dynamo.graph_break()\nreturn x + self.b(y)"

KINDS = {
    "mlp": Kind(
        "self.up, self.down = nn.Linear(8, {h}), nn.Linear({h}, 8)",
        "return x + self.down(F.gelu(self.up(x)))",
    ),
    "linear": Kind(LINEAR, "return x + torch.tanh(self.inner(x))"),
    "tiny": Kind("self.scale = nn.Parameter(torch.randn({h}))", "return x * (1 + self.scale.sum() / 8)"),
    "bias": Kind("self.bias = nn.Parameter(torch.randn(8))", "return torch.tanh(x + self.bias)"),
    "norm": Kind("self.norm = nn.LayerNorm(8)", "return self.norm(x)"),
    "rms": Kind("self.norm = nn.RMSNorm(8)", "return self.norm(x)"),
    "batch norm": Kind("self.norm = nn.BatchNorm1d(4)", "return self.norm(x)"),
    "group norm": Kind("self.norm = nn.GroupNorm(2, 4)", "return x + self.norm(x)"),
    "attention": Kind(
        "self.inner = nn.MultiheadAttention(8, 2, batch_first=True)",
        "return x + self.inner(x, x, x, need_weights=False)[0]",
    ),
    "sdpa": Kind(
        "self.qkv, self.out = nn.Linear(8, 24, bias=False), nn.Linear(8, 8)",
        "q, k, v = self.qkv(x).chunk(3, -1)\n"
        "return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))",
    ),
    "softmax": Kind(
        "self.q, self.v = nn.Linear(8, {h}), nn.Linear(8, 8)",
        "scores = self.q(x) @ self.q(x).transpose(1, 2)\nreturn x + scores.softmax(-1) @ self.v(x)",
    ),
    "dropout": Kind(TWO, "return x + self.b(F.dropout(torch.tanh(self.a(x)), 0.25, self.training))"),
    "encoder": Kind(
        "self.inner = nn.TransformerEncoderLayer(8, 2, {h}, dropout=0.0, batch_first=True)",
        "return self.inner(x)",
    ),
    "gru": Kind("self.inner = nn.GRU(8, 8, batch_first=True)", "return x + self.inner(x)[0]"),
    "lstm": Kind("self.inner = nn.LSTM(8, 8, batch_first=True)", "return x + self.inner(x)[0]"),
    "cell": Kind(
        "self.cell = nn.GRUCell(8, 8)",
        "state = torch.zeros_like(x[:, 0])\n"
        "for i in range(4):\n"
        "    state = self.cell(x[:, i], state)\n"
        "return x + state.unsqueeze(1)",
    ),
    "conv": Kind("self.conv = nn.Conv1d(4, 4, 3, padding=1)", "return x + self.conv(x)"),
    "conv 2d": Kind("self.conv = nn.Conv2d(1, {h}, 3, padding=1)", "return x + self.conv(x.unsqueeze(1)).mean(1)"),
    "transposed": Kind("self.conv = nn.ConvTranspose1d(4, 4, 3, padding=1)", "return x + self.conv(x)"),
    "table": Kind("self.table = nn.Embedding({h}, 8)", "return x + self.table(torch.arange(4) % {h})"),
    "bag": Kind(
        "self.table = nn.EmbeddingBag({h}, 8)",
        "return x + self.table((torch.arange(8) % {h}).view(4, 2)).unsqueeze(0)",
    ),
    "bilinear": Kind("self.inner = nn.Bilinear(8, 8, 8)", "return x + self.inner(x, x) / 8"),
    "einsum": Kind(
        "self.weight = nn.Parameter(torch.randn({h}, 8, 8) / 8)",
        'return x + torch.einsum("bld,hde->ble", x, self.weight)',
    ),
    "tied": Kind(
        "self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)\nself.b.weight = self.a.weight",
        "return x + self.b(torch.tanh(self.a(x)))",
    ),
    "twice": Kind(LINEAR, "return x + self.inner(torch.tanh(self.inner(x)))"),
    "function": Kind(
        "self.weight = nn.Parameter(torch.randn(8))",
        "return torch.tanh(Scale.apply(x, self.weight))",
        SCALE,
    ),
    "item": Kind(
        LINEAR,
        "y = self.inner(x)\nreturn x + (y if y.sum().item() > 1e9 else y * 0.5)",
    ),
    "by rank": Kind(
        LINEAR,
        "y = self.inner(x)\nreturn x + (y * 0.5 if x[0, 0, 0].item() > 0 else y * 0.25)",
    ),
    "by size": Kind(LINEAR, "return x + self.inner(x) * (0.5 if x.shape[0] > 2 else 0.25)"),
    "break": Kind(f"{TWO}\nself.breaks = True", BREAK.replace("CONDITION", "self.breaks")),
    "break by element": Kind(f"{TWO}\nself.breaks = [True]", BREAK.replace("CONDITION", "self.breaks[0]")),
    "break by name": Kind(
        f"{TWO}\nself.breaks = How.BREAKS", BREAK.replace("CONDITION", "self.breaks is How.BREAKS"), HOW
    ),
    "counted break": Kind(
        f"{TWO}\nself.calls = 0",
        "self.calls += 1\ny = torch.relu(self.a(x))\ntorch._dynamo.graph_break()\nreturn x + self.b(y)",
    ),
    "disabled": Kind(LINEAR, "return x + torch.compiler.disable(self.inner)(torch.tanh(x))"),
    "listed": Kind(LINEAR, "return self.inner(x) + 0.01 * sum(p.square().sum() for p in self.parameters())"),
    "lists": Kind(
        "self.some = nn.ParameterList(torch.randn(n) for n in ({h}, 8))\n"
        "self.more = nn.ParameterDict({{'w': torch.randn(8)}})",
        "return torch.tanh(x * self.some[0].mean() + self.some[1]) + self.more['w']",
    ),
    "weight norm": Kind(
        "self.inner = nn.utils.parametrizations.weight_norm(nn.Linear(8, {h}))",
        "return x + self.inner(x).mean(-1, True)",
    ),
    "old weight norm": Kind("self.inner = nn.utils.weight_norm(nn.Linear(8, 8))", "return x + self.inner(x)"),
    "spectral norm": Kind(
        "self.inner = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))",
        "return x + self.inner(x)",
    ),
    "merged": Kind(
        "self.inner = nn.Linear(8, 8)\nself.a, self.b = (nn.Parameter(torch.randn(8, {h}) / 8) for _ in range(2))",
        "return x + F.linear(x, self.inner.weight + self.a @ self.b.T, self.inner.bias)",
    ),
    "buffer": Kind(
        "self.inner = nn.Linear(8, 8)\nself.register_buffer('mean', torch.zeros(8))",
        "y = self.inner(x)\n"
        "if self.training:\n"
        "    with torch.no_grad():\n"
        "        self.mean.mul_(0.9).add_(y.mean((0, 1)), alpha=0.1)\n"
        "return x + y - self.mean",
    ),
    "counted": Kind(
        "self.inner = nn.Linear(8, 8)\nself.register_buffer('count', torch.zeros((), dtype=torch.int64))",
        "self.count.add_(1)\nreturn x + self.inner(x) / (1 + self.count)",
    ),
    "no grad": Kind(
        LINEAR,
        "with torch.no_grad():\n    size = self.inner.weight.norm()\nreturn x + self.inner(x) / (1 + size)",
    ),
    "detached": Kind(LINEAR, "return x + F.linear(x, self.inner.weight.detach()) + self.inner(x)"),
    "structured": Kind(
        "self.pair = Pair()",
        'out = self.pair({"x": [x, None]}, scale=0.5)\nreturn out["rest"][0][0] + out["y"] * out["rest"][1]',
        PAIR,
    ),
    "in place": Kind(
        LINEAR,
        "y = self.inner(x)\ny.mul_(0.5)\ny[:, 0] = 0\nreturn x + y",
    ),
    "autocast": Kind(
        LINEAR,
        'with torch.autocast("cpu", torch.bfloat16):\n    y = self.inner(x)\nreturn x + y.float()',
    ),
    "recomputed": Kind(LINEAR, "return x + checkpoint(lambda y: torch.tanh(self.inner(y)), x, use_reentrant=False)"),
    "hooked": Kind(
        "self.inner = nn.Linear(8, 8)\n"
        "self.inner.register_forward_hook(lambda m, args, out: out * 0.5)\n"
        "self.inner.register_forward_pre_hook(lambda m, args: (args[0] + 1,))",
        "return x + self.inner(x)",
    ),
    "hooked tensor": Kind(
        LINEAR,
        "y = self.inner(x)\nif y.requires_grad:\n    y.register_hook(lambda grad: grad * 0.5)\nreturn x + y",
    ),
    "which": Kind(
        "self.which = 0\nself.both = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))",
        "return x + self.both[self.which](x)",
    ),
    "complex": Kind(
        "self.weight = nn.Parameter(torch.randn(4, 8, dtype=torch.complex64))",
        "return torch.tanh(x + torch.fft.ifft(torch.fft.fft(x) * self.weight).real)",
    ),
    "float8": Kind(
        "self.inner = nn.Linear(8, 8)\n"
        "self.weight = nn.Parameter(torch.randn(8, {h}).to(torch.float8_e4m3fn), requires_grad=False)",
        "return x + self.inner(x) * (x @ self.weight.to(x.dtype)).tanh().mean(-1, True)",
    ),
    "named class": Kind("self.inner = First(8, 8)", "return x + self.inner(x)", NAMED),
    "numbers": Kind(
        "self.at = nn.Parameter(torch.arange(4) % {h}, requires_grad=False)\nself.table = nn.Embedding({h}, 8)",
        "return x + self.table(self.at)",
    ),
    "summed": Kind(
        "self.a, self.b = (nn.Parameter(torch.randn(4, 8)) for _ in range(2))",
        "return torch.tanh(x + (self.a + self.b))",
    ),
    "functional": Kind(
        LINEAR, "return x + torch.func.functional_call(self.inner, {'weight': self.inner.weight * 0.5}, (x,))"
    ),
    "nothing": Kind("", "return torch.tanh(x)"),
    "keyword": Kind(LINEAR, "return x + self.inner(input=x)"),
    "grad inside": Kind(
        LINEAR,
        "with torch.set_grad_enabled(not self.training):\n    y = self.inner(x)\nreturn x + self.inner(x) + y.detach()",
    ),
    "own constant": Kind(
        f"{TWO}\nself.how = ('none', 'tanh')[torch.randint(2, ()).item()]",
        "return x + self.b(F.gelu(self.a(x), approximate=self.how))",
    ),
    "own dropout": Kind(
        f"{TWO}\nself.share = (0.25, 0.5)[torch.randint(2, ()).item()]",
        "return x + self.b(F.dropout(torch.tanh(self.a(x)), self.share, self.training))",
    ),
}
"""The kinds by name."""

IN_CHAINS = {"own constant", "own dropout"}
"""Kinds whose layers have constants of their own, so that not all layers of a chain are equal."""

TOGGLES = {
    "which": ("which = 1",),
    "break": ("breaks = True", "breaks = False"),
    "break by element": ("breaks[0] = True", "breaks[0] = False"),
    "break by name": ("breaks = How.BREAKS", "breaks = How.GOES"),
}
"""By kind: assignments in such a layer that a program may do between steps."""

ALONE = {"complex"}
"""Kinds that must be units of their own: their parameters have another dtype, and an FSDP2 unit has only one dtype."""

NO_GRADIENTS = {"numbers", "float8"}
"""Kinds with parameters of dtypes that have no gradients."""

WRITE_TO_BUFFERS = {"batch norm", "buffer", "counted", "spectral norm"}
"""Kinds whose forward writes to buffers."""
