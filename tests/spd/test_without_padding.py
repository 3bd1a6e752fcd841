"""A scorer whose backbone sees one flat row of tokens: the same scores and gradients as with padding."""

import pytest
import torch
from tensordict import TensorDict

from spd_scorer import AutoModelForSPDScoring, ScoringModelConfig, SPDInputData
from tests.helpers.logs import logged
from tests.models.families import model_of
from verl.training.policy import get_policy
from verl.training.policy.packing import to_device

CONTEXTS = [[5, 6, 7, 8, 9, 10, 11, 12], [9, 10], [30, 31, 32, 33]]
DRAFTS = [[11, 12, 13], [14, 15], [40, 41, 42]]
TARGETS = [[11, 20, 21, 22], [23, 15, 24], [43, 44, 45, 46]]
SETTINGS = [
    {"backbone": "target"},
    *({"backbone": "own", "attention": mask, "head_inputs": inputs} for mask in ("causal", "spd", "hybrid")
      for inputs in ("state", "pair")),
    {"backbone": "own", "lora_rank": 4, "attention": "hybrid"},
    {"backbone": "own", "context_tokens": 3},
]  # fmt: skip


def scorer(directory: str, settings: dict):
    made = AutoModelForSPDScoring.from_config(ScoringModelConfig(base_model_path=directory, **settings)).train()
    generator = torch.Generator().manual_seed(0)
    for name, weight in made.named_parameters():
        if "lora_B" in name:  # zero at first: the adapters would not be seen
            weight.data = torch.randn(weight.shape, generator=generator) * 0.1
    return made


def gradients(made, remove_padding: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    inputs = SPDInputData.from_blocks(CONTEXTS, DRAFTS, TARGETS, sep_token_id=3, pad_token_id=0).as_kwargs()
    policy = get_policy("bernoulli")
    policy.set_forward(remove_padding=remove_padding, share_prompt=False)
    made.zero_grad()
    z = policy.scores(made, TensorDict(inputs, batch_size=3))
    z[z < 50].sigmoid().square().sum().backward()
    return z.detach(), {n: p.grad.clone() for n, p in made.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: "-".join(map(str, s.values())))
def test_scores_and_gradients_are_those_of_the_padded_batch(tiny_llama, settings):
    made = scorer(tiny_llama, settings)
    backbone = made.backbone.get_base_model() if settings.get("lora_rank") else made.backbone
    tokens = []
    backbone.get_input_embeddings().register_forward_hook(lambda module, ids, out: tokens.append(ids[0].shape))
    with_padding, plain = gradients(made, False)
    padded, tokens[:] = tokens[0], []
    without, packed = gradients(made, True)
    most = settings.get("context_tokens") or 99
    lengths = [min(len(c), most) + len(d) for c, d in zip(CONTEXTS, DRAFTS, strict=True)]
    if settings["backbone"] == "own":  # three separators and the target's tokens
        lengths = [n + 3 + len(t) for n, t in zip(lengths, TARGETS, strict=True)]
    assert tokens[0] == (1, sum(lengths)) and padded == (3, max(lengths))
    assert torch.allclose(without, with_padding, atol=1e-5)
    assert plain.keys() == packed.keys() and any(g.abs().max() > 1e-4 for g in plain.values())
    for name, wanted in plain.items():
        assert (packed[name] - wanted).norm() <= 1e-5 * max(wanted.norm(), 1e-3), name


@pytest.mark.parametrize("backbone", ["target", "own"])
def test_a_backbone_that_mixes_tokens_by_convolutions_keeps_its_padding(tiny_llama, tmp_path, backbone):
    model_of("LFM2").save_pretrained(tmp_path)
    for folder, kept in ((str(tmp_path), False), (tiny_llama, True)):
        policy = get_policy("bernoulli")
        policy.set_forward(remove_padding=True, share_prompt=False)
        with logged() as warned:
            policy.compare_layouts(scorer(folder, {"backbone": backbone}).eval(), torch.device("cpu"))
        assert policy.remove_padding == kept
        assert kept or "hidden states of Lfm2Model" in warned[0] and "keep their padding" in warned[0]


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: "-".join(map(str, s.values())))
def test_a_forward_without_padding_never_waits_for_the_device(tiny_llama, settings, share):
    """Values of tensors on the meta device cannot be read at all; the columns on the host say all that is needed."""
    config = ScoringModelConfig(base_model_path=tiny_llama, **settings)
    model = AutoModelForSPDScoring.from_config(config).to("meta")
    columns = SPDInputData.from_blocks(CONTEXTS, DRAFTS, TARGETS, sep_token_id=3, pad_token_id=0).as_kwargs()
    columns |= {"responses": torch.ones(3, 4, dtype=torch.int64), "group_index": torch.tensor([0, 1, 1])}
    batch = to_device(TensorDict(columns, batch_size=3), torch.device("meta"))
    policy = get_policy("bernoulli", share=share)
    policy.set_forward(remove_padding=True, share_prompt=share)
    log_probs, entropy = policy.log_probs(model, batch, temperature=1.0, with_entropy=True)
    assert log_probs.is_meta and log_probs.shape == entropy.shape == (3, 4)
