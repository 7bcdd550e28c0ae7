"""What the documentation points at is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])


def test_tests_named_in_the_contract_exist():
    named = re.findall(r"`(tests/)?([\w/]+\.py)::(test_\w+)`", (ROOT / "docs/contract.md").read_text())
    assert len(named) > 90
    for from_tests, file, function in named:
        source = (ROOT / "tests" / ("" if from_tests else "compiled_fsdp") / file).read_text()
        assert re.search(rf"^def {function}\(", source, re.MULTILINE), f"{file}::{function}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\((?!https?://)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target
