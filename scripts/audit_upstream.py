"""Compares the public face of an upstream release with ours: names, signatures, configuration keys, metrics.

    python scripts/audit_upstream.py --upstream verl-0.7.0-py3-none-any.whl [--html out.html] [--update]

Upstream's files are read as text (syntax trees, yaml); nothing of them is imported or shown. Exit code 1 where
anything differs, or a name in the modules of scripts/audit/reasons.yaml or a configuration key is missing, without a
reason in that file; where a reason is no longer needed; where docs/migrating.md names something that does not exist
here, states a departure that is no default and that no test of scripts/audit/departures.yaml shows, or has outdated
tables; where a module for imports of verl alone is at a path that verl does not have.
"""

import argparse
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from scripts.audit import changes, compat, departures, keys, names, page  # noqa: E402
from scripts.audit.reasons import Reasons  # noqa: E402
from scripts.audit.sources import read_release  # noqa: E402


def audit(release: dict[str, str], reasons: Reasons) -> dict[str, list[page.Row]]:
    """The findings by part: the modules that importers rely on, all others, configuration trees, metrics."""
    relied, other = [], []
    for path in sorted(p for p in release if p.endswith(".py")):
        required = path in reasons.modules
        for finding in names.compare_module(path, release[path]):
            (relied if required else other).append(page.Row(finding, reasons.of(finding), required))
    absent = [p for p in reasons.modules if p not in release]
    if absent:
        raise FileNotFoundError(f"the release has no {absent[0]}, which scripts/audit/reasons.yaml lists")
    parts = {"names importers rely on": relied, "names of other modules": other}
    for file, tree in keys.TREES.items():
        findings = keys.compare_keys(release, file, tree)
        parts[f"keys of {tree}"] = [page.Row(f, reasons.of(f), True) for f in findings]
    findings = keys.compare_metrics(release)
    parts["metrics"] = [page.Row(f, reasons.of(f), True) for f in findings]
    return parts


def known_keys() -> set[str]:
    """Keys of every configuration tree of ours."""
    return {key for tree in keys.OURS for key in keys.our_keys(tree)}


def check_changes(file: Path, release: dict[str, str], parts: dict[str, list[page.Row]]) -> list[str]:
    """What docs/migrating.md says wrongly; also where its tables of the audit are not those of `parts`."""
    wrong = [*changes.unfounded(file, known_keys(), ROOT), *departures.unfounded(file, ROOT, release)]
    text = file.read_text(encoding="utf-8")
    fresh = all(table in text for table in (page.markdown(parts), page.reasons_table(parts), compat.table(ROOT)))
    return wrong if fresh else [*wrong, "the tables of the audit are outdated; --update writes them"]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--upstream", type=Path, required=True, help="the wheel, or an unpacked folder")
    parser.add_argument("--html", type=Path, help="page with every finding")
    parser.add_argument("--update", action="store_true", help="write the tables of the audit to docs/migrating.md")
    parser.add_argument("--show", action="store_true", help="print every missing or different name")
    args = parser.parse_args(argv)
    began = time.monotonic()
    reasons = Reasons()
    release = read_release(args.upstream)
    parts = audit(release, reasons)
    migrating = ROOT / "docs" / "migrating.md"
    if args.update:
        text = migrating.read_text(encoding="utf-8")
        old = changes.section(text, changes.AUDIT)
        intro = old.partition("\n|")[0]
        new = f"{intro}\n{page.markdown(parts)}\n{page.reasons_table(parts)}\n{compat.table(ROOT)}\n\n"
        migrating.write_text(text.replace(old, new), encoding="utf-8")
    unfounded = check_changes(migrating, release, parts)
    misplaced = compat.misplaced(ROOT, release)
    if args.html:
        args.html.parent.mkdir(parents=True, exist_ok=True)
        args.html.write_text(page.html(f"{args.upstream.name} and this tree", parts, unfounded), encoding="utf-8")
    bad = [row for rows in parts.values() for row in page.unexplained(rows)]
    for rows in parts.values() if args.show else ():
        for row in rows:
            f = row.finding
            if f.status in ("missing", "differs") and (row.required or f.detail != "no module"):
                print(f"{f.status:8s} {f.module}:{f.name}  {f.detail}  [{row.reason}]")
    for row in bad:
        f = row.finding
        print(f"{f.status} without a reason: {f.module}:{f.name}  {f.detail}".rstrip())
    for line in unfounded:
        print(f"docs/migrating.md: {line}")
    for line in misplaced:
        print(line)
    for pattern in reasons.unused():
        print(f"scripts/audit/reasons.yaml: {pattern!r} excuses nothing any more")
    print(page.markdown(parts))
    print(f"{len(bad)} without a reason; {time.monotonic() - began:.0f} s")
    return int(bool(bad or unfounded or misplaced or reasons.unused()))


if __name__ == "__main__":
    sys.exit(main())
