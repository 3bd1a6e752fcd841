"""Deepened models, and the choice of a threshold."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.spd_arithmetic import demo_serve
from examples.spd_arithmetic.deepen import write_deepened
from examples.spd_arithmetic.demo_serve import choose_threshold
from examples.spd_arithmetic.questions import Question
from examples.spd_arithmetic.serving import accuracy, tokens_per_draft
from tests.helpers.models import save_answering_llama


def test_a_deepened_model_computes_the_same_at_a_higher_cost(tiny_llama, tmp_path):
    write_deepened(tiny_llama, tmp_path, layers=5, ff=512)
    plain, deep = (AutoModelForCausalLM.from_pretrained(folder).eval() for folder in (tiny_llama, tmp_path))
    ids = torch.randint(5, 60, (3, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        one, two = (model(ids, output_hidden_states=True) for model in (plain, deep))
    assert torch.allclose(one.logits, two.logits, atol=1e-5)
    assert torch.allclose(one.hidden_states[-1], two.hidden_states[-1], atol=1e-5)
    assert deep.config.num_hidden_layers == 5 and deep.config.intermediate_size == 512
    sizes = [sum(p.numel() for p in model.parameters()) for model in (plain, deep)]
    assert sizes[1] > 4 * sizes[0]
    added = [name for name, _ in deep.named_parameters() if name.startswith("model.layers.4.")]
    assert any(deep.get_parameter(name).abs().sum() > 0 for name in added)  # the added layers do work


def test_smaller_sizes_are_refused(tiny_llama, tmp_path):
    with pytest.raises(ValueError, match="give larger sizes"):
        write_deepened(tiny_llama, tmp_path, layers=1)


def test_tokens_of_a_draft_by_hand():
    # The prefills give 2 tokens. Three drafts extend the first answer by 3, 2 and 1 tokens, the last of which is an
    # accepted draft token that ends it; one draft extends the second by 4.
    assert tokens_per_draft([[1] * 7, [1] * 5], 4.0) == 10 / 4
    assert tokens_per_draft([[1] * 7], 0.0) is None


@pytest.mark.parametrize(
    "judged, chosen",
    [({-1: 0.90, 0: 0.975, 1: 0.98}, 1), ({-1: 0.976, 0: 0.975, 1: 0.98}, -1), ({0: 0.9, 1: 0.95, 2: 0.95}, 2)],
)
def test_the_lowest_threshold_within_the_drop_is_chosen_else_the_most_accurate(judged, chosen):
    assert choose_threshold(0.981, {t: right for t, right in judged.items()}, drop_points=0.5) == chosen


def test_an_answer_counts_if_it_has_ended_and_names_the_number(tmp_path):
    model = save_answering_llama(tmp_path)
    right, wrong = AutoTokenizer.from_pretrained(model)("a ####3 ####2", add_special_tokens=False)["input_ids"][1:]
    asked = [Question(str(i), "", [5], "3") for i in range(4)]
    assert accuracy(model, asked, [[right, 2], [right], [wrong, 2], []]) == 1 / 4


def test_the_serving_demo_shows_its_results_and_says_what_target_they_are_of(capsys):
    speed = {1: 64.0, 4: 219.0, 16: 360.0}
    results = {
        name: {"accuracy": 0.99, "tokens_per_draft": per_draft, "tokens_per_second": speed}
        for name, per_draft in (("greedy", None), ("exact", 2.3), ("scorer", 5.5))
    }
    record = {"questions": 200, "threshold": 1.0, "deepened": True, "results": results}
    demo_serve.console.print(demo_serve.table_of(record))
    shown = capsys.readouterr().out
    assert "deepened" in shown and "5.50" in shown and "360" in shown


def test_the_serving_demo_without_a_trained_scorer_names_the_command(tmp_path, capsys):
    assert demo_serve.main(["--demo", str(tmp_path)]) == 1
    assert "make demo" in capsys.readouterr().out
