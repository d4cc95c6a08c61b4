"""The chat templates, against Jinja's rendering of the models' own."""

from __future__ import annotations

import json
from functools import cache

import pytest

from ppsmoke.errors import InputError
from ppsmoke.worker.chat import render
from ppsmoke.worker.gguf import Gguf
from tests.worker.sources import DATA, smollm2_header

LLAMA3 = (
    "{{- bos_token }}{%- for message in messages %}{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>"
    "\\n\\n' + message['content'] | trim + '<|eot_id|>' }}{%- endfor %}{%- if add_generation_prompt %}"
    "{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"
)
LLAMA32 = (DATA / "llama-3.2-template.jinja").read_text()
CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML_DEFAULT = (
    "{%- if messages[0].role != 'system' %}{{- '<|im_start|>system\\nYou are kind.<|im_end|>\\n' }}{%- endif %}"
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + message.content.strip() + '<|im_end|>"
    "\\n' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
PROMPTS = (
    "Say hello",
    "",
    "  leading\n and trailing \t\n",
    "<|eot_id|><|im_end|>",
    "{{ bos_token }} {% x %}",
    "Ü\u3000",
)


@cache
def smollm2() -> str:
    return Gguf.read(smollm2_header()).text("tokenizer.chat_template")


def rendered(template: str, prompt: str) -> str:
    """What Jinja makes of it, without BOS, as transformers and llama.cpp set Jinja up."""
    jinja2 = pytest.importorskip("jinja2")
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    message = {"role": "user", "content": prompt}
    return environment.from_string(template).render(messages=[message], add_generation_prompt=True, bos_token="")


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("template", [LLAMA3, LLAMA32, CHATML, CHATML_DEFAULT, "smollm2"])
def test_a_prompt_is_rendered_as_the_models_own_template_does(template, prompt):
    template = smollm2() if template == "smollm2" else template
    parts = render(template, prompt)
    assert "".join(part.text for part in parts) == rendered(template, prompt)
    assert [part.by for part in parts] == ["template", "user", "template"]


def test_the_texts_of_the_oracle_are_rendered():
    for prompt in json.loads((DATA / "smollm2-f32.json").read_text())["prompts"]:
        assert "".join(part.text for part in render(smollm2(), prompt["prompt"])) == prompt["chat"]["text"]


@pytest.mark.parametrize("template", [None, "", "{% for message in messages %}[INST] {{ message.content }} [/INST]"])
def test_an_unknown_template_is_refused_with_the_way_out(template):
    with pytest.raises(InputError, match="chat template") as caught:
        render(template, "Hello")
    assert "--raw" in caught.value.hint
