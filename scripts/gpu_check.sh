#!/usr/bin/env bash
# What only a GPU can tell: builds in place, runs every test of the CUDA backend on the device and in the emulator,
# compares the two, and measures; writes docs/gpu_results.md. Needs nvcc, Python with NumPy, pybind11, Cython,
# setuptools and PyTorch (for its cuBLAS and its profiler), and no network. WHEELS names a folder with wheels of what
# else is missing: pytest, iniconfig, pluggy, packaging, pygments, gguf, pyyaml, requests, tqdm, psutil, tokenizers,
# jinja2, markupsafe, llguidance. Takes under 10 minutes with the default models; MODELS="shape:quant ..." names others.
set -uo pipefail
cd "$(dirname "$0")/.."
results=${1:-docs/gpu_results.md}
models=${MODELS:-smollm2-360m:Q8_0 llama-3.2-1b:F16 llama-3.2-1b:Q4_K_M llama-3.1-8b:Q4_K_M}
python=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failures=()
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} RVLLM_EMU_BUILD=$work/emu PYTHONUNBUFFERED=1 RVLLM_REQUIRE_GPU=1

# part TITLE LIMIT COMMAND...: a section of the results; what fails is named at its end.
part() {
  local title=$1 limit=$2 status
  shift 2
  printf '\n=== %s (%ss)\n' "$title" "$SECONDS"
  printf '\n## %s\n\n' "$title" >>"$work/results.md"
  timeout "$limit" bash -c '"$@"' _ "$@" 2>"$work/stderr" | tee -a "$work/results.md"
  status=${PIPESTATUS[0]}
  if [ "$status" -ne 0 ]; then
    tail -n 20 "$work/stderr"
    failures+=("$title (status $status)")
    printf '\nFailed with status %s:\n\n```\n%s\n```\n' "$status" "$(tail -n 5 "$work/stderr")" >>"$work/results.md"
  fi
}

type nvidia-smi >/dev/null 2>&1 || { echo "no nvidia-smi: this machine has no NVIDIA driver"; exit 1; }
if [ -n "${WHEELS:-}" ]; then
  "$python" -m pip install -q --no-index --no-deps --target "$work/site" "$WHEELS"/*.whl || exit 1
  export PYTHONPATH=$PYTHONPATH:$work/site
fi
arch=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1 | tr -d .)
commit=$(git rev-parse --short HEAD 2>/dev/null || echo unknown)

printf '=== build for sm_%s\n' "$arch"
RVLLM_CUDA_ARCHS=$arch "$python" setup.py -q build_ext --inplace >"$work/build.log" 2>&1 ||
  { tail -n 40 "$work/build.log"; exit 1; }
"$python" -c 'import rvllm._cuda' || exit 1

ops=tests/emu/test_cuda_ops.py
# Without tests/conftest.py, which needs more packages.
run_tests() {
  "$python" -m pytest -q --noconftest -p no:cacheprovider "$@" 2>&1 | tail -n 15 | sed 's/^/    /'
  return "${PIPESTATUS[0]}"
}
few='gpu and (test_norm or test_rope or test_add or test_attention_sinks or (test_linear and Q4_K))'
sanitize() {
  for tool in memcheck racecheck synccheck initcheck; do
    compute-sanitizer --tool "$tool" --error-exitcode 9 "$python" -m pytest -q --noconftest \
      -p no:cacheprovider "$ops" -k "$few" >"$work/$tool.log" 2>&1 ||
      { echo "- $tool: failed"; tail -n 20 "$work/$tool.log" >&2; return 1; }
    echo "- $tool: $(grep -a 'ERROR SUMMARY\|RACECHECK SUMMARY' "$work/$tool.log" | tail -n 1)"
  done
}
export -f run_tests sanitize
export python work ops few

part "Tests on the device" 120 run_tests "$ops" tests/emu/test_cuda_tokens.py -k gpu
part "Tests in the emulator, on the same machine" 120 run_tests "$ops" tests/emu/test_cuda_tokens.py -k emulator
part "The device against the emulator, operation by operation" 120 "$python" scripts/gpu_report.py compare
if type compute-sanitizer >/dev/null 2>&1; then
  part "compute-sanitizer" 150 sanitize
else
  printf '\n## compute-sanitizer\n\nNot installed on this machine.\n' >>"$work/results.md"
fi

files=()
for model in $models; do
  file=$work/${model/:/-}.gguf
  if timeout 120 "$python" scripts/make_model.py "${model%:*}" "$file" --quant "${model#*:}"; then
    files+=("$file")
  else
    failures+=("making $model")
  fi
done
part "Greedy tokens of random models, GPU against CPU" 150 "$python" scripts/gpu_report.py tokens "${files[@]}"
left=$((585 - SECONDS))
seconds=$((left > 90 ? left - 40 : 50))
part "Speed" $((left > 60 ? left : 60)) "$python" scripts/gpu_report.py speed --seconds "$seconds" "${files[@]}"

{
  printf '# What the CUDA backend did on a GPU\n\n'
  printf 'Last run: %s, %s, driver %s, commit %s, `scripts/gpu_check.sh`, %s s.\n' "$(date -u +%F)" \
    "$(nvidia-smi --query-gpu=name --format=csv,noheader | head -n 1)" \
    "$(nvidia-smi --query-gpu=driver_version --format=csv,noheader | head -n 1)" "$commit" "$SECONDS"
  if [ "${#failures[@]}" -gt 0 ]; then printf '\n**Failed:** %s\n' "$(IFS=';'; echo "${failures[*]}")"; fi
  cat "$work/results.md"
} >"$results"
printf '\n=== %s s, results in %s\n' "$SECONDS" "$results"
[ "${#failures[@]}" -eq 0 ] || { printf 'failed: %s\n' "${failures[@]}"; exit 1; }
