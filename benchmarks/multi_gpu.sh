#!/usr/bin/env bash
# Measures everything that needs several GPUs, in one go, into one folder.
#
#   benchmarks/multi_gpu.sh [--quick] [FOLDER]        default: results-HOST-DATE
#
# Needs two or more NVIDIA GPUs that do nothing else, and a Python with torch for CUDA: $PYTHON if
# it is set, else .venv/bin/python, else python3. This checkout need not be installed. First come
# the checks of first_run.py, under half an hour; then measurements, about an hour on eight GPUs.
# With --quick both take some minutes, and numbers mean little. A part that fails stops no other;
# the folder's summary.md says what to put into benchmarks/README.md. Where there is no GPU a table
# says what was not checked, and why.

set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
source benchmarks/environment.sh

warn() {
    echo "multi_gpu.sh: warning: $*" | tee -a "$folder/environment.txt" >&2
}

usage() {
    sed -n 's/^# \{0,1\}//; 2,11p' "${BASH_SOURCE[0]}"
}

quick=()
folder=""
for argument in "$@"; do
    case $argument in
        --quick) quick=(--quick) ;;
        -h | --help) usage; exit 0 ;;
        -*) die "unknown option $argument; there are --quick and --help" ;;
        *) [[ -z $folder ]] || die "one folder, got $folder and $argument"; folder=$argument ;;
    esac
done
folder=${folder:-results-$(hostname -s)-$(date +%Y%m%d-%H%M)}

# What must be there.

command -v "$python" > /dev/null || die "there is no $python; name one: PYTHON=... $0"
"$python" -c 'import torch' 2> /dev/null ||
    die "$python has no torch; install torch for CUDA, then: $python -m pip install -e '.[bench]'"
"$python" -c 'import mirror' ||
    die "$python cannot import mirror from $PWD; run: $python -m pip install -e '.[bench]'"

die_with_table() { # what first_run.py says without a GPU, and why this ends here
    "$python" benchmarks/first_run.py || true
    die "$@"
}

command -v nvidia-smi > /dev/null ||
    die_with_table "there is no nvidia-smi: is the NVIDIA driver installed?"
nvidia-smi > /dev/null || die_with_table "nvidia-smi fails: the driver does not answer"
count=$(count_gpus)
((count > 0)) ||
    die_with_table "this torch sees no GPU: it is built for CPU, CUDA_VISIBLE_DEVICES hides them, or the" \
        "driver is too old for it"
((count > 1)) ||
    die "torch sees one GPU; for one there is benchmarks/one_gpu.sh"

mkdir -p "$folder" || die "cannot make the folder $folder"
[[ -z $(ls -A "$folder") ]] || die "$folder is not empty; name another folder"

# What should be there.

plots=yes
"$python" -c 'import matplotlib' 2> /dev/null || {
    plots=no
    warn "no matplotlib, so no plots"
}
"$python" -c 'import cupy' 2> /dev/null ||
    warn "no CuPy, so the kernels ring, hierarchical and direct are left out"
busy=$(nvidia-smi --query-compute-apps=pid,name,used_memory --format=csv,noheader || true)
[[ -z $busy ]] || warn "other processes use the GPUs, the numbers will not be good: $busy"
((count >= 8)) || warn "$count GPUs: the rows of more stay empty"

counts=()
for n in 1 2 4 8; do
    if ((n <= count)); then counts+=("$n"); fi
done

# The parts. Each leaves NAME.txt and, when it came to its end, NAME.json.

failed=()

result() { # NAME PROGRAM OPTIONS...
    local name=$1 program=$2
    shift 2
    echo "== $name: $program $*"
    # They end with 1 when a target was missed, too: that they wrote their numbers tells.
    "$python" "benchmarks/$program" "$@" 2>&1 | tee "$folder/$name.txt" || true
    if [[ ! -e $folder/$name.json ]]; then
        failed+=("$name")
        echo "== $name FAILED"
    fi
}

part() { # NAME PROGRAM ARGUMENTS...
    local name=$1 program=$2
    shift 2
    local options=("$@" --json "$folder/$name.json")
    if [[ $plots = yes ]]; then options+=(--plot "$folder/$name.png"); fi
    result "$name" "$program" "${options[@]}"
}

{
    date
    uname -a
    lscpu | grep -E '^(Model name|CPU\(s\)|Socket|NUMA node\(s\))' || true
    git log -1 --format='commit %H of %cd' || true
    git status --short || true
    nvidia-smi
    nvidia-smi topo -m
    "$python" -m pip freeze || true
} >> "$folder/environment.txt" 2>&1

# First of all: silent errors on several GPUs would spoil whatever follows.
result first_run first_run.py "${quick[@]}" --json "$folder/first_run.json"
"$python" -m mirror doctor > "$folder/doctor.txt" 2>&1 || failed+=(doctor)

sizes=(1024 32768 1048576 8388608 67108864 268435456 1073741824)
rounds=(--rounds 21)
if ((${#quick[@]})); then
    sizes=(1024 1048576)
    rounds=(--rounds 3)
fi

visible=$("$python" -c '
import os, torch
names = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
print(" ".join(names if names[0] else map(str, range(torch.cuda.device_count()))))')
read -ra visible <<< "$visible"
for n in "${counts[@]:1}"; do
    first=$(IFS=,; echo "${visible[*]:0:n}")
    for dtype in float32 bfloat16; do
        CUDA_VISIBLE_DEVICES=$first part "all_reduce_${n}_$dtype" all_reduce.py --device all \
            --dtype "$dtype" --sizes "${sizes[@]}" "${rounds[@]}"
    done
done

several=(--devices all --replicas "${counts[@]}")
mapfile -t all < <(for ((i = 0; i < count; i++)); do echo "cuda:$i"; done)
part train train_step.py "${quick[@]}" "${several[@]}" "${rounds[@]}" --parts steps memory
part train_read_loss train_step.py "${quick[@]}" "${several[@]}" "${rounds[@]}" --parts steps \
    --read-loss
# By itself: it needs the most memory.
part train_resnet50 train_step.py "${several[@]}" "${rounds[@]}" --parts steps \
    --cases resnet50-224 --schedules staggered
result modules gpu_modules.py --budget 240 --json "$folder/modules.json" "${all[@]}"
# Beside what limits one GPU: N plain models in turn, and the plain step as one CUDA graph.
budget=(--budget 600)
if ((${#quick[@]})); then budget=(--budget 60 --models mlp); fi
result step_one_gpu gpu_step.py --devices cuda:0 "${budget[@]}" --json "$folder/step_one_gpu.json"
result step_all_gpus gpu_step.py --devices all "${budget[@]}" --json "$folder/step_all_gpus.json"
part one_gpu_read_loss train_step.py "${quick[@]}" --devices cuda:0 --replicas 1 2 4 \
    "${rounds[@]}" --parts steps memory --read-loss

{
    echo "# $(date +%F), $count x $(nvidia-smi --query-gpu=name --format=csv,noheader | head -1)"
    for table in "$folder"/*.json; do
        name=$(basename "$table" .json)
        printf '\n## %s\n\n' "$name"
        cat "$folder/$name.txt"
    done
    if ((${#failed[@]})); then printf '\nFailed: %s\n' "${failed[*]}"; fi
} > "$folder/summary.md"

echo "== everything is in $folder; its summary.md has the tables"
if ((${#failed[@]})); then
    echo "== these parts failed, see their .txt: ${failed[*]}"
    exit 1
fi
