#!/usr/bin/env bash
# What only a GPU can tell: builds in place, runs every test of the CUDA backend on the device and in the emulator,
# compares the two, and measures. Writes docs/gpu_results.md, or the file that is named, after each part, so that what
# is known stays when the run is cut short; everything that the parts print goes to the output. Needs nvcc, g++, Python
# with its headers, NumPy, pybind11, Cython, setuptools, pytest, tokenizers, jinja2, psutil, PyTorch (for its cuBLAS and
# its profiler) and gguf, and no network: WHEELS names a folder with wheels of what is missing. Stops after LIMIT
# seconds; with the default models and 16 processors that is enough. MODELS="shape:quant ..." names others, COMMIT what
# is tested where there is no .git.
set -uo pipefail
cd "$(dirname "$0")/.."
results=${1:-docs/gpu_results.md}
models=${MODELS:-llama-3.1-8b:Q4_K_M llama-3.2-1b:F16 llama-3.2-1b:Q4_K_M smollm2-360m:Q8_0}
python=${PYTHON:-python3}
limit=${LIMIT:-570}
work=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null; rm -rf "$work"' EXIT
failures=()
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} RVLLM_EMU_BUILD=$work/emu PYTHONUNBUFFERED=1 RVLLM_REQUIRE_GPU=1
export PYTEST_DISABLE_PLUGIN_AUTOLOAD=1

type nvidia-smi >/dev/null 2>&1 || { echo "no nvidia-smi: this machine has no NVIDIA driver"; exit 1; }
if [ -n "${WHEELS:-}" ]; then
  "$python" -m pip install -q --no-index --no-deps --target "$work/site" "$WHEELS"/*.whl || exit 1
  export PYTHONPATH=$PYTHONPATH:$work/site
fi
query() { nvidia-smi --query-gpu="$1" --format=csv,noheader | head -n 1; }
arch=$(query compute_cap | tr -d .)
machine="$(query name), driver $(query driver_version)"
processes=8  # that use the device at a time
[ "$(query compute_mode)" = Default ] || processes=1
commit=${COMMIT:-$(git rev-parse --short HEAD 2>/dev/null || echo unknown)}

# write_results [END]: of the parts so far; without an END the run goes on, or was ended.
write_results() {
  {
    printf '# What the CUDA backend did on a GPU\n\n'
    printf 'Last run: %s, %s, commit %s, `scripts/gpu_check.sh`, %s s%s.\n' "$(date -u +%F)" "$machine" "$commit" \
      "$SECONDS" "${1-, not to its end}"
    if [ "${#failures[@]}" -gt 0 ]; then printf '\n**Failed:** %s\n' "$(IFS=';'; echo "${failures[*]}")"; fi
    cat "$work/results.md"
  } >"$results"
}

# part TITLE LIMIT COMMAND...: a section of the results; what fails is named at its end.
part() {
  local title=$1 most=$2 left=$((limit - SECONDS)) status=1
  shift 2
  printf '\n=== %s (%ss)\n' "$title" "$SECONDS"
  printf '\n## %s\n\n' "$title" >>"$work/results.md"
  : >"$work/stderr"
  if [ "$left" -ge 10 ]; then
    timeout -k 5 $((left < most ? left : most)) bash -c '"$@"' _ "$@" 2>"$work/stderr" | tee -a "$work/results.md"
    status=${PIPESTATUS[0]}
  else
    echo "No time was left." | tee -a "$work/results.md"
  fi
  cat "$work/stderr"
  if [ "$status" -ne 0 ]; then
    failures+=("$title (status $status)")
    printf '\nFailed with status %s:\n\n```\n%s\n```\n' "$status" "$(tail -n 5 "$work/stderr")" >>"$work/results.md"
  fi
  write_results
}

make_models() {
  local model status=0
  for model in $models; do
    "$python" scripts/make_model.py "${model%:*}" "$work/${model/:/-}.gguf" --quant "${model#*:}" || status=1
  done
  return "$status"
}
make_models >"$work/models.log" 2>&1 &
making=$!

printf '=== build for sm_%s\n' "$arch"
CI= RVLLM_CUDA_ARCHS=$arch "$python" setup.py -q build_ext --inplace >"$work/build.log" 2>&1 ||
  { cat "$work/build.log"; exit 1; }
"$python" -c 'import rvllm._cuda' || exit 1
"$python" tests/emu/build_emulated.py >"$work/emulator.log" 2>&1 &
building=$!

pytest="-m pytest --noconftest -p no:cacheprovider --tb=short"  # tests/conftest.py needs more packages
# run_tests WHERE PROCESSES: every function in a process of its own, since a kernel that faults takes along all that
# follows it in its process.
run_tests() {
  local status
  trap : TERM  # when the time is up, what has been counted is printed all the same
  rm -rf "$work/tests"
  mkdir "$work/tests"
  # shellcheck disable=SC2086
  "$python" $pytest --collect-only -q -k "$1" tests/emu/test_cuda_{ops,steps,tokens}.py >"$work/collected" ||
    { cat "$work/collected" >&2; return 1; }
  grep :: "$work/collected" | sed 's/\[.*//' | sort -u >"$work/functions"
  xargs -P "$2" -I{} bash -c 'run_function "$@"' _ {} "$1" <"$work/functions"
  status=$?
  cat "$work"/tests/* | grep -a '^=.* in .*s.* =' | grep -oE '[0-9]+ (passed|failed|skipped|errors?)' |
    awk '{ count[$2] += $1 } END { for (kind in count) print "- " count[kind] " " kind }'
  return "$status"
}
run_function() {
  local log="$work/tests/${1##*/}.log" status
  # shellcheck disable=SC2086
  timeout --foreground -k 5 100 "$python" $pytest -v -k "$2" "$1" >"$log" 2>&1  # in the group that part ends
  status=$?
  cat "$log" >&2
  # Of what crashed or hung, the test that had begun.
  [ "$status" -eq 0 ] || echo "- \`${1##*/}\`: status $status, $(grep -a '::\|^=.* in ' "$log" | tail -n 1)"
  return "$status"
}
few='gpu and not by_cublas and (test_norm or test_rope or test_add or test_attention_sinks or (test_linear and Q4_K))'
sanitize() {
  local tool status=0 tests
  for tool in memcheck racecheck synccheck initcheck; do
    tests=$few
    # Products read the rows that fill up a tile of 8 tokens, which none writes, and let go of what comes of them.
    [ "$tool" != initcheck ] || tests="$few and not linear"
    # shellcheck disable=SC2086
    compute-sanitizer --tool "$tool" --error-exitcode 9 "$python" $pytest -q tests/emu/test_cuda_ops.py \
      -k "$tests" >"$work/$tool.log" 2>&1 || { status=1; echo "- $tool: failed"; }
    echo "- $tool: $(grep -a 'ERROR SUMMARY\|RACECHECK SUMMARY' "$work/$tool.log" | tail -n 1)"
    head -c 200000 "$work/$tool.log" >&2
  done
  return "$status"
}
export -f run_tests run_function sanitize
export python pytest work few

part "Tests on the device" 120 run_tests gpu "$processes"
wait "$making" || { failures+=("making models"); cat "$work/models.log"; }
files=()
for model in $models; do
  [ ! -f "$work/${model/:/-}.gguf" ] || files+=("$work/${model/:/-}.gguf")
done
part "Greedy tokens of random models, GPU against CPU" 120 "$python" scripts/gpu_report.py tokens "${files[@]}"
wait "$building" || { failures+=("building the emulator"); cat "$work/emulator.log"; }
part "The device against the emulator, operation by operation" 90 "$python" scripts/gpu_report.py compare
# One process a model: what fails with one leaves the others.
for file in "${files[@]}"; do
  part "Speed of $(basename "$file" .gguf)" 75 "$python" scripts/gpu_report.py speed --seconds 45 "$file"
done
part "Tests in the emulator, on the same machine" 120 run_tests emulator "$(nproc)"
if type compute-sanitizer >/dev/null 2>&1; then
  part "compute-sanitizer" 150 sanitize
else
  printf '\n## compute-sanitizer\n\nNot installed on this machine.\n' >>"$work/results.md"
fi

write_results ""
cat "$results"
[ "${#failures[@]}" -eq 0 ] || { printf 'failed: %s\n' "${failures[@]}"; exit 1; }
