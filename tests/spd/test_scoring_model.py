"""The scorer: where z is read, matches, save and load, and that a foreign target is refused."""

import importlib
import json
import math
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

import spd_scorer
from recipe.spd.scorer.auto import SCORERS, register_scorer
from recipe.spd.scorer.heads import logit_features
from recipe.spd.scorer.masks import MASKS
from recipe.spd.settings import BACKBONES
from spd_scorer import AutoModelForSPDScoring, PairHead, ScoringModelConfig, SPDInputData
from tests.helpers.models import save_tiny_llama

MY_SCORER = "examples.extending.my_scorer"
CONTEXTS = [[5, 6, 7, 8], [9, 10]]
DRAFTS = [[11, 12, 13], [14, 15]]
TARGETS = [[11, 20, 21, 22], [23, 15, 24]]


def data(pad: int = 0) -> SPDInputData:
    return SPDInputData.from_blocks(CONTEXTS, DRAFTS, TARGETS, sep_token_id=3, pad_token_id=pad)


def build(directory: str, **settings):
    return AutoModelForSPDScoring.from_config(ScoringModelConfig(base_model_path=directory, **settings)).eval()


@pytest.fixture
def draft_scorer(monkeypatch):
    """The class of examples/extending/my_scorer.py, registered while the test runs."""
    monkeypatch.delitem(sys.modules, MY_SCORER, raising=False)
    yield importlib.import_module(MY_SCORER).DraftScorer
    del SCORERS["draft_mlp"]
    BACKBONES.remove("draft_mlp")


def test_a_registered_scorer_is_built_saved_and_loaded_by_its_name(draft_scorer, llama, tmp_path):
    """Its head gets the state that predicted t_i and the embedding of d_i."""
    with pytest.raises(ValueError, match="'draft_mlp' is already registered by .*DraftScorer; .*Other needs another"):
        register_scorer("draft_mlp")(type("Other", (draft_scorer,), {}))
    model = build(llama, backbone="draft_mlp", head_size=8)
    z = model(**data().as_kwargs())
    target = AutoModelForCausalLM.from_pretrained(llama).eval()
    states = target.model(torch.tensor([CONTEXTS[0] + DRAFTS[0]])).last_hidden_state[0, 3:6]
    features = torch.cat([states, target.get_input_embeddings()(torch.tensor(DRAFTS[0]))], -1)
    expected = model.head.layers(features)[:, 0]
    assert isinstance(model, draft_scorer) and torch.allclose(z[0, 1:], expected[1:], atol=1e-5) and z[0, 0] == 50.0
    model.save_pretrained(tmp_path)
    loaded = AutoModelForSPDScoring.from_pretrained(tmp_path)
    assert type(loaded) is draft_scorer and torch.equal(loaded(**data().as_kwargs()), z)
    assert {name for name, weight in loaded.named_parameters() if weight.requires_grad} == {
        f"head.{name}" for name, _ in loaded.head.named_parameters()}  # fmt: skip


def test_masks_have_the_type_of_the_backbone(tiny_llama, monkeypatch):
    """Kernels of GPUs misread an additive mask of another type than the queries; heads are float32."""
    types, real = [], MASKS["spd"]
    monkeypatch.setitem(MASKS, "spd", lambda *args: (types.append(args[-1]), real(*args))[1])
    config = ScoringModelConfig(base_model_path=tiny_llama, backbone="own", attention="spd", context_tokens=2)
    model = AutoModelForSPDScoring.from_config(config, torch.bfloat16).eval()
    assert model(**data().as_kwargs()).dtype == torch.float32 and types == [torch.bfloat16]


@pytest.mark.parametrize(("inputs", "width"), [("state", 4), ("pair", 5)])
def test_target_head_reads_the_state_that_predicted_t_i_and_the_one_over_d_i(llama, inputs, width):
    model = build(llama, backbone="target", head_inputs=inputs)
    assert model.head.first.in_features == width * model.config.hidden_size
    z = model(**data().as_kwargs())
    plain = AutoModelForCausalLM.from_pretrained(llama)
    for row, (context, draft, target) in enumerate(zip(CONTEXTS, DRAFTS, TARGETS, strict=True)):
        states = plain.model(torch.tensor([context + draft])).last_hidden_state
        assert torch.allclose(plain.lm_head(states), plain(torch.tensor([context + draft])).logits)  # feeds the head
        for i, (d, t) in enumerate(zip(draft, target, strict=False)):
            if d == t:
                continue
            hidden = states[:, len(context) - 1 + i : len(context) + i + 1]
            alone = model.score_features(hidden, torch.tensor([[d]]), torch.tensor([[t]]))
            assert torch.allclose(z[row, i], alone[0, 0], atol=1e-5)


@pytest.mark.parametrize("attention", ["causal", "spd", "hybrid"])
def test_a_cut_context_is_a_block_that_begins_later(tiny_llama, attention):
    model = build(tiny_llama, backbone="own", attention=attention, context_tokens=2)
    z = model(**data().as_kwargs())
    whole = build(tiny_llama, backbone="own", attention=attention)
    short = SPDInputData.from_blocks(
        [context[-2:] for context in CONTEXTS], DRAFTS, TARGETS, sep_token_id=3, pad_token_id=0
    )
    torch.testing.assert_close(z, whole(**short.as_kwargs()), rtol=1e-5, atol=1e-6)
    assert not torch.allclose(z, whole(**data().as_kwargs()), atol=1e-4)
    with pytest.raises(ValueError, match="spd.context_tokens=2 does not fit spd.backbone=target"):
        ScoringModelConfig(backbone="target", context_tokens=2)


def test_what_each_mask_lets_the_first_score_see(tiny_llama):
    """Changing d_3 reaches z_2 (i = 1) under hybrid only; changing t_4, the bonus, likewise."""
    for attention, sees in (("causal", False), ("spd", False), ("hybrid", True)):
        model = build(tiny_llama, backbone="own", attention=attention)
        before = model(**data().as_kwargs())[0, 1]
        other = SPDInputData.from_blocks(
            CONTEXTS, DRAFTS, [[11, 20, 21, 40], TARGETS[1]], sep_token_id=3, pad_token_id=0
        )
        assert bool((model(**other.as_kwargs())[0, 1] - before).abs() > 1e-7) is sees
        later = SPDInputData.from_blocks(CONTEXTS, [[11, 12, 41], DRAFTS[1]], TARGETS, sep_token_id=3, pad_token_id=0)
        # causal reads the whole draft before the target; spd hides draft tokens behind i
        assert bool((model(**later.as_kwargs())[0, 1] - before).abs() > 1e-7) is (attention != "spd")


def test_a_head_may_read_the_entropy_and_the_margin_of_the_targets_logits(tmp_path):
    tied = save_tiny_llama(tmp_path / "tied", tied=True)
    model = build(tied, backbone="target", head_inputs="logits")
    assert model.head.first.in_features == 5 * model.config.hidden_size + 2
    z = model(**data().as_kwargs())
    plain = AutoModelForCausalLM.from_pretrained(tied)
    context, draft, target = CONTEXTS[0], DRAFTS[0], TARGETS[0]
    output = plain(torch.tensor([context + draft]), output_hidden_states=True)
    first = len(context) - 1
    given = output.hidden_states[-1][:, first:], torch.tensor([draft]), torch.tensor([target[: len(draft)]])
    assert torch.allclose(z[:1, : len(draft)], model.score_features(*given, output.logits[:, first:-1]), atol=1e-5)
    assert not torch.equal(model.score_features(*given, output.logits[:, first:-1] * 2), z[:1, : len(draft)])


def test_a_head_may_read_the_states_after_an_inner_layer(tmp_path):
    """By hand: layer norms of the last state over d_i and of those after layer 1 at both positions, then the values;
    plus the linear part."""
    tied = save_tiny_llama(tmp_path / "tied", tied=True)
    model = build(tied, backbone="target", head_inputs="logits", state_layer=1, head_size=8)
    plain = AutoModelForCausalLM.from_pretrained(tied)
    context, draft = CONTEXTS[0], DRAFTS[0]
    output = plain(torch.tensor([context + draft]), output_hidden_states=True)
    inner, last = (output.hidden_states[k][0, len(context) - 1 :] for k in (1, -1))
    values = logit_features(output.logits[0, len(context) - 1 : -1], torch.tensor(draft))
    parts = [torch.nn.functional.layer_norm(x, x.shape[-1:]) for x in (last[1:], inner[:-1], inner[1:])]
    hidden = torch.nn.functional.gelu(model.head.first(torch.cat([*parts, values], -1)))
    assert model.head.direct.weight[0].tolist() == pytest.approx([0, -0.2])  # begins as the margin rule
    model.head.direct.weight.data = torch.tensor([[0.3, -0.5]])
    z = model(**data().as_kwargs())
    expected = model.head.out(hidden)[:, 0] + 0.3 * values[:, 0] - 0.5 * values[:, 1]
    assert len(output.hidden_states) > 2 and not torch.equal(inner, last)
    assert torch.allclose(z[0, 1:], expected[1:], atol=1e-5) and z[0, 0] == 50.0
    model.save_pretrained(tmp_path / "scorer")
    with pytest.raises(ValueError, match="state_layer=1; this one has state_layer=None. Set spd.state_layer=1"):
        build(tied, backbone="target", head_inputs="logits").load_trained(tmp_path / "scorer")
    with pytest.raises(ValueError, match="spd.state_layer=1 reads the target, which spd.backbone=own never sees"):
        build(tied, backbone="own", state_layer=1)


def test_logit_features_by_hand():
    logits = torch.tensor([[0.6, 0.3, 0.1], [0.5, 0.5, 0.0]]).log() + 3.0  # the last one is -inf: forbidden
    entropies, margins = torch.tensor([0.8979457, math.log(2)]), torch.tensor([math.log(2), 100.0])
    expected = torch.stack([entropies, margins], dim=-1).log1p()
    assert torch.allclose(logit_features(logits, torch.tensor([1, 2])), expected, atol=1e-6)


def test_the_logit_gap_is_one_of_the_head_s_inputs():
    head = PairHead(hidden_size=4, width=4)
    for p in head.parameters():
        torch.nn.init.zeros_(p)
    head.first.weight.data[0, 12:] = 1.0  # reads the product alone
    head.first.bias.data[0] = head.second.bias.data[0] = 100.0  # GELU is the identity up there
    head.second.weight.data[0, 0] = head.out.weight.data[0, 0] = 1.0
    # Layer norm takes (3, 1, 1, 3) to +-1 and (1, 1, 1, 5) to (-1, -1, -1, 3) / sqrt 3.
    h, d, t = ([3.0, 1.0, 1.0, 3.0], [1.0, 3.0, 1.0, 3.0], [1.0, 1.0, 1.0, 5.0])
    z = head(*(torch.tensor([[x]]) for x in (h, d, t)))
    # h = (1, -1, -1, 1), d = (-1, 1, -1, 1): h.d = 0; h.t = (-1 + 1 + 1 + 3) / sqrt 3 = 4 / sqrt 3
    assert z.item() == pytest.approx(200.0 - 4 / 3**0.5, abs=1e-3)


@pytest.mark.parametrize("attention", ["causal", "spd", "hybrid"])
def test_a_pair_head_reads_five_parts_under_every_mask(tiny_llama, attention):
    """Of the second block: d_1 = 14 in column 7 (after the separator in 6), t_1 = 23 in column 10."""
    model, given = build(tiny_llama, backbone="own", head_inputs="pair", attention=attention), data()
    seen = []
    model.backbone.register_forward_hook(lambda module, args, output: seen.append(output.last_hidden_state[1]))
    judged = model(**given.as_kwargs())[1, 0]
    (states,), embedded = seen, model.backbone.get_input_embeddings().weight
    alone = model.head(states[6], embedded[14], embedded[23], states[10])
    torch.testing.assert_close(judged, alone, rtol=1e-5, atol=1e-6)
    for other in (7, 9, 11):  # neighbours of either column read otherwise
        assert not torch.allclose(model.head(states[6], embedded[14], embedded[23], states[other]), alone, atol=1e-5)


def test_a_head_is_refused_with_another_target(tiny_llama, tmp_path):
    build(tiny_llama, backbone="target").save_pretrained(tmp_path / "head")
    other = save_tiny_llama(tmp_path / "other", seed=1)
    with pytest.raises(ValueError, match="belongs to the model .*fingerprint"):
        AutoModelForSPDScoring.from_pretrained(tmp_path / "head", base_model_path=other)
    shared = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.bfloat16)
    assert AutoModelForSPDScoring.from_pretrained(tmp_path / "head", base_model=shared).config.backbone == "target"


def test_bad_settings_are_named(tiny_llama, tmp_path):
    with pytest.raises(ValueError, match="spd.backbone='targe'.*did you mean 'target'"):
        ScoringModelConfig(backbone="targe")
    with pytest.raises(ValueError, match="spd.attention=causal and actor_rollout_ref.model.lora_rank=0"):
        ScoringModelConfig(backbone="target", attention="hybrid")
    (tmp_path / "spd_config.json").write_text(json.dumps({"backbon": "own"}))
    with pytest.raises(ValueError, match="unknown keys .*backbon"):
        AutoModelForSPDScoring.from_pretrained(tmp_path)
    (tmp_path / "spd_config.json").write_text(json.dumps({"head_size": 0}))
    with pytest.raises(ValueError, match="spd_config.json: spd.head_size=0 is too small"):
        AutoModelForSPDScoring.from_pretrained(tmp_path)


# Masks and positions of [Context] SEP [Draft] SEP [Target] SEP, by hand on a sequence of 11 tokens:
# one padding column, context of 2, draft of 2:  p c c S d d S t t t S
#                                                0 1 2 3 4 5 6 7 8 9 10
MASK = torch.tensor([[0] + [1] * 10])
LAYOUT = torch.tensor([[1, 2, 4, 2, 7]])

SPD = """
 1 0 0 0 0 0 0 0 0 0 0
 0 1 0 0 0 0 0 0 0 0 0
 0 1 1 0 0 0 0 0 0 0 0
 0 1 1 1 0 0 0 0 0 0 0
 0 1 1 1 1 0 0 0 0 0 0
 0 1 1 1 1 1 0 0 0 0 0
 0 1 1 1 1 1 1 0 0 0 0
 0 1 1 1 1 0 0 1 0 0 0
 0 1 1 1 1 1 0 1 1 0 0
 0 1 1 1 1 1 0 1 1 1 0
 0 1 1 1 1 1 0 1 1 1 1
"""
HYBRID = """
 1 0 0 0 0 0 0 0 0 0 0
 0 1 0 0 0 0 0 0 0 0 0
 0 1 1 0 0 0 0 0 0 0 0
 0 1 1 1 0 0 0 0 0 0 0
 0 1 1 1 1 1 0 1 1 1 0
 0 1 1 1 1 1 0 1 1 1 0
 0 1 1 1 1 1 1 0 0 0 0
 0 1 1 1 1 1 0 1 1 1 0
 0 1 1 1 1 1 0 1 1 1 0
 0 1 1 1 1 1 0 1 1 1 0
 0 1 1 1 1 1 0 1 1 1 1
"""


def by_hand(text: str) -> torch.Tensor:
    return torch.tensor([[int(x) for x in line.split()] for line in text.strip().splitlines()]).bool()


@pytest.mark.parametrize("kind, expected", [("spd", SPD), ("hybrid", HYBRID)])
def test_mask_is_the_one_written_by_hand(kind, expected):
    mask = getattr(spd_scorer, f"create_{kind}_attention_mask")(MASK, LAYOUT)
    assert mask.shape == (1, 1, 11, 11)
    assert torch.equal(mask[0, 0] == 0, by_hand(expected))
    assert (mask[0, 0][~by_hand(expected)] == torch.finfo(torch.float32).min).all()


def test_positions_by_hand():
    assert spd_scorer.create_position_ids(MASK, LAYOUT).tolist() == [[0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9]]
    # SEP 2, d 3 4, second SEP 5, t 3 4 5, third SEP 6
    for attention in ("spd", "hybrid"):
        assert spd_scorer.create_position_ids(MASK, LAYOUT, attention).tolist() == [[0, 0, 1, 2, 3, 4, 5, 3, 4, 5, 6]]
