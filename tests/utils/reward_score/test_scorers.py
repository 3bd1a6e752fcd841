"""Rule rewards against hand-made answers. Not covered: agreement with the data sets' own judges on real answers."""

import json

import pytest

from verl.utils.reward_score import (
    default_compute_score,
    geo3k,
    known_sources,
    math_dapo,
    math_reward,
    math_verify,
    search_r1_like_qa_em,
)

MATH = "lighteval/MATH"


def test_every_source_of_the_conventions_has_a_rule():
    assert len(known_sources()) == 16
    answers = {"target": ["Paris"]}
    for source in ("DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500", MATH, "numina_olympiads"):
        assert default_compute_score(source, "so \\boxed{2}", "2") == 1.0
    for source in ("math_dapo", "math", "math_dapo_reasoning", "aime", "aime2024", "aime_2025"):
        assert default_compute_score(source, "Answer: 2", "2") == {"score": 1.0, "acc": True, "pred": "2"}
    for source in ("searchR1_nq", "searchR1_bamboogle"):
        assert default_compute_score(source, "<answer>paris.</answer>", answers) == 1.0
    assert default_compute_score("hiyouga/geometry3k", "<think>x</think>\\boxed{2}", "2") == 1.0
    for source in ("codecontests", "apps", "codeforces", "taco"):
        assert default_compute_score(source, "no code", json.dumps({"inputs": [""], "outputs": [""]})) == 0.0


def test_another_source_is_refused_with_the_mend():
    with pytest.raises(NotImplementedError) as caught:
        default_compute_score("mine/puzzles", "x", "1")
    said = str(caught.value)
    assert "'mine/puzzles'" in said and "custom_reward_function.path" in said and "openai/gsm8k" in said
    assert said.count("\n") == 0


@pytest.mark.parametrize(
    "text, found",
    [
        ("a \\boxed{1} b \\boxed{\\frac{1}{2}} c", "\\boxed{\\frac{1}{2}}"),
        ("\\fbox{3}", "\\fbox{3}"),
        ("$\\boxed 5$ end", "\\boxed 5"),
        ("\\boxed{never closed", None),
        ("no box", None),
    ],
)
def test_last_box(text, found):
    assert math_reward.last_boxed_only_string(text) == found


def test_what_stands_in_a_box():
    assert math_reward.remove_boxed("\\boxed{\\frac{1}{2}}") == "\\frac{1}{2}"
    assert math_reward.remove_boxed("\\boxed 5") == "5" and math_reward.remove_boxed("\\fbox{x}") == "x"
    with pytest.raises(ValueError, match="is no"):
        math_reward.remove_boxed("5")


@pytest.mark.parametrize(
    "text, plain",
    [
        ("\\frac12", "\\frac{1}{2}"),
        ("\\frac1{72}", "\\frac{1}{72}"),
        ("\\tfrac{3}4", "\\frac{3}{4}"),
        ("1/2", "\\frac{1}{2}"),
        ("-3/4", "\\frac{-3}{4}"),
        ("a/b", "a/b"),
        ("\\sqrt3", "\\sqrt{3}"),
        ("\\sqrt[3]{2}", "\\sqrt[3]{2}"),
        (".5", "\\frac{1}{2}"),
        ("-.25", "-0.25"),
        ("k = 7", "7"),
        ("5\\text{ cm}", "5"),
        ("90^\\circ", "90"),
        ("90^{\\circ}", "90"),
        ("\\$12", "12"),
        ("50\\%", "50"),
        ("\\left( 1, 2 \\right)", "(1,2)"),
    ],
)
def test_normalised_spelling(text, plain):
    assert math_reward.strip_string(text) == plain


def test_math_score_is_of_the_text():
    assert math_reward.compute_score("thus \\boxed{\\frac12}", "0.5") == 1.0
    assert math_reward.compute_score("thus \\boxed{2}", "3") == 0.0
    assert math_reward.compute_score("thus 3", "3") == 0.0
    assert math_reward.is_equiv(None, None) and not math_reward.is_equiv("1", None)


@pytest.mark.parametrize(
    "answer, truth, score",
    [
        ("\\frac{2}{4}", "\\frac{1}{2}", 1.0),
        ("x+1", "1+x", 1.0),
        ("\\sqrt{8}", "2\\sqrt{2}", 1.0),
        ("(x-1)(x+1)", "x^2-1", 1.0),
        ("\\{1, 2\\}", "\\{2, 1\\}", 1.0),
        ("0.3333", "\\frac{1}{3}", 0.0),
        ("3", "4", 0.0),
        ("\\text{East}", "\\text{East}", 1.0),
        ("", "4", 0.0),
        ("}{\\undefined", "4", 0.0),
    ],
)
def test_mathematical_equality(answer, truth, score):
    assert default_compute_score(MATH, f"It is \\boxed{{{answer}}}.", truth) == score


def test_math_verify_gives_the_time_out_score_to_what_never_ends(monkeypatch):
    monkeypatch.setattr(math_verify, "_SECONDS", 0.5)
    hostile = "\\boxed{9^{9^{9^{9^{9}}}} - 9^{9^{9^{9^{8}}}}}"
    assert math_verify.compute_score(hostile, "4", timeout_score=0.25) == 0.25
    assert math_verify.compute_score("\\boxed{4}", "4") == 1.0


@pytest.mark.parametrize("code", ["__import__('os').system('touch FILE')", "open('FILE', 'w').close()", "exec(x)"])
def test_an_answer_that_is_python_runs_nowhere(code, tmp_path):
    file = tmp_path / "ran"
    text = code.replace("FILE", str(file))
    for source in (MATH, "aime24", "numina_cn_k12", "hiyouga/geometry3k", "openai/gsm8k"):
        for answer in (f"\\boxed{{{text}}}", f"Answer: {text}", f"#### {text}", text):
            score = default_compute_score(source, answer, "4")
            assert score in (0.0, -1.0) or score["score"] == -1.0
    assert not file.exists()


@pytest.mark.parametrize(
    "text, truth, right, predicted",
    [
        ("so\nAnswer: 34", "34", True, "34"),
        ("Answer: 3\nanswer : 34", "34", True, "34"),
        ("Answer: $\\boxed{34}$", "34", True, "34"),
        ("Answer: x = 1,000", "1000", True, "1000"),
        ("Answer: 34 units", "34", True, "34"),
        ("Answer: \\frac12", "\\frac{1}{2}", True, "\\frac{1}{2}"),
        ("Answer: 35", "34", False, "35"),
        ("34", "34", False, "[INVALID]"),
        ("Answer: 34" + " " * 300, "34", False, "[INVALID]"),  # too far from the end
    ],
)
def test_dapo(text, truth, right, predicted):
    assert math_dapo.compute_score(text, truth) == {
        "score": 1.0 if right else -1.0, "acc": right, "pred": predicted,
    }  # fmt: skip


def test_dapo_strict_box():
    assert math_dapo.is_correct_strict_box("so \\boxed{5}", "5") == (1, "5")
    assert math_dapo.is_correct_strict_box("so \\boxed{5}" + "." * 100, "5") == (-1, None)
    assert math_dapo.compute_score("\\boxed{6}", "5", strict_box_verify=True)["score"] == -1.0
    assert math_dapo.verify("\\boxed{5}", "5", strict_box_verify=True) == (True, "5")
    assert math_dapo.is_correct_strict_box("\\boxed{5}" + "." * 200, "5", [0, 0, 0, 100]) == (1, "5")
    assert math_dapo.is_correct_minerva("Answer: 5", "\\boxed{5}", gt_need_extract=True) == (True, "5")


@pytest.mark.parametrize(
    "text, score",
    [
        ("<think>a\nb</think> so \\boxed{3}", 1.0),
        ("so \\boxed{3}", 0.9),
        ("<think>a</think> so \\boxed{4}", 0.1),
        ("<think>a</think> so 3", 0.0),
    ],
)
def test_geometry_scores_answer_and_format(text, score):
    assert default_compute_score("hiyouga/geometry3k", text, "3") == pytest.approx(score)
    assert geo3k.acc_reward("3", "3", use_boxed=False) == 1.0


@pytest.mark.parametrize(
    "text, score",
    [
        ("<answer> The  Eiffel-Tower! </answer>", 1.0),
        ("<answer>no</answer><answer>eiffeltower</answer>", 1.0),
        ("<answer>eiffeltower</answer><answer>no</answer>", 0.0),
        ("eiffeltower", 0.0),
        ("<answer>" * 10 + "</answer>" * 11 + "<answer>eiffeltower</answer>", 0.25),
    ],
)
def test_questions(text, score):
    assert default_compute_score("searchR1_hotpotqa", text, {"target": ["Big Ben", "Eiffel-Tower"]}) == score


def test_question_helpers():
    assert search_r1_like_qa_em.normalize_answer("An apple,  a DAY") == "apple day"
    assert search_r1_like_qa_em.em_check("the Moon", "moon") == 1
    assert search_r1_like_qa_em.subem_check("it is the moon, no?", ["sun", "moon"]) == 1
    assert search_r1_like_qa_em.count_answer_tags("<answer></answer></answer>") == (1, 2)
    truth = {"target": "moon"}
    assert search_r1_like_qa_em.compute_score_subem("<answer>blue moon</answer>", truth) == 1.0
    assert search_r1_like_qa_em.compute_score("<answer>blue moon</answer>", truth, format_score=0.2) == 0.2
