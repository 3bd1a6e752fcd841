"""Preparation of blocks, the training config of the command line, and defaults in the recipe's yaml and in code."""

import json
import os
from contextlib import nullcontext, suppress
from dataclasses import asdict

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

import train_spd_scorer as entry
from recipe.spd.data.dataset import SPDRLHFDataset
from recipe.spd.settings import SPDRewardConfig, SPDSettings
from spd_scorer import ScoringModelConfig
from tests.helpers.models import make_tokenizer
from verl.trainer import main_ppo

TOKENIZER = make_tokenizer()
META = {"question_id": "q1", "question": "how many", "ground_truth": "4", "is_correct_baseline": True}
BLOCK = {"question_id": "q1", "context_ids": [5, 6], "draft_ids": [7, 8], "target_ids": [7, 9, 10]}


def prepare(tmp_path, blocks, metadata=(META,)):
    for name, rows in (("blocks", blocks), ("metadata", metadata)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return entry.prepare_spd_data_from_real_source(
        tmp_path / "blocks.jsonl", tmp_path / "metadata.jsonl", tmp_path / "out" / "train.parquet", TOKENIZER
    )


def test_prepared_rows_are_what_the_dataset_reads(tmp_path):
    matched = {**BLOCK, "draft_ids": [7, 9]}
    ended = {**BLOCK, "draft_ids": [7, 2, 8], "target_ids": [7, 2, 9, 9]}  # agree up to the end token
    drifted = {**BLOCK, "is_correct_baseline": False, "baseline_length": 12}
    made = prepare(tmp_path, [BLOCK, matched, ended, drifted])
    assert (made.rows, made.skipped_matches, made.longest_input, made.gamma) == (2, 2, 10, 2)
    config = OmegaConf.create({"max_prompt_length": 12, "max_response_length": 2, "shuffle": False, "seed": None})
    items = [item for item in (SPDRLHFDataset(str(made.path), TOKENIZER, config)[i] for i in range(2))]
    assert items[0]["input_ids"].tolist() == [0, 0, 5, 6, 3, 7, 8, 3, 7, 9, 10, 3]
    assert items[0]["data_source"] == "spd_scorer" and items[0]["prompt"] == "how many"
    assert [i["extra_info"]["is_correct_baseline"] for i in items] == [1, 0]
    assert [i["extra_info"]["baseline_length"] for i in items] == [None, 12]
    assert items[1]["extra_info"]["index"] == 1 and items[1]["extra_info"]["ground_truth"] == "4"


def test_nothing_to_judge_and_doubled_questions_are_refused(tmp_path):
    with pytest.raises(ValueError, match="none of its 1 blocks has a mismatch"):
        prepare(tmp_path, [{**BLOCK, "draft_ids": [7, 9]}])
    with pytest.raises(ValueError, match="row 1: question_id 'q1' occurs twice"):
        prepare(tmp_path, [BLOCK], [META, META])


def composed(overrides):
    with initialize_config_module("recipe.spd.config", version_base=None):
        return compose("spd_trainer", overrides)


def test_options_and_environment_reach_the_config(tmp_path, monkeypatch):
    monkeypatch.setenv("REWARD_USELESS", "-2")
    monkeypatch.setenv("SPD_VLLM_URLS", "http://a:1,http://b:2")
    data = prepare(tmp_path, [BLOCK])
    args = entry.parse_args([
        "--blocks", "b", "--metadata", "m", "--model", "some model", "--output-dir", str(tmp_path / "o"),
        "trainer.device=cpu", "trainer.n_gpus_per_node=2", "actor_rollout_ref.actor.optim.lr=1e-3",
    ])  # fmt: skip
    config, known = entry.compose_config(entry.training_overrides(args, data, None))
    assert known.actor_rollout_ref.actor.optim.lr != 1e-3 and known.keys() == config.keys()
    assert config.actor_rollout_ref.model.path == "some model" and config.spd.target_path == "some model"
    assert config.data.max_prompt_length == 10 and config.data.max_response_length == 2
    assert config.trainer.n_gpus_per_node == 2 and config.actor_rollout_ref.actor.optim.lr == 1e-3
    assert config.spd.reward.useless == -2 and config.data.seed == config.spd.seed == 42
    assert config.spd.rollout.servers == "http://a:1,http://b:2"
    command = entry.build_training_command(args, data, None)
    assert command[command.index("--config-name") + 2 :] == entry.training_overrides(args, data, None)
    assert entry._create_training_env(args)["TENSORBOARD_DIR"] == str(tmp_path / "o" / "logs")


PUBLIC = """backbone attention context_tokens head_inputs head_size state_layer seed feature_store adapter_path
sample_temperature
loss_positions truncated target_path reward.alpha reward.penalty_break reward.useless
reward.correct_base reward.length reward.zero_length reward.length_penalty rollout.servers
rollout.served_model rollout.server_args rollout.server_log rollout.start_timeout_s rollout.max_model_len
rollout.store_path rollout.lost_share_max rollout.rounds rollout.draft_path rollout.max_tokens
rollout.timeout_s rollout.attempts rollout.prompts_per_request rollout.concurrency"""


def test_public_keys_of_the_recipe_are_frozen_and_the_scorer_s_defaults_are_the_code_s():
    spd = OmegaConf.to_container(composed(["actor_rollout_ref.model.path=m"]), resolve=True)["spd"]
    nested = {name: spd.pop(name) for name in ("reward", "rollout")}
    keys = [*spd, *(f"{group}.{name}" for group, names in nested.items() for name in names)]
    assert keys == PUBLIC.split(), "users set these keys: enter a new one here and in CHANGES.md"
    of_the_code = asdict(ScoringModelConfig())
    shared = spd.keys() & of_the_code.keys()
    assert len(shared) == 7 and all(spd[name] == of_the_code[name] for name in shared)


def test_yaml_and_code_agree_on_the_reward_and_the_settings_are_complete():
    config = OmegaConf.to_container(composed(["actor_rollout_ref.model.path=m"]), resolve=True)
    assert config["spd"]["reward"] == asdict(SPDRewardConfig())
    custom = config["actor_rollout_ref"]["rollout"]["custom"]
    settings = SPDSettings.from_custom(custom)
    assert settings.target_path == "m" and settings.rollout.rounds == 1
    custom["rollout"]["server_args"] = ["--tensor-parallel-size", 2]  # as Hydra reads it
    assert SPDSettings.from_custom(custom).rollout.server_args == ["--tensor-parallel-size", "2"]
    assert config["algorithm"]["norm_adv_by_std_in_grpo"] is False


def test_one_temperature_for_all_and_the_environment_wins(monkeypatch):
    overrides = ["actor_rollout_ref.model.path=m", "spd.sample_temperature=0.8"]
    assert composed(overrides).actor_rollout_ref.rollout.temperature == 0.8
    monkeypatch.setenv("SPD_SAMPLE_TEMPERATURE", "0.6")
    assert composed(overrides).actor_rollout_ref.rollout.temperature == 0.6


def test_unknown_options_and_levels_are_refused(capsys):
    given = ["--blocks", "b", "--metadata", "m", "--model", "x", "--output-dir", "o"]
    for more, said in (
        (["--stepz", "3"], "unknown option '--stepz'"),
        (["actor_rollout_ref.model.path=y"], "actor_rollout_ref.model.path is set by --model; leave it out"),
        (["trainer.default_local_dir=y"], "trainer.default_local_dir is set by --output-dir"),
    ):
        with pytest.raises(SystemExit):
            entry.parse_args([*given, *more])
        assert said in capsys.readouterr().err
    with pytest.raises(ValueError, match="LOGURU_LEVEL='LOUD'"):
        entry.setup_loguru_rank0("LOUD")
    entry.setup_loguru_rank0("INFO")


def test_a_server_starts_early_for_a_valid_config_only(tmp_path, monkeypatch):
    from recipe.spd.rollout import spd_rollout as server
    from tests.helpers.models import save_tiny_llama

    class Started:
        stopped = 0

        def handle(self):
            return "7 http://127.0.0.1:9 log"

        def stop(self):
            Started.stopped += 1

    asked = []
    monkeypatch.setattr(server, "server_of", lambda settings, *lengths: asked.append((settings, *lengths)) or Started())
    data = prepare(tmp_path, [BLOCK] * 2)
    base = ["--blocks", "b", "--metadata", "m", "--model", save_tiny_llama(tmp_path / "t"), "trainer.device=cpu"]
    base += ["--output-dir", str(tmp_path / "o"), "data.train_batch_size=2"]

    def named(*more, **env):
        """Whether the training would find the server."""
        handles = []
        with monkeypatch.context() as patch:
            patch.setattr(main_ppo, "started_session", lambda config: nullcontext(True))
            patch.setattr(main_ppo, "run_here", lambda *_: handles.append(os.environ.get(server.LOCAL_VARIABLE)))
            for name, value in env.items():
                patch.setenv(name, value)
            overrides = entry.training_overrides(entry.parse_args([*base, *more]), data, None)
            with suppress(SystemExit):  # refused
                entry.run_training(*entry.compose_config(overrides))
        return handles == ["7 http://127.0.0.1:9 log"]

    assert named() and Started.stopped == 1 and server.LOCAL_VARIABLE not in os.environ
    (settings, *lengths), log = asked[0], tmp_path / "o" / "vllm_server.log"
    assert lengths == [10, 2] and settings.rollout.server_log == str(log)
    assert not named(SPD_VLLM_URLS="http://a:1") and not named(RAY_ADDRESS="a:1")
    for refused in ("trainer.totl_epochs=1", "data.max_prompt_length=3", "trainer.dry_run=true", "trainer.nnodes=2"):
        assert not named(refused), refused
    assert len(asked) == Started.stopped == 1


def test_all_errors_of_the_data_and_settings_are_reported_at_once(tmp_path, capsys):
    prepare(tmp_path, [BLOCK])
    given = ["--blocks", str(tmp_path / "blocks.jsonl"), "--metadata", str(tmp_path / "none.jsonl")]
    given += ["--val-blocks", "v.jsonl", "--model", "/no/model", "--output-dir", str(tmp_path / "o")]
    code = entry.main([*given, "trainer.device=cpu", "+trainer.totl_epochs=1"])
    errors = capsys.readouterr().err.splitlines()
    assert sum("trainer.totl_epochs" in line and "trainer.total_epochs" in line for line in errors) == 1
    lines = [line for line in errors if line.startswith("--") and not line.startswith("--- ")]
    assert code == 1 and len(lines) == 3
    assert lines[0] == f"--metadata {tmp_path / 'none.jsonl'}: the file does not exist."
    assert lines[1] == "--val-blocks v.jsonl: the file does not exist."
    assert lines[2].startswith("--model=/no/model: the folder does not exist")


@pytest.mark.parametrize(
    ("more", "code"),
    [(["trainer.dry_run=True"], 0), (["trainer.dry_run=true", "trainer.dry_run=false"], 1), ([], 1)],
)
def test_a_dry_run_where_only_the_model_is_absent_is_no_error(tmp_path, capsys, more, code):
    prepare(tmp_path, [BLOCK])
    given = ["--blocks", str(tmp_path / "blocks.jsonl"), "--metadata", str(tmp_path / "metadata.jsonl")]
    given += ["--model", "hub/model", "--output-dir", str(tmp_path / "o"), "data.train_batch_size=1"]
    assert entry.main([*given, "trainer.device=cpu", *more]) == code, capsys.readouterr().err
