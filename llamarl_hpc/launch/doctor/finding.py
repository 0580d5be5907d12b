"""What a check found: a verdict, one sentence, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from llamarl_hpc.errors import EXIT_OK, EXIT_USER_ERROR

Verdict = Literal["ok", "warn", "fail"]
_ORDER: tuple[Verdict, ...] = ("ok", "warn", "fail")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One check. `ok` also stands for what could not be checked, and says so."""

    name: str
    verdict: Verdict
    sentence: str
    advice: str = ""  # empty when there is nothing to do
    figures: dict[str, Any] = field(default_factory=dict)  # for the JSON file

    @property
    def text(self) -> str:
        return f"{self.sentence}; {self.advice}" if self.advice else self.sentence


def ok(name: str, sentence: str, **figures: Any) -> Finding:
    return Finding(name=name, verdict="ok", sentence=sentence, figures=figures)


def warn(name: str, sentence: str, advice: str, **figures: Any) -> Finding:
    return Finding(name=name, verdict="warn", sentence=sentence, advice=advice, figures=figures)


def fail(name: str, sentence: str, advice: str, **figures: Any) -> Finding:
    return Finding(name=name, verdict="fail", sentence=sentence, advice=advice, figures=figures)


def worst(findings: Iterable[Finding]) -> Verdict:
    """The worst verdict; `ok` when there is none."""
    return max((f.verdict for f in findings), key=_ORDER.index, default="ok")


def exit_code(findings: Iterable[Finding]) -> int:
    """0, or 2 when something fails: a person can mend it."""
    return EXIT_USER_ERROR if worst(findings) == "fail" else EXIT_OK


def as_json(findings: Sequence[Finding], seconds: float) -> dict[str, Any]:
    """For `--json`: the verdict of all, and every finding with its figures."""
    return {
        "verdict": worst(findings),
        "seconds": round(seconds, 2),
        "findings": [
            {
                "name": f.name,
                "verdict": f.verdict,
                "sentence": f.sentence,
                "advice": f.advice,
                "figures": f.figures,
            }
            for f in findings
        ],
    }
