"""A chat template, which is a program, ends in bounded time and memory; known ones give transformers' text."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pytest
from helpers import raises_one_line
from transformers.utils.chat_template_utils import render_jinja_template

from tilemoe.data.bounded import Renderer
from tilemoe.data.chat_encoder import ChatEncoder
from tilemoe.data.conversations import Conversation
from tilemoe.data.tokenizer import PLAIN, ChatTemplate, Tokenizer, load_tokenizer

MESSAGES = ({"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo!"})
NESTED = "{% for a in r %}{% for b in r %}{% for c in r %}x{% endfor %}{% endfor %}{% endfor %}"
RANGE = "{% set r = range(100000) %}"
# One of each kind of work: Python's own, native code's, of memory, of recursion, of the compiler.
ATTACKS = {
    "loops that write": RANGE + NESTED,
    "loops that recur": RANGE + "{% for a in r recursive %}{{ loop(r) }}{% endfor %}",
    "a macro that calls itself": "{% macro m(n) %}{% if n %}{{ m(n - 1) ~ m(n - 1) }}{% endif %}{% endmacro %}"
    "{{ m(90) }}",
    "a power": "{{ 9 ** 999999999 }}",
    "sorted": "{{ ('a' * 3 * 10 ** 7) | sort }}",
    "a constant filter": "{{ 'a' | center(10 ** 10) }}",
    "a method by filter": "{{ ('a' | attr('ljust'))(10 ** 10) }}",
    "a format": "{{ '{:9999999999}'.format(1) }}",
    "doubled": "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "characters": "{% set s = 'a' * 6 * 10 ** 7 %}{{ [s | list, s | list, s | list, s | list, s | list] | length }}",
    "a long text": "{{ 'a ' * 10 ** 6 }}{% generation %}b{% endgeneration %}",
    "of a long template": "{#" + "€" * 60_000 + "#}{{ 'a ' * 10 ** 6 }}{% generation %}b{% endgeneration %}",
    "half a pair": "{{ '\\ud800' }}{% generation %}b{% endgeneration %}",
    "NUL": "{{ '\\0' }}{% generation %}b{% endgeneration %}",
    "a long template": "{{ 1 }}" * 99_999,
    "a deep template": "{{ " + "(" * 9_999 + "1" + ")" * 9_999 + " }}",
}


def with_template(source: str) -> Tokenizer:
    tokenizer = load_tokenizer("bytes")
    return Tokenizer(tokenizer.backend, "any", ChatTemplate(source, (("eos_token", "<0x00>"),)))


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_template_ends_in_bounded_time_and_memory(attack: str) -> None:
    encoder, before = ChatEncoder(with_template(ATTACKS[attack])), resource.getrusage(resource.RUSAGE_SELF)
    started = resource.getrusage(resource.RUSAGE_CHILDREN)
    with raises_one_line("a.jsonl:3: the chat template cannot render it .*; correct or remove the line"):
        encoder.encode(Conversation("a.jsonl:3", MESSAGES))
    del encoder  # and its process, whose times are counted when it has ended
    ended, after = resource.getrusage(resource.RUSAGE_CHILDREN), resource.getrusage(resource.RUSAGE_SELF)
    assert ended.ru_utime + ended.ru_stime - started.ru_utime - started.ru_stime < 5
    assert after.ru_utime - before.ru_utime < 5
    assert after.ru_maxrss - before.ru_maxrss < 1 << 20  # KiB


def test_a_process_is_begun_anew_and_ends_with_its_renderer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "jinja2.py").write_text("raise SystemExit")  # in the current folder, which may be anybody's
    monkeypatch.chdir(tmp_path)
    renderer = Renderer("{% if messages | length == 2 %}{{ 'a' * 10 ** 10 }}{% endif %}{{ messages[0].content }}")
    for _ in range(2):
        with raises_one_line("rendering it needs too much time or memory"):
            renderer.render([*MESSAGES])
        assert renderer.render([MESSAGES[0]]) == ("Hi", [])
    process = renderer._process
    assert process is not None
    process.kill()
    process.wait()
    with raises_one_line("rendering it needs too much time"):
        renderer.render([MESSAGES[0]])
    assert renderer.render([MESSAGES[0]]) == ("Hi", [])
    other = Renderer("x")
    other.render([])
    process = other._process
    assert process is not None
    del other
    assert process.returncode is not None


TEMPLATES = (
    PLAIN.source,
    "{%- for m in messages %}{{- '<|' ~ m.role ~ '|>' ~ (m.content | trim) ~ '\n' }}{{ m | tojson }}{% endfor %}",
    "{{ b }}{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{{ eos_token }}{% endfor %}",
)


@pytest.mark.parametrize("source", TEMPLATES)
def test_the_text_is_that_of_transformers(source: str) -> None:
    more_of_it = {"content": "né 漢!\n ", "n": 2**70, "reasoning": "r"}
    messages: list[dict[str, Any]] = [*map(dict, MESSAGES), {"role": "user", **more_of_it}]
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    renderer = Renderer(source)
    for more in ({}, {"add_generation_prompt": True}):
        texts, marks = render_jinja_template(
            [messages], chat_template=source, return_assistant_tokens_mask="generation" in source, **more, **tokens
        )
        assert renderer.render(messages, **more, **tokens) == (texts[0], marks[0] if marks else [])
        assert renderer.render(messages, **more, **tokens)[0] == texts[0]


def test_long_conversations_are_no_attack() -> None:
    messages = [{"role": "user", "content": "word " * 20_000}, {"role": "assistant", "content": "Yo! " * 5000}] * 20
    for source in TEMPLATES[:2]:
        assert len(Renderer(source).render(messages, eos_token="")[0]) > 1_000_000
