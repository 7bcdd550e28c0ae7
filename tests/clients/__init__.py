"""Other people's libraries, with ours in FSDP2's place: what docs/ecosystem.md says, run as it stands there."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs/ecosystem.md"


def recipe(heading: str, number: int = 0) -> str:
    """The code of the page's block `number` below `## heading`.

    Raises:
        LookupError: the page has no such heading, or fewer blocks below it.
    """
    sections = re.split(r"^## (.*)\n", PAGE.read_text(), flags=re.MULTILINE)
    texts = dict(zip(sections[1::2], sections[2::2], strict=True))
    blocks = re.findall(r"^```\w*\n(.*?)^```", texts[heading], re.MULTILINE | re.DOTALL) if heading in texts else []
    if number >= len(blocks):
        raise LookupError(f"{PAGE.name} has {len(blocks)} blocks below '## {heading}'")
    return blocks[number]
