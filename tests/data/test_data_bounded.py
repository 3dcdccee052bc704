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
from tilemoe.data.chat_template import PLAIN, ChatTemplate
from tilemoe.data.conversations import Conversation
from tilemoe.data.tokenizer import Tokenizer, load_tokenizer

MESSAGES = ({"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo!"})
NESTED = "{% for a in r %}{% for b in r %}{% for c in r %}BODY{% endfor %}{% endfor %}{% endfor %}"
RANGE = "{% set r = range(100000) %}"
DOUBLED = "{% set ns = namespace(x='ab') %}{% for i in range(60) %}SET{% endfor %}"
ATTACKS = {
    "loops that do nothing": RANGE + NESTED.replace("BODY", ""),
    "loops that write": RANGE + NESTED.replace("BODY", "x"),
    "loops within a text": "{% set t %}" + RANGE + NESTED.replace("BODY", "a long text " * 99) + "{% endset %}",
    "loops over ranges": NESTED.replace(" r ", " range(99999) ").replace("BODY", "{% set q = 1 %}"),
    "loops with a condition": RANGE + "{% for a in r %}{% for b in r if b < 0 %}{% endfor %}{% endfor %}",
    "loops that recur": RANGE + "{% for a in r recursive %}{{ loop(r) }}{% endfor %}",
    "a macro that calls itself": "{% macro m(n) %}{% if n %}{{ m(n - 1) ~ m(n - 1) }}{% endif %}{% endmacro %}"
    "{{ m(90) }}",
    "a block that calls itself": "{% block b %}{{ self.b() }}{{ self.b() }}{% endblock %}",
    "a caller": "{% macro m() %}" + RANGE + NESTED.replace("BODY", "{{ caller() }}") + "{% endmacro %}"
    "{% call m() %}x{% endcall %}",
    "a range": "{{ range(10 ** 9) | list }}",
    "a text times a number": "{{ 'a' * 10 ** 10 }}",
    "a number times a text": "{{ 10 ** 10 * 'a' }}",
    "a list times a number": "{{ ([0] * 10 ** 10) | length }}",
    "a power": "{{ 9 ** 999999999 }}",
    "squares": DOUBLED.replace("SET", "{% set ns.x = (ns.x if i else 9) * (ns.x if i else 9) %}"),
    "a constant filter": "{{ 'a' | center(10 ** 10) }}",
    "a written number": "{{ 'a' | center(9999999999) }}",
    "indented": "{{ 'a\\nb' | indent(10 ** 10) }}",
    "indented JSON": "{{ messages | tojson(indent=10 ** 10) }}",
    "rounded": "{{ 1.5 | round(10 ** 10, 'ceil') }}",
    "a method": "{{ 'a'.center(10 ** 10) }}",
    "a method by filter": "{{ ('a' | attr('ljust'))(10 ** 10) }}",
    "a method of safe text": "{{ ('a' | safe).zfill(10 ** 10) }}",
    "replaced": "{{ ('a' * 99999).replace('', 'b' * 99999).replace('', 'c' * 99999) }}",
    "joined": "{{ ('a' * 99999).join(range(99999) | map('string')) }}",
    "a width": "{{ '%9999999999d' % 1 }}",
    "a width that is given": "{{ '%*d' % (9999999999, 1) }}",
    "a format": "{{ '{:9999999999}'.format(1) }}",
    "a format that is given its width": "{{ '{:{w}}'.format(1, w=9999999999) }}",
    "a filtered format": "{{ '%9999999999d' | format(1) }}",
    "doubled by +": DOUBLED.replace("SET", "{% set ns.x = ns.x + ns.x %}"),
    "doubled by ~": DOUBLED.replace("SET", "{% set ns.x = ns.x ~ ns.x %}"),
    "doubled by a block": DOUBLED.replace("SET", "{% set x %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = x %}"),
    "a list in lists": DOUBLED.replace("SET", "{% set ns.x = [ns.x, ns.x] %}") + "{{ ns.x == ns.x }}{{ ns.x }}",
    "a tuple in tuples": DOUBLED.replace("SET", "{% set ns.x = (ns.x, ns.x) %}") + "{{ {ns.x: 1} }}",
    "a table in tables": DOUBLED.replace("SET", "{% set ns.x = dict(a=ns.x, b=ns.x) %}") + "{{ ns.x | tojson }}",
    "a namespace in others": DOUBLED.replace("SET", "{% set ns.x = namespace(a=ns.x, b=ns.x) %}") + "{{ ns.x }}",
    "filler": "{{ lipsum(n=10 ** 9) }}",
    "sorted": "{{ ('a' * 3 * 10 ** 7) | sort }}",
    "wrapped": "{{ ('a' * 10 ** 7) | wordwrap(1) }}",
    "a codec": "{{ ('\\xfc' * 10 ** 7).encode('idna') }}",
    "a date": "{{ strftime_now('%c' * 10 ** 8) }}",
    "slices": "{% set s = 'a' * 6 * 10 ** 7 %}" + "{% set x = s[1:] %}" * 3000,
    "comparisons": "{% set a = 'a' * 6 * 10 ** 7 %}{% set b = a ~ '' %}" + "{% set x = a == b %}" * 3000,
    "characters": "{% set s = 'a' * 6 * 10 ** 7 %}{{ [s | list, s | list, s | list, s | list, s | list] | length }}",
    "titles": "{{ ('a-' * 10 ** 8) | title }}",
    "a long template": "{{ 1 }}" * 99_999,
    "a deep template": "{{ " + "(" * 9_999 + "1" + ")" * 9_999 + " }}",
}  # fmt: skip


def with_template(source: str) -> Tokenizer:
    tokenizer = load_tokenizer("bytes")
    return Tokenizer(tokenizer.backend, "any", ChatTemplate(source, (("eos_token", "<0x00>"),)))


# One of each kind: a process is begun for each, and some take their second.
SELECTED = {"loops that write", "sorted", "characters", "a constant filter", "a long template", "a deep template"}


@pytest.mark.parametrize(
    "attack", [pytest.param(name, marks=() if name in SELECTED else pytest.mark.thorough) for name in ATTACKS]
)
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
    "{%- for m in messages %}{{- '<|' ~ m.role ~ '|>' ~ (m.content | trim) ~ '\n' }}{% endfor %}",
(    "{% macro say(m, n=2) %}{{ ' ' * n }}{{ m['content'].split('!')[0] | upper | replace('O', '0') }}{% endmacro %}"
    "{% set ns = namespace(turns=0, all=[]) %}{% for m in messages if m.role != 'x' %}{% set ns.turns = ns.turns + 1 %}"
    "{% set ns.all = ns.all + [m.content] %}{{ loop.index }}{{ say(m) }}{% if loop.last %}{% break %}{% endif %}"
    "{% else %}none{% endfor %}{{ ns.turns }} {{ ns.all | join(', ') }} {{ '%s of %03d' % ('a', 1700000000 % 7) }}"),
    "{% set long %}{% for m in messages %}{{ m | tojson(indent=2) }}{% endfor %}{% endset %}{{ long | indent(4) }}",
    "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | list }}{{ nothing }}{{ None }}",
    "{{ '{:>5}|{}'.format(messages[0].role, 1700000000) }}{{ messages[0].items() | list }}",
    "{{ ('a', 'b') }}{{ {'a': [1]} }}{{ [] }}{{ 'a' in ['a', 'b'] }}{% set a, b = (1, 2) %}{{ a }}",
    "{{ 1700000000 % 60 }}{{ ', '.join(messages | map(attribute='role')) }}{{ 2 ** 10 - 7 // 2 * 1.5 + 1 }}",
    "{% macro m() %}{{ caller('q') }}{% endmacro %}{% call(x) m() %}{{ x }}{% endcall %}",
    "{% filter upper %}ab{% endfilter %}",
    "{% for c in [[1, [2]], 3] recursive %}{{ loop(c) if c is iterable else c }}{% endfor %}",
    "{{ b }}{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{{ eos_token }}{% endfor %}",
)  # fmt: skip


@pytest.mark.parametrize(
    "source", [*TEMPLATES[:2], *(pytest.param(each, marks=pytest.mark.thorough) for each in TEMPLATES[2:])]
)
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
    for source in TEMPLATES[2:4]:
        assert len(Renderer(source).render(messages, eos_token="")[0]) > 1_000_000
