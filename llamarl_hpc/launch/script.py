"""The text of a batch script: pure, so that it can be compared with a recorded one.

    #!/bin/bash
    options of the whole job          (they count in the first component only)
    options of component 0
    #SBATCH hetjob
    options of component 1 ...
    set-up, environment
    exec COMMAND                      the batch script becomes the command: signals reach it

What Slurm's own reader of `#SBATCH` lines does with quotes, blanks, `#` and backslashes is what
`_value` is made for; it is not a shell.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from llamarl_hpc.errors import ConfigError

Options = Mapping[str, str | int | None]  # long name -> value; None: an option without a value

_PLAIN = re.compile(r"[A-Za-z0-9@%+=:,./_\-\[\]&|*()]+")
_MAX_NAME = 64


@dataclass(frozen=True, kw_only=True)
class Component:
    """One part of a heterogeneous job: nodes of one kind."""

    name: str
    options: Options


@dataclass(frozen=True, kw_only=True)
class BatchScript:
    """Everything in a batch script. One component is an ordinary job."""

    job: Options  # of the whole job: job-name, output, signal, ...
    components: Sequence[Component]
    command: str  # shell text, the last thing that runs
    comment: Sequence[str] = ()
    setup: Sequence[str] = ()  # lines of shell
    environment: Mapping[str, str] = field(default_factory=dict)


def render(script: BatchScript) -> str:
    """The batch script. Raises ConfigError for values that Slurm cannot be given."""
    return "\n".join(_lines(script)) + "\n"


def _lines(script: BatchScript) -> Iterator[str]:
    yield "#!/bin/bash"
    yield from (f"# {line}".rstrip() for line in script.comment)
    yield from _directives(script.job)
    for number, component in enumerate(script.components):
        yield "#"
        if number:
            yield "#SBATCH hetjob"
        several = f"component {number}: " if len(script.components) > 1 else ""
        yield f"# {several}{_one_line(component.name)}"
        yield from _directives(component.options)
    yield ""
    yield from script.setup
    yield from (f"export {k}={shlex.quote(v)}" for k, v in script.environment.items())
    yield f"exec {script.command}"


def _directives(options: Options) -> Iterator[str]:
    for name, value in options.items():
        yield f"#SBATCH --{name}" if value is None else f"#SBATCH --{name}={_value(name, value)}"


def _value(name: str, value: str | int) -> str:
    text = str(value)
    if "\n" in text or "\r" in text:
        raise ConfigError(f"--{name} cannot be given to Slurm: {text!r} has several lines")
    if _PLAIN.fullmatch(text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _one_line(text: str) -> str:
    return " ".join(text.split())


def log_file(path: str) -> str:
    """A path for --output in which only `%j`, the job id, is replaced. Raises ConfigError for a
    backslash, after which Slurm replaces nothing."""
    if "\\" in path:
        raise ConfigError(
            f"Slurm cannot write its log below '{path}' because of the backslash; choose a folder "
            "without one"
        )
    return path.replace("%", "%%").replace("%%j", "%j")


def job_name(text: str) -> str:
    """A name that squeue can show and a file name can hold; never empty."""
    return re.sub(r"[^A-Za-z0-9._=+-]+", "-", text).strip("-")[:_MAX_NAME] or "run"
