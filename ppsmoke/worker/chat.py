"""One user's message in a model's chat template: which texts come from the template and which from the user.

Templates are recognised, not rendered: Jinja is a programming language, and two families cover every Llama.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from ppsmoke.errors import InputError

# Llama 3.1's and 3.2's templates set this system text when no message does, with this date if none is given.
LLAMA31_MARK = "Cutting Knowledge Date: December 2023"
LLAMA31_SYSTEM = "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n"

# ChatML's default system text, a literal inside the template; its line breaks are real ones or Jinja's \n.
_CHATML_SYSTEM = re.compile(r"<\|im_start\|>system(?:\n|\\n)([^'\"{}<>]+)<\|im_end\|>")
_TRIMS = re.compile(r"""message(?:\.content|\[['"]content['"]\])\s*(?:\|\s*trim|\.strip\(\))""")


class Part(NamedTuple):
    """A piece of the prompt. Only a template's own text may hold control tokens; a user's stays text."""

    text: str
    by: str  # "template" or "user"


def render(template: str | None, prompt: str) -> list[Part]:
    """The parts of a prompt of one user message, up to where the assistant's answer begins; no BOS.

    Raises InputError for a template that is missing or of an unknown family.
    """
    if not template:
        raise InputError("the model has no chat template", hint="--raw sends the prompt as it is")
    if "<|start_header_id|>" in template and "<|eot_id|>" in template:
        return _llama3(template, prompt)
    if "<|im_start|>" in template and "<|im_end|>" in template:
        return _chatml(template, prompt)
    raise InputError(
        "the model's chat template is neither Llama 3's nor ChatML", hint="--raw sends the prompt as it is"
    )


def _llama3(template: str, prompt: str) -> list[Part]:
    system = f"{_header('system')}{LLAMA31_SYSTEM}<|eot_id|>" if LLAMA31_MARK in template else ""
    return [
        Part(system + _header("user"), "template"),
        Part(prompt.strip() if _TRIMS.search(template) else prompt, "user"),
        Part("<|eot_id|>" + _header("assistant"), "template"),
    ]


def _header(role: str) -> str:
    return f"<|start_header_id|>{role}<|end_header_id|>\n\n"


def _chatml(template: str, prompt: str) -> list[Part]:
    found = _CHATML_SYSTEM.search(template)
    text = found[1].replace("\\n", "\n") if found else ""
    system = f"<|im_start|>system\n{text}<|im_end|>\n" if found else ""
    return [
        Part(f"{system}<|im_start|>user\n", "template"),
        Part(prompt.strip() if _TRIMS.search(template) else prompt, "user"),
        Part("<|im_end|>\n<|im_start|>assistant\n", "template"),
    ]
