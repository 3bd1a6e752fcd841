"""Writes docs/config.md and docs/metrics.md from the code: python scripts/make_docs.py [--check]."""

import re
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from verl.utils.metric.names import METRICS  # noqa: E402

TREES = {
    "python -m verl.trainer.main_ppo": ROOT / "verl/trainer/config/ppo_trainer.yaml",
    "torchrun -m verl.trainer.fsdp_sft_trainer": ROOT / "verl/trainer/config/sft_trainer.yaml",
    "torchrun -m dllm_reasoning.train_iterative_refine: what differs from SFT":
        ROOT / "dllm_reasoning/config/iterative_refine.yaml",
    "python -m recipe.dapo.main_dapo: what differs": ROOT / "recipe/dapo/config/dapo_trainer.yaml",
    "the SPD scorer (spd_trainer): what differs": ROOT / "recipe/spd/config/spd_trainer.yaml",
}
KEY = re.compile(r"( *)(\w+):(?: (.*))?$")


def keys_of(file: Path, prefix: str = "") -> dict[str, tuple[str, str]]:
    """{dotted key: (default, sentence)} of a yaml file and of the files of its defaults list, sections left out."""
    text = file.read_text()
    listed: dict[str, tuple[str, str]] = {}
    own = _own_keys(text)
    for entry in yaml.safe_load(text).get("defaults", []):
        if not isinstance(entry, dict):
            if entry == "_self_":
                listed.update({f"{prefix}{key}": value for key, value in own.items()})
            continue
        ((group, name),) = entry.items()
        folder, _, package = group.partition("@")
        included = (file.parent / folder / f"{name}.yaml").resolve()
        if included.exists():
            listed.update(keys_of(included, f"{prefix}{package}."))
    return listed or {f"{prefix}{key}": value for key, value in own.items()}


def _own_keys(text: str) -> dict[str, tuple[str, str]]:
    path: list[tuple[int, str]] = []
    listed, sentence, skipped = {}, [], None
    for line in text.splitlines():
        match, stripped = KEY.match(line), line.strip()
        indent = len(line) - len(line.lstrip())
        if skipped is not None and stripped and indent > skipped:
            continue
        skipped = None
        if stripped.startswith("#"):
            sentence.append(stripped.lstrip("# "))
            continue
        if match is None:
            sentence = [] if not stripped else sentence
            continue
        name, value = match.group(2), match.group(3)
        path = [(i, n) for i, n in path if i < indent]
        if name in ("defaults", "hydra") and indent == 0:
            skipped = indent
        elif value is None:
            path.append((indent, name))
        elif name != "_target_":
            listed[".".join([*(n for _, n in path), name])] = (value, " ".join(sentence))
        sentence = []
    return listed


def config_page() -> str:
    """The configuration, one table a section."""
    lines = ["# Configuration", "", "Made by `scripts/make_docs.py` from the yaml files; change it there.", ""]
    for title, file in TREES.items():
        lines += [f"## {title}", ""]
        keys, section = keys_of(file), None
        for key, (default, sentence) in sorted(keys.items()):
            here = ".".join(key.split(".")[: 2 if key.startswith("actor_rollout_ref.") else 1])
            if here != section:
                section = here
                lines += ["", f"### {section}", "", "| key | default | |", "|---|---|---|"]
            lines.append(f"| `{key}` | `{default}` | {sentence.replace('|', '/')} |")
        lines.append("")
    return "\n".join(lines) + "\n"


def metrics_page() -> str:
    """The metrics, one table."""
    lines = ["# Metrics", "", "Made by `scripts/make_docs.py` from `verl/utils/metric/names.py`; change it there.", ""]
    lines += ["| name | |", "|---|---|", *(f"| `{name}` | {sentence} |" for name, sentence in METRICS.items())]
    return "\n".join(lines) + "\n"


def main() -> int:
    pages = {ROOT / "docs" / "config.md": config_page(), ROOT / "docs" / "metrics.md": metrics_page()}
    stale = [path for path, text in pages.items() if not path.exists() or path.read_text() != text]
    if "--check" in sys.argv[1:]:
        for path in stale:
            print(f"{path.relative_to(ROOT)} is not what the code says; run python scripts/make_docs.py")
        return int(bool(stale))
    for path in stale:
        path.write_text(pages[path])
        print(f"{path.relative_to(ROOT)} written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
