"""Fine-tuning examples: what is read and learnt, what a mistake says, and how documents are packed and sampled."""

import gzip
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tokenizers
from helpers import raises_one_line
from transformers import AutoTokenizer

from tilemoe.data import PackedDocuments, Prepared, TokenShards, prepare, prepare_chat
from tilemoe.data.chat_encoder import ChatEncoder
from tilemoe.data.conversations import CHAT_SUFFIXES, Conversation, read_examples
from tilemoe.data.corpus import open_corpus
from tilemoe.data.tokenizer import END_OF_TEXT, Tokenizer, load_tokenizer, read_chat_template

ASK, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo!"}
CHAT = {"messages": [ASK, ANSWER, {"role": "user", "content": "Bye"}, {"role": "assistant", "content": "é"}]}
# ChatML, whose assistant's turns are marked or not, and a template that drops them once more turns follow.
HEAD = "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n"
END = "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
UNMARKED = HEAD + "{{ m.content }}<|im_end|>\n" + END
MARKED = (
    HEAD
    + "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    + "{% else %}{{ m.content }}<|im_end|>{% endif %}\n"
    + END
)
FORGETFUL = HEAD + "{% if loop.last or m.role != 'assistant' %}{{ m.content }}{% endif %}<|im_end|>\n" + END


def write_lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return path


def write_tokenizer(folder: Path, template: str | None) -> Path:
    """A byte-level BPE of a few ids with ChatML's special tokens, as transformers saves it."""
    folder.mkdir()
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    special = [END_OF_TEXT, "<|im_start|>", "<|im_end|>"]
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=270, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(["user assistant hello there Yo! " * 3], trainer)
    backend.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": {"__type": "AddedToken", "content": END_OF_TEXT},
        "eos_token": "<|im_end|>",
    }
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder / "tokenizer.json"


def learnt_texts(tokenizer: Tokenizer, ids: np.ndarray, learnt: np.ndarray) -> list[str]:
    """The runs of learnt tokens, as text."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], learnt.astype(int), [0]])))
    return [tokenizer.backend.decode(ids[a:b].tolist(), skip_special_tokens=False) for a, b in edges.reshape(-1, 2)]


def prepared(path: Path, tmp_path: Path, tokenizer: str = "bytes", **options: Any) -> Prepared:
    return prepare_chat(str(path), tokenizer, tmp_path / "cache", **{"seq_len": 64, "heldout_every": 2, **options})


def documents_of(split: PackedDocuments | TokenShards) -> list[tuple[bytes, bytes]]:
    """(text, what is learnt of it) of every document of bytes, sorted."""
    assert isinstance(split, PackedDocuments)
    found = []
    for window in range(split.num_windows):
        (inputs,), (targets,), (positions,) = split.read(np.array([window]))
        begins = np.flatnonzero(positions == 0)
        for a, b in zip(begins, [*begins[1:], positions.size], strict=True):
            assert positions[a:b].tolist() == list(range(b - a))
            known = targets[a:b] >= 0
            if known.any():
                assert (inputs[a + 1 : b][known[:-1]] == targets[a : b - 1][known[:-1]]).all()
                found.append((bytes(inputs[a:b].tolist()), bytes(targets[a:b][known].tolist())))
    return sorted(found)


def test_the_plain_template_learns_the_assistants_words_and_the_end(tmp_path: Path) -> None:
    rows = [CHAT, {"messages": [{"role": "system", "content": "Be"}, ASK, ANSWER, ASK]}]
    rows += [{"prompt": "2+2=", "completion": "4"}, {"prompt": "a\0b", "completion": "ü"}]
    data = prepared(write_lines(tmp_path / "a.jsonl", rows), tmp_path)
    first = b"user:\nHi\n\nassistant:\nYo!\0user:\nBye\n\nassistant:\n\xc3\xa9"
    assert documents_of(data.train) == [(b"2+2=4", b"4\0"), (first, b"Yo!\0\xc3\xa9\0")]
    second = b"system:\nBe\n\nuser:\nHi\n\nassistant:\nYo!"
    assert documents_of(data.heldout) == [(b"ab\xc3\xbc", b"\xc3\xbc\0"), (second, b"Yo!\0")]
    assert data.notes == ()
    assert data.train.num_targets == 9
    assert data.train.num_tokens == 6 + len(first) + 1


def with_weights(*weights: Any) -> dict[str, Any]:
    """Questions and as many answers, with these weights."""
    turns = [(ASK, {"role": "assistant", "content": f"a{i}", "weight": weight}) for i, weight in enumerate(weights)]
    return {"messages": [turn for pair in turns for turn in pair]}


def test_a_turn_of_weight_0_is_given_and_not_learnt(tmp_path: Path) -> None:
    rows = [with_weights(1, 1, None), with_weights(0, 1, None), with_weights(1, 1.0, 0.0)]
    data = prepared(
        write_lines(tmp_path / "a.jsonl", rows[:2] * 2 + rows[2:] * 2), tmp_path, heldout_every=6, seq_len=80
    )
    text = b"user:\nHi\n\nassistant:\na0\0user:\nHi\n\nassistant:\na1\0user:\nHi\n\nassistant:\na2"
    learnt = [b"a0\0a1\0", b"a0\0a1\0a2\0", b"a0\0a1\0a2\0", b"a1\0a2\0", b"a1\0a2\0"]
    assert documents_of(data.train) == [(text, each) for each in learnt]


@pytest.mark.parametrize(("template", "end"), [(MARKED, "<|im_end|>"), (UNMARKED, "<|im_end|>\n")])
def test_a_chat_template_learns_no_turn_of_weight_0(template: str, end: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(write_tokenizer(tmp_path / "base", template)))
    encoder, everything = ChatEncoder(tokenizer), (1, 1, 1)
    whole, _ = encoder.encode(Conversation("a:1", tuple(with_weights(*everything)["messages"])))
    for weights in ((0, 1, 1), (1, 0, 1), (1, 1, 0), (0, 1, 0), (0, 0, None), everything):
        ids, learnt = encoder.encode(Conversation("a:1", tuple(with_weights(*weights)["messages"])))
        assert ids.tolist() == whole.tolist()
        assert learnt_texts(tokenizer, ids, learnt) == [f"a{i}{end}" for i in range(3) if weights[i] != 0]


def test_a_template_that_marks_the_last_turn_alone_cannot_tell_weights(tmp_path: Path) -> None:
    last_alone = MARKED.replace("m.role == 'assistant'", "loop.last")
    path = write_tokenizer(tmp_path / "base", last_alone)
    good = prepared(write_lines(tmp_path / "a.jsonl", [with_weights(1, 1)] * 2), tmp_path, str(path))
    assert good.train.num_targets == 3
    with raises_one_line(r"b\.jsonl:1: the chat template marks 1 spans in 2 assistant's turns"):
        prepared(write_lines(tmp_path / "b.jsonl", [with_weights(1, 0)] * 2), tmp_path, str(path))


@pytest.mark.parametrize(("template", "end"), [(MARKED, "<|im_end|>"), (UNMARKED, "<|im_end|>\n")])
def test_whitespace_is_learnt_whatever_the_tokenizer_says_of_its_place(template: str, end: str, tmp_path: Path) -> None:
    """Those of OLMoE and Llama 3 trim whitespace from the offsets of tokens; a token of spaces alone then has none."""
    path = write_tokenizer(tmp_path / "base", template)
    backend = tokenizers.Tokenizer.from_file(str(path))
    backend.post_processor = tokenizers.processors.ByteLevel(trim_offsets=True)
    backend.save(str(path))
    tokenizer = load_tokenizer(str(path))
    said = ["if x:\n    y  \n", "  indented "]
    messages = [turn for text in said for turn in (ASK, {"role": "assistant", "content": text})]
    ids, learnt = ChatEncoder(tokenizer).encode(Conversation("a:1", tuple(messages)))
    assert learnt_texts(tokenizer, ids, learnt) == [text + end for text in said]
    theirs = AutoTokenizer.from_pretrained(path.parent)
    assert ids.tolist() == theirs.apply_chat_template(messages, tokenize=True, return_dict=True)["input_ids"]


def test_a_template_travels_with_its_tokenizer(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path / "base", None)
    assert load_tokenizer(str(path)).chat_template is None
    (path.parent / "chat_template.jinja").write_text(UNMARKED)
    tokenizer = load_tokenizer(str(path))
    (tmp_path / "copy").mkdir()
    tokenizer.save(tmp_path / "copy" / "tokenizer.json")
    copy = load_tokenizer(str(tmp_path / "copy" / "tokenizer.json"))
    assert copy.chat_template == tokenizer.chat_template
    assert copy.chat_template is not None
    assert copy.chat_template.config() == {
        "bos_token": END_OF_TEXT, "eos_token": "<|im_end|>", "chat_template": UNMARKED
    }  # fmt: skip
    assert {**tokenizer.hf_config(64)}.items() >= copy.chat_template.config().items()
    rows = write_lines(tmp_path / "a.jsonl", [CHAT] * 2)
    first = prepared(rows, tmp_path, str(path))
    shutil.rmtree(path.parent)
    assert prepared(rows, tmp_path, str(tmp_path / "copy" / "tokenizer.json")).train.directory == first.train.directory


@pytest.mark.parametrize("shape", [list, dict])
def test_of_several_templates_the_default_serves(shape: type, tmp_path: Path) -> None:
    def write(*names: str) -> None:
        named = {name: f"{name} of several" for name in names}
        several = named if shape is dict else [{"name": n, "template": text} for n, text in named.items()]
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": several}))

    write("tool_use", "default")
    template = read_chat_template(tmp_path)
    assert template is not None
    assert template.source == "default of several"
    write("tool_use", "rag")
    with raises_one_line(
        r"tokenizer_config\.json: .*none of its templates 'rag', 'tool_use' is named 'default'\); correct or remove it"
    ):
        read_chat_template(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("beside")
    template = read_chat_template(tmp_path)
    assert template is not None
    assert template.source == "beside"
    (tmp_path / "chat_template.jinja").unlink()
    write()
    assert read_chat_template(tmp_path) is None


def test_templates_that_cannot_serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_tokenizer(tmp_path / "base", FORGETFUL)
    rows = write_lines(tmp_path / "a.jsonl", [CHAT] * 2)
    with raises_one_line(r"a\.jsonl:1: .*messages\[1\] differently when more turns follow.*mark it .*{% generation %}"):
        prepared(rows, tmp_path, str(path))
    for template, message in (
        ("{{ raise_exception('no\nsystem') }}", r"the chat template cannot render it \(no system\)"),
        ("{{ 1 / 0 }}", r"the chat template cannot render it \(division by zero\)"),
        ("ab{% generation %}{% endgeneration %}c", "no token to learn"),
    ):
        (path.parent / "chat_template.jinja").write_text(template)
        with raises_one_line(rf"a\.jsonl:1: {message}"):
            prepared(rows, tmp_path, str(path))
    for content in ("[1]", '{"chat_template": "a", "eos_token": "\\ud800"}', '{"chat_template": 7}'):
        (path.parent / "tokenizer_config.json").write_text(content)
        (path.parent / "chat_template.jinja").unlink(missing_ok=True)
        with raises_one_line(r"tokenizer_config\.json: no chat template can be read"):
            read_chat_template(path.parent)
    monkeypatch.setitem(sys.modules, "transformers", None)
    path = write_tokenizer(tmp_path / "other", UNMARKED)
    with raises_one_line(r"needs transformers; pip install 'tilemoe\[hf\]'"):
        prepared(rows, tmp_path, str(path))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("no json", "this line is not JSON"),
        ([CHAT], "no 'messages', no 'prompt' with 'completion'"),
        ({**CHAT, "tools": [{}]}, "'tools' is not passed to chat templates; write its content into a turn"),
        ({**CHAT, "images": ["a.png"]}, "'images' is not passed to chat templates"),
        ({"prompt": "x", "completion": "y", "system": "Be"}, "'system' is not passed to chat templates"),
        ({"messages": [ASK, {**ANSWER, "tool_calls": [{}]}]}, "'tool_calls' needs a tokenizer with a chat template"),
        ({"prompt": "x"}, "no 'messages', no 'prompt' with 'completion'.*, but 'prompt'; "),
        ({"question": "x", "answer": "y"}, ".*and no ShareGPT or Alpaca fields, but 'question', 'answer'; rename them"),
        ({"instruction": "x", "input": 3, "output": "y"}, ".*but 'instruction', 'input', 'output'; rename them"),
        ({"instruction": "x", "output": ""}, r"messages\[1\]: the assistant's turn is empty"),
        ({"instruction": "x", "output": "y", "history": [["a", "b"]]}, "'history' is not passed to chat templates"),
        ({"conversations": [ASK, ANSWER], "system": "Be"}, "'system' is not passed to chat templates"),
        ({"conversations": [{"from": "gpt", "value": "x"}]}, r"messages\[0\]: the assistant speaks first"),
        ({"conversations": [{"from": ["gpt"], "value": "x"}]}, r"messages\[0\] must have a 'role' and a 'content'"),
        ({"prompt": "x", "completion": " \n"}, "'completion' must be a text that is not empty"),
        ({"prompt": "", "completion": "x"}, "'prompt' must be a text that is not empty"),
        ({"prompt": 4, "completion": "x"}, "'prompt' must be a text"),
        ({"messages": "x"}, "'messages' must be a list"),
        ({"messages": []}, "no assistant's turn, so nothing to learn"),
        ({"messages": [ASK]}, "no assistant's turn, so nothing to learn"),
        ({"messages": [ASK, "x"]}, r"messages\[1\] must have a 'role' and a 'content'"),
        ({"messages": [ASK, {"role": "assistant", "content": None}]}, r"messages\[1\] must have a 'role' and a"),
        ({"messages": [ASK, {"role": "assistant", "content": " "}]}, r"messages\[1\]: the assistant's turn is empty"),
        ({"messages": [ASK, {"role": "assistant", "content": "\0"}]}, r"messages\[1\]: the assistant's turn is empty"),
        ({"messages": [ANSWER, ASK]}, r"messages\[0\]: the assistant speaks first"),
        (with_weights(1, 2), r"messages\[3\]: 'weight' must be 0 \(not learnt\) or 1, got 2"),
        (with_weights(0.5), r"messages\[1\]: 'weight' must be 0"),
        (with_weights("0"), r"messages\[1\]: 'weight' must be 0 \(not learnt\) or 1, got '0'"),
        (with_weights(True), r"messages\[1\]: 'weight' must be 0"),
        (with_weights(0, 0), "every assistant's turn has weight 0, so nothing to learn"),
        ({"messages": [{**ASK, "weight": 1}, ANSWER]}, r"messages\[0\]: 'weight' is 1, but only the assistant's turns"),
    ],
)
def test_a_bad_line_is_named(row: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(CHAT) + "\n\n" + (row if row == "no json" else json.dumps(row)) + "\n")
    with raises_one_line(rf"^{path}:3: {message}"):
        prepared(path, tmp_path)
    assert not list((tmp_path / "cache").rglob("index.json"))


def test_examples_too_long_are_named_and_treated_as_told(tmp_path: Path) -> None:
    long = {"prompt": "x" * 10, "completion": "y" * 60}
    hopeless = {"prompt": "x" * 65, "completion": "y"}
    fits = {"prompt": "x" * 10, "completion": "z" * 54}  # 65 tokens with the end: 64 places
    path = write_lines(tmp_path / "a.jsonl", [fits, fits, long, fits, hopeless, fits])
    with raises_one_line(rf"^{path}:3: 71 tokens, more than the 65 that seq_len 64 has room for; raise data\.seq_len"):
        prepared(path, tmp_path)
    skipped = prepared(path, tmp_path, too_long="skip")
    assert skipped.notes == (f"examples of more than 65 tokens, 2 left out: {path}:3, {path}:5",)
    assert documents_of(skipped.train) == [(b"x" * 10 + b"z" * 54, b"z" * 54 + b"\0")]
    cut = prepared(path, tmp_path, too_long="truncate")
    assert cut.notes == (f"examples of more than 65 tokens, 1 cut and 1 left out: {path}:3, {path}:5",)
    assert documents_of(cut.train)[0] == (b"x" * 10 + b"y" * 54, b"y" * 55)
    assert cut.train.num_windows == 2
    with raises_one_line("too_long must be one of error, skip, truncate; got 'drop'"):
        prepared(path, tmp_path, too_long="drop")
    for choice in ("skip", "truncate"):
        with raises_one_line(r"b\.jsonl': every training example has more than 65 tokens; raise data\.seq_len"):
            prepared(write_lines(tmp_path / "b.jsonl", [hopeless] * 4), tmp_path, too_long=choice)
    with raises_one_line(r"too few examples to hold any out; add some or lower data.heldout_every \(20\)"):
        prepared(path, tmp_path, too_long="skip", heldout_every=20)


def test_compressed_files_are_read_like_plain_ones(tmp_path: Path) -> None:
    plain = write_lines(tmp_path / "a.jsonl", [CHAT] * 3)
    (tmp_path / "packed").mkdir()
    with gzip.open(tmp_path / "packed" / "a.jsonl.gz", "wb") as file:
        file.write(plain.read_bytes())
    with pyarrow.OSFile(str(tmp_path / "packed" / "b.jsonl.zst"), "wb") as raw:
        for part in (plain.read_bytes()[:50], plain.read_bytes()[50:]):  # two frames
            raw.write(pyarrow.compress(part, "zstd", asbytes=True))
    examples = [(type(e), getattr(e, "messages", None)) for e in read_examples(open_corpus(str(plain), CHAT_SUFFIXES))]
    corpus = open_corpus(str(tmp_path / "packed"), CHAT_SUFFIXES)
    assert corpus.files == ("a.jsonl.gz", "b.jsonl.zst")
    found = list(read_examples(corpus))
    assert [(type(e), getattr(e, "messages", None)) for e in found] == examples * 2
    assert [e.name.rpartition("/")[2] for e in found[2:4]] == ["a.jsonl.gz:3", "b.jsonl.zst:1"]
    text = tmp_path / "t.txt.gz"
    text.write_bytes(gzip.compress("naïve\n".encode()))
    assert list(open_corpus(str(text)).documents()) == ["naïve\n"]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_damaged_compressed_file_is_named(suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / f"a.jsonl{suffix}"
    lines = "\n".join(json.dumps({"prompt": f"{i} {i * i}", "completion": "x"}) for i in range(500)).encode()
    whole = gzip.compress(lines) if suffix == ".gz" else bytes(pyarrow.compress(lines, "zstd", asbytes=True))
    for content in (whole[: len(whole) // 2], b"no such thing " * 9):
        path.write_bytes(content)
        with raises_one_line(rf"a\.jsonl\{suffix}: not a readable {suffix} file; write or copy it again"):
            prepared(path, tmp_path)
    path.unlink()
    with raises_one_line(r"no such file or folder"):
        prepared(path, tmp_path)
    path.write_bytes(whole)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    if suffix == ".zst":
        with raises_one_line(r"reading \.zst needs pyarrow; pip install 'tilemoe\[data\]'"):
            prepared(path, tmp_path)


def test_chat_reads_jsonl_alone_and_text_reads_no_chat(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    for spec in (tmp_path, tmp_path / "a.txt", "stdlib"):
        with raises_one_line(r"corpus"):
            prepared(Path(spec), tmp_path)
    with raises_one_line("it is empty"):
        prepared(write_lines(tmp_path / "e.jsonl", []), tmp_path)
    chats = [CHAT, {"conversations": []}, {"prompt": "a", "completion": "b"}, {"instruction": "a", "output": "b"}]
    for row in chats:
        named = ", ".join(map(repr, row))
        with raises_one_line(rf"b\.jsonl:1: no string in a field 'text' .*, found {named}; use --data\.format chat"):
            prepare(str(write_lines(tmp_path / "b.jsonl", [row])), "bytes", tmp_path / "cache")
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "b.parquet")
        columns = ", ".join(row)
        with raises_one_line(rf"b\.parquet: no column .* among {columns}; --data\.format chat reads only \.jsonl"):
            prepare(str(tmp_path / "b.parquet"), "bytes", tmp_path / "cache")
    with raises_one_line(r"no string in a field 'text' or 'content', found 'id'; correct or remove the line"):
        prepare(str(write_lines(tmp_path / "b.jsonl", [{"id": 1}])), "bytes", tmp_path / "cache")


def test_lines_of_sharegpt_and_alpaca_are_conversations(tmp_path: Path) -> None:
    turns = [("system", "Be"), ("human", "Hi"), ("gpt", "Yo!")]
    rows = [
        {"id": 1, "conversations": [{"from": role, "value": text} for role, text in turns]},
        {"instruction": "Add", "input": "1 2", "output": "3"},
        {"instruction": "Sing", "input": "", "output": "La"},
        {"instruction": "Sing", "output": "La"},
    ]
    names = {"human": "user", "gpt": "assistant"}
    asked = ["Add\n\n1 2", "Sing", "Sing"]
    same = [[{"role": names.get(role, role), "content": text} for role, text in turns]] + [
        [{"role": "user", "content": ask}, {"role": "assistant", "content": row["output"]}]
        for ask, row in zip(asked, rows[1:], strict=True)
    ]
    found = prepared(write_lines(tmp_path / "a.jsonl", rows), tmp_path)
    expected = prepared(write_lines(tmp_path / "b.jsonl", [{"messages": messages} for messages in same]), tmp_path)
    for split in ("train", "heldout"):
        assert documents_of(getattr(found, split)) == documents_of(getattr(expected, split))
