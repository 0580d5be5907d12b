"""Spans, metrics and TensorBoard events on disk."""

from __future__ import annotations

import errno
import json
import os
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from llamarl_hpc.observability.json_lines import JsonLinesFile, read_json_lines
from llamarl_hpc.observability.metrics_file import MetricsFile
from llamarl_hpc.observability.tensorboard import TensorBoard
from llamarl_hpc.observability.trace import Span, Tracer, read_spans, to_chrome_trace


def test_spans_are_written_when_they_end_also_after_an_error(tmp_path: Path) -> None:
    path = tmp_path / "trace" / "trainer.1.jsonl"
    tracer = Tracer(path, "trainer", rank=2)
    with pytest.raises(RuntimeError), tracer.span("train", step=3):
        raise RuntimeError("boom")
    tracer.record("score", 5.0, 7.5, groups=2)
    spans = read_spans([path])
    assert [(s.name, s.executor, s.rank, s.args) for s in spans] == [
        ("score", "trainer", 2, {"groups": 2}),
        ("train", "trainer", 2, {"step": 3}),
    ]
    assert spans[0].duration_s == 2.5
    assert 0 <= spans[1].duration_s < 1.0
    tracer.close()
    tracer.close()


def test_spans_do_not_go_backwards_when_the_wall_clock_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import time

    tracer = Tracer(tmp_path / "t.jsonl", "generator.0")
    with tracer.span("generate"):
        monkeypatch.setattr(time, "time", lambda: 0.0)
    assert 0 <= read_spans([tmp_path / "t.jsonl"])[0].duration_s < 1.0


def test_a_torn_last_line_is_passed_over_and_removed_on_reopening(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step":0}\n{"step":1}\n{"step":2,"rew')
    assert read_json_lines(path) == [{"step": 0}, {"step": 1}]
    with JsonLinesFile(path) as file:
        file.append({"step": 2})
    assert path.read_text() == '{"step":0}\n{"step":1}\n{"step":2}\n'


def test_a_last_line_without_its_newline_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step":0}\n{"step":1}')
    with JsonLinesFile(path) as file:
        file.append({"step": 2})
    assert [row["step"] for row in read_json_lines(path)] == [0, 1, 2]


def test_every_line_is_strict_json_whatever_the_values(tmp_path: Path) -> None:
    with JsonLinesFile(tmp_path / "m.jsonl") as file:
        file.append({"a": float("nan"), "b": np.float32(0.5), "c": [np.int64(3), float("inf")]})
        file.append({"d": Path("x"), "e": None, "f": True})

    def refuse(name: str) -> None:
        raise AssertionError(name)

    lines = (tmp_path / "m.jsonl").read_text().splitlines()
    rows = [json.loads(line, parse_constant=refuse) for line in lines]
    assert rows == [{"a": None, "b": 0.5, "c": [3, None]}, {"d": "x", "e": None, "f": True}]


def test_a_full_disk_delays_lines_and_loses_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write = os.write
    with JsonLinesFile(tmp_path / "m.jsonl") as file, monkeypatch.context() as patch:
        calls = iter([3, OSError(errno.ENOSPC, "No space left on device")])

        def nearly_full(descriptor: int, data: bytes) -> int:
            answer = next(calls, None)
            if isinstance(answer, OSError):
                raise answer
            return write(descriptor, bytes(data)[:answer])

        patch.setattr(os, "write", nearly_full)
        file.append({"step": 0})
        assert (tmp_path / "m.jsonl").read_text() == '{"s'
        file.append({"step": 1})
    assert [row["step"] for row in read_json_lines(tmp_path / "m.jsonl")] == [0, 1]
    assert caplog.text.count("lines are kept for now") == 1


def test_threads_do_not_mix_their_lines(tmp_path: Path) -> None:
    with JsonLinesFile(tmp_path / "m.jsonl") as file:
        threads = [
            threading.Thread(
                target=lambda i=i: [file.append({"i": i, "x": "y" * 500}) for _ in range(50)]
            )
            for i in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(read_json_lines(tmp_path / "m.jsonl")) == 200


def test_chrome_trace_has_one_process_per_executor(tmp_path: Path) -> None:
    tracer = Tracer(tmp_path / "a.jsonl", "generator.0")
    tracer.record("generate", 1.0, 1.5, version=3)
    other = Tracer(tmp_path / "b.jsonl", "trainer")
    other.record("train", 1.25, 2.0)
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl", tmp_path / "missing.jsonl"]
    events = json.loads(to_chrome_trace(read_spans(paths)))["traceEvents"]
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names == ["generator.0", "trainer"]
    first, second = (e for e in events if e["ph"] == "X")
    assert (first["ts"], first["dur"], first["pid"], first["args"]) == (0.0, 5e5, 1, {"version": 3})
    assert (second["ts"], second["dur"], second["cat"]) == (2.5e5, 7.5e5, "trainer")


def test_an_empty_trace_and_a_clock_that_was_set_make_a_valid_file() -> None:
    assert json.loads(to_chrome_trace([]))["traceEvents"] == []
    backwards = Span(name="train", start=5.0, end=4.0, executor="trainer")
    event = json.loads(to_chrome_trace([backwards]))["traceEvents"][-1]
    assert (event["ts"], event["dur"]) == (0.0, 0.0)


def test_metrics_lines_carry_step_version_attempt_and_time(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl", attempt=2)
    metrics.step(4, {"reward/mean": 0.5})
    metrics.event("eval", policy_version=5, metrics={"eval/heldout/avg@1": 0.25})
    metrics.close()
    step, event = read_json_lines(tmp_path / "metrics.jsonl")
    assert (step["step"], step["policy_version"], step["attempt"]) == (4, 5, 2)
    assert step["reward/mean"] == 0.5 and step["time"] > 1.7e9
    assert (event["event"], event["policy_version"], event["eval/heldout/avg@1"]) == (
        "eval",
        5,
        0.25,
    )


def test_tensorboard_events_hold_the_finite_numbers(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = TensorBoard(tmp_path / "tb")
    assert board.is_on
    board.add(3, {"reward/mean": 0.5, "kl": float("nan")})
    board.add(4, {"reward/mean": 0.75})
    board.close()
    board.close()
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    assert events.Tags()["scalars"] == ["reward/mean"]
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [(3, 0.5), (4, 0.75)]


def test_events_that_a_full_disk_refuses_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = TensorBoard(tmp_path)
    board.add(0, {"x": 1.0})
    write, room = os.pwrite, 10

    def full(handle: int, data: bytes, offset: int) -> int:
        return write(handle, data[:room], offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        board.add(1, {"x": 2.0})
        board.add(2, {"x": 3.0})
    board.add(3, {"x": 4.0})
    board.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [e.step for e in events.Scalars("x")] == [0, 3]
    assert caplog.text.count("left out for now") == 1


def test_without_the_package_or_switched_off_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    off = TensorBoard(tmp_path / "off", enabled=False)
    off.add(0, {"x": 1.0})
    monkeypatch.setitem(sys.modules, "tensorboard.summary.writer.record_writer", None)
    with caplog.at_level("INFO"):
        missing = TensorBoard(tmp_path / "missing")
    missing.add(0, {"x": 1.0})
    missing.close()
    assert not missing.is_on and not off.is_on
    assert not list(tmp_path.iterdir())
    assert "'tensorboard' is not installed" in caplog.text
