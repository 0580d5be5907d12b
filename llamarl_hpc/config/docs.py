"""The text of docs/config.md: `python -m llamarl_hpc.config.docs > docs/config.md`.

A test compares the file with `render()`; the schema's descriptions are the only place to edit.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

from llamarl_hpc.config.fields import Key, all_keys

_HEAD = """\
# Configuration

Generated from `llamarl_hpc/config/schema.py` by `make docs`; edit there.

A run is one YAML file. Every key has a default, so a file holds only what differs. Any key can be
set on the command line with `--set`, by its dotted name:

```
llamarl-hpc run experiments/quickstart.yaml --set trainer.max_steps=10 --set rewards.0.weight=2
```

- Values are read as YAML; keys that hold text take the text as it stands. `N` is an index into a
  list, `NAME` a key of your choice. `--set KEY=` without a value is `null` where that is allowed,
  and an empty text below `options` and `env`.
- `${oc.env:SCRATCH}` stands for an environment variable, `${oc.env:SCRATCH,/tmp}` with a default,
  `${oc.decode:${oc.env:STEPS}}` for one that is a number, `${trainer.max_steps}` for another key.
- File names are relative to the folder the command is given in. The copy of the configuration in
  the run folder has every key and absolute paths.
- An unknown key, a wrong type and keys that contradict each other are errors before anything
  starts (exit code 2); the message names the line.
"""


def render() -> str:
    """The whole page, Markdown."""
    return "\n".join([_HEAD.rstrip(), *_tables()]) + "\n"


def _tables() -> Iterator[str]:
    title = None
    for key in all_keys():
        if key.is_block and key.leaf != "N":
            continue  # its keys follow
        if key.leaf in ("N", "NAME"):
            continue  # said by the type of the list or mapping
        if _title(key) != title:
            title = _title(key)
            yield f"\n## {title}\n"
            if summary := _summary(key):
                yield f"{summary}\n"
            yield "| key | type | default | meaning |\n| --- | --- | --- | --- |"
        yield _row(key)


def _title(key: Key) -> str:
    block = f"`{key.parent}`" if key.parent else "Top level"
    return f"{block} with `kind: {key.variant}`" if key.variant else block


def _summary(key: Key) -> str:
    block = next((k for k in all_keys() if k.name == key.parent), None)
    return " ".join(block.description.split()) if block is not None else ""


def _row(key: Key) -> str:
    default = "required" if key.required else f"`{_yaml(key.default)}`"
    cells = (f"`{key.name}`", key.wanted, default, " ".join(key.description.split()))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _yaml(value: Any) -> str:
    if isinstance(value, list):
        return json.dumps([v.model_dump() if hasattr(v, "model_dump") else v for v in value])
    return value if isinstance(value, str) else json.dumps(value)


if __name__ == "__main__":
    sys.stdout.write(render())
