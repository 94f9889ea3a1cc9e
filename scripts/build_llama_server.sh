#!/usr/bin/env bash
# Builds llama-server, rvllm's peer in scripts/compare_llama_server.py, for the machine it runs on: from the llama.cpp
# source inside llama-cpp-python's source distribution.
#   scripts/build_llama_server.sh FOLDER    leaves FOLDER/llama-server; sources and objects go to FOLDER/build
# VERSION: of llama-cpp-python. JOBS: compilers at a time. CC, CXX: another compiler. PYTHON: has pip.
set -euo pipefail
[ $# -eq 1 ] || { sed -n '2,5s/^# \{0,1\}//p' "$0" >&2; exit 2; }
mkdir -p "$1/build"
folder=$(cd "$1" && pwd)
work=$folder/build
python=${PYTHON:-python3} version=${VERSION:-0.3.36} jobs=${JOBS:-$(nproc)}

sdist=$work/llama_cpp_python-$version.tar.gz
[ -e "$sdist" ] ||
  "$python" -m pip download -q --no-deps --no-binary llama-cpp-python -d "$work" "llama-cpp-python==$version"
source=$work/llama_cpp_python-$version/vendor/llama.cpp
[ -e "$source/CMakeLists.txt" ] || tar -xzf "$sdist" -C "$work"

has() { grep -qw -e "$1" /proc/cpuinfo 2>/dev/null; }
flags=""
# gcc drops the stores that fill the AMX tile configuration, and the first tile is then an illegal instruction.
if has amx_tile && ! "${CXX:-c++}" --version | grep -q clang; then flags="-fno-tree-dse -fno-dse"; fi
cmake -S "$source" -B "$work/cmake" -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF -DGGML_NATIVE=ON \
  -DCMAKE_CXX_FLAGS="$flags" -DCMAKE_C_FLAGS="$flags" -DLLAMA_OPENSSL=OFF -DLLAMA_USE_PREBUILT_UI=OFF \
  -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF
cmake --build "$work/cmake" --target llama-server --parallel "$jobs"
cp "$work/cmake/bin/llama-server" "$folder/llama-server"

# A peer without its best kernels makes a comparison worthless.
check() {
  if has "$1"; then
    count=$(objdump -d "$folder/llama-server" | grep -c -e "$2" || true)
    [ "$count" -gt 0 ] ||
      { echo "llama-server has no $2, and this processor has $1: use a newer compiler" >&2; exit 1; }
    echo "$1: $count times $2"
  fi
}
check avx2 vpmaddubsw
check avx512_vnni vpdpbusd
check amx_tile tdpb
"$folder/llama-server" --version
