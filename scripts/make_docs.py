"""Writes the yaml files of the config trees, docs/config.md and api.md; in other pages the tables between comments (of
columns, metrics, keys of other releases of verl, and of tests/models) and the files that they show.

python scripts/make_docs.py [--check]
"""

import ast
import difflib
import functools
import itertools
import json
import re
import sys
from dataclasses import make_dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from dllm_reasoning.config.iterative import IterativeRefineConfig  # noqa: E402
from dllm_reasoning.metrics import METRICS as DLLM_METRICS  # noqa: E402
from recipe.spd.metrics import METRICS as SPD_METRICS  # noqa: E402
from recipe.spd.settings import SPDSettings  # noqa: E402
from scripts.audit.page import table_of  # noqa: E402
from scripts.config_files import describe, files  # noqa: E402
from verl.config import aliases  # noqa: E402
from verl.config.asynchronous import AsyncPPOConfig  # noqa: E402
from verl.config.compose import CHOICE  # noqa: E402
from verl.config.fields import field_metadata, field_types, section_type, setting, type_name  # noqa: E402
from verl.config.offline import EvaluationConfig, GenerationConfig  # noqa: E402
from verl.config.ppo import PPOConfig  # noqa: E402
from verl.config.sft import SFTConfig  # noqa: E402
from verl.protocol.columns import ARRAYS, TENSORS, WRITERS, Column  # noqa: E402
from verl.report.health import RULES  # noqa: E402
from verl.report.metric_names import METRICS  # noqa: E402

SPD = make_dataclass("SPD", [("spd", SPDSettings, setting(SPDSettings))], bases=(PPOConfig,))
MODELS, TEMPLATES = "tests/models/table.json", "tests/models/templates.json"
BAR = "&#124;"  # a bar in a table's cell
CONFIG = ROOT / "verl/trainer/config"
TREES = {
    "python -m verl.trainer.main_ppo": (CONFIG / "ppo_trainer.yaml", PPOConfig),
    "python -m recipe.fully_async_policy.fully_async_main: what differs from main_ppo":
        (CONFIG / "fully_async_ppo_trainer.yaml", AsyncPPOConfig),
    "python -m recipe.one_step_off_policy.main_ppo: what differs from main_ppo":
        (CONFIG / "one_step_off_ppo_trainer.yaml", AsyncPPOConfig),
    "torchrun -m verl.trainer.fsdp_sft_trainer": (CONFIG / "sft_trainer.yaml", SFTConfig),
    "torchrun -m verl.trainer.sft_trainer: what differs from fsdp_sft_trainer":
        (CONFIG / "sft_trainer_engine.yaml", SFTConfig),
    "torchrun -m dllm_reasoning.train_iterative_refine: what differs from SFT":
        (ROOT / "dllm_reasoning/config/iterative_refine.yaml", IterativeRefineConfig),
    "python -m recipe.dapo.main_dapo: what differs from main_ppo":
        (ROOT / "recipe/dapo/config/dapo_trainer.yaml", PPOConfig),
    "the SPD scorer (spd_trainer): what differs from main_ppo":
        (ROOT / "recipe/spd/config/spd_trainer.yaml", SPD),
    "python -m verl.trainer.main_generation: what differs from main_ppo's actor_rollout_ref.model and .rollout":
        (CONFIG / "generation.yaml", GenerationConfig),
    "python -m verl.trainer.main_eval": (CONFIG / "evaluation.yaml", EvaluationConfig),
}  # fmt: skip
KEY = re.compile(r"( *)(\w+):(?: (.*))?$")
SHOWN = re.compile(r"^<!-- (\S+\.py) -->\n```python\n.*?^```\n", re.M | re.S)  # a file of the tree in a page
#: keys that most runs set, in the order in which people meet them
COMMON = (
    "data.train_files", "data.val_files", "data.train_batch_size", "data.max_prompt_length", "data.max_response_length",
    "custom_reward_function.path", "algorithm.adv_estimator", "actor_rollout_ref.model.path",
    "actor_rollout_ref.model.lora_rank", "actor_rollout_ref.model.use_remove_padding",
    "actor_rollout_ref.actor.optim.lr", "actor_rollout_ref.actor.ppo_mini_batch_size",
    "actor_rollout_ref.actor.use_dynamic_bsz", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
    "actor_rollout_ref.actor.use_kl_loss", "actor_rollout_ref.actor.fsdp_config.param_offload",
    "actor_rollout_ref.rollout.name", "actor_rollout_ref.rollout.mode", "actor_rollout_ref.rollout.n",
    "actor_rollout_ref.rollout.temperature", "actor_rollout_ref.rollout.tensor_model_parallel_size",
    "actor_rollout_ref.rollout.gpu_memory_utilization", "trainer.device", "trainer.n_gpus_per_node",
    "trainer.total_epochs", "trainer.total_training_steps", "trainer.test_freq", "trainer.save_freq",
    "trainer.default_local_dir", "trainer.dry_run",
)  # fmt: skip
#: the columns of docs/concepts.md, in the order in which a step adds them
MAIN_COLUMNS = (
    "uid", "input_ids", "attention_mask", "responses", "response_mask", "token_level_scores", "old_log_probs",
    "ref_log_prob", "token_level_rewards", "advantages",
)  # fmt: skip
API = {
    "Data": ["verl.protocol.DataProto"],
    "Trainers": ["verl.trainer.ppo.ray_trainer.RayPPOTrainer", "verl.trainer.sft.trainer.FSDPSFTTrainer"],
    "Advantage estimators": ["verl.algos.advantage"],
    "Policy losses": ["verl.algos.policy_loss"],
    "KL penalties": ["verl.algos.kl"],
    "Reward managers": ["verl.reward.managers.base", "verl.reward.managers.naive.NaiveRewardManager"],
    "Rollout": ["verl.rollout.base"],
    "Agents": ["verl.agents.agent_loop.base", "verl.agents.message_encoder.MessageEncoder",
               "verl.agents.agent_loop.tool_parser.ToolParser", "verl.agents.tools.base_tool.BaseTool",
               "verl.agents.interactions.base.BaseInteraction"],
    "Engine": ["verl.training.engine.base"],
    "Settings": ["verl.config.fields.setting"],
}


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
            listed.update(keys_of(included, f"{prefix}{package or group}."))
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


def described(owner: type | None, key: str) -> tuple[str, str]:
    """(type and permitted values, description) of a key of a tree; empty where no dataclass has it."""
    *sections, name = key.split(".")
    for section in sections:
        owner = section_type(field_types(owner).get(section)) if owner else None
    if owner is None or name not in field_types(owner):
        return "", ""
    rule = field_metadata(owner, name)["rule"]
    words = {"low": "at least {}", "above": "above {}", "high": "at most {}", "choices": "{}", "each_of": "of {}"}
    texts = [
        text.format(", ".join(map(str, rule[part])) if isinstance(rule[part], tuple) else rule[part])
        for part, text in words.items()
        if part in rule
    ]
    return "; ".join([type_name(field_types(owner)[name]), *texts]), describe(owner, name) or ""


def config_page() -> str:
    """The configuration, one table per section."""
    source = "Generated by `scripts/make_docs.py` from the dataclasses of `verl/config`; change it there."
    printing = "This prints the resolved configuration of a command (`--config-name=sft_trainer`: of another tree):"
    lines = ["# Configuration", "", source, "", printing, ""]
    lines += ["```bash", "python scripts/print_cfg.py trainer.seed=3", "```", ""]
    lines += ["*always*: this behaviour is always on; setting the key to `false` is reported."]
    lines += ["*no effect*: the key is accepted for scripts that set it, and setting it is reported.", ""]
    lines += ["## The keys of most runs", "", "| key | default | meaning |", "|---|---|---|"]
    file, owner = TREES["python -m verl.trainer.main_ppo"]
    keys = keys_of(file)
    for key in COMMON:
        default, sentence = keys[key]
        meaning = (sentence or described(owner, key)[1]).replace("|", "/")
        lines.append(f"| `{key}` | `{default}` | {meaning} |")
    check = "`trainer.dry_run=true` checks the settings, data, memory and disk space of a command without training."
    lines += ["", check, ""]
    shown = set()  # rows of main_ppo's model and rollout, as main_generation would show them
    for title, (file, owner) in TREES.items():
        lines += [f"## {title}", ""]
        keys, section = keys_of(file), None
        for key, (default, sentence) in sorted(keys.items()):
            values, description = described(owner, key)
            row = f"| `{key}` | `{default}` | {values} | {(sentence or description).replace('|', '/')} |"
            if file.stem == "ppo_trainer" and key.startswith("actor_rollout_ref."):
                shown.add(row.replace("actor_rollout_ref.", "", 1))
            elif owner is GenerationConfig and row in shown:
                continue
            here = ".".join(key.split(".")[: 2 if key.startswith("actor_rollout_ref.") else 1])
            if here != section:
                section = here
                lines += ["", f"### {section}", "", "| key | default | values | meaning |", "|---|---|---|---|"]
            lines.append(row)
        lines.append("")
    return "\n".join(lines) + "\n"


def metric_tables() -> dict[str, str]:
    """Tables of docs/metrics.md: the metrics of all runs and of the recipes, and the limits of `health/*`."""
    made = {}
    for name, metrics in (("metrics", METRICS), ("dllm", DLLM_METRICS.meanings), ("spd", SPD_METRICS.meanings)):
        rows = ((f"`{metric}`", meaning.replace("|", "\\|")) for metric, meaning in metrics.items())
        made[name] = table_of(("name", "meaning"), rows)
    limits = ((f"`{rule.metric}`", rule.limits, rule.patience, f"{rule.meaning}.", rule.remedy) for rule in RULES)
    return made | {"health": table_of(("metric", "expected", "steps", "otherwise", "remedy"), limits)}


def api_page() -> str:
    """The API reference: a table of names for readers of the file; mkdocstrings adds the docstrings to the site."""
    shapes = "Shapes: B rows, P prompt tokens, R response tokens, T tokens of a full row."
    lines = ["# API reference", "", "Generated by `scripts/make_docs.py` from the docstrings.", "", shapes, ""]
    for title, names in API.items():
        lines += [f"## {title}", ""]
        for name in names:
            module = name if (ROOT / name.replace(".", "/")).with_suffix(".py").exists() else name.rpartition(".")[0]
            path = module.replace(".", "/")
            file = f"{path}/__init__.py" if (ROOT / path).is_dir() else f"{path}.py"
            body = ast.parse((ROOT / file).read_text()).body
            if name != module:
                (owner,) = (node for node in body if getattr(node, "name", None) == name.rpartition(".")[2])
                body = [owner, *(owner.body if isinstance(owner, ast.ClassDef) else ())]
            lines += [f"`{file}`:", "", "| name | meaning |", "|---|---|"]
            for node in body:
                described = isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
                if described and not node.name.startswith("_") and (docstring := ast.get_docstring(node)):
                    sentence = " ".join(docstring.partition("\n\n")[0].split())
                    lines.append(f"| `{node.name}` | {sentence.replace('|', '/').replace('<', '&lt;')} |")
            lines += ["", f"::: {name}", ""]
    return "\n".join(lines)


def model_tables() -> dict[str, str]:
    """Tables of docs/models.md, from those that the tests of model families and chat templates compare with."""
    rows, templates = (json.loads((ROOT / table).read_text()) for table in (MODELS, TEMPLATES))
    columns = list(next(iter(rows.values())))
    reasons: dict[str, list[str]] = {}
    for name, row in rows.items():
        if "reason" in row:
            reasons.setdefault(row["reason"], []).append(name)
    families = ((name, *(row[column] for column in columns)) for name, row in rows.items())
    errors = [f"- {', '.join(names)}: {text.replace('<', '&lt;')}." for text, names in reasons.items()]
    listed = []
    for name, row in sorted(templates.items(), key=lambda item: not item[1]["testable"]):
        reason = row.get("reason", "").replace("|", BAR).replace("<", "&lt;")
        listed.append((name, row["result"], row["calls"], reason))
    return {"families": table_of(("family", *columns), families), "errors": "\n".join(errors),
            "templates": table_of(("template", "conversations", "calls", "reason"), listed)}  # fmt: skip


def column_table(columns: dict[str, Column]) -> str:
    """Rows of the registry of columns."""
    rows = ((f"`{name}`", column.shape, column.dtype, column.writer, column.meaning)
            for name, column in columns.items())  # fmt: skip
    return table_of(("column", "shape", "dtype", "written by", "meaning"), rows)


def columns_tables() -> dict[str, str]:
    """Tables of docs/columns.md: all columns of a batch, and who writes them."""
    writers = ((writer, f"`{method}`", ", ".join(f"`{place}`" for place in places.split(", ")))
               for writer, (method, places) in WRITERS.items())  # fmt: skip
    return {"tensors": column_table(TENSORS), "arrays": column_table(ARRAYS),
            "writers": table_of(("writer", "method", "code"), writers)}  # fmt: skip


def alias_tables() -> dict[str, str]:
    """Tables of docs/verl_names.md: keys of other releases of verl."""
    made = {}
    for name, rows in (("RL", aliases.RL), ("SFT", aliases.SFT)):
        cells = ((row.old.replace(f".{CHOICE}", "= (a group)"), row.since, row.new or "-", row.text) for row in rows)
        made[f"aliases: {name}"] = table_of(("verl", "since", "here", "value"), cells)
    return made


def with_tables(page: Path, tables: dict[str, str]) -> str:
    """A page with each table between its comments, `<!-- NAME ... -->` and `<!-- end of NAME -->`."""
    text = page.read_text()
    for name, table in tables.items():
        between = re.compile(rf"(<!-- {name}\b[^>]*-->).*(<!-- end of {name} -->)", re.S)
        text, count = between.subn(lambda found, table=table: f"{found[1]}\n\n{table}\n\n{found[2]}", text)
        if not count:
            raise ValueError(f"{page} lacks the comments of the table {name!r}")
    return text


def with_shown_files(page: Path) -> str:
    """A page whose code block after each comment `<!-- path -->` is that file."""
    return SHOWN.sub(lambda m: f"<!-- {m[1]} -->\n```python\n{(ROOT / m[1]).read_text()}```\n", page.read_text())


def main() -> int:
    check, stale = "--check" in sys.argv[1:], 0
    pages = {ROOT / path: file.text for path, file in files().items()}  # the pages read the yaml files
    docs = ROOT / "docs"
    pages |= {docs / "config.md": config_page, docs / "api.md": api_page}
    pages |= {docs / name: functools.partial(with_shown_files, docs / name) for name in ("extending.md", "plugins.md")}
    main_columns = {name: {**ARRAYS, **TENSORS}[name] for name in MAIN_COLUMNS}
    for name, tables in {
        "columns": columns_tables(), "concepts": {"columns": column_table(main_columns)}, "metrics": metric_tables(),
        "models": model_tables(), "verl_names": alias_tables(),
    }.items():  # fmt: skip
        page = docs / f"{name}.md"
        pages[page] = functools.partial(with_tables, page, tables)
    for path, write in pages.items():
        text, name = write(), path.relative_to(ROOT)
        if path.exists() and path.read_text() == text:
            continue
        stale += 1
        if check:
            print(f"{name} is out of date; run python scripts/make_docs.py. The first lines that differ:")
            kept = path.read_text().splitlines() if path.exists() else []
            print(*itertools.islice(difflib.unified_diff(kept, text.splitlines(), n=0, lineterm=""), 3, 7), sep="\n")
        else:
            path.write_text(text)
            print(f"{name} written")
    return int(check and stale > 0)


if __name__ == "__main__":
    sys.exit(main())
