"""Commands in the fenced blocks of all Markdown files."""

import itertools
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"```bash\n(.*?)```", re.S)
#: program -> the tree whose keys its key=value words name
SETTINGS = {
    "verl.trainer.main_ppo": "ppo_trainer", "verl.trainer.main_generation": "generation",
    "verl.trainer.main_eval": "evaluation", "verl.trainer.fsdp_sft_trainer": "sft_trainer",
    "recipe.dapo.main_dapo": "dapo_trainer", "dllm_reasoning.train_iterative_refine": "iterative_refine",
    "train_spd_scorer.py": "spd_trainer", "scripts/print_cfg.py": "ppo_trainer",
}  # fmt: skip


def tracked(*patterns: str) -> list[Path]:
    """Files of the tree that git knows or, outside of a checkout, that lie there."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", *patterns], cwd=ROOT, capture_output=True,
                            text=True)  # fmt: skip
    if listed.returncode == 0 and listed.stdout:
        return [ROOT / name for name in listed.stdout.split("\n") if name and (ROOT / name).is_file()]
    return [f for p in patterns for f in ROOT.rglob(p) if not {".venv", "outputs"} & set(f.parts)]


def commands() -> Iterator[tuple[Path, list[str]]]:
    """(file, words) of every command; continued lines are joined, comments and variables before it are cut."""
    for page in tracked("*.md"):
        for block in FENCE.findall(page.read_text()):
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                for _, command in itertools.groupby(words, lambda word: word == "&&"):
                    words = list(itertools.dropwhile(lambda word: re.fullmatch(r"[A-Z_]+=.*", word), command))
                    if words and words != ["&&"]:
                        yield page.relative_to(ROOT), words


def program_of(words: list[str]) -> tuple[str, list[str]]:
    """(module or script, its arguments) of a python or torchrun command."""
    rest = list(itertools.dropwhile(lambda word: word.startswith("--"), words[1:]))
    return (rest[1], rest[2:]) if rest[0] == "-m" else (rest[0], rest[1:])
