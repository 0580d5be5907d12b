"""`llamarl-hpc submit --site`, `--preflight`: what they add to a config."""

from __future__ import annotations

from pathlib import Path

import yaml
from tiny_run import cli, write_run_files


def test_a_site_and_a_preflight_are_two_words_on_the_command_line(tmp_path: Path) -> None:
    file = write_run_files(tmp_path)
    answer = cli("submit", file, "--site", "lumi", "--preflight", "--dry-run")
    assert answer.code == 0, answer.err
    script, _, resolved = answer.out.partition("# ---- config.yaml ----\n")
    assert script.count("#SBATCH --partition=standard\n") == 3
    assert "module load LUMI partition/G\nexec " in script
    launch = yaml.safe_load(resolved)["launch"]
    assert (launch["site"], launch["preflight"], launch["mpi"]) == ("lumi", True, "default")


def test_a_site_that_is_not_known_is_one_sentence(tmp_path: Path) -> None:
    answer = cli("submit", write_run_files(tmp_path), "--site", "lumy", "--dry-run")
    assert answer.code == 2
    assert "there is no site profile 'lumy'; did you mean 'lumi'?" in answer.err
