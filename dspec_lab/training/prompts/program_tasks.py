"""Own programming tasks: contest statements, functions to complete from their heads, requests with an assertion."""

from __future__ import annotations

import random

from dspec_lab.training.prompts.contest_statements import TASKS, Lines, Task
from dspec_lab.training.prompts.function_heads import HEADS, Head
from dspec_lab.training.prompts.record import TrainPrompt
from dspec_lab.training.prompts.wording import NAMES, distinct

SOURCE = "own_tasks"
BEFORE = (
    "", "", "Write a Python program that reads from standard input and prints to standard output.\n\n",
    "Solve the following task in Python. The program reads standard input.\n\n",
    "Below is a contest task. Answer with one Python program in a code block.\n\n",
    "You are given a programming task. Think about an efficient way, then write the Python code.\n\n",
)  # fmt: skip
AFTER = (
    "", "Read the input from standard input and write a complete Python 3 program.",
    "Give a Python solution that is fast enough for the limits.", "Return only the code, in a block of Python.",
    "First explain the idea in a few sentences, then give the program in Python.",
    "Write the answer as a Python script which uses input() and print().",
)  # fmt: skip
SPACING = "Numbers in one line are separated by single spaces. The output is compared without regard to final blanks."
METHOD_BEFORE = (
    "Complete the method below.\n\n", "Solve this task by filling in the class.\n\n", "", "",
    "Here is a coding task with starter code in Python.\n\n",
)  # fmt: skip
METHOD_AFTER = (
    "Use the starter code:", "Write the method in this class:", "The answer must have this form:", "Starter code:",
)  # fmt: skip
METHODS = "findAnswer computeValue bestChoice solveTask getResult evaluate determine".split()
HEAD_BEFORE = (
    "", "", "Complete this Python function.\n\n", "Finish the function so that the examples hold.\n\n",
    "Write the body of the function. Repeat the head in your answer.\n\n", "Continue this code:\n\n",
    "Implement the function below according to its docstring.\n\n",
    "Please give a full, self-contained version of this function in a Python code block.\n\n",
)  # fmt: skip
SAY = ("Return {does}.", "Give back {does}.", "Compute and return {does}.", "The result is {does}.", "Find {does}.")
EXTRA = (
    "", "", "", "The arguments are not changed.", "No library outside the standard one is needed.",
    "The arguments are taken to be valid.", "A simple loop is enough.",
)  # fmt: skip
ASK = (
    "Write a python function to find {does}.", "Write a python function to compute {does}.",
    "Write a Python function `{name}` which returns {does}.", "Write a function in Python that returns {does}.",
    "Create a short Python function that gives {does}.", "I need a python function to get {does}.",
)  # fmt: skip
CHECK = (
    "\nYour code should satisfy this check:\n{line}", " It has to pass:\n{line}", "\n\n{line}", "\nTest: `{line}`",
    "\n```python\n{line}\n```", " For example, this must hold:\n\n{line}",
)  # fmt: skip
PARAMETERS = {
    "numbers": ("numbers", "values", "nums", "items", "data"), "text": ("text", "s", "line", "string"),
    "words": ("words", "names", "terms"), "rows": ("rows", "table", "matrix", "grid"), "n": ("n", "number", "x"),
}  # fmt: skip


def program_tasks(count: int, seed: int = 0) -> list[TrainPrompt]:
    """`count` different tasks: 45 % statements, 40 % heads of functions, 15 % requests with an assertion."""
    return distinct(_prompt, count, seed, "code", SOURCE)


def _prompt(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.45:
        task = rng.choice(TASKS)
        return _method(task, rng) if rng.random() < 0.25 and _arguments(task.case(rng)) else _statement(task, rng)
    head = rng.choice(HEADS)
    return _completion(head, rng) if kind < 0.85 else _request(head, rng)


def _statement(task: Task, rng: random.Random) -> str:
    story = rng.choice(task.stories).format(name=rng.choice(NAMES))
    names = rng.choice([("Input", "Output", "Limits"), ("Input format", "Output format", "Constraints")])
    mark = rng.choice(["{}\n", "### {}\n", "**{}**\n\n", "{}:\n", "-----{}-----\n\n"])
    parts = [story]
    for name, body in zip(names, (task.reads, task.prints, task.limits), strict=True):
        parts.append(mark.format(name) + body)
    cases = [task.case(rng) for _ in range(rng.randint(1, 2))]
    fence = rng.choice(["{}", "```\n{}\n```"])
    for i, case in enumerate(cases, 1):
        number = f" {i}" if len(cases) > 1 else ""
        parts.append(mark.format(f"Sample input{number}") + fence.format(_typed(case)))
        parts.append(mark.format(f"Sample output{number}") + fence.format(task.solve(case)))
    if len(" ".join(parts).split()) < 85:
        parts.insert(4, SPACING)
    before, after = rng.choice(BEFORE), rng.choice(AFTER)
    return before + "\n\n".join([*parts, after] if after or before else [*parts, AFTER[1]]).rstrip()


def _typed(case: Lines) -> str:
    return "\n".join(" ".join(str(value) for value in line) for line in case)


def _arguments(case: Lines) -> dict[str, object]:
    """The case as arguments of a method; empty where it is neither a word nor one list of numbers."""
    if len(case) == 1:
        return {"s" if isinstance(case[0][0], str) else "n": case[0][0]}
    if len(case) == 2 and len(case[1]) > 2:
        return {"nums": case[1]} if len(case[0]) == 1 else {"nums": case[1], "k": case[0][1]}
    return {}


def _method(task: Task, rng: random.Random) -> str:
    story = rng.choice(task.stories).format(name=rng.choice(NAMES))
    parts = [story, "Return" + task.prints.removeprefix("Print")]
    cases = [task.case(rng) for _ in range(rng.randint(1, 3))]
    if "nums" in _arguments(cases[0]):
        parts[1] += " Here $n$ is the length of `nums`, and $a_i$ is its element number $i$, counted from $1$."
    for i, case in enumerate(cases, 1):
        given = ", ".join(f"{name} = {value!r}" for name, value in _arguments(case).items())
        parts.append(f"Example {i}:\nInput: {given}\nOutput: {task.solve(case)!r}".replace("'", '"'))
    parts.append(f"{rng.choice(['Constraints', 'Limits'])}: {task.limits}")
    types = {"nums": "List[int]", "k": "int", "n": "int", "s": "str"}
    typed = ", ".join(f"{name}: {types[name]}" for name in _arguments(cases[0]))
    result = type(task.solve(cases[0])).__name__
    code = f"class Solution:\n    def {rng.choice(METHODS)}(self, {typed}) -> {result}:\n        "
    parts.append(f"{rng.choice(METHOD_AFTER)}\n```python\n{code}\n```")
    return rng.choice(METHOD_BEFORE) + "\n\n".join(parts)


def _calls(head: Head, name: str, count: int, rng: random.Random) -> list[tuple[str, str]]:
    """Different calls and the results that they show."""
    calls: dict[str, str] = {}
    for _ in range(20):
        arguments = head.draw(rng)
        call = f"{name}({', '.join(map(repr, arguments))})"
        calls[call] = repr(head.solve(*arguments))
        if len(calls) == count:
            break
    return list(calls.items())


def _completion(head: Head, rng: random.Random) -> str:
    name = rng.choice(head.names.split())
    signature = head.signature
    for parameter, others in PARAMETERS.items():
        signature = signature.replace(f"({parameter}:", f"({rng.choice(others) if parameter != 'n' else parameter}:")
    needed = ", ".join(kind for kind in ("Dict", "List") if kind in signature)
    modern = rng.random() < 0.3
    imports = f"from typing import {needed}\n\n\n" if needed and not modern else ""
    if modern:
        signature = signature.replace("List", "list").replace("Dict", "dict")
    quotes = rng.choice(['"""', '"""', "'''"])
    lines = [rng.choice(["", " "]) + rng.choice(SAY).format(does=head.does), rng.choice(EXTRA)]
    body = "\n    ".join(line for line in lines if line)
    gap = rng.choice(["\n", "\n\n"])
    examples = "\n".join(f"    >>> {call}\n    {result}" for call, result in _calls(head, name, rng.randint(1, 3), rng))
    code = f"{imports}def {name}{signature}:\n    {quotes}{body}{gap}{examples}\n    {quotes}\n"
    before = rng.choice(HEAD_BEFORE)
    return before + (f"```python\n{code}```" if before and rng.random() < 0.6 else code)


def _request(head: Head, rng: random.Random) -> str:
    name = rng.choice(head.names.split())
    call, result = _calls(head, name, 1, rng)[0]
    ask = rng.choice(ASK).format(does=head.does, name=name)
    return ask + rng.choice(CHECK).format(line=f"assert {call} == {result}")
