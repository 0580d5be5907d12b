"""Rollouts to look at in a notebook: prompt, completion coloured by how far each token was
off-policy, reward and where it came from."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import Any

from analysis.read_run import Run
from analysis.stored_rollout import StoredRollout
from analysis.tokens import coloured_pieces, load_tokenizer

_MORE, _LESS = "0,158,115", "213,94,0"  # green: likelier under the trainer; orange: less likely
_STRENGTH = {1: 0.18, 2: 0.35, 3: 0.55}
_PRE = "white-space:pre-wrap;overflow-wrap:anywhere;font-family:monospace;font-size:.92em"


class RolloutView:
    """Some rollouts of a run. A cell shows them; `print` shows them without colours."""

    def __init__(self, run: Run, rollout_ids: Iterable[int]) -> None:
        self._rollouts = [run.rollout(int(number)) for number in rollout_ids]
        self._run, self._tokenizer = run, load_tokenizer(run)

    def __repr__(self) -> str:
        return "\n\n".join(
            f"{question(self._run, r.columns, r.prompt)}\n{r.text.strip()}\n[{', '.join(facts(r))}]"
            for r in self._rollouts
        )

    def _repr_html_(self) -> str:
        return "".join(self._card(rollout) for rollout in self._rollouts) or "<em>none</em>"

    def _card(self, rollout: StoredRollout) -> str:
        tokens = "".join(
            _token(text, level) for text, level in coloured_pieces(self._tokenizer, rollout)
        )
        asked = question(self._run, rollout.columns, rollout.prompt)
        return (
            '<div style="border-left:3px solid rgba(128,128,128,.4);padding:.1em .8em;'
            'margin:.5em 0">'
            f'<div style="{_PRE};opacity:.65">{escape(asked)}</div>'
            f'<div style="{_PRE}">{tokens}</div>'
            f'<div style="font-size:.85em;opacity:.75">{escape(", ".join(facts(rollout)))}</div>'
            "</div>"
        )


def question(run: Run, columns: dict[str, Any], prompt: str) -> str:
    """The question as the data have it; the whole prompt where it is not one of their columns."""
    name = (run.config.get("data") or {}).get("prompt")
    for column in (name, "question"):
        text = columns.get(column) if isinstance(column, str) else None
        if isinstance(text, str):
            return text.strip()
    return prompt.strip()


def facts(rollout: StoredRollout) -> list[str]:
    """Reward, credit, age and origin, in a few words each."""
    found = [f"reward {rollout.reward:.3f}"]
    if rollout.status == "trained":
        found += [f"advantage {rollout.advantage:+.3f}", f"staleness {rollout.staleness}"]
    found.append(f"{'version' if rollout.purpose == 'eval' else 'step'} {rollout.step}")
    found += [f"{len(rollout.token_ids)} tokens, {rollout.finish_reason}", rollout.generator]
    return [*found, f"rollout {rollout.rollout_id}"]


def _token(text: str, level: int) -> str:
    if not level:
        return escape(text)
    colour = f"rgba({_MORE if level > 0 else _LESS},{_STRENGTH[abs(level)]})"
    return f'<span style="background:{colour}">{escape(text)}</span>'
