"""User errors end with one message and an exit code, before Ray or a server starts.

Not covered: a run on a remote cluster (RAY_ADDRESS), whose files and servers are checked on its nodes.
"""

import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import recipe.spd.config
import train_spd_scorer as entry
from spd_scorer import AutoModelForSPDScoring, ScoringModelConfig
from tests.helpers.configs import compose_ppo
from tests.helpers.http_server import serving
from tests.helpers.models import make_tokenizer, save_tiny_llama
from verl.trainer import main_ppo
from verl.utils.ports import free_port

RECIPE = Path(recipe.spd.config.__path__[0])
VARIABLES = ("SPD_VLLM_URLS", "SPD_SEP_TOKEN_ID", "RAY_ADDRESS", "MODEL_PATH", "TOKENIZER_PATH", "ADAPTER_PATH")
ROWS = 8


def block_rows():
    """Eight blocks of four drafted tokens; all but the first token are mismatches."""
    return [
        {
            "question_id": f"q{i}", "context_ids": [5 + i, 6, 7], "draft_ids": [10, 11, 12, 13 + i],
            "target_ids": [10, 21, 22, 23, 24], "is_correct_baseline": i % 2, "baseline_length": 5 + i,
        }
        for i in range(ROWS)
    ]  # fmt: skip


def metadata_rows():
    return [
        {"question_id": f"q{i}", "question": f"{i} + 1 =", "ground_truth": str(i + 1), "is_correct_baseline": i % 2}
        for i in range(ROWS)
    ]


def write(path, rows):
    pq.write_table(pa.Table.from_pylist(rows), path, write_page_checksum=True)
    return str(path)


class Bed:
    """A target with blocks prepared for it, a scorer saved for it, and one for another target."""

    def __init__(self, directory):
        self.directory = directory
        self.target = save_tiny_llama(directory / "target")
        self.blocks = write(directory / "blocks.parquet", block_rows())
        self.metadata = write(directory / "metadata.parquet", metadata_rows())
        self.train = str(directory / "train.parquet")
        entry.prepare_spd_data_from_real_source(self.blocks, self.metadata, self.train, make_tokenizer())
        for name, model in (("scorer", self.target), ("foreign", save_tiny_llama(directory / "other", seed=1))):
            config = ScoringModelConfig(base_model_path=model)
            AutoModelForSPDScoring.from_config(config).save_pretrained(directory / name)

    def scorer(self, tmp_path, file=None, change=None):
        """A copy of the saved scorer; `change` makes the new bytes of `file` from its bytes (None removes it)."""
        folder = shutil.copytree(self.directory / "scorer", tmp_path / "scorer")
        if file is not None:
            data = (folder / file).read_bytes()
            (folder / file).unlink()
            if change is not None:
                (folder / file).write_bytes(change(data))
        return str(folder)


@pytest.fixture(scope="module")
def bed(tmp_path_factory):
    return Bed(tmp_path_factory.mktemp("bed"))


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


class Started(Exception):
    """The run would start Ray now."""


def settings(bed, **more):
    """key=value settings of a valid run on `bed`, changed by `more` (__ stands for a dot)."""
    keys = {
        "data__train_files": bed.train, "data__val_files": bed.train, "data__max_prompt_length": 20,
        "data__max_response_length": 4, "data__train_batch_size": 4, "actor_rollout_ref__rollout__n": 2,
        "actor_rollout_ref__model__path": bed.target, "trainer__device": "cpu", "trainer__n_gpus_per_node": 1,
        "trainer__logger": "[]", "trainer__default_local_dir": f"{bed.directory}/none", **more,
    }  # fmt: skip
    return [f"{key.replace('__', '.')}={value}" for key, value in keys.items()]


def refusal(monkeypatch, bed, **more):
    """The error message with which main_ppo ends; it must end before a Ray session starts."""

    def started(config):
        raise Started

    monkeypatch.setattr(main_ppo, "started_session", started)
    config = compose_ppo(*settings(bed, **more), config_dir=RECIPE, config_name="spd_trainer")
    with pytest.raises(SystemExit) as ended:
        main_ppo.run_ppo(config)
    text = ended.value.code
    assert isinstance(text, str), text  # Python prints it and exits with 1
    return text


def one_problem(text):
    """The only problem of a refusal: one line."""
    head, *errors = text.splitlines()
    assert head == "1 problem in the config:" and len(errors) == 1, text
    return errors[0]


def test_a_valid_run_is_not_refused(bed, monkeypatch):
    with pytest.raises(Started):
        refusal(monkeypatch, bed, spd__adapter_path=f"{bed.directory}/scorer")


def test_files_are_not_checked_here_for_a_run_on_a_cluster(bed, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "ray://elsewhere:10001")
    with pytest.raises(Started):
        refusal(monkeypatch, bed, actor_rollout_ref__model__path="/only/there")


# ---- train_spd_scorer.py: blocks, metadata, model, tokenizer ----------------------------------------------------


def prepare(bed, capsys, monkeypatch, tmp_path, *more, **files):
    """(exit code, last line of stderr) of train_spd_scorer.py; the training is replaced."""
    monkeypatch.setattr(entry, "run_training", lambda config, known: None)
    given = {"blocks": bed.blocks, "metadata": bed.metadata, "model": bed.target, **files}
    argv = [text for name, value in given.items() for text in (f"--{name}", str(value))]
    code = entry.main([*argv, "--output-dir", str(tmp_path / "out"), "trainer.device=cpu", *more])
    output = capsys.readouterr().err
    assert "Traceback" not in output
    return code, output.strip().splitlines()[-1] if output.strip() else ""


@pytest.mark.parametrize(
    "file, column",
    [("blocks", c) for c in ("question_id", "context_ids", "draft_ids", "target_ids")]
    + [("metadata", c) for c in ("question_id", "question", "ground_truth", "is_correct_baseline")],
)
def test_a_missing_column_is_named(bed, capsys, monkeypatch, tmp_path, file, column):
    rows = [{k: v for k, v in row.items() if k != column} for row in pq.read_table(getattr(bed, file)).to_pylist()]
    path = write(tmp_path / "lacking.parquet", rows)
    code, output = prepare(bed, capsys, monkeypatch, tmp_path, **{file: path})
    assert code == 1 and output.startswith(f"{path}, row 0: lacks {column}; it has ")


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"draft_ids": [], "target_ids": [9]}, "row 2: draft_ids is empty; it needs at least one token id."),
        ({"context_ids": []}, "row 2: context_ids is empty"),
        ({"draft_ids": [10, 11, 12, 59]}, "row 2: draft_ids must be a list of token ids from 0 to 58, those of the "
         "tokenizer, but holds 59. Name the tokenizer that the ids were made with."),
        ({"draft_ids": [10, 11, 12, -1]}, "but holds -1"),
        ({"target_ids": [10, 21]}, "row 2: 2 target_ids for 4 draft_ids"),
        ({"baseline_length": -3}, "row 2: baseline_length must be a number of tokens, not -3."),
        ({"is_correct_baseline": 2}, "row 2: is_correct_baseline must be 0 or 1, not 2."),
        ({"question_id": "q99"}, "row 2: question_id 'q99' is not in "),
    ],
)  # fmt: skip
def test_an_invalid_block_is_refused_with_file_and_row(bed, capsys, monkeypatch, tmp_path, changes, message):
    rows = block_rows()
    rows[2].update(changes)
    path = write(tmp_path / "odd.parquet", rows)
    code, output = prepare(bed, capsys, monkeypatch, tmp_path, blocks=path)
    assert code == 1 and output.startswith(f"{path}, ") and message in output


def test_a_misspelt_optional_column_is_reported(bed, capsys, monkeypatch, tmp_path):
    rows = [{("baseline_lenght" if k == "baseline_length" else k): v for k, v in row.items()} for row in block_rows()]
    code, output = prepare(bed, capsys, monkeypatch, tmp_path, blocks=write(tmp_path / "slip.parquet", rows))
    assert code == 1 and "'baseline_lenght' is not a known column; did you mean 'baseline_length'? Rename it." in output


def test_a_damaged_tokenizer_folder_is_named(bed, capsys, monkeypatch, tmp_path):
    torn = shutil.copytree(bed.target, tmp_path / "torn")
    (torn / "tokenizer.json").write_text('{"version": "1.0", "mod')
    code, output = prepare(bed, capsys, monkeypatch, tmp_path, tokenizer=torn)
    assert code == 1 and output.startswith(f"--tokenizer={torn} cannot be loaded: ")


# ---- main_ppo: prepared rows, model, scorer, servers, batch sizes ---------------------------------------------


def test_a_limit_that_would_cut_the_context_of_a_target_head_is_refused(bed, monkeypatch):
    # 3 context tokens, 4 drafted, 5 of the target, 3 separators
    head, error, _ = refusal(monkeypatch, bed, data__max_prompt_length=14).splitlines()
    assert head == "2 problems in the config:"  # train_files and val_files
    assert "row 0: its 15 ids exceed data.max_prompt_length=14: a target head would train on states" in error
    assert error.endswith("Raise data.max_prompt_length to 15.")
    with pytest.raises(Started):
        refusal(monkeypatch, bed, data__max_prompt_length=14, spd__backbone="own")


def test_a_model_folder_with_incomplete_weights_is_refused(bed, monkeypatch, tmp_path):
    text = refusal(monkeypatch, bed, spd__target_path="/no/such/target")
    assert one_problem(text).startswith("  - spd.target_path=/no/such/target: the folder does not exist.")
    model = shutil.copytree(bed.target, tmp_path / "model")
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert f"{weights} is missing or incomplete" in refusal(monkeypatch, bed, actor_rollout_ref__model__path=model)
    weights.unlink()
    assert "the folder holds no weights" in refusal(monkeypatch, bed, actor_rollout_ref__model__path=model)


@pytest.mark.parametrize(
    "file, change, message",
    [
        ("score_head.safetensors", lambda data: data[:-10], "score_head.safetensors is missing or incomplete"),
        ("score_head.safetensors", None, "score_head.safetensors is missing or incomplete"),
        ("spd_config.json", lambda data: data[:40], "spd_config.json is damaged"),
        ("spd_config.json", None, "holds no spd_config.json: it is not a saved scorer."),
        ("spd_config.json", lambda data: data.replace(b'"target"', b'"own"'), "holds a scorer with backbone='own'"),
    ],
)
def test_a_scorer_that_cannot_be_read_is_refused(bed, monkeypatch, tmp_path, file, change, message):
    folder = bed.scorer(tmp_path, file, change)
    error = one_problem(refusal(monkeypatch, bed, spd__adapter_path=folder))
    assert error.startswith(f"  - spd.adapter_path={folder}: ") and message in error


def test_a_scorer_of_another_target_or_width_is_refused(bed, monkeypatch):
    folder = bed.directory / "foreign"
    error = one_problem(refusal(monkeypatch, bed, spd__adapter_path=folder))
    assert f"the scorer in {folder} belongs to the model '{bed.directory}/other'" in error and "name that one" in error
    folder = bed.directory / "scorer"
    error = one_problem(refusal(monkeypatch, bed, spd__adapter_path=folder, spd__head_size=64))
    assert "has first.bias of shape (128,)" in error and "Set spd.head_size=128" in error


def test_a_tokenizer_that_does_not_fit_the_ids_is_refused(bed, monkeypatch, tmp_path):
    make_tokenizer(["a", "b"]).save_pretrained(tmp_path / "small")  # ids 0 to 6
    text = refusal(monkeypatch, bed, actor_rollout_ref__model__tokenizer_path=tmp_path / "small")
    assert "row 0: context_ids must be a list of token ids from 0 to 6, those of the tokenizer, but holds 7." in text
    monkeypatch.setenv("SPD_SEP_TOKEN_ID", "4")
    text = refusal(monkeypatch, bed, spd__backbone="own")
    assert "are separated by token id 3, the tokenizer's separator is 4. Prepare it again, or set " in text
    monkeypatch.delenv("SPD_SEP_TOKEN_ID")
    narrow = save_tiny_llama(tmp_path / "narrow", vocab_size=24)
    text = refusal(monkeypatch, bed, actor_rollout_ref__model__path=narrow)
    assert f"row 0: token id 24 is outside the vocabulary (24) of the model {narrow}." in text


def test_a_lora_adapter_that_cannot_be_read_is_refused(bed, monkeypatch, tmp_path):
    key = "actor_rollout_ref.model.lora_adapter_path"
    error = one_problem(refusal(monkeypatch, bed, actor_rollout_ref__model__lora_adapter_path=tmp_path))
    assert f"{key}={tmp_path} cannot be loaded: " in error and "adapter_config.json" in error
    (tmp_path / "adapter_config.json").write_text("{}")
    error = one_problem(refusal(monkeypatch, bed, actor_rollout_ref__model__lora_adapter_path=tmp_path))
    assert f"{tmp_path}/adapter_model.safetensors is missing or incomplete" in error


def server(answer):
    """A server whose /v1/models gives `answer`."""
    return serving(lambda request: (200 if request.path == "/v1/models" else 404, answer))


def models(*paths):
    return {"object": "list", "data": [{"id": f"m{i}", "object": "model", "root": p} for i, p in enumerate(paths)]}


def test_unreachable_servers_are_refused_but_one_of_two_suffices(bed, monkeypatch):
    dead = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setenv("SPD_VLLM_URLS", dead)
    error = one_problem(refusal(monkeypatch, bed))
    assert f"spd.rollout.servers (SPD_VLLM_URLS)={dead}/v1/models does not answer from here" in error
    assert "Start it, or unset SPD_VLLM_URLS" in error
    with server(models(bed.target)) as (alive, _):
        monkeypatch.setenv("SPD_VLLM_URLS", f"{dead},{alive}")
        with pytest.raises(Started):
            refusal(monkeypatch, bed)


def test_a_server_of_another_model_or_without_models_is_refused(bed, monkeypatch):
    other = f"{bed.directory}/other"
    with server(models(other)) as (url, _):
        monkeypatch.setenv("SPD_VLLM_URLS", url)
        error = one_problem(refusal(monkeypatch, bed))
        assert f"SPD server {url} serves m0 ({other}), but the target is '{bed.target}'. Start it with that" in error
        with pytest.raises(Started):
            refusal(monkeypatch, bed, spd__rollout__served_model="m0")
    with server({"detail": "a wiki"}) as (url, _):
        monkeypatch.setenv("SPD_VLLM_URLS", url)
        error = one_problem(refusal(monkeypatch, bed))
        assert f"{url}/v1/models answers" in error and "is it a vLLM server?" in error


def test_the_training_command_reports_what_the_trainer_refuses(bed, monkeypatch, tmp_path):
    monkeypatch.setenv("SPD_VLLM_URLS", f"http://127.0.0.1:{free_port()}")
    arguments = ["--blocks", bed.blocks, "--metadata", bed.metadata, "--model", bed.target, "trainer.device=cpu"]
    arguments += ["--output-dir", str(tmp_path / "out"), "data.train_batch_size=4"]
    with pytest.raises(SystemExit) as ended:
        entry.main([*arguments, f"spd.adapter_path={bed.directory / 'foreign'}"])
    text = ended.value.code  # Python prints it and exits with 1
    assert "2 problems in the config:" in text
    assert "/v1/models does not answer from here" in text and "belongs to the model" in text
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["data"]  # no session, no server's log
