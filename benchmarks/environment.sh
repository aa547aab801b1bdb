# Sourced by one_gpu.sh and multi_gpu.sh, in the root of the checkout.
#
# Sets $python, a Python with torch for CUDA: $PYTHON if it is set, else .venv/bin/python, else
# python3. Makes it import this checkout, installed or not.

if [[ -n ${PYTHON:-} ]]; then
    python=$PYTHON
elif [[ -x .venv/bin/python ]]; then
    python=.venv/bin/python
else
    python=python3
fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

die() { # what is wrong, after the name of the script
    echo "$(basename "$0"): $*" >&2
    exit 2
}

count_gpus() { # prints how many this torch sees
    "$python" -c 'import torch; print(torch.cuda.device_count())'
}
