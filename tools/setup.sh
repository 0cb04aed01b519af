#!/usr/bin/env bash
# Set up .venv, once.
#
# What:   tools/setup.sh site       what it takes to render the records
#         tools/setup.sh engine     also vLLM: for an NVIDIA GPU where nvidia-smi finds one, else for the CPU
#         tools/setup.sh browser    also a Chromium, for the tests
# Why:    `make book` on a fresh machine is one command. A second call costs a few milliseconds: a stamp in .venv holds the hash of
#         everything the environment was made from.
# How:    WALL_ENGINE=gpu or cpu overrides the choice of engine; PYTHON names another interpreter than python3.
# Not:    machines other than x86-64 Linux for the engine; drivers. On Debian and Ubuntu, as root or with a password-less sudo, missing
#         system packages are installed; elsewhere they are named.

set -euo pipefail
cd "$(dirname "$0")/.."

VENV=.venv
STAMP=$VENV/.inference-wall
# Only here does a host name stand: torch's CPU builds are not on the common package index.
TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu
export PIP_DISABLE_PIP_VERSION_CHECK=1

say() { printf 'set-up: %s\n' "$*" >&2; }

fail() { # message, remedy
    printf 'error: %s\nremedy: %s\n' "$1" "$2" >&2
    exit 1
}

# Install Debian packages where that is possible without asking anybody; otherwise return 1.
apt_install() {
    local as=()
    command -v apt-get >/dev/null || return 1
    if [ "$(id -u)" != 0 ]; then
        sudo -n true 2>/dev/null || return 1
        as=(sudo -n)
    fi
    say "installing $* (apt-get)"
    "${as[@]}" apt-get update -qq >/dev/null && "${as[@]}" env DEBIAN_FRONTEND=noninteractive \
        apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}

python_version() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }

is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

find_python() {
    local name
    for name in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
        if command -v "$name" >/dev/null && is_new_enough "$name"; then
            command -v "$name"
            return
        fi
    done
    fail "Python 3.11 or later is needed; ${PYTHON:-python3} is $(python_version "${PYTHON:-python3}" || echo absent)" \
        "apt-get install -y python3 python3-venv on Debian 12 or Ubuntu 24.04 and later; elsewhere conda env create -f environment.yml"
}

make_venv() {
    local python=$1 package
    if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
        package=$(basename "$python")-venv
        apt_install "$package" || fail "$python has no module venv" "apt-get install -y $package"
    fi
    say "creating $VENV with $("$python" -V)"
    rm -rf "$VENV"
    "$python" -m venv "$VENV"
}

# A virtual environment is bound to the minor version of the Python that made it.
venv_is_sound() {
    local made
    made=$(sed -n 's/^version = \([0-9]*\.[0-9]*\).*/\1/p' "$VENV/pyvenv.cfg" 2>/dev/null) && [ -n "$made" ] &&
        [ "$(python_version "$VENV/bin/python")" = "$made" ]
}

fingerprint() { # everything that the environment is made from
    cat requirements*.txt pyproject.toml packages/*/pyproject.toml tools/setup.sh "$VENV/pyvenv.cfg" 2>/dev/null | sha256sum | cut -c1-64
}

choose_engine() {
    if [ -n "${WALL_ENGINE:-}" ]; then
        case $WALL_ENGINE in gpu | cpu) echo "$WALL_ENGINE" ;; *) fail "WALL_ENGINE is '$WALL_ENGINE'" "set it to gpu or cpu" ;; esac
    elif nvidia-smi -L 2>/dev/null | grep -q GPU; then
        echo gpu
    else
        echo cpu
    fi
}

requirements_of() { case $1 in site) echo requirements-site.txt ;; gpu) echo requirements.txt ;; cpu) echo requirements-cpu.txt ;; esac; }

install_packages() {
    local profile=$1 file list own=(-e .)
    file=$(requirements_of "$profile")
    list=$VENV/requirements.txt
    # One flat list. torch+cpu comes by pip alone: pip knows this machine's own sources of wheels, uv does not.
    cat requirements-site.txt "$file" | grep -vE '^(#|-r |torch==.*\+cpu$)' | sort -u >"$list"
    if grep -q '^torch==.*+cpu$' "$file"; then install_torch "$(grep '^torch==.*+cpu$' "$file")"; fi
    say "installing $(wc -l <"$list") packages of $file"
    # uv is three times as fast as pip. It does not read pip's configuration, so pip remains the way out.
    if ! { "$VENV/bin/pip" install -q --no-deps "$(grep '^uv==' requirements-site.txt)" &&
        "$VENV/bin/uv" pip install -q --python "$VENV/bin/python" --no-deps -r "$list"; }; then
        say "uv did not manage; going on with pip"
        "$VENV/bin/pip" install -q --no-deps --no-compile -r "$list" ||
            fail "the packages of $file could not be installed" "check the network and the disk (3 GB), then run the same command again"
    fi
    [ "$profile" = cpu ] && own+=(./packages/vllm-alias)
    "$VENV/bin/pip" install -q --no-deps --no-build-isolation "${own[@]}" ||
        fail "this package itself could not be installed" "read pip's message above"
}

install_torch() {
    say "installing $1"
    "$VENV/bin/pip" install -q --no-deps --no-compile "$1" 2>/dev/null ||
        "$VENV/bin/pip" install -q --no-deps --no-compile --extra-index-url "$TORCH_CPU_INDEX" "$1" ||
        fail "$1 could not be installed" "check the network and the disk (3 GB); its index is $TORCH_CPU_INDEX"
}

# Let Python write the bytecode of what will be imported: uv writes none, a server start imports everything three times, and an
# image that sets PYTHONDONTWRITEBYTECODE would pay for it at every start. (Compiling all 28,000 files takes three times as long.)
warm_up() {
    local modules="jupyter_book.cli.main myst_nb sphinx_book_theme papermill jupytext plotly.graph_objects pyarrow.parquet scipy.stats ipykernel.kernelapp"
    if [ "$1" != site ]; then
        say "compiling what the engine imports"
        modules+=" vllm.entrypoints.cli.main vllm.entrypoints.openai.api_server vllm.v1.engine.core vllm.benchmarks.serve"
        modules+=" vllm.v1.worker.$1_worker vllm.model_executor.models.llama gguf"
    fi
    env -u PYTHONDONTWRITEBYTECODE VLLM_NO_USAGE_STATS=1 "$VENV/bin/python" - $modules >/dev/null 2>&1 <<'PYTHON' || true
import importlib
import sys

for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except Exception:  # a module that this version does not have is compiled when it is first needed
        pass
PYTHON
}

# What the engines load or call and no wheel holds.
system_needs() {
    local missing=()
    if [ "$1" = cpu ]; then
        "$VENV/bin/python" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null || missing+=(libnuma1)
    elif [ "$1" = gpu ]; then # Triton compiles a small launcher for each kernel
        command -v cc >/dev/null || missing+=(gcc libc6-dev)
        [ -f "$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" ] || missing+=(python3-dev)
    fi
    [ ${#missing[@]} -eq 0 ] || apt_install "${missing[@]}" ||
        fail "the engine needs system packages that are missing: ${missing[*]}" "apt-get install -y ${missing[*]}"
}

set_up() {
    local wanted=$1 python have hash
    if ! venv_is_sound; then
        python=$(find_python)
        make_venv "$python"
    fi
    hash=$(fingerprint)
    have=$(cat "$STAMP" 2>/dev/null || true)
    # An environment with an engine can also render the site.
    case "$have" in "$wanted $hash") return ;; "gpu $hash" | "cpu $hash") [ "$wanted" = site ] && return ;; esac
    [ "$wanted" = site ] || [ "$(uname -sm)" = "Linux x86_64" ] ||
        fail "the engines exist for x86-64 Linux only, this is $(uname -sm)" "make site renders the records without an engine"
    if [ "$wanted" = gpu ]; then
        python=$(python_version "$VENV/bin/python")
        case $python in 3.11 | 3.12 | 3.13) ;; *) fail "vLLM 0.18.0 does not run on Python $python" "make distclean book PYTHON=python3.13" ;; esac
    fi
    rm -f "$STAMP"
    install_packages "$wanted"
    system_needs "$wanted"
    warm_up "$wanted"
    echo "$wanted $hash" >"$STAMP"
    say "done in $SECONDS s"
}

have_chromium() { "$VENV/bin/python" -c 'import sys; from inference_wall.doctor import chromium; sys.exit(chromium() is None)'; }

get_chromium() {
    local with=()
    if command -v chromium >/dev/null || have_chromium; then return; fi
    if ! apt_install chromium || ! have_chromium; then # on Ubuntu the package is only a pointer to a snap
        say "downloading Chromium"
        if [ "$(id -u)" = 0 ]; then with=(--with-deps); fi
        "$VENV/bin/playwright" install "${with[@]}" chromium >/dev/null || true
    fi
    have_chromium || fail "there is no Chromium for the browser tests" "apt-get install -y chromium, or any Chromium named by WALL_CHROMIUM"
}

# Two set-ups at once would spoil each other: the second waits. The lock is this file itself.
exec 9<"$0"
if command -v flock >/dev/null; then flock 9; fi

case "${1:-}" in
site)
    set_up site
    ;;
engine | browser)
    engine=$(choose_engine)
    set_up "$engine"
    if [ "$1" = browser ]; then get_chromium; fi
    ;;
*) fail "tools/setup.sh ${1:-} is not a thing" "say site, engine or browser" ;;
esac
