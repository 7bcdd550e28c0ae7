"""Write a finding as a script that runs the program and prints the differences. At most 40 lines after shrinking."""

from __future__ import annotations

import re

from tests.fuzz.program import Program
from tests.fuzz.source import IMPORTS, source_of

MOST_LINES = 40

MAIN = """dist.init_process_group("gloo"); seen = {{"ours": {{}}, "{other}": {{}}}}
for way, to in seen.items():
    train(way, lambda name, t, to=to: to.update({{name: t if t is None else t.detach().clone()}}))
for name, t in seen["{other}"].items():
    one, two = (t.full_tensor() if hasattr(t, "full_tensor") else t for t in (seen["ours"].get(name), t))
    one is two is None or torch.allclose(one, two, 1e-5, 1e-6) or print(f"{{name}}: ours {{one}}, {other} {{two}}")
"""


def script_of(program: Program, other: str, about: str) -> str:
    """Return the text of the script, which torchrun runs with `program.world` ranks.

    Args:
        program: the program of the finding.
        other: the way that compiled_fsdp is compared with: "fsdp2" or "plain".
        about: one line that describes the finding.
    """
    body = source_of(program, ("ours", other)) + MAIN.format(other=other)
    imports = [line for line in IMPORTS.splitlines() if any(_uses(body, name) for name in _names(line))]
    imports = [_without(line, body) for line in imports]
    head = [f"# torchrun --nproc-per-node {program.world} this.py: {about}"]
    return "\n".join([*head, *imports, body])


def _names(line: str) -> list[str]:
    """Return the names that an import line defines."""
    listed = line.split("import ", 1)[1]
    return [name.split(" as ")[-1].split(".")[0].strip() for name in listed.split(",")]


def _uses(body: str, name: str) -> bool:
    return re.search(rf"\b{name}\b", body) is not None


def _without(line: str, body: str) -> str:
    """Return an import line without the names that the body does not use."""
    start, listed = line.split("import ", 1)
    kept = [part.strip() for part in listed.split(",") if _uses(body, _names(f"import {part}")[0])]
    return f"{start}import {', '.join(kept)}"
