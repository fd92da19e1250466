"""Just enough of a Dockerfile's syntax to run one without Docker."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Stage:
    """From one FROM to the next.

    Args:
        base: image it starts from.
        steps: `(instruction, rest of the line)` in order, continuation lines joined.

    """

    base: str
    steps: list[tuple[str, str]] = field(default_factory=list)

    def values(self, instruction: str) -> list[str]:
        """What follows each `instruction`."""
        return [value for name, value in self.steps if name == instruction]


def stages(path: Path) -> list[Stage]:
    """The stages of a Dockerfile."""
    text = re.sub(r"^\s*#.*\n", "", path.read_text(), flags=re.MULTILINE)
    found: list[Stage] = []
    for line in re.sub(r"\\\n", " ", text).splitlines():
        if not line.strip():
            continue
        instruction, rest = line.strip().split(maxsplit=1)
        if instruction == "FROM":
            found.append(Stage(rest.split()[0]))
        else:
            found[-1].steps.append((instruction, " ".join(rest.split())))
    return found
