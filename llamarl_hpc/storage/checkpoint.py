"""Checkpoints that are whole or not there.

    checkpoints/step_000100.tmp/     being written: never looked at by a resume
    checkpoints/step_000100/         state.json, manifest.json, COMPLETE, and what the trainer wrote
    latest.json                      names the newest, for people and scripts

`commit` syncs every file, writes a manifest of sizes and hashes, and renames. Only then are older
ones removed. `latest` believes the manifest and not the names: the newest that validates wins, and
every one passed over is named with the reason.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llamarl_hpc.errors import ConfigError, StoreError
from llamarl_hpc.run_dir import RunDir
from llamarl_hpc.storage import atomic

log = logging.getLogger(__name__)

STATE, MANIFEST, COMPLETE = "state.json", "manifest.json", "COMPLETE"
_NAME = re.compile(r"step_(\d+)")
_REPLACED = ".replaced"  # the old folder of a step while a new one takes its name
_BLOCK_BYTES = 8 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A checkpoint whose every file is as it was written."""

    step: int  # optimizer steps applied: the policy version of its weights
    path: Path
    state: dict[str, Any]  # what the controller gave to `commit`
    warnings: list[str] = field(default_factory=list)  # newer ones that were passed over, and why


class CheckpointStore:
    """The checkpoints of one run. Only the run's controller calls `begin`, `commit`, `abort`."""

    def __init__(self, run: RunDir, keep: int) -> None:
        """Keeps the newest `keep` complete checkpoints. Raises ConfigError below 1."""
        if keep < 1:
            raise ConfigError(
                f"trainer.save_total_limit is {keep}, which would delete every checkpoint; use 1 "
                "or more"
            )
        self._folder, self._pointer = run.checkpoints, run.path / "latest.json"
        self._keep = keep
        self._best = run.path / "best.json"
        self.waits_for_accuracy: int | None = None  # step that may yet be the best; it is kept

    # ------------------------------------------------------------ writing

    def begin(self, step: int) -> Path:
        """An empty folder to write the checkpoint of `step` into; half-written ones are removed.

        Raises StoreError when the disk is visibly too full for one more.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        for left in self._folder.glob("step_*.tmp"):
            shutil.rmtree(left)
        for left in self._folder.glob(f"step_*{_REPLACED}"):
            if left.with_name(left.name.removesuffix(_REPLACED)).exists():
                shutil.rmtree(left)
        self._check_space()
        folder = self._temporary(step)
        folder.mkdir()
        return folder

    def commit(self, step: int, state: dict[str, Any]) -> Path:
        """Make what lies in `begin`'s folder the checkpoint of `step`, then remove old ones.

        Raises StoreError when it cannot be written; the folder is removed and the checkpoints
        before it are as they were.
        """
        folder, final = self._temporary(step), self._final(step)
        try:
            atomic.write_json(folder / STATE, state)
            manifest = _manifest(folder)
            atomic.write_json(folder / MANIFEST, manifest)
            _sync_tree(folder)
            atomic.write_text(folder / COMPLETE, _hash(folder / MANIFEST) + "\n")
            self._take_name(folder, final)
        except OSError as error:
            self.abort(step)
            raise StoreError(
                f"the checkpoint of step {step} could not be written ({error}); the one before it "
                "is untouched"
            ) from error
        reason = _flaw(final, hashes=False)
        if reason:
            raise StoreError(f"the checkpoint {final} is damaged right after writing: {reason}")
        pointer = {"step": step, "path": f"{self._folder.name}/{final.name}"}
        atomic.write_json(self._pointer, pointer)
        self._rotate(step)
        return final

    def mark_best(self, step: int, policy_version: int, accuracy: float) -> None:
        """The checkpoint of `step` survives rotation until another is marked. Nothing happens
        when it is not there any more."""
        path = self._final(step)
        if path.is_dir():
            found = {
                "step": step,
                "policy_version": policy_version,
                "accuracy": accuracy,
                "path": f"{self._folder.name}/{path.name}",
            }
            atomic.write_json(self._best, found)

    def best(self) -> dict[str, Any] | None:
        """What `mark_best` was told last, if that checkpoint is still there."""
        try:
            found = _read_json(self._best)
        except (OSError, ValueError):
            return None
        return found if self._final(found["step"]).is_dir() else None

    def forget_best_after(self, step: int) -> None:
        """The run goes on from `step`: what was best after it belongs to an abandoned branch."""
        found = self.best()
        if found is not None and found["step"] > step:
            self._best.unlink(missing_ok=True)

    def abort(self, step: int) -> None:
        """Remove what was begun."""
        shutil.rmtree(self._temporary(step), ignore_errors=True)

    def _take_name(self, folder: Path, final: Path) -> None:
        """Rename; an older checkpoint of the same step stays readable until that has happened."""
        aside = final.with_name(final.name + _REPLACED)
        if final.exists():
            shutil.rmtree(aside, ignore_errors=True)
            os.rename(final, aside)
        os.rename(folder, final)
        atomic.sync_folder(self._folder)
        shutil.rmtree(aside, ignore_errors=True)

    def _rotate(self, newest: int) -> None:
        """Keep `newest` and the valid ones before it. Later numbers are of an abandoned branch:
        we went on from an earlier step than theirs."""
        kept, best = 0, self.best()
        others = {self.waits_for_accuracy, None if best is None else best["step"]}
        for step, path in self._candidates():
            if step > newest or _flaw(path, hashes=False):
                shutil.rmtree(path, ignore_errors=True)
            elif kept < self._keep:
                kept += 1
            elif step in others:
                continue
            else:
                shutil.rmtree(path, ignore_errors=True)

    def _check_space(self) -> None:
        newest = next((path for _, path in self._candidates() if (path / MANIFEST).exists()), None)
        if newest is None:
            return
        needed = sum(entry["size"] for entry in _read_json(newest / MANIFEST)["files"].values())
        free = shutil.disk_usage(self._folder).free
        if free < needed:
            raise StoreError(
                f"a checkpoint needs about {_size(needed)} but {self._folder} has {_size(free)} "
                "free; free some space or lower trainer.save_total_limit"
            )

    # ------------------------------------------------------------ reading

    def latest(self) -> Checkpoint | None:
        """The newest checkpoint that validates, with warnings about newer ones that do not.

        None when there is no checkpoint at all. Raises StoreError when there are some and none
        is whole: starting from nothing would throw the run away without a word.
        """
        warnings = self._unfinished()
        candidates = list(self._candidates())
        for step, path in candidates:
            reason = _flaw(path, hashes=True)
            if reason is None:
                state = _read_json(path / STATE)
                newer = [text for at, text in warnings if at > step]
                for text in newer:
                    log.warning("%s", text)
                return Checkpoint(step=step, path=path, state=state, warnings=newer)
            warnings.append((step, f"{path.name} was passed over: {reason}"))
        if candidates:
            raise StoreError(
                f"none of the checkpoints in {self._folder} is whole: "
                + "; ".join(text for _, text in warnings)
            )
        return None

    def steps(self) -> list[int]:
        """Of all checkpoints that have their name, whole or not; the newest first."""
        return [step for step, _ in self._candidates()]

    def find(self, step: int | None = None) -> Checkpoint:
        """The checkpoint of `step`, or the newest. Raises ConfigError when it is not there."""
        if step is None:
            found = self.latest()
            if found is None:
                raise ConfigError(f"{self._folder} holds no checkpoint yet; wait for the first one")
            return found
        steps = dict(self._candidates())
        if step not in steps:
            known = ", ".join(str(number) for number in sorted(steps)) or "none"
            raise ConfigError(f"there is no checkpoint of step {step}; there are: {known}")
        reason = _flaw(steps[step], hashes=True)
        if reason is not None:
            raise StoreError(f"the checkpoint of step {step} is damaged: {reason}")
        return Checkpoint(step=step, path=steps[step], state=_read_json(steps[step] / STATE))

    def _unfinished(self) -> list[tuple[int, str]]:
        found = []
        for path in sorted(self._folder.glob("step_*.tmp")):
            match = _NAME.match(path.name)
            if match:
                found.append((int(match[1]), f"{path.name} was passed over: it was never finished"))
        return found

    def _candidates(self) -> Iterator[tuple[int, Path]]:
        """(step, folder), highest number first; numbers, not text: 9 < 10 < 100."""
        found: dict[int, Path] = {}
        for path in self._folder.glob("step_*"):
            match = _NAME.fullmatch(path.name.removesuffix(_REPLACED))
            if match and path.is_dir():
                step = int(match[1])
                if not path.name.endswith(_REPLACED) or step not in found:
                    found[step] = path
        yield from sorted(found.items(), reverse=True)

    def _final(self, step: int) -> Path:
        return self._folder / f"step_{step:06d}"

    def _temporary(self, step: int) -> Path:
        return self._folder / f"step_{step:06d}.tmp"


def _size(num_bytes: int) -> str:
    gib = num_bytes / 2**30
    return f"{gib:.1f} GiB" if gib >= 1.0 else f"{num_bytes / 2**20:.1f} MiB"


# ---------------------------------------------------------------- one folder


def _manifest(folder: Path) -> dict[str, Any]:
    """Size and xxh3 hash of every file below `folder`; large ones are hashed side by side."""
    files = _files(folder)
    with ThreadPoolExecutor(max_workers=4) as pool:
        hashes = list(pool.map(_hash, files))
    return {
        "hash": "xxh3_128",
        "files": {
            str(path.relative_to(folder)): {"size": path.stat().st_size, "xxh3_128": digest}
            for path, digest in zip(files, hashes, strict=True)
        },
    }


def _flaw(folder: Path, *, hashes: bool) -> str | None:
    """Why a folder is not a whole checkpoint; None when it is."""
    if not (folder / COMPLETE).is_file():
        return "it has no COMPLETE marker"
    try:
        if (folder / COMPLETE).read_text().strip() != _hash(folder / MANIFEST):
            return "its manifest was changed"
        files = _read_json(folder / MANIFEST)["files"]
        for name, entry in files.items():
            size = (folder / name).stat().st_size
            if size != entry["size"]:
                return f"{name} has {size} bytes instead of {entry['size']}"
        if hashes:
            with ThreadPoolExecutor(max_workers=4) as pool:
                found = pool.map(_hash, [folder / name for name in files])
                for (name, entry), digest in zip(files.items(), found, strict=True):
                    if digest != entry["xxh3_128"]:
                        return f"{name} does not have the hash it was written with"
    except (OSError, ValueError, KeyError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def _hash(path: Path) -> str:
    import xxhash

    digest = xxhash.xxh3_128()
    with open(path, "rb", buffering=0) as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _sync_tree(folder: Path) -> None:
    atomic.sync_files(_files(folder))
    for path in [*(p for p in folder.rglob("*") if p.is_dir()), folder]:
        atomic.sync_folder(path)


def _read_json(path: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(path.read_text())
    return value
