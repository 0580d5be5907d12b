"""`bench rollouts` at a small size: all figures, nothing left behind."""

from __future__ import annotations

import json
import os
from pathlib import Path

from typer.testing import CliRunner

from llamarl_hpc.cli.main import app

SMALL = ["--rollouts", "16", "--tokens", "20", "--flushes", "3", "--rounds", "3", "--segments", "3"]


def test_the_store_is_measured_against_a_raw_file(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    words = ["bench", "rollouts", "--dir", str(tmp_path), "--json", str(out), *SMALL]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    figures = json.loads(out.read_text())
    rounds = figures["append_vs_raw_write_rounds"]
    assert len(rounds) == 3 and figures["append_vs_raw_write"] == sorted(rounds)[1] > 0
    assert figures["num_rollouts"] == 3000 and figures["open_and_read_column_s"] > 0
    assert 0 < figures["rollout_by_id_ms"] <= figures["rollout_by_id_max_ms"]
    assert 0 < figures["writer_share_of_step"] < 0.01
    assert "append_vs_raw_write" in result.output
    compression = figures["compression"]
    assert {"checksum", "gzip", "lzf"} <= set(compression)
    assert all(entry["size"] > 0 and entry["read_mib_per_s"] > 0 for entry in compression.values())
    assert compression["gzip"]["size"] <= compression["checksum"]["size"]
    assert os.listdir(tmp_path) == ["figures.json"]
