"""Other people's libraries, with ours in FSDP2's place: what docs/ecosystem.md says, run as it stands there."""

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def recipe(heading: str, number: int = 0, page: str = "ecosystem.md") -> str:
    """The code of the page's block `number` below `## heading`.

    Raises:
        LookupError: the page has no such heading, or fewer blocks below it.
    """
    sections = re.split(r"^## (.*)\n", (DOCS / page).read_text(), flags=re.MULTILINE)
    texts = dict(zip(sections[1::2], sections[2::2], strict=True))
    blocks = re.findall(r"^```\w*\n(.*?)^```", texts[heading], re.MULTILINE | re.DOTALL) if heading in texts else []
    if number >= len(blocks):
        raise LookupError(f"{page} has {len(blocks)} blocks below '## {heading}'")
    return blocks[number]
