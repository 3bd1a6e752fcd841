#!/usr/bin/env bash
# Makes .venv-sglang, in which SGLang's published wheel runs on a CPU; does nothing when it is up to date.
# SGLang's declared requirements exist for CUDA only: here it gets the packages of .venv, what else it imports
# (requirements/sglang.txt), and stubs of the two CUDA packages that it imports without need (tests/helpers/sglang_stubs).
# On a machine with GPUs: pip install -e .[sglang] in an environment of its own.
set -euo pipefail
cd "$(dirname "$0")/.."
VENV="$(readlink -f "${VENV:-.venv}")"
SGLANG_VENV="${SGLANG_VENV:-.venv-sglang}"
stamp="$VENV $("$VENV/bin/python" -V) $(cat requirements/sglang.txt "$0" | sha256sum | cut -c1-16)"
if [ "$(cat "$SGLANG_VENV/.ready" 2>/dev/null)" = "$stamp" ]; then
    exit 0
fi
printf '[setup] %s: SGLang on a CPU (about 1.5 GB, 1-2 minutes on a fast line)\n' "$SGLANG_VENV"
"$VENV/bin/python" -m venv --without-pip --clear "$SGLANG_VENV"
packages="$("$SGLANG_VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
log="$SGLANG_VENV/setup.log"
"$VENV/bin/python" -m pip --disable-pip-version-check --python "$SGLANG_VENV/bin/python" install --no-deps -r requirements/sglang.txt >"$log" 2>&1 ||
    { printf '[setup] pip failed; the last lines of %s:\n' "$log"; tail -n 20 "$log" >&2; exit 1; }
cat > "$packages/project.pth" <<END
$PWD/tests/helpers/sglang_stubs
import site; site.addsitedir("$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')")
END
"$SGLANG_VENV/bin/python" -c 'import sglang, torch; print(f"[setup] sglang {sglang.__version__} on torch {torch.__version__}")'
printf '%s' "$stamp" > "$SGLANG_VENV/.ready"
printf '[setup] ready; what pip said: %s\n' "$log"
