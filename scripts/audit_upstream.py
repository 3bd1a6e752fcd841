"""Compares the public face of an upstream release with ours: names, signatures, configuration keys, metrics.

    python scripts/audit_upstream.py --release 0.7.0 [--upstream verl-0.7.0-py3-none-any.whl] [--show] [--update]

Of the release no more is read than the stored list in scripts/audit/releases; with `--upstream` the wheel's files are
read as text (syntax trees, yaml) and compared with that list, and nothing of them is imported or shown. Exit code 1
where anything differs, or a name in the modules of the release's reasons or a configuration key is missing, without a
reason in that file; where a reason is no longer needed; where docs/migrating.md names something that does not exist
here, or states a departure that is no default and that no test of scripts/audit/departures.yaml shows; where the
tables of docs/verl_names.md are outdated; where verl.compat serves a path that verl does not have; where a loss,
estimator, rule or reward helper gives another result than the release without a reason in scripts/audit/values.py.
"""

import argparse
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from scripts.audit import changes, compat, departures, facts, keys, names, page, values  # noqa: E402
from scripts.audit.facts import Facts  # noqa: E402
from scripts.audit.reasons import Reasons, file_of  # noqa: E402
from scripts.audit.sources import read_release  # noqa: E402


def audit(release: Facts, reasons: Reasons) -> dict[str, list[page.Row]]:
    """The findings by part: the modules that importers rely on, all others, configuration trees, metrics."""
    relied, other = [], []
    for path, entries in release.modules.items():
        required = path in reasons.modules
        for finding in names.compare_names(path, entries):
            row = page.Row(finding, reasons.of(finding, required), required)
            (relied if required else other).append(row)
    absent = [p for p in reasons.modules if p not in release.modules]
    if absent:
        raise FileNotFoundError(f"the release has no {absent[0]}, which its reasons list")
    parts = {"names importers rely on": relied, "names of other modules": other}
    for file, tree in keys.TREES.items():
        if file in release.keys:
            findings = keys.compare_trees(release.keys[file], tree)
            parts[f"keys of {tree}"] = [page.Row(f, reasons.of(f), True) for f in findings]
    findings = keys.compare_metric_names(release.metrics)
    parts["metrics"] = [page.Row(f, reasons.of(f), True) for f in findings]
    return parts


def known_keys() -> set[str]:
    """Keys of every configuration tree of ours."""
    return {key for tree in keys.OURS for key in keys.our_keys(tree)}


def tables_of(parts: dict[str, list[page.Row]], version: str) -> list[str]:
    """The tables of docs/verl_names.md: the counts, the reasons, and of 0.7.0 the modules for imports of verl."""
    tables = [page.markdown(parts), page.reasons_table(parts)]
    return [*tables, compat.table()] if version == facts.VERSIONS[0] else tables


def check_changes(docs: Path, release: Facts, parts: dict[str, list[page.Row]], version: str = "0.7.0") -> list[str]:
    """What migrating.md in `docs` says wrongly; also where the tables of verl_names.md are not those of `parts`."""
    wrong = []
    if version == facts.VERSIONS[0]:
        file = docs / "migrating.md"
        wrong = [*changes.unfounded(file, known_keys(), ROOT), *departures.unfounded(file, ROOT, release.keys)]
    text = (docs / "verl_names.md").read_text(encoding="utf-8")
    fresh = all(table in text for table in tables_of(parts, version))
    return wrong if fresh else [*wrong, "the tables of the audit are outdated; --update writes them"]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--release", help=f"a stored release: {', '.join(facts.VERSIONS)}; default: that of the wheel")
    parser.add_argument("--upstream", type=Path, help="the wheel, or an unpacked folder")
    parser.add_argument("--update", action="store_true", help="write the stored list, and the tables of the audit")
    parser.add_argument("--show", action="store_true", help="print every missing or different name")
    args = parser.parse_args(argv)
    began = time.monotonic()
    version = args.release or (args.upstream.name.split("-")[1] if args.upstream else facts.VERSIONS[0])
    stored, outdated = facts.stored(version), []
    if args.upstream:
        release = Facts.parse(Facts.of(read_release(args.upstream)).text())  # in the order of the list, as without
        if args.update:
            stored.parent.mkdir(exist_ok=True)
            stored.write_text(release.text(), encoding="utf-8")
        elif stored.is_file() and stored.read_text(encoding="utf-8") != release.text():
            outdated.append(f"{stored.relative_to(ROOT)} is not the list of {args.upstream.name}; --update writes it")
    else:
        release = Facts.load(stored)
    reasons = Reasons(file_of(version))
    parts = audit(release, reasons)
    docs = ROOT / "docs"
    if args.update:
        text = (docs / "verl_names.md").read_text(encoding="utf-8")
        old = changes.section(text, changes.AUDITS[version])
        intro = old.partition("\n|")[0]
        joined = "\n".join(tables_of(parts, version))
        (docs / "verl_names.md").write_text(text.replace(old, f"{intro}\n{joined}\n\n"), encoding="utf-8")
    unfounded = check_changes(docs, release, parts, version)
    paths = {path for known in facts.VERSIONS if facts.stored(known).is_file()
             for path in Facts.load(facts.stored(known)).modules}  # fmt: skip
    misplaced = compat.misplaced(dict.fromkeys(paths, ""))
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
        print(f"docs: {line}")
    differing = values.unexplained(version)
    for line in [*misplaced, *outdated, *differing]:
        print(line)
    for pattern in reasons.unused():
        print(f"scripts/audit/{file_of(version).name}: {pattern!r} excuses nothing any more")
    print(page.markdown(parts))
    print(f"{len(bad)} without a reason; {time.monotonic() - began:.0f} s")
    return int(bool(bad or unfounded or misplaced or outdated or differing or reasons.unused()))


if __name__ == "__main__":
    sys.exit(main())
