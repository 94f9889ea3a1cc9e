"""The Metal kernels as text: what Apple's compiler would refuse, and that each is found where CUDA has it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from build_emulated_metal import CSRC, KERNELS, check_strictly, flattened_source
from metal_devices import REASON
from metal_source import find_kernels, without_comments

pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))


def test_each_kernel_has_the_name_and_the_file_of_its_twin() -> None:
    """Except that cuBLAS takes the place of matmul, and a kernel for few tokens and one for many that of
    quantized_linear."""
    metal = {
        (path.stem, name) for path in KERNELS for name in find_kernels(without_comments(path.read_text()))
    }
    cuda = {
        (path.stem, name)
        for path in CSRC.glob("cuda/*")
        for name in re.findall(r"__global__ void [^;{]*?(\w+)_kernel\(", path.read_text())
    }
    assert metal - cuda == {("matmul", "matmul"), ("quantized_linear", "quantized_linear")}
    assert cuda - metal == {("few_tokens", "few_tokens"), ("many_tokens", "many_tokens")}


def test_kernels_have_metals_address_spaces(tmp_path: Path) -> None:
    assert check_strictly(flattened_source(), tmp_path) == ""


TYPE_FAULTS = {
    "device pointer for a threadgroup one": "f(x);",
    "no address space": "float* p = x;",
    "address space dropped": "thread float* p = (thread float*)x; device float* q = p;",
    "write to a constant": "n = 1;",
    "write to const": "y[0] = 1.0f;",
    "double": "double d = 1.0; x[0] = d;",
    "allocation": "int* p = new int;",
    "static variable": "static int count; count++;",
    "exception": "try { } catch (...) { }",
    "literal of double precision": "x[0] = y[0] * 0.1;",
    "vector of another type": "int4 v = 1; float4 w = v;",
    "vector of another length": "float2 v = 1.0f; float4 w = v;",
    "half that is not converted": "half h = y[0];",
    "threadgroup memory with values": "threadgroup float u[1] = {0.0f};",
    "pointer to an address space for one to another": "thread float* p = (device float*)x;",
    "lambda": "auto h = [&] { return 1; }; x[0] = h();",
    "goto": "again: goto again;",
    "infinity": "x[0] = -INFINITY;",
    "test for NaN": "x[0] = isnan(y[0]) ? 0.0f : y[0];",
    "virtual function": "struct S { virtual void f(); }; S s;",
}
SOURCE_FAULTS = {
    "recursion": ("// here", "inline int twice(int n) { return n > 0 ? twice(n - 1) : 0; }"),
    "recursion of a template": ("// here", "template <int N> int down(int n) { return n ? down<N>(n) : N; }"),
    "attribute of a parameter": ("[[buffer(1)]]", "[[slot(1)]]"),
    "attribute of a kernel": ("kernel void", "[[max_threads_per_threadgroup(64)]]\nkernel void"),
    "variable of the program": ("// here", "int count = 0;"),
    "variable of the program in device memory": ("// here", "device int count = 0;"),
    "constant that is none": ("// here", "inline int f() { return 1; }\nconstant int one = f();"),
    "positions of two widths": (
        "[[buffer(2)]]",
        "[[buffer(2)]], uint a [[threadgroup_position_in_grid]], uint3 b [[threads_per_threadgroup]]",
    ),
    "kernel with a result": ("kernel void", "kernel int"),
}


@pytest.mark.parametrize("fault", ["", *TYPE_FAULTS, *SOURCE_FAULTS])
def test_faults_of_types_are_found(fault: str, tmp_path: Path) -> None:
    source = f"""
#include <metal_stdlib>
using namespace metal;
// here
inline void f(threadgroup float* p) {{ p[0] = 0.0f; }}
kernel void g(constant int& n [[buffer(0)]], device float* x [[buffer(1)]], device const float* y [[buffer(2)]]) {{
  threadgroup float t[1];
  f(t);
  x[n] = y[n];
  {TYPE_FAULTS.get(fault, "")}
}}
"""
    assert bool(check_strictly(source.replace(*SOURCE_FAULTS.get(fault, ("", ""))), tmp_path)) == bool(fault)
