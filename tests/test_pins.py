"""constraints.txt pins all that the project needs, and nothing else is needed."""

from __future__ import annotations

import configparser
import re
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PINS = {
    canonicalize_name(name): version
    for name, version in re.findall(
        r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE
    )
}
# torch brings its own CUDA packages where its build has them, at versions it pins itself
UNPINNED = re.compile(r"nvidia-|cuda-|triton|setuptools")


NOT_SET_UP = {"bench"}  # extras that `make setup` leaves out


def direct() -> list[Requirement]:
    """Requirements of setup.cfg, with all extras that are set up."""
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    lines = settings["options"]["install_requires"]
    for name, extra in settings["options.extras_require"].items():
        if name in NOT_SET_UP:
            continue
        lines += "\n" + extra.replace(";", "\n")
    return [Requirement(line) for line in lines.splitlines() if line.strip()]


def closure() -> set[str]:
    """Names of all packages that the direct requirements need here, by installed metadata."""
    found: set[str] = set()
    queue = direct()
    while queue:
        requirement = queue.pop()
        name = canonicalize_name(requirement.name)
        if name in found or UNPINNED.match(name):
            continue
        found.add(name)
        for text in metadata.distribution(name).requires or []:
            inner = Requirement(text)
            extras = requirement.extras or {""}
            if inner.marker is None or any(inner.marker.evaluate({"extra": e}) for e in extras):
                queue.append(inner)
    return found


def test_every_package_of_the_closure_is_pinned() -> None:
    assert sorted(closure() - set(PINS)) == []


def test_the_tests_run_with_the_pinned_versions() -> None:
    different = {
        name: (metadata.version(name).split("+")[0], PINS[name])
        for name in closure() & set(PINS)
        if metadata.version(name).split("+")[0] != PINS[name]
    }
    if different and not (ROOT / ".venv" / ".set-up").exists():
        pytest.skip(f"an environment that 'make setup' did not make: {different}")
    assert different == {}
