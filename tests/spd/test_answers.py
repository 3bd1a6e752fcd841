"""Answers out of texts, and their comparison with the ground truth, by tables of cases."""

import time

import pytest

from recipe.spd.rollout.answers import extract_answer, is_correct


@pytest.mark.parametrize(
    "text, answer",
    [
        ("so 2 * 11 = 22 . the answer is 22", "22"),
        ("the answer is 5 . no , the final answer is : 1,234.50 dollars", "1234.5"),
        ("work #### 18", "18"),
        (r"thus \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        ("The answer is $-3.", "-3"),
        ("The answer is -$3.", "-3"),
        ("The answer is **18**.", "18"),
        (r"The answer is \( 18 \)", "18"),
        ("The answer is 5 . Q: more ? #### 7", "7"),  # the last mark counts, whichever it is
        (r"\boxed{9} so the answer is 7", "7"),
        ("22 apples", None),
        ("**Answer:** 18 dollars", "18"),
        ("**Final Answer**: **$1,800**", "1800"),
        ("The answer is 3 * 6 = 18 apples", "18"),
        ("the answer is 5 . then 3 + 4 = 7", "5"),  # another sentence
        (r"\boxed{\$18}", "18"),
        (r"\boxed{18\%}", "18"),
        (r"\boxed{18 \text{ dollars}}", "18"),
        (r"\boxed{\textbf{18}}", "18"),
        (r"\boxed{**18**}", "18"),
        (r"\boxed{3 \times 6 = 18}", "18"),
        (r"\boxed{1{,}800}", "1800"),
        (r"\boxed{1\,800}", "1800"),
        (r"\boxed{1, 800}", "1800"),
        (r"\boxed{(1,2)}", "(1,2)"),
        (r"\boxed{2x}", "2x"),
        (r"\boxed{007.50}", "7.5"),
        (r"\boxed{5\text{ cm}^2}", "5"),
        (r"\boxed{3\frac{1}{2}}", r"3\frac{1}{2}"),
        ("the answer is about 18", "18"),
        ("the answer is USD 18", "18"),
        ("the answer is 3 * 6 = 18 = unknown", "18"),
    ],
)
def test_answers_by_hand(text, answer):
    assert extract_answer(text) == answer


@pytest.mark.parametrize(
    "text, truth, right",
    [
        ("the answer is 2", "2", True),
        ("the answer is 22", "2", False),
        ("the answer is 18", "Janet has 18 . #### 18", True),
        (r"\boxed{\$18.00}", "18", True),
        (r"\boxed{\frac{1}{2}}", "0.5", True),
        ("the answer is 1/2", r"\frac{1}{2}", True),
        (r"\boxed{.5}", "0.50", True),
        (r"\boxed{2x}", "2", False),
        (r"\boxed{3\frac{1}{2}}", "3.5", True),
        (r"\boxed{-3\frac{1}{2}}", "-3.5", True),
        (r"\boxed{\frac{-1}{2}}", "-0.5", True),
        ("the answer is 1.5e3", "1500", True),
        (r"\boxed{2 1/2}", "2.5", True),
        (r"\boxed{2 1/2}", "10.5", False),
        ("#### 2 1/2", "2.5", True),
        (r"the answer is 3\frac{1}{2} .", "3.5", True),
        pytest.param(r"\boxed{x^2 + 2x + 1}", "(x+1)^2", True, marks=pytest.mark.process),  # by math-verify
        pytest.param(r"\boxed{x^2 + 2x}", "(x+1)^2", False, marks=pytest.mark.process),
        (r"\boxed{\text{Monday}}", "Monday", True),
        (r"\boxed{\text{Monday}}", "Tuesday", False),
        ("Logan is a boy. The answer is son.", "son", True),
        ("so the answer is mother-in-law.", "mother-in-law", True),
        ("the answer is **Tariq-Jay**", "Tariq-Jay", True),
        ("The answer is Son", "#### son", True),
        ("The answer is son. Or the answer is daughter.", "son", False),
        ("Logan is the son.", "son", False),
        ("The answer is stepson.", "son", False),
        ("The answer is son.", "3", False),
    ],
)
def test_an_answer_is_compared_whole_and_by_value(text, truth, right):
    assert is_correct(text, truth) is right


@pytest.mark.parametrize("text", [
    "answer is x" + " = y" * 2000, "answer is 1" + "=  " * 2000 + "x", "answer is" + " " * 20000 + "x",
    "answer is" + "\n" * 20000, "answer is " * 2000 + "x", "answer is " + "a b " * 5000, "answer is " + "1 / " * 5000,
    "answer is -" + " " * 20000 + "$", r"\boxed{" + "5 " * 5000, r"\boxed{5 " + "ab " * 5000 + "!}",
    r"\boxed{" + "1, " * 5000 + "}", "answer is 1e99999999", r"\boxed{1e99999999}",
])  # fmt: skip
def test_no_answer_takes_long(text):
    """A degenerate answer of a model must not hold up a rank: minutes with nested quantifiers, milliseconds here."""
    started = time.process_time()
    is_correct(text, "5")
    assert time.process_time() - started < 5
