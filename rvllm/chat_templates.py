"""Chat templates by name or from a file, for models that have none or a broken one: `--chat-template`."""

from __future__ import annotations

from pathlib import Path

from rvllm.chat_template import ChatTemplateError

_ALTERNATE = "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}"
_SPLIT_SYSTEM = (
    "{% if messages and messages[0].role == 'system' %}{% set system = messages[0].content %}"
    "{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}"
)


def _instruct(system: str, turn: str, answer: str) -> str:
    """[INST] turns that alternate, the first with the system message in it. All three are Jinja expressions."""
    return (
        _SPLIT_SYSTEM + "{% for m in messages %}"
        "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}" + _ALTERNATE + "{% endif %}"
        "{% if m.role == 'user' %}{% set head = "
        + system
        + " if loop.first and system else '' %}{{ "
        + turn
        + " }}"
        "{% else %}{{ " + answer + " }}{% endif %}{% endfor %}"
    )


NAMED = {
    "chatml": (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    ),
    "llama2": _instruct(
        system="'<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n'",
        turn="bos_token + '[INST] ' + (head + m.content).strip() + ' [/INST]'",
        answer="' ' + m.content.strip() + ' ' + eos_token",
    ),
    "mistral": "{{ bos_token }}"
    + _instruct(
        system="system + '\\n\\n'",
        turn="'[INST] ' + head + m.content.strip() + ' [/INST]'",
        answer="' ' + m.content.strip() + eos_token",
    ),
    "llama3": (
        "{{ bos_token }}{% for m in messages %}"
        "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
    ),
    "gemma": (
        _SPLIT_SYSTEM + "{{ bos_token }}{% for m in messages %}"
        "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' }}"
        "{% if loop.first and system %}{{ system + '\\n\\n' }}{% endif %}"
        "{{ m.content | trim + '<end_of_turn>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
    ),
    "zephyr": (
        "{% for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content + eos_token + '\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
    ),
    "phi3": (
        "{% for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
    ),
    "vicuna": (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content + '\\n\\n' }}"
        "{% elif m.role == 'user' %}{{ 'USER: ' + m.content + '\\n' }}"
        "{% else %}{{ 'ASSISTANT: ' + m.content + eos_token + '\\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
    ),
    "alpaca": (
        "{% for m in messages %}{% if m.role == 'system' %}{{ m.content + '\\n\\n' }}"
        "{% elif m.role == 'user' %}{{ '### Instruction:\\n' + m.content + '\\n\\n' }}"
        "{% else %}{{ '### Response:\\n' + m.content + eos_token + '\\n\\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '### Response:\\n' }}{% endif %}"
    ),
}


def read_template(name_or_path: str) -> str:
    """The Jinja source of a template. Raises ChatTemplateError for what is neither a name nor a file of text."""
    if name_or_path in NAMED:
        return NAMED[name_or_path]
    try:
        source = Path(name_or_path).read_text("utf-8-sig")
    except FileNotFoundError:
        known = ", ".join(NAMED)
        raise ChatTemplateError(
            f"chat template {name_or_path!r} is neither a file nor one of {known}"
        ) from None
    except OSError as error:
        raise ChatTemplateError(f"chat template {name_or_path!r}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ChatTemplateError(f"chat template {name_or_path!r}: byte {error.start} is not UTF-8") from None
    if not source.strip():
        raise ChatTemplateError(f"chat template {name_or_path!r} is empty")
    return source.removesuffix("\n")
