#!/usr/bin/env bash
# Runs on one GPU, within ten minutes, what shows whether replicas train as one device does, and
# how long a step takes.
#
#   benchmarks/one_gpu.sh [FOLDER]        default: results-one-gpu-DATE
#
# Needs an NVIDIA GPU and a Python with torch for CUDA: $PYTHON if it is set, else .venv/bin/python,
# else python3. This checkout need not be installed. First come the checks of compiled modules by
# gpu_modules.py; then those of first_run.py --quick; then those of gpu_several.py, with four
# replicas; then the step times of gpu_step.py; then tests, which need pytest, on several replicas
# of the GPU: PyTorch's own modules and optimizers, and as many other tests as fit. Each part has a
# limit, and one that fails stops no other. The folder has the output of each.

set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
source benchmarks/environment.sh

case ${1:-} in
    -h | --help) sed -n 's/^# \{0,1\}//; 2,13p' "${BASH_SOURCE[0]}"; exit 0 ;;
    -*) die "unknown option $1; there is --help" ;;
esac
folder=${1:-results-one-gpu-$(date +%Y%m%d-%H%M)}
count=$(count_gpus) || count=0
((count > 0)) || die "the torch of $python sees no GPU"
mkdir -p "$folder"

failed=()

part() { # NAME SECONDS ARGUMENTS-OF-PYTHON...
    local name=$1 seconds=$2 status=0
    shift 2
    echo "== $name: $*"
    timeout --kill-after=5 "$seconds" "$python" "$@" > "$folder/$name.txt" 2>&1 || status=$?
    grep -E '^(passed|failed|skipped) |^(FAILED|ERROR) ' "$folder/$name.txt" || true
    tail -n 1 "$folder/$name.txt"
    case $status in
        0) ;;
        124 | 137) echo "== $name ended by its limit of $seconds s: what is above has run" ;;
        *) failed+=("$name"); echo "== $name FAILED" ;;
    esac
}

# Plug-ins of the environment may warn, which fails a test; cores launch beside each other.
pytest=(-m pytest -v -ra --tb=short -p no:cacheprovider -p no:benchmark)
if "$python" -c 'import xdist' 2> /dev/null; then pytest+=(-n 8); fi

part modules 80 benchmarks/gpu_modules.py --budget 70 --json "$folder/modules.json" cuda:0
part first_run 130 benchmarks/first_run.py --quick --budget 120 --json "$folder/first_run.json"
part several 65 benchmarks/gpu_several.py --budget 55 --json "$folder/several.json" \
    cuda:0 cuda:0 cuda:0 cuda:0
part step 150 benchmarks/gpu_step.py --json "$folder/step.json"
part catalogues 115 "${pytest[@]}" tests/gpu/test_catalogues.py
# The devices of fixtures in tests/conftest.py: four replicas on the GPU.
part fixtures 60 "${pytest[@]}" -m "not slow" -k cuda0-x4 tests/replica tests/execution

echo "== everything is in $folder"
if ((${#failed[@]})); then
    echo "== these parts failed: ${failed[*]}"
    exit 1
fi
