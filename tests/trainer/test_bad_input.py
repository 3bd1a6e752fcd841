"""What a user may get wrong, each in one sentence, in the dry run as at a start, before anything is started."""

import json
import shutil

import pytest

from tests.helpers.configs import compose_ppo
from tests.helpers.rl_run import overrides
from verl.trainer.main_ppo import dry_run, run_ppo

TEMPLATE = "no chat template, which turns messages into prompts. Set actor_rollout_ref.model.custom_chat_template"
HEADS = "attention heads of dimension {}, which vLLM on a CPU (trainer.device=cpu) cannot run: it has"
ARITHMETIC = (
    "data.train_batch_size=9 x actor_rollout_ref.rollout.n=4 gives 36 samples, which 8 ranks cannot share evenly. "
    "Use a multiple of 2 (8 or 10)."
)
CASES = {
    "column": ({"data.prompt_key": "question"}, "train.jsonl, row 0: there is no column 'question' (columns: "
               "data_source, prompt, reward_model, extra_info). Set data.prompt_key."),
    "template": ({"actor_rollout_ref.model.tokenizer_path": "{plain}"}, TEMPLATE),
    "template_file": ({"actor_rollout_ref.model.custom_chat_template": "{here}/none.jinja"},
                      "none.jinja cannot be read: No such file or directory. Name another file."),
    "length": ({"data.max_response_length": 0}, "data.max_response_length=0"),
    "file": ({"custom_reward_function.path": "{here}/none.py"}, "custom_reward_function.path: no Python file at"),
    "name": ({"custom_reward_function.name": "compute_scores"}, "has no 'compute_scores'; it has: compute_score"),
    "function": ({"custom_reward_function.name": "__doc__"}, "is None; name a function."),
    "manager": ({"reward_manager.source": "importlib", "reward_manager.module.path": "{here}/none.py"},
                "no Python file at"),
    "manager_argument": ({"+reward_model.reward_kwargs.budgt": 3, "reward_manager.name": "Short",
                          "reward_manager.source": "importlib", "reward_manager.module.path": "{here}/short.py"},
                         "reward_model.reward_kwargs={'budgt': 3}: reward manager Short got an unexpected keyword "
                         "argument 'budgt'; it takes tokenizer, num_examine, compute_score, reward_fn_key, budget."),
    "arithmetic": ({"trainer.n_gpus_per_node": 8, "data.train_batch_size": 9, "trainer.device": "cpu"}, ARITHMETIC),
    "heads": ({"actor_rollout_ref.rollout.name": "vllm", "+actor_rollout_ref.model.override_config.head_dim": 24},
              HEADS.format(24)),
    "folder": ({"trainer.default_local_dir": "{here}/train.jsonl"},
               "train.jsonl is not a folder. Name another folder."),
}  # fmt: skip


@pytest.fixture
def sound(tmp_path, tiny_llama, monkeypatch):
    """A run's command line with nothing wrong in it; no Ray may be started on it."""
    monkeypatch.setattr("verl.trainer.main_ppo.started_session", lambda config: pytest.fail("Ray was started"))
    shutil.copytree(tiny_llama, tmp_path / "plain")
    (tmp_path / "plain" / "chat_template.jinja").unlink(missing_ok=True)
    (tmp_path / "short.py").write_text(
        "from verl.workers.reward_manager.abstract import AbstractRewardManager\n"
        "class Short(AbstractRewardManager):\n"
        "    def __init__(self, tokenizer, num_examine, compute_score, reward_fn_key, budget=1): ...\n"
        "    def __call__(self, data, return_dict=False): ...\n"
    )
    file = tmp_path / "plain" / "tokenizer_config.json"
    file.write_text(json.dumps({k: v for k, v in json.loads(file.read_text()).items() if k != "chat_template"}))
    return overrides(tmp_path, tiny_llama)


def with_changes(sound, changes, folder):
    places = {"{plain}": str(folder / "plain"), "{here}": str(folder)}
    changed = [f"{key}={value}" for key, value in changes.items()]
    for mark, place in places.items():
        changed = [text.replace(mark, place) for text in changed]
    return compose_ppo(*sound, *changed)


def wrong_part(capsys):
    return capsys.readouterr().out.partition("Wrong on every machine: ")[2].partition("Absent on this machine")[0]


@pytest.mark.parametrize("case", CASES)
def test_it_is_one_message_in_the_dry_run_and_at_the_start(sound, tmp_path, capsys, case):
    changes, said = CASES[case]
    assert dry_run(with_changes(sound, changes, tmp_path), known=compose_ppo()) == 1
    reported = wrong_part(capsys)
    assert said in reported
    if case not in ("column", "manager"):  # of these both files, and every name that leads there, are reported
        assert reported.startswith("1\n"), reported
    with pytest.raises(SystemExit) as end:
        run_ppo(with_changes(sound, changes, tmp_path))
    assert said in str(end.value)


def test_nothing_is_wrong_with_the_command_line_that_the_cases_change(sound, tmp_path, capsys):
    for changes in (
        {},
        {"actor_rollout_ref.model.tokenizer_path": str(tmp_path / "plain"),
         "actor_rollout_ref.model.custom_chat_template": "'{{ messages[0].content }}'"},
        {"actor_rollout_ref.rollout.name": "vllm"},
        {"actor_rollout_ref.rollout.name": "vllm", "+actor_rollout_ref.model.override_config.head_dim": 128},
        {"+actor_rollout_ref.model.override_config.head_dim": 24},  # without vLLM any dimension will do
    ):  # fmt: skip
        assert dry_run(with_changes(sound, changes, tmp_path), known=compose_ppo()) == 0, (changes, wrong_part(capsys))


def test_one_start_names_what_is_wrong_in_settings_model_machine_and_data(sound, tmp_path):
    changes = {"actor_rollout_ref.actor.policy_loss.loss_mode": "plian", "actor_rollout_ref.model.path": "{here}/none",
               "trainer.device": "cuda", "trainer.n_gpus_per_node": 99, "data.train_batch_size": 99,
               "actor_rollout_ref.actor.ppo_mini_batch_size": 99}  # fmt: skip
    with pytest.raises(SystemExit) as end:
        run_ppo(with_changes(sound, changes, tmp_path))
    for part in (
        "loss_mode='plian' is unknown", "none: the folder does not exist", "trainer.device=cuda: this machine has",
        "data.train_files: columns and rows are not checked until the tokenizer loads",
    ):  # fmt: skip
        assert part in str(end.value), part
