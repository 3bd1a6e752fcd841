"""Why a name or key is not there or differs: a yaml file for each release, checked as strictly as the code."""

from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import yaml

from scripts.audit.names import Finding

FILE = Path(__file__).with_name("reasons.yaml")


def file_of(version: str) -> Path:
    """The reasons of a release; those of 0.7.0, whose interface is that here, are reasons.yaml."""
    return FILE if version == "0.7.0" else FILE.with_name(f"reasons-{version}.yaml")


@dataclass(frozen=True)
class Reason:
    """A pattern of `module:name` (or `tree:key`, `metrics:name`) with its sentence."""

    pattern: str
    text: str

    def fits(self, finding: Finding) -> bool:
        return fnmatchcase(f"{finding.module}:{finding.name}", self.pattern)


class Reasons:
    """The modules that importers rely on, and a reason for what they lack; `others`: one for what differs elsewhere."""

    def __init__(self, file: Path = FILE) -> None:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
        self.modules: list[str] = content["modules"]
        self.others: str = " ".join(content.get("others", "").split())
        self.reasons = [Reason(p, " ".join(t.split())) for p, t in content["reasons"].items()]
        self.used: set[str] = set()

    def of(self, finding: Finding, required: bool = True) -> str:
        """The first reason that fits; empty without one, or where there is nothing to excuse."""
        if not required and finding.status == "differs" and self.others:
            return self.others
        for reason in self.reasons if finding.status in ("missing", "differs") else ():
            if reason.fits(finding):
                self.used.add(reason.pattern)
                return reason.text
        return ""

    def unused(self) -> list[str]:
        """Patterns that fitted nothing: what they excuse is there now."""
        return [r.pattern for r in self.reasons if r.pattern not in self.used]
