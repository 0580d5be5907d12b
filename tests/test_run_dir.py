"""What is read of a run folder is what a run writes, or said to be damaged."""

from __future__ import annotations

from pathlib import Path

import pytest

from llamarl_hpc.errors import RunDirError
from llamarl_hpc.run_dir import RunDir


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[]", r"it is \[\]"),
        ('{"attempts": {}}', r"it\.attempts is \{\}"),
        ('{"attempts": [3]}', r"attempts\.0 is 3"),
        ('{"attempts": [{"nu}ber": 1}]}', r"attempts\.0 has no number"),
        ('{"attempts": [{"number": 1, "started": "x"}]}', r"attempts\.0\.started is 'x'"),
        ('{"attempts": [], "jobs": [{"submitted": 1}]}', r"jobs\.0 has no id"),
        ('{"attempts": ', "Expecting value"),
    ],
)
def test_a_damaged_run_json_is_one_sentence(tmp_path: Path, text: str, said: str) -> None:
    run = RunDir(tmp_path)
    run.run_json.write_text(text)
    with pytest.raises(RunDirError, match=rf"run\.json is damaged \({said}.*\); mend it"):
        run.read_info()


def test_what_a_run_writes_is_read_and_no_file_is_nothing(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert run.read_info() == {}
    run.run_json.write_text('{"attempts": [{"number": 1, "started": 1, "ended": null}]}')
    assert run.read_info()["attempts"][0]["started"] == 1


@pytest.mark.parametrize("data", [b"trainer: 3\n", b"- 1\n", b"a: b: c\n", b"name: \xd4\n", b"\0"])
def test_a_damaged_configuration_is_one_sentence(tmp_path: Path, data: bytes) -> None:
    run = RunDir(tmp_path)
    with pytest.raises(RunDirError, match="cannot be read"):
        run.read_config()
    run.config.write_bytes(data)
    with pytest.raises(RunDirError, match=r"config\.yaml (is damaged|cannot be read) \(.*\); mend"):
        run.read_config()
    run.config.write_text("name: x\ntrainer:\n  max_steps: 3\nrewards: []\n")
    assert run.read_config()["trainer"]["max_steps"] == 3
