"""Rewards by name: TRL's form, what is checked at the start, what a function may return."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llamarl_hpc.config.schema import Config
from llamarl_hpc.errors import ConfigError
from llamarl_hpc.rewards.base import NamedReward, build_rewards, call, specs, total
from llamarl_hpc.rewards.python_function import PythonFunction

SOURCE = """
from dataclasses import dataclass

@dataclass
class Thing:
    x: int = 0

def length(completions, **kwargs):
    return [-len(c) for c in completions]

def only_what_it_wants(completions, level):
    return [float(level[0])] * len(completions)

def no_completions(prompts):
    return []

async def later(completions, **kwargs):
    return []

NUMBER = 3
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "my_own_rewards.py"
    path.write_text(SOURCE)
    return path


def test_a_function_of_a_file_gets_the_arguments_it_names(source: Path) -> None:
    length = PythonFunction(f"{source}:length")
    assert length(["p"] * 2, ["a", "bcd"], answer=["1"] * 2) == [-1, -3]
    wanted = PythonFunction(f"{source}:only_what_it_wants")
    assert wanted(["p"] * 2, ["a", "b"], level=[4, 4], answer=["1", "1"]) == [4.0, 4.0]


def test_a_module_in_the_current_folder_is_found(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(source.parent)
    monkeypatch.setattr("sys.path", ["/usr/lib"])
    assert PythonFunction("my_own_rewards:length")([], ["ab"]) == [-2]


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("nothing", "wanted module:function or path/to/file.py:function"),
        (":f", "wanted module:function"),
        ("m:f()", "wanted module:function"),
        ("no_such_module_here:f", "rewards module 'no_such_module_here' was not found"),
        ("json.no_such:f", "rewards module 'json.no_such' was not found"),
        ("json:dumbs", "json has no 'dumbs'; it has dump"),
        ("/no/such/file.py:f", "the rewards file /no/such/file.py does not exist"),
        ("{source}:ength", "has no 'ength'; it has length"),
        ("{source}:NUMBER", "is int, not a function"),
        ("{source}:later", "is async; wanted a plain function"),
        ("{source}:no_completions", "takes (prompts); wanted f(prompts, completions, **columns)"),
    ],
)
def test_a_function_that_cannot_be_used_is_refused_at_the_start(
    source: Path, function: str, said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        PythonFunction(function.replace("{source}", str(source)))
    assert said in str(caught.value)


def test_an_error_while_importing_is_told(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("import no_such_thing_at_all\n")
    (tmp_path / "b.py").write_text("1 / 0\n")
    with pytest.raises(ConfigError, match=r"a\.py failed: ModuleNotFoundError: .*no_such_thing"):
        PythonFunction(f"{tmp_path}/a.py:f")
    with pytest.raises(ConfigError, match=r"b\.py failed: ZeroDivisionError"):
        PythonFunction(f"{tmp_path}/b.py:f")


def test_the_configs_rewards_get_names_and_weights(source: Path) -> None:
    config = Config.model_validate(
        {
            "rewards": [
                {"kind": "math_answer"},
                {"kind": "python", "function": f"{source}:length", "weight": 0.1},
            ]
        }
    )
    assert [(s.name, s.weight) for s in specs(config.rewards)] == [
        ("math_answer", 1.0),
        ("length", 0.1),
    ]
    rewards = build_rewards(config.rewards, answer="target")
    columns = {"target": 4, "prompts": "a column of this name never reaches the function"}
    parts = [call(reward, "2+2", ["4", "five"], columns) for reward in rewards]
    assert parts == [[1.0, 0.0], [-1.0, -4.0]]
    assert total([r.weight for r in rewards], parts) == pytest.approx([0.9, -0.4])


def test_none_counts_as_nothing_in_the_sum() -> None:
    assert total([1.0, 2.0], [[1.0, None], [None, 0.25]]) == [1.0, 0.5]
    assert total([1.0], [[]]) == []


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ([1.0], "returned 1 scores for 2 completions"),
        (None, "returned None, not a list of numbers"),
        (["a", "b"], "not a list of numbers"),
        ([float("nan"), 0.0], "wanted finite numbers"),
        ([float("inf"), 0.0], "wanted finite numbers"),
    ],
)
def test_a_function_that_breaks_its_form_is_an_error(returned: Any, said: str) -> None:
    reward = NamedReward(name="r", weight=1.0, function=lambda *a, **k: returned)
    with pytest.raises(ValueError, match=said):
        call(reward, "p", ["a", "b"], {})


def test_none_integers_and_numpy_numbers_are_scores() -> None:
    import numpy as np

    reward = NamedReward(
        name="r", weight=1.0, function=lambda *a, **k: [None, True, np.float32(0.5)]
    )
    assert call(reward, "p", ["a", "b", "c"], {}) == [None, 1.0, 0.5]
