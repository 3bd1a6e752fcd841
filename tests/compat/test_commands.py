"""The command lines of verl 0.7 and 0.9 in tests/compat/commands are accepted, or refused with what works here."""

import re
import shlex
from pathlib import Path

import pandas as pd
import pytest

from scripts.audit.keys import OURS
from tests.helpers.documents import ROOT, SETTINGS
from tests.helpers.models import save_tiny_llama
from verl.config.aliases import with_current_names
from verl.config.compose import forced_override
from verl.planning.config_check import known_tree
from verl.planning.sft import sft_entry
from verl.trainer.main_ppo import dry_run
from verl.trainer.sft.trainer import FSDPSFTTrainer

COMMANDS = sorted(Path(__file__).with_name("commands").glob("*.sh"))
REFUSED = {
    "verl09_distillation": ("distillation.enabled=true", "algorithm.adv_estimator=opd"),
}
TREES = {**SETTINGS, "verl.trainer.sft_trainer": "sft_trainer_engine"}
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }} {% endfor %}"
    "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} <eos> {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """{variable of the commands: file}."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

    folder = tmp_path_factory.mktemp("commands")
    model = save_tiny_llama(folder / "model", hidden=256, positions=32768)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(model)
    reward_model = folder / "reward_model"
    config = LlamaConfig.from_pretrained(model)
    config.num_labels = 1
    LlamaForSequenceClassification(config).save_pretrained(reward_model)
    tokenizer.save_pretrained(reward_model)
    rows = [
        {"data_source": "openai/gsm8k", "prompt": [{"role": "user", "content": "1 + 1"}],
         "reward_model": {"style": "rule", "ground_truth": "2"}, "extra_info": {"index": i}}
        for i in range(1600)
    ]  # fmt: skip
    pd.DataFrame(rows).to_parquet(folder / "prompts.parquet")
    messages = [{"role": "user", "content": "1 + 1"}, {"role": "assistant", "content": "2"}]
    pairs = [{"question": "1 + 1", "answer": "2", "messages": messages}] * 300
    pd.DataFrame(pairs).to_parquet(folder / "pairs.parquet")
    (folder / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n"
    )
    (folder / "tools.yaml").write_text((ROOT / "examples/tools_arithmetic/tools.yaml").read_text())
    return {
        "TRAIN": folder / "prompts.parquet", "VAL": folder / "prompts.parquet", "SFT_TRAIN": folder / "pairs.parquet",
        "SFT_VAL": folder / "pairs.parquet", "MODEL": model, "REWARD_MODEL": reward_model,
        "REWARD_FUNCTION": folder / "reward.py", "TOOL_CONFIG": folder / "tools.yaml",
    }  # fmt: skip


def command(file, files):
    """(module, overrides, ranks that torchrun starts) of a command with the files of the test."""
    words = shlex.split(file.read_text().replace("\\\n", " "))
    at = words.index("-m") + 1
    ranks = next((w.partition("=")[2] for w in words[:at] if w.startswith("--nproc_per_node=")), None)
    return words[at], [re.sub(r"\$(\w+)", lambda m: str(files[m[1]]), word) for word in words[at + 1 :]], ranks


def composed(program, words):
    """(the config of these words under the names of this project, the tree without them)."""
    from hydra import compose, initialize_config_dir

    name = TREES[program]
    folder = ROOT / OURS[SETTINGS.get(program, "sft_trainer")].replace(".", "/")
    with initialize_config_dir(str(folder), version_base=None):
        forced = [forced_override(word, groups="sft" not in program) for word in [*words, "trainer.dry_run=true"]]
        config, known = compose(name, forced), known_tree(name, forced)
    return with_current_names(config, {word.lstrip("+").partition("=")[0] for word in forced}), known


def test_there_are_twenty_of_which_one_is_refused():
    names = [file.stem for file in COMMANDS]
    assert len(names) == 20 and sum(name.startswith("verl09_") for name in names) == 10
    assert len(REFUSED) == 1 and REFUSED.keys() <= set(names)


@pytest.mark.parametrize("file", COMMANDS, ids=lambda file: file.stem)
def test_a_command_passes_the_dry_run(file, files, capsys, monkeypatch):
    program, words, ranks = command(file, files)
    if ranks is not None:
        monkeypatch.setenv("WORLD_SIZE", ranks)
    if file.stem in REFUSED:
        with pytest.raises(ValueError) as refused:
            composed(program, words)
        assert all(part in str(refused.value) for part in REFUSED[file.stem])
        return
    config, known = composed(program, words)
    assert ("async_training" in config) == (file.stem == "verl09_async")
    code = sft_entry(FSDPSFTTrainer).dry_run(config, known) if "sft" in program else dry_run(config, known=known)
    output = capsys.readouterr().out.rpartition("Problems")[2]
    assert code == 0, output
