"""Saved scorers that do not fit a model are refused with one message, before a start and by the loader."""

import json
import shutil
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from recipe.spd.checks import check_scorer
from spd_scorer import AutoModelForSPDScoring, ScoringModelConfig, SPDInputData
from tests.helpers.engines import count_gathered_copies, make_engine
from tests.helpers.logs import logged
from tests.helpers.models import save_tiny_llama
from verl.models.loading import create_huggingface_actor
from verl.training.parallel.sharding import local_tensor
from verl.workers.config import PluginConfig

ADAPTERS = {"backbone": "own", "attention": "hybrid", "lora_rank": 4}
WHOLE = {"backbone": "own", "attention": "hybrid"}
ADAPTER_FILE = "adapter/adapter_model.safetensors"
WHOLE_FILE = "backbone/model.safetensors"
KINDS = {"adapters": ADAPTERS, "whole": WHOLE, "head": {}}
PAIR = {**ADAPTERS, "head_inputs": "pair"}


def scores(model) -> torch.Tensor:
    contexts, drafts, targets = [[5, 6, 7], [8, 9]], [[10, 11], [12, 13]], [[20, 21, 22], [23, 24, 25]]
    blocks = SPDInputData.from_blocks(contexts, drafts, targets, sep_token_id=3, pad_token_id=0)
    with torch.no_grad():
        return model.eval()(**blocks.as_kwargs())


def randomise(model) -> None:
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.requires_grad and (".lora_" in name or name.startswith("head.")):
                local_tensor(p).add_(0.1 * torch.randn(p.shape, generator=g))


def save(path: str, folder: Path, settings: dict) -> tuple[Path, torch.Tensor]:
    """The folder, and the scores of the model that was saved there."""
    model = AutoModelForSPDScoring.from_config(ScoringModelConfig(base_model_path=path, **settings))
    randomise(model)
    model.save_pretrained(folder)
    return folder, scores(model)


@pytest.fixture(scope="module")
def saved(tiny_llama, tmp_path_factory) -> dict[str, tuple[Path, torch.Tensor]]:
    """Scorers of tiny_llama, saved once, with their scores."""
    root = tmp_path_factory.mktemp("kept")
    return {kind: save(tiny_llama, root / kind, settings) for kind, settings in KINDS.items()}


@pytest.fixture(scope="module")
def kept(saved) -> dict[str, Path]:
    return {kind: folder for kind, (folder, _) in saved.items()}


@pytest.fixture
def adapters(kept, tmp_path) -> Path:
    """A copy to change."""
    return Path(shutil.copytree(kept["adapters"], tmp_path / "adapters"))


@pytest.fixture
def whole(kept, tmp_path) -> Path:
    return Path(shutil.copytree(kept["whole"], tmp_path / "whole"))


def arguments(settings: dict, **more) -> dict:
    """The keyword arguments of the loader for fields of ScoringModelConfig and `more` of the group spd."""
    adapters = {name: value for name, value in settings.items() if name.startswith("lora_")}
    return adapters | {"spd": {name: value for name, value in settings.items() if name not in adapters} | more}


def message_before_start(folder, path: str, settings: dict) -> str | None:
    """The message of the check before a start."""
    loader = {"name": "spd_scorer", "kwargs": arguments(settings, adapter_path=str(folder))}
    model = {"path": path, "trust_remote_code": False, "loader": loader}
    config = OmegaConf.create({"actor_rollout_ref": {"model": model}})
    problems = list(check_scorer(config, SimpleNamespace(hf_config=AutoConfig.from_pretrained(path))))
    assert len(problems) <= 1 and all(p.kind == "wrong" and p.key == "spd.adapter_path" for p in problems)
    return problems[0].message.removeprefix(f"spd.adapter_path={folder}: ") if problems else None


def load(folder, path: str, settings: dict):
    kwargs = arguments(settings, adapter_path=str(folder))
    return create_huggingface_actor(path, automodel_kwargs=kwargs, loader="spd_scorer")


@cache
def built(path: str, **settings):
    return AutoModelForSPDScoring.from_config(ScoringModelConfig(base_model_path=path, **settings))


def refused(folder, path: str, settings: dict) -> str:
    """The message of the check before a start; the loader must raise the same."""
    message = message_before_start(folder, path, settings)
    assert message is not None and "\n" not in message
    with pytest.raises(ValueError) as error:
        built(path, **settings).load_trained(folder)
    assert str(error.value) == message
    return message


def edit_config(folder: Path, **values) -> Path:
    file = folder / "spd_config.json"
    held = {**json.loads(file.read_text()), **values}
    file.write_text(json.dumps({key: value for key, value in held.items() if value is not None}))
    return folder


@pytest.fixture(scope="module")
def others(tmp_path_factory) -> dict[str, str]:
    """Models of the same width as tiny_llama."""
    root = tmp_path_factory.mktemp("others")
    return {"seed": save_tiny_llama(root / "seed", seed=1), "deeper": save_tiny_llama(root / "deeper", layers=3)}


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_scorer_is_loaded_from_its_own_folder(tiny_llama, saved, kind):
    (folder, z), settings = saved[kind], KINDS[kind]
    assert message_before_start(folder, tiny_llama, settings) is None
    for loaded in (AutoModelForSPDScoring.from_pretrained(folder), load(folder, tiny_llama, settings)):
        torch.testing.assert_close(scores(loaded), z, rtol=0, atol=1e-6)
    fresh = AutoModelForSPDScoring.from_config(ScoringModelConfig(base_model_path=tiny_llama, **settings))
    assert (scores(fresh) - z).abs().max() > 1e-3
    files = {file.name for file in folder.rglob("*") if file.is_file()}
    assert "score_head.safetensors" in files and not any(name.endswith(".bin") for name in files)
    assert kind != "head" or files == {"score_head.safetensors", "spd_config.json"}


@pytest.mark.parametrize("which", ["seed", "deeper"])
def test_adapters_of_another_model_are_refused(tiny_llama, others, kept, which):
    folder, other = kept["adapters"], others[which]
    message = refused(folder, other, ADAPTERS)
    assert message.startswith(f"the scorer in {folder} belongs to the model '{tiny_llama}' (fingerprint ")
    assert f"; the model here, '{other}', has " in message and message.endswith("was trained on only: name that one.")
    with pytest.raises(ValueError, match="belongs to the model"):
        AutoModelForSPDScoring.from_pretrained(folder, base_model_path=other)


def test_adapters_without_fingerprint_are_refused_by_their_shapes(tiny_llama, others, adapters):
    folder = edit_config(adapters, base_fingerprint=None)
    with logged() as heard:
        assert load(folder, others["seed"], ADAPTERS).config.base_fingerprint
    assert any(f"{folder} has no fingerprint of its base model" in line for line in heard)
    message = refused(folder, others["deeper"], ADAPTERS)
    # 7 linear layers in the third layer, two matrices each
    assert f"{folder / ADAPTER_FILE} does not fit the model here, '{others['deeper']}': 14 weights differ" in message
    assert "layers.2.mlp.down_proj.lora_A.weight (missing there, (4, 128) here)" in message
    assert f"the model that it was trained on, '{tiny_llama}'" in message


@pytest.mark.parametrize(
    "change, fix",
    [
        ({"attention": "causal"}, "attention='hybrid'; this one has attention='causal'. Set spd.attention=hybrid."),
        ({"context_tokens": 8}, "context_tokens=0; this one has context_tokens=8. Set spd.context_tokens=0."),
        ({"lora_alpha": 4}, "lora_alpha=16; this one has lora_alpha=4. Set actor_rollout_ref.model.lora_alpha=16."),
        ({"lora_rank": 0}, "lora_rank=4; this one has lora_rank=0. Set actor_rollout_ref.model.lora_rank=4."),
        ({"head_inputs": "pair"}, "head_inputs='state'; this one has head_inputs='pair'. Set spd.head_inputs=state."),
    ],
)
def test_a_scorer_of_another_kind_is_refused(tiny_llama, kept, change, fix):
    folder = kept["adapters"]
    assert refused(folder, tiny_llama, {**ADAPTERS, **change}) == f"{folder} holds a scorer with {fix}"


def test_other_target_modules_are_refused(tiny_llama, tmp_path):
    folder, _ = save(tiny_llama, tmp_path, {**ADAPTERS, "lora_target_modules": ["q_proj", "v_proj"]})
    message = refused(folder, tiny_llama, ADAPTERS)
    assert "20 weights differ" in message  # 5 linear layers more in each of 2 layers
    assert message.endswith("actor_rollout_ref.model.target_modules=['q_proj', 'v_proj'].")


@pytest.mark.parametrize("kind, file", [("adapters", ADAPTER_FILE), ("whole", WHOLE_FILE)])
@pytest.mark.parametrize("change", ["lost", "more", "wider"])
def test_a_weight_lost_added_or_of_another_shape_is_refused(tiny_llama, request, kind, file, change):
    folder, settings = request.getfixturevalue(kind), KINDS[kind]
    weights = load_file(folder / file)
    name = sorted(weights)[1]
    weight = weights.pop(name)
    if change != "lost":
        weights["another.weight" if change == "more" else name] = torch.cat([weight, weight])
    if change == "more":
        weights[name] = weight
    save_file(weights, folder / file, metadata={"format": "pt"})
    message = refused(folder, tiny_llama, settings)
    assert "1 weights differ, such as " + ("another.weight" if change == "more" else name) in message
    assert str(folder) in message


def test_a_renamed_weight_of_a_full_backbone_is_refused_by_the_loader(tiny_llama, whole):
    """The number of elements is right: only loading shows that a name is wrong."""
    weights = load_file(whole / WHOLE_FILE)
    weights["layers.0.mlp.other.weight"] = weights.pop("layers.0.mlp.up_proj.weight")
    save_file(weights, whole / WHOLE_FILE, metadata={"format": "pt"})
    with pytest.raises(ValueError, match="not a complete backbone: layers.0.mlp.other.weight is missing"):
        load(whole, tiny_llama, WHOLE)


def test_a_full_backbone_of_another_depth_or_rope_is_refused(tiny_llama, others, whole):
    message = refused(whole, others["deeper"], WHOLE)
    assert message == (
        f"{whole / 'backbone'} has num_hidden_layers=2; the model here, '{others['deeper']}', has 3. Name the model "
        "that it was trained from, or another of the same config."
    )
    file = whole / "backbone" / "config.json"
    values = json.loads(file.read_text())
    file.write_text(json.dumps({**values, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}))
    message = refused(whole, tiny_llama, WHOLE)
    assert "has rope_parameters={'rope_theta': 500.0}; " in message and "has its default. " in message
    # A model of the same shape with other weights is accepted: the backbone contains all weights.
    file.write_text(json.dumps(values))
    torch.testing.assert_close(
        scores(load(whole, others["seed"], WHOLE)), scores(AutoModelForSPDScoring.from_pretrained(whole)),
        rtol=0, atol=1e-6,
    )  # fmt: skip


def test_a_head_without_fingerprint_is_loaded(tiny_llama, kept, tmp_path):
    folder = Path(shutil.copytree(kept["head"], tmp_path / "head"))
    edit_config(folder, base_fingerprint=None)
    assert message_before_start(folder, tiny_llama, {}) is None
    loaded, meant = load(folder, tiny_llama, {}), AutoModelForSPDScoring.from_pretrained(kept["head"])
    assert torch.equal(scores(loaded), scores(meant))


# ---- a checkpoint's folders -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tiny_llama, tmp_path_factory):
    """(scores of a scorer with adapters in an engine, the folder it was saved to)"""
    folder = tmp_path_factory.mktemp("checkpoint") / "actor"
    loader = PluginConfig(name="spd_scorer", kwargs=arguments(PAIR))
    engine = make_engine(tiny_llama, loader=loader, contents=("model", "hf_model"))
    randomise(engine.module)
    z = scores(engine.module)
    engine.save_checkpoint(str(folder))
    return z, folder


def test_adapters_and_head_of_a_checkpoint_can_be_loaded(tiny_llama, checkpoint):
    z, folder = checkpoint
    adapters = folder / "lora_adapter"
    assert sorted(file.name for file in adapters.iterdir() if file.suffix != ".md") == [
        "adapter_config.json", "adapter_model.safetensors", "score_head.safetensors", "spd_config.json",
    ]  # fmt: skip
    assert message_before_start(adapters, tiny_llama, PAIR) is None
    again = load(adapters, tiny_llama, PAIR)
    torch.testing.assert_close(scores(again), z, rtol=0, atol=1e-6)
    trained = [name for name, p in again.named_parameters() if p.requires_grad]
    assert all(".lora_" in name or name.startswith("head.") for name in trained) and len(trained) > 28
    torch.testing.assert_close(scores(AutoModelForSPDScoring.from_pretrained(adapters)), z, rtol=0, atol=1e-6)


def test_a_scorer_of_its_own_is_written_from_weights_that_are_gathered_one_at_a_time(tiny_llama, tmp_path, monkeypatch):
    kept = count_gathered_copies(monkeypatch)
    loader = PluginConfig(name="spd_scorer", kwargs=arguments(WHOLE))
    engine = make_engine(tiny_llama, loader=loader, contents=("model", "hf_model"))
    randomise(engine.module)
    engine.save_checkpoint(str(tmp_path))
    assert len(kept) > 10 and max(kept) == 0
    written = {file.relative_to(tmp_path / "huggingface").parts[0] for file in tmp_path.glob("huggingface/*")}
    assert written == {"backbone", "score_head.safetensors", "spd_config.json"}
    again = AutoModelForSPDScoring.from_pretrained(tmp_path / "huggingface")
    torch.testing.assert_close(scores(again), scores(engine.module), rtol=0, atol=0)


def test_the_merged_export_refers_a_run_with_adapters_to_their_folder(tiny_llama, checkpoint):
    z, folder = checkpoint
    merged = folder / "huggingface"
    torch.testing.assert_close(scores(AutoModelForSPDScoring.from_pretrained(merged)), z, rtol=0, atol=1e-5)
    assert message_before_start(merged, tiny_llama, {**PAIR, "lora_rank": 0}) is None
    message = refused(merged, tiny_llama, PAIR)
    assert message == (
        f"{merged} holds a scorer with lora_rank=0; this one has lora_rank=4. Name {folder / 'lora_adapter'}, which "
        "holds the adapters that are merged in here."
    )
