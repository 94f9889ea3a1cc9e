#!/usr/bin/env bash
# What only a Mac can tell: builds rvllm with its Metal backend in an environment of its own, runs every test of the
# backend on the GPU, compares tokens with the CPU's, and measures, beside llama.cpp's llama-batched-bench where that is on
# PATH. Writes metal_report.md, or the file that is named. Needs Xcode's command line tools, Python and the internet.
set -uo pipefail
cd "$(dirname "$0")/.."
report=${1:-metal_report.md}
[ "$(uname -s)" = Darwin ] || { echo "this is no Mac: Metal needs macOS"; exit 1; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failures=()

# part TITLE COMMAND...: a section of the report; what fails is named at its end.
part() {
  local title=$1 status
  shift
  printf '\n=== %s (%ss)\n' "$title" "$SECONDS"
  printf '\n## %s\n\n```\n' "$title" >>"$work/report.md"
  "$@" 2>&1 | tee "$work/output"
  status=${PIPESTATUS[0]}
  tail -n 60 "$work/output" >>"$work/report.md"
  printf '```\n' >>"$work/report.md"
  [ "$status" -eq 0 ] || failures+=("$title (status $status)")
}

machine() {
  sw_vers
  sysctl -n machdep.cpu.brand_string hw.memsize
  xcrun -sdk macosx metal --version || echo "no Metal compiler: the kernels are compiled when they are loaded"
}
build() {
  "${PYTHON:-python3}" -m venv "$work/venv" && "$work/venv/bin/pip" install -q -v '.[test]' pybind11 >"$work/build.log" 2>&1
  local status=$?
  grep -a -e 'rvllm:' -e 'error' -e 'warning' "$work/build.log"
  [ $status -eq 0 ] && (cd "$work" && venv/bin/python -c 'import rvllm._metal')
}
outside() { (cd "$work" && "$@"); }  # so that the installed package is meant, not the checkout
on_device() { outside venv/bin/pytest -q -p no:cacheprovider tests/emu/test_metal_kernels.py tests/emu/test_metal_tokens.py -k apple-gpu; }
tokens() {
  for device in cpu metal; do
    outside venv/bin/rvllm generate --device "$device" --temperature 0 --max-tokens 64 -p "The capital of France is" \
      >"$work/$device.txt" || return 1
  done
  diff "$work/cpu.txt" "$work/metal.txt" && echo "the same 64 tokens" && cat "$work/metal.txt"
}
bench() { outside venv/bin/rvllm bench --device metal --batch-sizes 1,4,8; }
llama_bench() {
  local model
  model=$(outside venv/bin/rvllm pull default | tail -n 1)
  llama-batched-bench -m "$model" -npp 128 -ntg 64 -npl 1,4,8 -ngl 99
}

printf '# rvllm on Metal: %s, commit %s\n' "$(date -u +%Y-%m-%d)" "$(git rev-parse --short HEAD 2>/dev/null || echo unknown)" \
  >"$work/report.md"
part "Machine" machine
part "Build" build
cp -r tests scripts docs pyproject.toml "$work"
part "Operations and whole models on the GPU, against the CPU" on_device
part "Greedy tokens of the default model, GPU against CPU" tokens
part "Speed" bench
if type llama-batched-bench >/dev/null 2>&1; then
  part "llama.cpp" llama_bench
else
  printf '\n## llama.cpp\n\nNot measured: no llama-batched-bench (brew install llama.cpp).\n' >>"$work/report.md"
fi
{
  printf '\n## Result\n\n'
  if [ ${#failures[@]} -eq 0 ]; then echo "All parts passed."; else printf -- '- failed: %s\n' "${failures[@]}"; fi
} >>"$work/report.md"
cp "$work/report.md" "$report"
tail -n 5 "$report"
[ ${#failures[@]} -eq 0 ]
