"""What the documentation points at is there."""

import ast
import functools
import re
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from tests.harness import batch, distributed
from tests.harness.models import Mlp, small

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])


def test_tests_named_in_the_contract_are_in_the_suite():
    """Each row names a test, or says `no test`. It is there, and `make test` runs it: it is not marked `more` as a
    whole."""
    page = (ROOT / "docs/contract.md").read_text()
    rows = re.split(r"^- ", page.partition("\n## ")[2], flags=re.MULTILINE)[1:]
    assert len(rows) > 150
    named = [re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", row) for row in rows]
    for row, tests in zip(rows, named, strict=True):
        assert len(tests) == row.count("::"), row
        assert tests or "`no test`" in row, row
    for file, function in {test for tests in named for test in tests}:
        tree = ast.parse((ROOT / file).read_text())
        found = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == function]
        assert found, f"{file}::{function}"
        assert all(ast.unparse(mark) != "pytest.mark.more" for mark in found[0].decorator_list), f"{file}::{function}"


def test_recipes_for_other_libraries():
    """Ten lines at most; and each row of what was run names a test that is there."""
    page = (ROOT / "docs/ecosystem.md").read_text()
    for code in re.findall(r"^```\w+\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        assert len([line for line in code.splitlines() if line.strip()]) <= 10, code
    rows = re.split(r"^[-|] (?!client)", page.partition("\n## What was run\n")[2], flags=re.MULTILINE)[1:]
    assert len(rows) >= 15
    for row in rows:
        text = (ROOT / "tests/clients" / re.search(r"`(test_\w+\.py)::", row)[1]).read_text()
        for function in re.findall(r"::(test_\w+)`", row):
            assert f"def {function}(" in text, row


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\((?!https?://)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", ["accumulation", "porting"])
@distributed(world_size=2)  # many variants of a model are compiled
def test_snippets_run(rank, world_size, page):
    """In the order in which they stand, in one namespace."""
    text = (ROOT / f"docs/{page}.md").read_text()
    snippets = list(re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    assert len(snippets) >= 4
    names = {
        "build_model": functools.partial(small, blocks=2),
        "Block": Mlp,
        "mesh": init_device_mesh("cpu", (2,)),
        "loss_fn": lambda logits, targets: F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten()),
        "microbatches": [batch(rank, number) for number in range(3)],
        "inputs": batch(rank, 0)[0],
        "targets": batch(rank, 0)[1],
    }
    # generated code takes longer to compile, and is no other here
    quick = functools.partial(torch.compile, options={"codegen": "aot_eager"})
    with mock.patch.object(torch, "compile", quick):
        for snippet in snippets:
            # the page's own line numbers in a traceback
            above = "\n" * text[: snippet.start(1)].count("\n")
            exec(compile(above + snippet[1], f"{page}.md", "exec"), names)
    assert all(not param.isnan().any() for param in names["model"].state_dict().values())
