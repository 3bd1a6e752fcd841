"""Why a name or key is not there or differs: scripts/audit/reasons.yaml, checked as strictly as the code."""

from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import yaml

from scripts.audit.names import Finding

FILE = Path(__file__).with_name("reasons.yaml")


@dataclass(frozen=True)
class Reason:
    """A pattern of `module:name` (or `tree:key`, `metrics:name`) with its sentence."""

    pattern: str
    text: str

    def fits(self, finding: Finding) -> bool:
        return fnmatchcase(f"{finding.module}:{finding.name}", self.pattern)


class Reasons:
    """The modules that importers rely on, and a reason for what they lack."""

    def __init__(self, file: Path = FILE) -> None:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
        self.modules: list[str] = content["modules"]
        self.reasons = [Reason(p, " ".join(t.split())) for p, t in content["reasons"].items()]
        self.used: set[str] = set()

    def of(self, finding: Finding) -> str:
        """The first reason that fits; empty without one, or where there is nothing to excuse."""
        for reason in self.reasons if finding.status in ("missing", "differs") else ():
            if reason.fits(finding):
                self.used.add(reason.pattern)
                return reason.text
        return ""

    def unused(self) -> list[str]:
        """Patterns that fitted nothing: what they excuse is there now."""
        return [r.pattern for r in self.reasons if r.pattern not in self.used]
