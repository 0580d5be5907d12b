"""Which answers count as right: extraction, numbers, equivalent forms, and what is refused."""

from __future__ import annotations

import time
from fractions import Fraction

import pytest

from llamarl_hpc.rewards.equality import equal, normalise
from llamarl_hpc.rewards.extraction import extract_answer, last_box
from llamarl_hpc.rewards.math_answer import MathAnswer, reference_answer, score
from llamarl_hpc.rewards.numbers import read_number

# ------------------------------------------------------------------ numbers


@pytest.mark.parametrize(
    "text",
    [
        "$1,000",
        "1,000.00",
        "1000 dollars.",
        "#### 1,000",
        "**1000**",
        "1 000",
        r"\$1{,}000",
        r"\boxed{1{,}000}",
        "1e3",
        r"1 \times 10^3",
        "####\n1000",
        "1000km",
        "$1000$",
        "1000!",
    ],
)
def test_a_thousand_is_read_however_it_is_written(text: str) -> None:
    assert score("1000", text) == 1.0
    assert score(text, "1000") == 1.0


@pytest.mark.parametrize(
    "text", ["1,00", ",", "10,00", "", " ", "1000th", "1000x", "100", "1 00 0"]
)
def test_what_is_not_a_thousand_is_wrong(text: str) -> None:
    assert score("1000", text) == 0.0


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("7", {7}),
        ("007", {7}),
        ("-3", {-3}),
        ("- 3", {-3}),
        ("-$5", {-5}),
        ("$-5", {-5}),
        (".5", {Fraction(1, 2)}),
        ("5.", {5}),
        ("0.1", {Fraction(1, 10)}),
        ("3/4", {Fraction(3, 4)}),
        (r"-\frac{3}{4}", {Fraction(-3, 4)}),
        (r"1\frac{1}{2}", {Fraction(3, 2)}),
        ("1 1/2", {Fraction(3, 2)}),
        ("1.5e-1", {Fraction(3, 20)}),
        ("50%", {50, Fraction(1, 2)}),
        ("12 apples left", {12}),
        ("12 miles per hour", {12}),
        ("5 m", {5}),
        ("5 cm^2", {5}),
    ],
)
def test_numbers_are_exact(text: str, values: set[object]) -> None:
    assert read_number(text) == values


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "5x",
        "2k",
        "3rd",
        "1,00",
        "1,0000",
        "12 + 7",
        "2^3",
        "6/2",
        "1/0",
        "5 or 6",
        "5 x",
        "3 million",
        "3 dollars and 50 cents",
        "2:30",
        "1e99999",
        "9" * 300,
        r"2\pi",
        "5 and a half",
    ],
)
def test_everything_else_is_no_number(text: str) -> None:
    assert read_number(text) is None


# ------------------------------------------------------------------ where the answer stands


@pytest.mark.parametrize(
    ("text", "box"),
    [
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{1} ... \boxed{2}", "2"),
        (r"\boxed{\text{(B)}}", r"\text{(B)}"),
        (r"\boxed{{3}}", "{3}"),
        (r"\boxed{4", None),
        (r"\boxed{3} so \boxed{4", "3"),
        (r"\boxed{}", ""),
        (r"\\boxed{7}", "7"),
        (r"\boxed 5", "5"),
        (r"\boxed 5.", "5"),
        (r"\fbox{6}", "6"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxedset{1}", None),
        ("no box", None),
    ],
)
def test_the_last_complete_box_counts(text: str, box: str | None) -> None:
    assert last_box(text) == box


@pytest.mark.parametrize(
    "text",
    [
        "19",
        "12 + 7 = 19",
        "The sum of 12 and 7 is 19.",
        "The answer is 19.",
        "answer: 19",
        "The answer is 19 because 12+7=19",
        "The answer is 18. Sorry, the answer is 19.",
        "12 + 7 = 19\nSo she has 19 apples.",
        "19\nI hope this helps!",
        "1. Add 12 and 7\n2. The sum is 19",
        "Step 1: 12\nStep 2: 19",
        r"\boxed{18}, wait \boxed{19}",
        r"\boxed{19} hmm 18",
        r"\boxed{12+7=19}",
        r"\boxed{19\text{ apples}}",
        r"\boxed{x=19}",
        "#### 18\n#### 19\nbye",
        "$19$",
        "The answer is $19$.",
        "$12+7=19$",
        "The result is **19**.",
        "She pays $19",
        "= $19",
        "The 3rd try gives 19",
        "x2 gives 19",
        "12 plus 7 equals 19",
    ],
)
def test_nineteen_is_found(text: str) -> None:
    assert score("19", text) == 1.0


@pytest.mark.parametrize(
    "text",
    [
        "5 or 19",
        "It is 5 or 19",
        "between 3 and 19",
        "19 apples in 2 days",
        "answer: 5 ... no, 19",
        "She pays $5 and then $19",
        "The total is 19 (12 + 7).",
        r"\boxed{19",
        r"19 \boxed{}",
        "12+7=1,9",
        "19th",
        "19x",
        "-19",
        "12 - 19",
        "12 + 7",
        "12 + 7 =",
        "19 = 12 + 7",
        r"\boxed{12+7}",
        "nineteen",
        "no digits",
    ],
)
def test_an_answer_that_is_not_stated_plainly_is_none(text: str) -> None:
    assert score("19", text) == 0.0


@pytest.mark.parametrize(
    "text", ["-5", "3 - 8 = -5", "3-8=-5", "3 - 8 = - 5", "The answer is -5.", "is - 5", "\u22125"]
)
def test_a_negative_answer_keeps_its_sign(text: str) -> None:
    assert score("-5", text) == 1.0
    assert score("5", text) == 0.0


def test_a_worked_solution_is_read_by_its_mark() -> None:
    solution = "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\n48+24 = 72\n#### 72"
    assert reference_answer(solution) == "72"
    assert extract_answer(solution) == "72"
    assert reference_answer(r"so $x = \boxed{\frac{1}{2}}$.") == r"\frac{1}{2}"
    assert reference_answer(" 43.0 ") == "43.0"


# ------------------------------------------------------------------ equivalent forms


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        (r"\dfrac{3}{4}", "0.75", True),
        ("x=5", "5", True),
        (r"1\frac{1}{2}", "3/2", True),
        ("(1,2)", "(2,1)", False),
        (r"\{1,2\}", r"\{2,1\}", True),
        ("(1,2)", "[1,2]", False),
        (r"90^\circ", "90", True),
        ("**73**", "73", True),
        (r"\sqrt{2}", "1.414", False),
        ("x^2-1", "(x-1)(x+1)", True),
        (r"3\sqrt{13}", r"\sqrt{117}", True),
        (r"11\sqrt2", r"11\sqrt{2}", True),
        (r"\frac{270}7\text{ degrees}", r"\frac{270}{7}", True),
        (r"864 \mbox{ inches}^2", "864", True),
        ("6+9i", "9i+6", True),
        ("1,-2", "-2,1", True),
        ("1,-2", "1,2", False),
        ("3, 5, 7", "3, 5", False),
        (r"1 \pm \sqrt{19}", r"1\pm\sqrt{19}", True),
        (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\dfrac{\pi}{2})", True),
        (r"(-\infty, 2) \cup (3, \infty)", r"(3,\infty)\cup(-\infty,2)", True),
        (r"x \in [-2,7]", "[-2,7]", True),
        ("y = 2x + 3", "2x+3", True),
        (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix} 1\\2\end{pmatrix}", True),
        (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix} 2 \\ 1\end{pmatrix}", False),
        (r"\text{(B)}", "B", True),
        ("evelyn", r"\text{Evelyn}", True),
        ("east", "west", False),
        ("50%", "0.5", True),
        ("50%", "50", True),
        ("0.333", "1/3", False),
        (r"4210_{5}", "4210_5", True),
        (r"11,\! 111,\! 111,\! 100", "11111111100", True),
        # a number has to be stated, not left to be worked out
        ("12+7", "19", False),
        ("2^3", "8", False),
        (r"\frac{6}{2}", "3", False),
        ("5x", "5", False),
        ("", "", False),
    ],
)
def test_forms_that_mean_the_same(a: str, b: str, same: bool) -> None:
    assert equal(a, b) is same
    assert equal(b, a) is same, "the comparison is symmetric"


@pytest.mark.parametrize(
    "text", ["9^{9^{9^9}}", "9^9^9^9", "100000!", "x^{99999}", "(" * 5000 + "1" + ")" * 5000]
)
def test_monsters_are_wrong_at_once(text: str) -> None:
    start = time.perf_counter()
    assert score("x^2", text) == 0.0
    assert score("x^2", rf"\boxed{{{text}}}") == 0.0
    assert time.perf_counter() - start < 5.0


def test_normalising_twice_changes_nothing_more() -> None:
    for text in (
        r"\left( 3, \frac{\pi}{2} \right)",
        r"x = \dfrac34 \text{ cm}^2",
        "**12**",
        "= 3.",
    ):
        assert normalise(normalise(text)) == normalise(text)


# ------------------------------------------------------------------ the reward function


def test_the_reward_reads_the_column_it_is_told() -> None:
    reward = MathAnswer("target")
    assert reward(["q"] * 3, ["43", "44", "x"], target=[43.0] * 3) == [1.0, 0.0, 0.0]
    assert reward(["q"] * 2, ["43", "44"], answer=["43"] * 2) == [None, None]
    assert reward(["q"], ["43"], target=[None]) == [None]


def test_an_arithmetic_answer_costs_microseconds() -> None:
    score("19", "The sum of 12 and 7 is 19.")
    start = time.perf_counter()
    for i in range(1000):
        score("19", f"The sum of {i} and 7 is {i + 7}.")
    assert time.perf_counter() - start < 0.5  # measured: about 30 us each
