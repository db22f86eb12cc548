"""Templates, config files and rows as an attacker would write them: refused by name, in seconds, and nothing runs."""

import json
import resource
import sys
import time

import pytest

from alignment.data.text import rendering
from alignment.data.text.templates import Dialogue, EscapedControlTokens, render_dialogues
from alignment.errors import UserError

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="limits of memory are set as on Linux"),
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
]

MESSAGES = [{"role": "user", "content": "hello"}]
LOOP = "{% for a in range(99999) %}"
TEMPLATES = {  # name: (template, what the message says)
    "nested_loops": (LOOP * 3 + "{% endfor %}" * 3, "processor time"),
    "power": ("{{ 2 ** (10 ** 9) % 7 }}", "processor time"),
    "power_folded_while_compiling": ("{% set a = 3 ** (3 ** 20) %}{{ a }}", ""),
    "repeated_text": ("{{ 'a' * 10 ** 10 }}", "memory"),
    "repeated_list": ("{{ ([0] * 10 ** 10) | length }}", "memory"),
    "doubled_text": (
        "{% set n = namespace(x='aaaaaaaa') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
        "",  # memory or time, whichever ends first
    ),
    "wide_format": ("{{ '%99999999999d' % 1 }}", "memory"),
    "wide_column": ("{{ 'a'.ljust(10 ** 11) }}", "memory"),
    "replaced": ("{{ ('a' * 10 ** 6) | replace('a', 'a' * 10 ** 6) }}", "memory"),
    "output_of_gigabytes": ("{% for a in range(4000) %}{{ 'a' * 10 ** 6 }}{% endfor %}", "memory"),
    "output_without_end": (LOOP * 2 + "aaaaaaaa" + "{% endfor %}" * 2, ""),
    "recursive_macro": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "calls itself"),
    "branching_macro": (
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(40) }}",
        "processor",
    ),
    "nested_brackets": ("{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}", ""),
    "nested_lists": ("{{ " + "[" * 50_000 + "]" * 50_000 + " }}", ""),
    "division": ("{{ 1 / 0 }}", "ZeroDivisionError"),
    "long_digits": ("{{ 10 ** 100000 }}", "digits"),
    "missing_name": ("{{ messages.nobody.content }}", "nobody"),
    "wrong_type": ("{{ 1 + 'a' }}", "TypeError"),
    "unfinished": ("{% if messages %}", "Unexpected end"),
    "classes": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
    "globals": ("{{ raise_exception.__globals__ }}", ""),
    "code": ("{{ cycler.__init__.__globals__.os.system('touch CANARY') }}", "unsafe"),
    "code_by_attr": ("{{ (cycler|attr('__init__'))|attr('__globals__') }}", ""),
    "included_file": ("{% include 'OUTSIDE' %}", ""),
    "imported_file": ("{% import 'OUTSIDE' as a %}{{ a }}", ""),
    "changed_messages": ("{{ messages.append(1) }}", ""),
    "too_long": ("a" * 200_001, "characters"),
    "said_by_itself": ("{{ raise_exception('only for adults') }}", "only for adults"),
}


def render(tokenizer, messages, *, open_turn):
    [texts] = render_dialogues(
        tokenizer, [Dialogue(messages, None, EscapedControlTokens(), ((len(messages), open_turn),))]
    )
    if isinstance(texts, UserError):
        raise texts
    return texts[0]


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_hostile_template_ends_with_a_message(name, tokenizer, tmp_path, monkeypatch):
    """Within five seconds of this process's and the template's own processor time together."""
    template, named = TEMPLATES[name]
    (tmp_path / "private").write_text("what lies outside")
    template = template.replace("CANARY", str(tmp_path / "canary")).replace("OUTSIDE", str(tmp_path / "private"))
    monkeypatch.setattr(tokenizer, "chat_template", template)
    monkeypatch.setattr(tokenizer, "name_or_path", "models/given")
    rendering._process.stop()  # the helper of the tests before would count here with all that it rendered for them
    start, peak = time.process_time() + children(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        text = render(tokenizer, MESSAGES, open_turn=False)
    except UserError as error:
        assert "models/given" in str(error) and named in str(error)
    else:  # the sandbox gives an undefined name no value, which is written as nothing
        assert not named and "what lies outside" not in text and len(text) < 100
    assert time.process_time() + children() - start < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 2**18  # KiB
    assert not (tmp_path / "canary").exists()


def children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_a_good_template_works_after_a_hostile_one(tokenizer, monkeypatch):
    good = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    for template in (good, TEMPLATES["nested_loops"][0], good):
        monkeypatch.setattr(tokenizer, "chat_template", template)
        if template != good:
            with pytest.raises(UserError):
                render(tokenizer, [*MESSAGES, *MESSAGES], open_turn=False)
        else:
            expected = tokenizer.apply_chat_template(MESSAGES, tokenize=False)
            assert render(tokenizer, MESSAGES, open_turn=False) == expected == "[user]hello"


def test_a_template_that_asks_for_the_day_gets_the_same_one_always(tokenizer, monkeypatch):
    """A resumed run, and a model served later, read the ids that it was trained on."""
    template = "{{ strftime_now('%d %b %Y') }}{{ strftime_now('%H:%M') }}"
    monkeypatch.setattr(tokenizer, "chat_template", template)
    assert render(tokenizer, MESSAGES, open_turn=True) == "26 Jul 202400:00"


# --- config files ---------------------------------------------------------------------------------------------------

NINE = "\n".join(
    f"{after}: &{after} [{', '.join([f'*{name}'] * 9)}]" for name, after in zip("abcdefgh", "bcdefghi", strict=True)
)
MERGED = "\n".join(
    f"{after}: &{after}\n  x: *{name}\n  y: *{name}\n  <<: *{name}"
    for name, after in zip("abcdefghijklmnopqrst", "bcdefghijklmnopqrstu", strict=True)
)
CONFIGS = {  # name: (text of the file, what the message says)
    "aliases": ("a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + NINE, "alias"),
    "merges": ("a: &a {z: 1}\n" + MERGED, ""),
    "alias_of_itself": ("a: &a [*a]", "contains itself"),
    "deep_lists": ("policy: " + "[" * 3000 + "]" * 3000, "deep"),
    "deep_sections": ("\n".join("  " * depth + "a:" for depth in range(200)), "deep"),
    "python_object": ("policy: !!python/object/apply:os.system ['touch CANARY']", "run.yaml"),
    "python_name": ("policy: !!python/name:os.system", "run.yaml"),
    "twice": ("policy: a\npolicy: b\n", "twice"),
    "no_utf8": (b"\xff\xfe\x00policy", "UTF-8"),
    "control_characters": ("policy: \x00\x01", "run.yaml"),
    "long_digits": ("policy: " + "9" * 10_000, "run.yaml"),
    "many_megabytes": ("a: b\n" * 2_000_000, "bytes"),
    "a_list": ("[1, 2]", "run.yaml"),
    "two_documents": ("a: 1\n---\nb: 2\n", "run.yaml"),
    "unclosed": ("policy: [a", "run.yaml"),
    "tabs": ("policy:\n\t- a", "run.yaml"),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_a_hostile_config_is_refused_by_name(name, run_apart, tmp_path):
    text, named = CONFIGS[name]
    data = text if isinstance(text, bytes) else text.replace("CANARY", str(tmp_path / "canary")).encode()
    (tmp_path / "run.yaml").write_bytes(data)
    outcome = run_apart("sft", str(tmp_path / "run.yaml"))
    assert outcome.code == 2, outcome
    assert "run.yaml" in outcome.text and named in outcome.text and "Traceback" not in outcome.text
    assert not (tmp_path / "canary").exists()


def test_a_key_that_replaces_a_merged_section_keeps_its_own_line():
    from alignment.config.yaml_source import parse_yaml

    text = "a: &a\n  s: {x: 1, y: 2}\n  t: 3\nb:\n  <<: *a\n  s: {z: 4}\n"
    document = parse_yaml(text, "run.yaml")
    assert document.values["b"] == {"s": {"z": 4}, "t": 3}
    assert document.location(("b", "s", "z")) == "run.yaml:6"
    assert document.location(("b", "t")) == "run.yaml:3"


# --- rows -----------------------------------------------------------------------------------------------------------

GOOD_ROW = '{"prompt": "a", "completion": " b"}\n'
ROWS = {
    "nested": '{"prompt": ' + "[" * 100_000 + "\n",
    "nested_and_closed": '{"prompt": ' + "[" * 100_000 + "]" * 100_000 + ', "completion": "b"}\n',
    "long_digits": '{"prompt": "a", "completion": ' + "9" * 10_000 + "}\n",
    "no_utf8": b"\xff\xfe\n",
    "no_object": "[1, 2]\n",
    "zero_bytes": b"\x00\x00\x00\n",
    "half_a_character": '{"prompt": "a\\ud800", "completion": "b"}\n',
    "unknown_role": '{"messages": [{"role": ["user"], "content": "a"}]}\n',
    "infinite": '{"prompt": "a", "completion": Infinity}\n',
}


@pytest.mark.parametrize("name", ROWS)
def test_a_hostile_row_is_refused_by_line(name, run_apart, tmp_path, checkpoints):
    row = ROWS[name]
    path = tmp_path / "rows.jsonl"
    path.write_bytes(GOOD_ROW.encode() + (row if isinstance(row, bytes) else row.encode()))
    config = {"policy": checkpoints["llama"], "output": str(tmp_path / "out"), "data": {"train": str(path)}}
    (tmp_path / "run.yaml").write_text(json.dumps(config))
    outcome = run_apart("sft", str(tmp_path / "run.yaml"))
    assert outcome.code == 2, outcome
    assert "rows.jsonl:2" in outcome.text and "Traceback" not in outcome.text
