"""The trainings, generations and evaluations in README and docs pass the dry run, with model and data of a test."""

import re
from pathlib import Path

import pandas as pd
import pytest

from dllm_reasoning import train_iterative_refine
from scripts.audit.keys import OURS
from tests.helpers.chat_templates import IM, Format, byte_tokenizer
from tests.helpers.configs import SOUND, compose_ppo
from tests.helpers.documents import ROOT, SETTINGS, commands, is_later_name, program_of
from tests.helpers.models import save_tiny_llama
from verl.config.aliases import with_current_names
from verl.config.compose import forced_override
from verl.trainer import fsdp_sft_trainer, main_eval, main_generation
from verl.trainer.main_ppo import dry_run
from verl.utils.config import validate_config

MODELS = re.compile(r"^(.*model\.path|model\.partial_pretrain)=")
ENTRIES = {
    "verl.trainer.main_generation": main_generation.main, "verl.trainer.main_eval": main_eval.main,
    "verl.trainer.fsdp_sft_trainer": fsdp_sft_trainer.main,
    "dllm_reasoning.train_iterative_refine": train_iterative_refine.main,
}  # fmt: skip
TRAININGS = ("verl.trainer.main_ppo", "recipe.dapo.main_dapo")
DOCUMENTED = [
    (page, *program_of(words))
    for page, words in commands()
    if words[0] in ("python", "torchrun") and program_of(words)[0] in (*ENTRIES, *TRAININGS)
]
TRIAL = re.search(r"small trial, append\s+`([^`]+)`", (ROOT / "docs/quickstart.md").read_text())[1].split()
FIRST_RUN = next(found for found in DOCUMENTED if found[0] == Path("docs/quickstart.md"))
DOCUMENTED.append((*FIRST_RUN[:2], [*FIRST_RUN[2], *TRIAL]))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with prompts and answers in one file, SFT pairs in another."""
    folder = tmp_path_factory.mktemp("documented")
    rows = [
        {"data_source": "openai/gsm8k", "prompt": [{"role": "user", "content": "1 + 1"}], "responses": ["#### 2"],
         "reward_model": {"style": "rule", "ground_truth": "2"}, "extra_info": {"index": i}}
        for i in range(1200)
    ]  # fmt: skip
    pd.DataFrame(rows).to_parquet(folder / "prompts.parquet")
    pd.DataFrame(rows).assign(agent_name="tool_agent").to_parquet(folder / "tools.parquet")
    pairs = [{"question": "1 + 1", "answer": "2", "instruction": "1 + 1", "output": "2"}] * 1200
    pd.DataFrame(pairs).to_parquet(folder / "pairs.parquet")
    return folder


@pytest.fixture(scope="module")
def chatml_llama(tmp_path_factory):
    """A small Llama whose tokenizer has the tokens of Qwen's turns, for a template of the examples."""
    directory = tmp_path_factory.mktemp("chatml_llama")
    save_tiny_llama(directory, vocab_size=320)
    byte_tokenizer(Format(IM % "user", "<|im_end|>", None, None)).save_pretrained(directory)
    return str(directory)


@pytest.mark.parametrize(("page", "program", "words"), DOCUMENTED, ids=lambda v: str(v) if isinstance(v, Path) else "")
def test_a_documented_command_passes_the_dry_run(
    page, program, words, files, tiny_llama, chatml_llama, tmp_path, capsys
):
    has_tools = any("tool_config_path=" in word for word in words)
    prompts = "tools.parquet" if has_tools else "prompts.parquet"
    data = files / ("pairs.parquet" if "sft" in program or "dllm" in program else prompts)
    model = chatml_llama if any("custom_chat_template=" in word for word in words) else tiny_llama
    settings = [re.sub(r"=\S+\.(parquet|jsonl)$", f"={data}", word) for word in words]
    settings = [MODELS.sub(rf"\1={model}#", word).partition("#")[0] for word in settings]
    settings = [re.sub(r"output_path=.*", f"output_path={tmp_path}/answers.parquet", word) for word in settings]
    if program in TRAININGS:
        settings = [forced_override(word) if is_later_name(word.partition("=")[0]) else word for word in settings]
    tree = {"config_dir": ROOT / OURS[SETTINGS[program]].replace(".", "/"), "config_name": SETTINGS[program]}
    config = with_current_names(compose_ppo(*settings, "trainer.dry_run=true", **tree))
    if program in TRAININGS:
        code = dry_run(config, known=compose_ppo(**tree))
    else:
        with pytest.raises(SystemExit) as ended:
            ENTRIES[program].__wrapped__(config)
        code = ended.value.code
    assert code == 0, capsys.readouterr().out.rpartition("Problems")[2]


SECTION = (ROOT / "docs/algorithms.md").read_text().partition("## Common settings")[2].partition("\n## ")[0]
COMMON = re.findall(r"^\| .+ \| `(.+?)`", SECTION, re.M)


@pytest.mark.parametrize("settings", COMMON)
def test_the_common_settings_are_valid(settings):
    validate_config(compose_ppo(*SOUND, *settings.split()), use_reference_policy=False, use_critic="critic" in settings)


def test_the_pages_document_each_entry():
    assert len(COMMON) > 10
    assert {program for _, program, _ in DOCUMENTED} == {*ENTRIES, *TRAININGS}
