#!/usr/bin/env bash
# What only a Mac can tell: builds rvllm with its Metal backend in an environment of its own, makes every kernel, runs
# every test of the backend on the GPU, compares tokens with the CPU's, and measures, beside llama.cpp's
# llama-batched-bench where that is on PATH. Writes metal_report.md, or the file that is named.
#
# Needs an Apple GPU, macOS 14 or later, Xcode's command line tools (not Xcode) and Python 3.10 or later: PYTHON names
# one that is not on PATH. Without a network what is needed comes from WHEELS, a folder of wheels (of rvllm's
# dependencies, setuptools, Cython, pybind11, pytest, hypothesis and gguf), or from PYTHON's own packages. MODEL names a
# GGUF file; else the default model is taken from rvllm's cache or fetched, else one of its shape is made, with random
# weights.
set -uo pipefail
[ "$(uname -s)" = Darwin ] || { echo "this is no Mac: Metal needs macOS"; exit 1; }
[ "$(sw_vers -productVersion | cut -d. -f1)" -ge 14 ] || { echo "macOS 14 or later is needed"; exit 1; }
xcrun --find clang++ >/dev/null 2>&1 || { echo "no compiler: xcode-select --install"; exit 1; }
absolute() { case $1 in /*) echo "$1" ;; *) echo "$PWD/$1" ;; esac; }
report=$(absolute "${1:-metal_report.md}")
model=${MODEL:+$(absolute "$MODEL")}
wheels=${WHEELS:+$(absolute "$WHEELS")}
cd "$(dirname "$0")/.." || exit 1

python=
for candidate in "${PYTHON:-}" python3.13 python3.12 python3.11 python3.10 python3; do
  if "$candidate" -c 'import sys, venv; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
    python=$candidate
    break
  fi
done
[ -n "$python" ] || { echo "no Python 3.10 or later (the one of Xcode is 3.9): PYTHON=/path/to/python3 $0"; exit 1; }

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failures=()

# part TITLE COMMAND...: a section of the report, with the first and last lines of the output. What fails is named at
# its end.
part() {
  local title=$1 status
  shift
  printf '\n=== %s (%ss)\n' "$title" "$SECONDS"
  printf '\n## %s\n\n```\n' "$title" >>"$work/report.md"
  "$@" 2>&1 | tee "$work/output"
  status=${PIPESTATUS[0]}
  if [ "$(wc -l <"$work/output")" -le 160 ]; then
    cat "$work/output" >>"$work/report.md"
  else
    { head -n 80 "$work/output"; echo '[...]'; tail -n 80 "$work/output"; } >>"$work/report.md"
  fi
  printf '```\n' >>"$work/report.md"
  [ "$status" -eq 0 ] || failures+=("$title (status $status)")
  return "$status"
}

machine() {
  sw_vers
  sysctl -n machdep.cpu.brand_string hw.memsize
  xcrun clang++ --version | head -n 1
  "$python" --version
  xcrun -sdk macosx metal --version 2>/dev/null || echo "no Metal compiler: kernels are compiled when they are loaded"
}

packages=(pytest hypothesis gguf pybind11)
install() {
  "$work/venv/bin/pip" install --disable-pip-version-check -q -v "$@" . "${packages[@]}" >>"$work/build.log" 2>&1
}
build() {
  if [ -n "$wheels" ]; then
    export PIP_NO_INDEX=1 PIP_FIND_LINKS=$wheels
  fi
  if ! { "$python" -m venv "$work/venv" && install --retries 1; }; then
    echo "not installed with packages of its own: trying with those of $python"
    tail -n 20 "$work/build.log"
    if ! { "$python" -m venv --clear --system-site-packages "$work/venv" && install --no-index --no-build-isolation; }
    then
      tail -n 40 "$work/build.log"
      return 1
    fi
  fi
  grep -a -e 'rvllm:' -e 'error:' -e 'warning:' "$work/build.log" | sort | uniq
  outside venv/bin/python -c 'import rvllm._metal'
}
outside() { (cd "$work" && "$@"); }  # so that the installed package is meant, not the checkout

kernels() {
  outside venv/bin/python - <<'END'
import time
from rvllm.metal import import_metal, kernel_library

start = time.perf_counter()
backend = import_metal().make_backend(1, kernel_library())
print(f"all kernels of {kernel_library()} made in {time.perf_counter() - start:.1f} s")
print(backend.device_name, "with bytes of memory (free, recommended):", backend.memory_info)
END
}
on_device() {
  outside venv/bin/python venv/bin/pytest -q -rs -p no:cacheprovider tests/emu/test_metal_kernels.py \
    tests/emu/test_metal_tokens.py -k apple-gpu
}
find_model() {
  if [ -z "$model" ] && ! model=$(outside venv/bin/rvllm pull default | tail -n 1); then
    echo "the default model cannot be fetched: one of its shape, with random weights"
    model=$work/model.gguf
    outside venv/bin/python scripts/make_model.py smollm2-135m "$model" || return 1
  fi
  echo "$model" | tee "$work/model"
}
tokens() {
  local device
  for device in cpu metal; do
    outside venv/bin/rvllm generate -m "$(cat "$work/model")" --device "$device" --temperature 0 --max-tokens 64 \
      -p "The capital of France is" >"$work/$device.txt" || return 1
  done
  diff "$work/cpu.txt" "$work/metal.txt" && echo "the same 64 tokens" && cat "$work/metal.txt"
}
products() {
  outside venv/bin/python - <<'END'
from rvllm.metal import import_metal, kernel_library

for name, settings in (
    ("int8, the CPU's bits", {}),
    ("simdgroup matrices, float32", {"f16_prefill": True}),
    ("MPSMatrixMultiplication, F16", {"f16_prefill": True, "mps": True}),
):
    memory, products = import_metal().make_backend(1, kernel_library(), **settings).measure_ceilings()
    print(f"{name}: {products / 1e9:.0f} GMAC/s of 256 tokens by Q4_0 weights; memory {memory / 1e9:.0f} GB/s")
END
}
bench() {
  outside venv/bin/rvllm bench -m "$(cat "$work/model")" --device metal --batch-sizes 1,4,8 &&
    outside venv/bin/rvllm bench -m "$(cat "$work/model")" --device metal --batch-sizes 1 --prefill-compute f16
}
llama_bench() { llama-batched-bench -m "$(cat "$work/model")" -npp 128 -ntg 64 -npl 1,4,8 -ngl 99; }

# What needs the parts before it is left out when one of them fails.
check() {
  part "Build" build || return
  cp -r tests scripts docs pyproject.toml "$work"
  part "Kernels" kernels || return
  part "Operations and whole models on the GPU, against the CPU" on_device
  part "Model" find_model || return
  part "Greedy tokens, GPU against CPU" tokens
  part "Products" products
  part "Speed" bench
  if type llama-batched-bench >/dev/null 2>&1; then
    part "llama.cpp" llama_bench
  else
    printf '\n## llama.cpp\n\nNot measured: no llama-batched-bench (brew install llama.cpp).\n' >>"$work/report.md"
  fi
}

commit=$(git rev-parse --short HEAD 2>/dev/null || echo unknown)
printf '# rvllm on Metal: %s, commit %s\n' "$(date -u +%Y-%m-%d)" "$commit" >"$work/report.md"
part "Machine" machine
check
{
  printf '\n## Result\n\n'
  if [ ${#failures[@]} -eq 0 ]; then echo "All parts passed."; else printf -- '- failed: %s\n' "${failures[@]}"; fi
} >>"$work/report.md"
cp "$work/report.md" "$report"
tail -n 5 "$report"
echo "written: $report"
[ ${#failures[@]} -eq 0 ]
