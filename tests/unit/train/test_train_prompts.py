"""Prompt generators and sources."""

from __future__ import annotations

import ast
import itertools
import json
import random
import re
from pathlib import Path

import pytest

from dspec_lab.training.prompts.chat_requests import chat_requests
from dspec_lab.training.prompts.code_requests import code_requests
from dspec_lab.training.prompts.contest_problems import GROUPS, contest_problems
from dspec_lab.training.prompts.contest_statements import TASKS
from dspec_lab.training.prompts.files import dataset_prompts, jsonl_prompts, user_turns
from dspec_lab.training.prompts.math_problems import math_problems
from dspec_lab.training.prompts.program_tasks import program_tasks
from dspec_lab.training.prompts.record import TrainPrompt, without_repeats
from dspec_lab.training.prompts.self_synthesis import synthesise, usable, user_prefix
from dspec_lab.training.prompts.wording import distinct, fill

BUNDLED = Path(__file__).resolve().parents[3] / "data" / "prompts"
GENERATORS = {"math": math_problems, "code": code_requests, "chat": chat_requests}
GENERATORS |= {"contest": contest_problems, "tasks": program_tasks}
DOMAIN_OF = {"contest": "math", "tasks": "code"}


@pytest.mark.parametrize("name", GENERATORS)
def test_generators_are_seeded_varied_and_complete(name):
    make, domain = GENERATORS[name], DOMAIN_OF.get(name, name)
    prompts = make(1500, seed=1)
    texts = [prompt.turns[0] for prompt in prompts]
    assert len(set(texts)) == 1500 and {prompt.domain for prompt in prompts} == {domain}
    assert make(1500, seed=1) == prompts and make(1500, seed=2) != prompts
    assert make(10, seed=1) == prompts[:10], "asking for more must not change the first ones"
    assert not any("{" in text and "}" in text for text in texts if domain == "chat"), "a place was left unfilled"
    starts = {" ".join(text.split()[:2]) for text in texts}
    assert len(starts) > 40
    assert all(10 < len(text) < (2000 if name == "tasks" else 600) for text in texts)


@pytest.mark.parametrize("make", [contest_problems, program_tasks])
@pytest.mark.parametrize("seed", [0, 7])
def test_the_new_generators_have_thousands_of_prompts(make, seed):
    texts = [prompt.turns[0] for prompt in make(4500, seed)]
    assert len({" ".join(text.lower().split()) for text in texts}) == 4500
    assert not any(re.search(r"<\w+(=[^<>]*)?>", text) for text in texts), "a place was left unfilled"
    assert not any("{name}" in text or "{does}" in text for text in texts)
    assert len({" ".join(text.split()[:6]) for text in texts}) > 300
    if make is contest_problems:
        assert sum(map(len, GROUPS)) >= 55
        assert 0.4 < sum("put your final answer within \\boxed{}" in text for text in texts) / 4500 < 0.6


def _solutions_by_force():
    """Story of a task -> a slow solution of its input, written anew."""

    def meetings(lines):
        spans = lines[1:]
        best = 0
        for size in range(len(spans) + 1):
            for chosen in itertools.combinations(sorted(spans), size):
                if all(a[1] <= b[0] for a, b in itertools.pairwise(chosen)):
                    best = size
        return best

    def subsets(lines):
        indices = range(len(lines[1]))
        return [c for size in range(len(indices) + 1) for c in itertools.combinations(indices, size)]

    def climb(lines):
        a = lines[1]
        return max(len(c) for c in subsets(lines) if all(a[i] < a[j] for i, j in itertools.pairwise(c)))

    def no_neighbours(lines):
        a = lines[1]
        return max(sum(a[i] for i in c) for c in subsets(lines) if all(j - i > 1 for i, j in itertools.pairwise(c)))

    def even_bars(lines):
        s = lines[0][0]
        pieces = [s[i:j] for i in range(len(s) + 1) for j in range(i, len(s) + 1)]
        return max(len(piece) for piece in pieces if piece.count("L") == piece.count("R"))

    def covered(lines):
        return sum(any(s <= moment < e for s, e in lines[1:]) for moment in range(40))

    def mirrored(lines):
        orders = itertools.permutations(lines[0][0][:7])
        return "YES" if any(order == order[::-1] for order in orders) else "NO"

    def weights(lines):
        (_, total), kinds = lines
        counts = itertools.product(*(range(total // kind + 1) for kind in kinds))
        return min((sum(c) for c in counts if sum(map(int.__mul__, c, kinds)) == total), default=-1)

    def repairs(lines):
        s = lines[0][0]
        while "()" in s:
            s = s.replace("()", "")
        return len(s)

    return {
        "rehearsal room": meetings, "album": climb, "pear trees": no_neighbours, "dancer": even_bars,
        "hut to hikers": covered, "letter tiles": mirrored, "weights of $n$ kinds": weights, "cat chewed": repairs,
    }  # fmt: skip


def test_sample_outputs_agree_with_slow_solutions():
    slow = _solutions_by_force()
    assert len(TASKS) >= 22
    for words, solution in slow.items():
        (task,) = [task for task in TASKS if words in task.stories[0]]
        rng = random.Random(words)
        for _ in range(40):
            case = task.case(rng)
            if words == "letter tiles":
                case = [[case[0][0][:7]]]
            assert task.solve(case) == solution(case), (words, case)


def test_heads_show_what_their_functions_give():
    texts = [prompt.turns[0] for prompt in program_tasks(3000, 2)]
    shown = re.findall(r"(?:>>> |assert )(turn_words|spread|dot)\((.*)\)(?:\n    | == )(.*?)`?\n", "\n".join(texts))
    slow = {
        "turn_words": lambda t: " ".join(t[::-1].split()[::-1]),
        "spread": lambda a: sorted(a)[-1] - sorted(a)[0],
        "dot": lambda a, b: sum(a[i] * b[i] for i in range(len(a))),
    }
    assert {name for name, _, _ in shown} == set(slow)
    for name, arguments, result in shown:
        assert slow[name](*ast.literal_eval(f"({arguments},)")) == ast.literal_eval(result)


def test_no_generated_prompt_is_a_bundled_one():
    bundled = set()
    for path in BUNDLED.glob("*.jsonl"):
        for line in path.read_text(encoding="utf-8").splitlines():
            bundled |= {" ".join(turn.lower().split()) for turn in json.loads(line)["turns"]}
    assert len(bundled) > 100
    for make in GENERATORS.values():
        assert not bundled & {" ".join(prompt.turns[0].lower().split()) for prompt in make(3000, seed=0)}


def test_templates_fill_nested_and_numbered_places():
    words = {"a": ("x", "y", "z"), "b": ("<{a}>",)}
    for seed in range(20):
        text = fill("{a1}{a2}{a1} {b}", words, random.Random(seed))
        assert text[0] == text[2] != text[1] and text[4:] in ("<x>", "<y>", "<z>")
    with pytest.raises(ValueError, match="no words for {c}"):
        fill("{c}", words, random.Random(0))
    with pytest.raises(ValueError, match="not enough words for {a4}"):
        fill("{a1}{a2}{a3}{a4}", words, random.Random(0))
    with pytest.raises(ValueError, match="no more than 2 different"):
        distinct(lambda rng: rng.choice("pq"), 3, 0, "chat", "letters")


def test_jsonl_prompts(tmp_path):
    path = tmp_path / "some.jsonl"
    path.write_text('{"turns": ["one", "two"]}\n\n{"turns": ["three"], "domain": "math"}\n')
    assert jsonl_prompts(path) == [
        TrainPrompt("other", "some", ("one", "two")),
        TrainPrompt("math", "some", ("three",)),
    ]
    assert len(jsonl_prompts(path, limit=1)) == 1
    for bad in ('{"turns": [""]}', '{"prompt": "x"}', "{nope"):
        path.write_text(f'{{"turns": ["one"]}}\n{bad}\n')
        with pytest.raises(ValueError, match="some.jsonl, line 2"):
            jsonl_prompts(path)
    with pytest.raises(FileNotFoundError, match="absent.jsonl"):
        jsonl_prompts(tmp_path / "absent.jsonl")


def test_data_set_columns(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "chats.jsonl"
    conversation = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]
    rows = [{"text": "ask me", "talk": conversation}, {"text": "  ", "talk": conversation}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [p.turns for p in dataset_prompts(str(path), "text")] == [("ask me",)]
    assert [p.turns for p in dataset_prompts(str(path), "talk", domain="chat", limit=1)] == [("hello",)]
    with pytest.raises(ValueError, match="no column 'prompt'; it has text, talk"):
        dataset_prompts(str(path), "prompt")


def test_user_turns_of_all_forms():
    assert user_turns([{"from": "human", "value": "a "}, {"from": "gpt", "value": "b"}]) == ("a",)
    assert user_turns(["a", " ", "b"]) == ("a", "b") and user_turns(3) == () and user_turns("") == ()
    with pytest.raises(ValueError, match="7"):
        user_turns([7])


class Words:
    """A tokenizer over whole words, enough for self-synthesis."""

    words = ("how", "why", "does", "the", "river", "bend", "here", "today", "rise", "sun", "and", "moon")

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [1] * text.count("<user>") + [5 + len(word) % 7 for word in text.split()]}

    def decode(self, ids, skip_special_tokens=False):
        return " ".join(self.words[token % len(self.words)] for token in ids)

    def apply_chat_template(self, messages, *, add_generation_prompt, tokenize):
        return f"<user>{messages[0]['content']}<end>"


def test_the_target_writes_the_users_turn(tiny_target):
    assert user_prefix(Words()) == [1, 5 + 6]
    prompts = synthesise(tiny_target, Words(), 60, seed=1, num_slots=16, temperature=3.0)
    assert 0 < len(prompts) < 60
    assert all(prompt.source == "self" and usable(prompt.turns[0]) for prompt in prompts)
    assert prompts == synthesise(tiny_target, Words(), 60, seed=1, num_slots=5, temperature=3.0)
    with pytest.raises(ValueError, match="'law'"):
        synthesise(tiny_target, Words(), 1, domain="law")


def test_unusable_texts_are_dropped():
    assert usable("How does a kettle work?")
    assert not usable("no no no no no no no") and not usable("12 + 4 = [ ] {} 99") and not usable("Hello there")
    twice = [TrainPrompt("chat", "x", ("A  b",)), TrainPrompt("chat", "y", ("a B",))]
    assert without_repeats(twice) == twice[:1]


def test_contest_problems_can_be_solved():
    """Draws that would leave a problem without an answer, or with too many."""
    text = "\n".join(prompt.turns[0] for prompt in contest_problems(4000, 31))
    found = dict.fromkeys(("stairs", "prize", "hall", "primes", "children", "absolute", "vectors"), 0)
    for slow, fast in re.findall(r"moving stairway and counts \$(\d+)\$ steps; .*?counts \$(\d+)\$", text):
        found["stairs"] += 1
        assert int(slow) < int(fast) < 2 * int(slow)
    for first, third in re.findall(r"share a prize in the ratio \$(\d+) : \d+ : (\d+)\$", text):
        found["prize"] += 1
        assert int(third) > int(first)
    for rows in re.findall(r"A hall has \$(\d+)\$ rows", text):
        found["hall"] += 1
        assert int(rows) % 2 == 0
    for a, b in re.findall(r"prime for which \$p \+ (\d+)\$ and \$p \+ (\d+)\$", text):
        found["primes"] += 1
        small = [p for p in range(2, 2000) if all(is_prime(n) for n in (p, p + int(a), p + int(b)))]
        assert small and small[0] > 0
    for things, children in re.findall(r"ways can \$(\d+)\$ identical \w+ be given to \$(\d)\$ children", text):
        found["children"] += 1
        assert int(things) >= 2 * int(children)
    for a, b, c in re.findall(r"\|x - (\d+)\| \+ \|x \+ (\d+)\| = (\d+)\$", text):
        found["absolute"] += 1
        assert int(c) > int(a) + int(b)
    for b, d in re.findall(r"vectors \$\(\d+, t, (-?\d+)\)\$ and \$\(-?\d+, (\d+), t\)\$", text):
        found["vectors"] += 1
        assert int(b) + int(d) != 0
    assert all(found.values()), found


def is_prime(n: int) -> bool:
    return n > 1 and all(n % k for k in range(2, int(n**0.5) + 1))
