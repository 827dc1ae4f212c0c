"""Bundled prompts are complete, labelled and our own; the loader reads any turns file and names what is wrong."""

from __future__ import annotations

import collections
import doctest
import json
import re
from pathlib import Path

import pytest

from dspec_lab.core.files import data_dir
from dspec_lab.evaluation.prompts import BUNDLED, Prompt, bundled_names, domain_of_file, load_prompts

BENCHMARKS = [name for names in BUNDLED.values() for name in names]
EVAL_PROMPTS = Path(__file__).resolve().parents[2].parent / "shared" / "eval_prompts"
MATH_SUFFIX = "please reason step by step and put your final answer within boxed"


def _write(folder: Path, *lines: str, name: str = "mine.jsonl") -> Path:
    path = folder / name
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.mark.parametrize("benchmark", BENCHMARKS)
def test_each_bundled_file_holds_twelve_labelled_prompts(benchmark: str) -> None:
    records = [json.loads(line) for line in (data_dir() / "prompts" / f"{benchmark}.jsonl").open(encoding="utf-8")]
    domain = next(domain for domain, names in BUNDLED.items() if benchmark in names)
    assert len(records) == 12
    for i, record in enumerate(records):
        assert set(record) == {"turns", "domain", "benchmark", "id"}
        assert (record["domain"], record["benchmark"]) == (domain, benchmark)
        assert record["id"] == f"{benchmark}/{i:02d}"
        assert len(record["turns"]) == (2 if benchmark == "mtbench_style" else 1)
    assert [prompt.turns for prompt in load_prompts(benchmark)] == [tuple(record["turns"]) for record in records]


def test_folder_and_table_of_names_agree() -> None:
    assert sorted(path.stem for path in (data_dir() / "prompts").glob("*.jsonl")) == sorted(BENCHMARKS)
    readme = (data_dir() / "prompts" / "README.md").read_text(encoding="utf-8")
    for domain, names in BUNDLED.items():
        for name in names:
            assert f"| `{name}.jsonl` | {domain} | 12 |" in readme


def test_all_prompts_differ() -> None:
    prompts = load_prompts("all")
    assert len(prompts) == 108
    assert len({prompt.prompt_id for prompt in prompts}) == 108
    assert len({turn for prompt in prompts for turn in prompt.turns}) == 120
    assert collections.Counter(prompt.domain for prompt in prompts) == {"math": 36, "code": 36, "chat": 36}


def test_forms_of_the_benchmarks() -> None:
    for prompt in load_prompts("math"):
        assert prompt.turns[0].endswith("Please reason step by step, and put your final answer within \\boxed{}.")
    for prompt in load_prompts("mbpp_style"):
        assert "\n" not in prompt.turns[0] and prompt.turns[0].endswith(".")
    for prompt in load_prompts("humaneval_style"):
        code = re.search(r"```python\n(.*)```", prompt.turns[0], re.DOTALL)
        assert code is not None
        namespace: dict[str, object] = {}
        exec(code.group(1), namespace)  # a signature with a docstring is a complete function
        function = next(value for value in namespace.values() if hasattr(value, "__code__"))
        examples = doctest.DocTestParser().get_examples(str(function.__doc__))
        assert len(examples) >= 2 and all(function.__name__ in example.source for example in examples)
    for prompt in load_prompts("livecodebench_style"):
        for part in ("\n\nInput\n\n", "\n\nOutput\n\n", "\n\nSample input\n\n", "\n\nSample output\n\n"):
            assert prompt.turns[0].count(part) == 1


def _word_runs(text: str, length: int = 8) -> set[tuple[str, ...]]:
    words = " ".join(re.findall(r"[a-z0-9]+", text.lower())).replace(MATH_SUFFIX, "|").split()
    return {tuple(words[i : i + length]) for i in range(len(words) - length + 1)}


def test_word_runs_ignore_only_the_customary_suffix() -> None:
    text = "one two three four five six seven eight"
    suffix = "Please reason step by step, and put your final answer within \\boxed{}."
    assert ("one", "two", "three", "four", "five", "six", "seven", "eight") in _word_runs(f"{text}\n{suffix}")
    assert _word_runs(suffix) == set()


@pytest.mark.skipif(not EVAL_PROMPTS.is_dir(), reason="the benchmark prompts to compare with are not beside the tree")
def test_no_eight_words_in_a_row_are_a_benchmarks() -> None:
    benchmark_runs: set[tuple[str, ...]] = set()
    for path in EVAL_PROMPTS.glob("*.jsonl"):
        for prompt in load_prompts(path):
            benchmark_runs.update(run for turn in prompt.turns for run in _word_runs(turn))
    assert len(benchmark_runs) > 10_000
    shared = {
        prompt.prompt_id: " ".join(run)
        for prompt in load_prompts("all")
        for turn in prompt.turns
        for run in _word_runs(turn) & benchmark_runs
    }
    assert shared == {}


def test_limit_keeps_sets_balanced() -> None:
    assert [prompt.benchmark for prompt in load_prompts("math", limit=4)] == [*BUNDLED["math"], "gsm8k_style"]
    nine = load_prompts("all", limit=9)
    assert [prompt.domain for prompt in nine] == ["math", "code", "chat"] * 3
    assert {prompt.prompt_id for prompt in nine} == {f"{name}/00" for name in BENCHMARKS}
    assert load_prompts("alpaca_style", limit=50) == load_prompts("alpaca_style")
    for limit in (0, -1, True):
        with pytest.raises(ValueError, match=rf"limit .* got {limit}"):
            load_prompts("math", limit=limit)


def test_labels_come_from_the_record_then_from_the_file_name(tmp_path: Path) -> None:
    labelled = {"turns": ["a", "b"], "domain": "law", "benchmark": "bar", "id": 7}
    path = _write(tmp_path, '{"turns": ["x\u2028y"]}', "", json.dumps(labelled), name="gsm8k.jsonl")
    assert load_prompts(path) == [
        Prompt("gsm8k/00", "math", "gsm8k", ("x\u2028y",)),
        Prompt("7", "law", "bar", ("a", "b")),
    ]
    assert load_prompts(str(path), limit=1) == load_prompts(path)[:1]


@pytest.mark.parametrize(
    ("file", "domain"),
    [
        ("gsm8k.jsonl", "math"),
        ("math500.jsonl", "math"),
        ("MATH-500_test.jsonl", "math"),
        ("aime25.jsonl", "math"),
        ("humaneval.jsonl", "code"),
        ("mbpp.jsonl", "code"),
        ("livecodebench_v6.jsonl", "code"),
        ("mt-bench.jsonl", "chat"),
        ("alpaca.jsonl", "chat"),
        ("arena-hard-v2.jsonl", "chat"),
        ("aimed.jsonl", "other"),
        ("my_gsm8k.jsonl", "other"),
        ("prompts.jsonl", "other"),
    ],
)
def test_domain_of_file(file: str, domain: str) -> None:
    assert domain_of_file(Path("folder") / file) == domain


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"turns": ["hi"]', r"line 2: not valid JSON \(.*\): .*turns"),
        ("[1, 2]", r"line 2: expected an object .* got \[1, 2\]"),
        ('{"prompt": "hi"}', r"line 2: no \"turns\" in \{'prompt': 'hi'\}"),
        ('{"turns": []}', r"line 2: \"turns\" must be a non-empty list .* got \[\]"),
        ('{"turns": "hi"}', r"line 2: \"turns\" must be a non-empty list .* got 'hi'"),
        ('{"turns": ["hi", 3]}', r"line 2: turn 2 must be non-empty text, got 3"),
        ('{"turns": [" \\n"]}', r"line 2: turn 1 must be non-empty text, got ' \\n'"),
        ('{"turns": ["\\ud800"]}', r"line 2: turn 1 holds half of a surrogate pair, '\\ud800' at character 0"),
        ('{"turns": ["hi"], "domain": ""}', r"line 2: domain must be non-empty text, got ''"),
        ('{"turns": ["hi"], "id": null}', r"line 2: id must be non-empty text, got None"),
        ('{"turns": ["hi"], "id": "first"}', r"line 2: id 'first' is also on line 1"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, complaint: str) -> None:
    path = _write(tmp_path, '{"turns": ["fine"], "id": "first"}', line)
    with pytest.raises(ValueError, match=complaint) as caught:
        load_prompts(path)
    assert str(caught.value).startswith(str(path)) and "\n" not in str(caught.value)


def test_a_bad_file_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "missing.jsonl"
    with pytest.raises(FileNotFoundError, match=f"no prompt file {re.escape(str(missing))}"):
        load_prompts(missing)
    with pytest.raises(FileNotFoundError, match=r"no prompt file missing\.jsonl"):
        load_prompts("missing.jsonl")
    with pytest.raises(ValueError, match=r"empty\.jsonl holds no prompts"):
        load_prompts(_write(tmp_path, "", name="empty.jsonl"))
    with pytest.raises(ValueError, match="is a folder"):
        load_prompts(tmp_path)
    latin = tmp_path / "latin.jsonl"
    latin.write_bytes(b'{"turns": ["caf\xe9"]}\n')
    with pytest.raises(ValueError, match=r"latin\.jsonl is not UTF-8 text .*0xe9"):
        load_prompts(latin)
    with pytest.raises(ValueError, match="got ''"):
        load_prompts("")


def test_a_prompt_checks_itself() -> None:
    with pytest.raises(ValueError, match=r"turns must hold at least one text, got \(\)"):
        Prompt("a/0", "math", "a", ())
    with pytest.raises(ValueError, match="turn 2 must be non-empty text, got ' '"):
        Prompt("a/0", "math", "a", ("hi", " "))
    with pytest.raises(ValueError, match="prompt_id must be non-empty text, got ''"):
        Prompt("", "math", "a", ("hi",))


def test_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(ValueError, match="is called 'gsm9k'") as caught:
        load_prompts("gsm9k")
    assert all(name in str(caught.value) for name in bundled_names())
