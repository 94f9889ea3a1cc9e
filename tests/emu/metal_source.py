"""Metal kernels as C++ for the emulator, and as C++ for OpenCL for a strict check of their types.

Only what csrc/metal uses is understood: every parameter of a kernel has one attribute, templates of kernels are
instantiated by rows of `template [[host_name("...")]] kernel name_t name<...>;`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_THREAD = "::rvllm::emu::current_thread->"
POSITIONS = {
    "threadgroup_position_in_grid": f"metal::rv_position{{{_THREAD}block_idx, {_THREAD}grid_dim}}",
    "threads_per_threadgroup": f"metal::rv_position{{{_THREAD}block_dim, {_THREAD}block_dim}}",
    "thread_index_in_threadgroup": f"{_THREAD}linear",
    "thread_index_in_simdgroup": f"{_THREAD}lane",
    "simdgroup_index_in_threadgroup": f"{_THREAD}warp",
}
# Attributes with arguments of these forms are all that csrc/metal has; Metal's compiler knows no others by these names.
_ATTRIBUTES = re.compile(
    r'host_name\("\w+"\)|function_constant\(\d+\)|max_total_threads_per_threadgroup\(\d+\)'
    rf"|buffer\(\d+\)|threadgroup\(\d+\)|{'|'.join(POSITIONS)}"
)
_THREADS = re.compile(r"\[\[max_total_threads_per_threadgroup\((\d+)\)\]\]\s*kernel void (\w+)\(")
_LEAST_THREADS = 256  # of a group, that any GPU gives
_KERNEL = re.compile(r"(?P<template>template\s*<(?P<parameters>[^>{};]*)>\s*)?\bkernel void (?P<name>\w+)\(")
_ROW = re.compile(
    r'template \[\[host_name\("(?P<host>\w+)"\)\]\] kernel \w+_t (?P<name>\w+)<(?P<values>[^>;]*)>;'
)
_CONSTANT = re.compile(r"constant bool (?P<name>\w+) \[\[function_constant\((?P<index>\d+)\)\]\];")
_TYPE = re.compile(r"typedef decltype\([^;]*;")
_ARRAY = re.compile(r"threadgroup (?P<type>\w+) (?P<name>\w+)\[(?P<count>\w+)\];")


@dataclass
class Kernel:
    name: str
    begin: int  # of its template or the word kernel
    open: int  # its parenthesis
    end: int  # behind its body
    template: list[str]  # parameters, such as "class F" or "int kTokens"
    parameters: list[str]
    rows: list[tuple[str, list[str]]] = field(default_factory=list)  # host name, values of the template


def without_comments(text: str) -> str:
    """The same number of lines and characters."""
    return re.sub(r"//[^\n]*|/\*.*?\*/", lambda m: re.sub(r"[^\n]", " ", m[0]), text, flags=re.DOTALL)


def matching(text: str, start: int) -> int:
    """Where the bracket at `start` is closed."""
    pairs = {"(": ")", "{": "}"}
    depth, opens, closes = 0, text[start], pairs[text[start]]
    for i in range(start, len(text)):
        depth += (text[i] == opens) - (text[i] == closes)
        if depth == 0:
            return i
    raise ValueError(f"no {closes} for what is opened at {text[start : start + 60]!r}")


def find_kernels(code: str) -> dict[str, Kernel]:
    kernels = {}
    for m in _KERNEL.finditer(code):
        close = matching(code, m.end() - 1)
        end = matching(code, code.index("{", close)) + 1
        template = [p.strip() for p in m["parameters"].split(",")] if m["template"] else []
        parameters = [p.strip() for p in code[m.end() : close].split(",")]
        kernels[m["name"]] = Kernel(m["name"], m.start(), m.end() - 1, end, template, parameters)
    for m in _ROW.finditer(code):
        kernels[m["name"]].rows.append((m["host"], [value.strip() for value in m["values"].split(",")]))
    for kernel in kernels.values():
        if bool(kernel.template) != bool(kernel.rows):
            raise ValueError(f"{kernel.name}: a template without rows, or rows without a template")
    return kernels


def host_names(source: str) -> list[str]:
    kernels = find_kernels(without_comments(source))
    return [host for k in kernels.values() for host, _ in (k.rows or [(k.name, [])])]


def argument(kernel: str, parameter: str) -> str:
    """The C++ expression for one parameter."""
    attributes = re.findall(r"\[\[(\w+)(?:\((\d+)\))?\]\]", parameter)
    if len(attributes) != 1:
        raise ValueError(f"{kernel}: a parameter needs exactly one attribute: {parameter}")
    name, index = attributes[0]
    if name == "buffer":
        kind = "BufferReference" if "&" in parameter else "BufferPointer"
        return f"::rvllm::emu::{kind}{{b.buffers[{index}], {index}}}"
    if name == "threadgroup" and index == "0":
        return "::rvllm::emu::ThreadgroupPointer{b.threadgroup_bytes}"
    return POSITIONS[name]


def broken_rules(source: str) -> list[str]:
    """What Metal forbids and clang lets pass: attributes that are not known, lambdas, and recursion."""
    code = without_comments(source)
    broken = [
        f"attribute {name}"
        for name in re.findall(r"\[\[(.*?)\]\]", code, re.DOTALL)
        if not _ATTRIBUTES.fullmatch(name)
    ]
    for kernel in find_kernels(code).values():
        positions = [
            p.split()[0] for p in kernel.parameters if "threadgroup_position" in p or "threads_per" in p
        ]
        if len(set(positions)) > 1:
            broken.append(f"positions of several widths in {kernel.name}")
    broken += [f"lambda {text}" for text in re.findall(r"[^\w\[\])]\s*(\[[&=]?\])\s*[({]", code)]
    # Nothing is declared before it is defined, so a function that recurs calls itself.
    for m in re.finditer(r"\b(\w+)\(", code):
        behind = matching(code, m.end() - 1) + 1
        body = re.compile(r"\s*\{").match(code, behind)
        if not body or m[1] in ("if", "for", "while", "switch"):
            continue
        text = code[body.end() : matching(code, body.end() - 1)]
        if re.search(rf"\b{m[1]}(<[^;]*>)?\(", text):
            broken.append(f"recursion of {m[1]}")
    return broken


def blanked(match: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", match[0])


def without_attributes(text: str) -> str:
    return re.sub(r"\[\[.*?\]\]", blanked, text)


def to_cpp(source: str, path: str) -> str:
    code = without_comments(source)
    kernels = find_kernels(code)
    most_threads = {name: count for count, name in _THREADS.findall(code)}
    registrations = []
    for kernel in kernels.values():
        arguments = ", ".join(argument(kernel.name, p) for p in kernel.parameters)
        for host, values in kernel.rows or [(kernel.name, [])]:
            function = f"::{kernel.name}<{', '.join(values)}>" if values else f"::{kernel.name}"
            threads = most_threads.get(kernel.name, _LEAST_THREADS)
            registrations.append(
                f'static const ::rvllm::emu::KernelRegistration rv_{host}("{host}", {threads}, '
                f"[](const ::rvllm::emu::Bindings& b) {{ {function}({arguments}); }});"
            )
            if _CONSTANT.search(code):
                registrations.append(
                    f'static const ::rvllm::emu::ConstantUser rv_constants_{host}("{host}");'
                )
    text = _TYPE.sub(blanked, _ROW.sub(blanked, code))
    text = _CONSTANT.sub(r"static const ::rvllm::emu::FunctionConstant \g<name>{\g<index>};", text)
    text = _ARRAY.sub(r"RV_THREADGROUP(\g<type>, \g<name>, \g<count>);", text)
    return "\n".join([f'#line 1 "{path}"', without_attributes(text), *registrations, ""])


def to_opencl(source: str) -> str:
    """Templates of kernels written out, since C++ for OpenCL has none."""
    code = without_comments(source)
    kernels = find_kernels(code)
    text = _TYPE.sub(blanked, _ROW.sub(blanked, code))
    for kernel in sorted(kernels.values(), key=lambda k: -k.begin):
        if not kernel.template:
            continue
        body = text[kernel.open : kernel.end]
        line = text.count("\n", 0, kernel.open) + 1
        copies = []
        for host, values in kernel.rows:
            names = [p.split() for p in kernel.template]
            bound = " ".join(
                f"typedef {value} {name};" if kind == "class" else f"enum : {kind} {{ {name} = {value} }};"
                for (kind, name), value in zip(names, values, strict=True)
            )
            copies.append(f"namespace of_{host} {{ {bound}\n#line {line}\nkernel void {host}{body}\n}}")
        after = text.count("\n", 0, kernel.end) + 1
        text = text[: kernel.begin] + "\n".join([*copies, f"#line {after}", ""]) + text[kernel.end :]
    text = _CONSTANT.sub(r"constant bool \g<name> = true;", text)
    return "#line 1\n" + without_attributes(text)
