"""Prints what works for each model family, and fails where that is not the stored table.

python -m tests.models [--write]: stores the table, from which scripts/make_docs.py writes docs/models.md.
"""

import json
import sys

from tests.models.checks import TABLE, observed, stored
from tests.models.families import FAMILIES


def main(write: bool) -> int:
    rows, wrong = {}, []
    for name in FAMILIES:
        try:
            rows[name] = observed(name)
        except Exception as error:  # noqa: BLE001 - the other families are shown too
            rows[name], wrong = {"fails": f"{type(error).__name__}: {error}".splitlines()[0][:200]}, [*wrong, name]
        print(f"{name:16} " + ", ".join(f"{key}: {value}" for key, value in rows[name].items() if key != "has"))
    if write and not wrong:
        TABLE.write_text(json.dumps(rows, indent=1) + "\n")
        return 0
    known = stored() if TABLE.exists() else {}
    wrong += [name for name in {**known, **rows} if rows.get(name) != known.get(name) and name not in wrong]
    if wrong:
        print(f"not as in {TABLE.name}: {', '.join(wrong)}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main("--write" in sys.argv[1:]))
